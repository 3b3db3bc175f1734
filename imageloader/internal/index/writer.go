package index

import (
	"encoding/binary"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/internal/safefile"
)

// indexFile is the kind of file that an index may overwrite.
var indexFile = safefile.Prefix("an index", sidecarMagic)

// CheckFile returns an error if the file at path is neither empty nor an index.
func CheckFile(path string) error { return safefile.Check(path, indexFile) }

// IsFile reports whether path names an index file, or a temporary file of one.
func IsFile(path string) bool {
	return strings.HasSuffix(path, sidecarSuffix) || unfinished(filepath.Base(path))
}

// unfinished reports whether name belongs to a temporary file of an index.
func unfinished(name string) bool {
	return strings.Contains(name, sidecarSuffix+".") && strings.HasSuffix(name, ".tmp")
}

// output is a section to write.
type output struct {
	kind  uint32
	count uint64
	write func(io.Writer) error
}

// writeSidecar writes an index file under a temporary name and then renames it. Readers therefore
// see the complete file or none, even if the program or the machine crashes. writeSidecar returns
// the written file, still open, because another process may already have replaced the file at path.
func writeSidecar(path string, mode fs.FileMode, sections []output) (*os.File, error) {
	f, err := safefile.Replace(path, indexFile, mode, func(f *os.File) error { return writeSections(f, sections) })
	if err != nil {
		return nil, err
	}
	sweep(path)
	return f, nil
}

// writeSections writes the header, the table and the sections of an index file.
func writeSections(f *os.File, sections []output) error {
	w := &sectionWriter{file: f, at: uint64(sidecarHeader + len(sections)*sectionBytes)}
	w.buffer = make([]byte, 0, 256<<10)
	if _, err := f.Seek(int64(w.at), io.SeekStart); err != nil {
		return err
	}
	var table []byte
	for _, s := range sections {
		begin := w.at
		w.crc = 0
		if err := s.write(w); err != nil {
			return err
		}
		table = binary.LittleEndian.AppendUint32(table, s.kind)
		table = binary.LittleEndian.AppendUint32(table, w.crc)
		table = binary.LittleEndian.AppendUint64(table, begin)
		table = binary.LittleEndian.AppendUint64(table, w.at-begin)
		table = binary.LittleEndian.AppendUint64(table, s.count)
	}
	if err := w.flush(); err != nil {
		return err
	}
	head := []byte(sidecarMagic)
	head = binary.LittleEndian.AppendUint32(head, sidecarVersion)
	head = binary.LittleEndian.AppendUint32(head, uint32(len(sections)))
	head = binary.LittleEndian.AppendUint64(head, w.at)
	head = binary.LittleEndian.AppendUint32(head, crc32.ChecksumIEEE(table))
	head = binary.LittleEndian.AppendUint32(head, crc32.ChecksumIEEE(head))
	_, err := f.WriteAt(append(head, table...), 0)
	return err
}

// leftAfter is the age from which sweep removes a temporary file. A process that leaves a file for
// so long must have been killed.
const leftAfter = 24 * time.Hour

// sweep removes temporary files of this index that killed processes have left behind.
func sweep(path string) {
	list, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		return // the files stay
	}
	for _, f := range list {
		if !strings.HasPrefix(f.Name(), filepath.Base(path)+".") || !unfinished(f.Name()) {
			continue
		}
		if info, err := f.Info(); err == nil && info.Mode().IsRegular() && time.Since(info.ModTime()) > leftAfter {
			_ = os.Remove(filepath.Join(filepath.Dir(path), f.Name())) // if it fails, the file stays
		}
	}
}

// sectionWriter writes sections one after another. It is buffered.
type sectionWriter struct {
	file   *os.File
	at     uint64
	crc    uint32 // CRC-32 of the section so far
	buffer []byte
}

func (w *sectionWriter) Write(p []byte) (int, error) {
	w.at += uint64(len(p))
	w.crc = crc32.Update(w.crc, crc32.IEEETable, p)
	if len(w.buffer)+len(p) > cap(w.buffer) {
		if err := w.flush(); err != nil {
			return 0, err
		}
		if len(p) > cap(w.buffer) {
			return w.file.Write(p)
		}
	}
	w.buffer = append(w.buffer, p...)
	return len(p), nil
}

func (w *sectionWriter) flush() error {
	_, err := w.file.Write(w.buffer)
	w.buffer = w.buffer[:0]
	return err
}

// outputs returns the sections for the index file of a Builder. The archive must have been read to
// its end.
func outputs(a *archive.Archive, b *Builder) ([]output, error) {
	shards, err := encodeShards(a)
	if err != nil {
		return nil, err
	}
	var dirs []byte
	for i, d := range b.dirs.names {
		length := uint32(len(d)) << 1
		if b.dirs.claimed[i] {
			length |= 1
		}
		dirs = append(binary.LittleEndian.AppendUint32(dirs, length), d...)
	}
	counts := binary.LittleEndian.AppendUint64(nil, uint64(b.ignored))
	counts = binary.LittleEndian.AppendUint64(counts, uint64(b.orphans))
	counts = binary.LittleEndian.AppendUint64(counts, labelling(&b.config))
	whole := func(data []byte) func(io.Writer) error {
		return func(w io.Writer) error { _, err := w.Write(data); return err }
	}
	list := []output{
		{sectionShards, uint64(len(a.Shards())), whole(shards)},
		{sectionDirs, uint64(len(b.dirs.names)), whole(dirs)},
		{sectionCounts, 3, whole(counts)},
		{sectionOrphans, uint64(len(b.orphansNamed)), whole(encodeOrphans(b.orphansNamed))},
	}
	if len(b.dirs.columns) > 0 {
		list = append(list, output{sectionColumns, uint64(len(b.dirs.columns)), whole(encodeColumns(b.dirs.columns))})
	}
	large := b.records.sections()
	for _, kind := range largeSections {
		list = append(list, output{kind, uint64(large[kind].count), large[kind].copyTo})
	}
	return list, nil
}

// encodeShards returns the section of shards.
func encodeShards(a *archive.Archive) (shards []byte, err error) {
	r := archive.NewReader(a)
	defer r.Close()
	for i, s := range a.Shards() {
		digest, err := shardDigest(a, r, i)
		if err != nil {
			return nil, err
		}
		name := shardName(s.Path)
		shards = binary.LittleEndian.AppendUint64(shards, uint64(s.Info.Size()))
		shards = binary.LittleEndian.AppendUint64(shards, uint64(s.Info.ModTime().UnixNano()))
		shards = binary.LittleEndian.AppendUint32(shards, digest)
		shards = binary.LittleEndian.AppendUint32(shards, formatNumber(s.Format))
		shards = binary.LittleEndian.AppendUint32(shards, uint32(len(name)))
		shards = binary.LittleEndian.AppendUint32(shards, 0)
		shards = append(shards, name...)
	}
	return shards, nil
}
