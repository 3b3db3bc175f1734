package loadersim

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
)

// checkIndex checks that a file is a whole index, by docs/index-format.md.
func checkIndex(b []byte) error {
	le := binary.LittleEndian
	if len(b) < 32 || string(b[:8]) != "TSIDX\x00\r\n" || le.Uint32(b[8:]) != 3 {
		return fmt.Errorf("its header is %q", b[:min(len(b), 12)])
	}
	n := int(le.Uint32(b[12:]))
	if le.Uint64(b[16:]) != uint64(len(b)) || crc32.ChecksumIEEE(b[:28]) != le.Uint32(b[28:]) || 32+32*n > len(b) {
		return errors.New("its header is damaged")
	}
	table := b[32:][:32*n]
	if crc32.ChecksumIEEE(table) != le.Uint32(b[24:]) {
		return errors.New("its table is damaged")
	}
	for ; len(table) > 0; table = table[32:] {
		kind, at, size := le.Uint32(table), le.Uint64(table[8:]), le.Uint64(table[16:])
		if at > uint64(len(b)) || size > uint64(len(b))-at {
			return fmt.Errorf("section %d is outside of it", kind)
		}
		if kind != 6 && kind != 9 && crc32.ChecksumIEEE(b[at:][:size]) != le.Uint32(table[4:]) {
			return fmt.Errorf("section %d is damaged", kind)
		}
	}
	return nil
}

// unchecked returns the number of bytes of an index before the sections whose bytes have no
// checksum: the first of the sections 6 and 9, which are read on demand.
func unchecked(b []byte) int {
	le, first := binary.LittleEndian, len(b)
	for table := b[32:][:32*le.Uint32(b[12:])]; len(table) > 0; table = table[32:] {
		if kind := le.Uint32(table); kind == 6 || kind == 9 {
			first = min(first, int(le.Uint64(table[8:])))
		}
	}
	return first
}

// logger adds log lines to the story.
type logger struct{ say func(string, ...any) }

func (l *logger) Enabled(context.Context, slog.Level) bool { return true }
func (l *logger) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l *logger) WithGroup(string) slog.Handler            { return l }

func (l *logger) Handle(_ context.Context, r slog.Record) error {
	text := "log: " + r.Message
	r.Attrs(func(a slog.Attr) bool { text += " " + a.String(); return true })
	l.say("%s", text)
	return nil
}
