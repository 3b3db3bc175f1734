package index

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/arena"
	"github.com/torchstream/torchstream/imageloader/internal/hostmem"
)

// sharedContents are the contents of samples in memory that the processes of a host share. A
// process that has read a sample publishes its content for all. The places follow from the sizes in
// the index. So a process that is killed while it writes leaves only a content that is not
// published, and two processes that read the same sample write the same bytes to the same place.
type sharedContents struct {
	memory  *hostmem.Memory
	samples []record
	limit   int64   // maximum size of a content; larger samples have no place
	blocks  []int64 // the place of the first record of each block
	log     *slog.Logger
	failed  sync.Once
}

const (
	placeBlock = 64 // records in a block of places
	placeAlign = 16
)

// shareContents joins the memory for the contents of x's samples. It fails when ctx ends.
func shareContents(ctx context.Context, x *Index, limit int64, log *slog.Logger) (*sharedContents, error) {
	s := &sharedContents{samples: x.samples, limit: limit, log: log}
	total := int64(0)
	for i := range s.samples {
		if i%placeBlock == 0 {
			s.blocks = append(s.blocks, total)
		}
		total += s.room(i)
	}
	var err error
	s.memory, err = hostmem.Join(ctx, hostmem.Config{Name: x.SharedName(limit), Flags: len(s.samples) + 1,
		Bytes: total})
	if err != nil {
		return nil, err
	}
	return s, nil
}

// SharedName identifies the archive and its samples.
func (x *Index) SharedName(limit int64) string {
	h := sha256.New()
	for i := range x.shards {
		s := &x.shards[i]
		fmt.Fprintf(h, "%q %d %d\n", absolute(s.path), s.info.Size(), s.info.ModTime().UnixNano())
	}
	_ = binary.Write(h, binary.LittleEndian, []int64{limit, int64(len(x.samples))}) // a hash does not fail
	for i := range x.samples {
		b := x.samples[i].encode()
		h.Write(b[:])
	}
	h.Write([]byte(x.names))
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// absolute returns an absolute path, or a URL as it is: equal relative paths in two folders are two
// archives.
func absolute(path string) string {
	if archive.IsURL(path) {
		return path
	}
	if abs, err := filepath.Abs(path); err == nil {
		return abs
	}
	return path // without a working directory
}

// room returns the bytes of a record's place.
func (s *sharedContents) room(i int) int64 {
	r := &s.samples[i]
	if r.kind != archive.Regular || r.size > s.limit {
		return 0
	}
	return (r.size + placeAlign - 1) / placeAlign * placeAlign
}

// place returns the place of a record's content.
func (s *sharedContents) place(i int) int64 {
	at := s.blocks[i/placeBlock]
	for j := i / placeBlock * placeBlock; j < i; j++ {
		at += s.room(j)
	}
	return at
}

// of returns the content of record i, or nil if no process has published it.
func (s *sharedContents) of(i int) []byte {
	if s.room(i) == 0 || !s.memory.Flag(i) {
		return nil
	}
	at, size := s.place(i), s.samples[i].size
	return s.memory.Data()[at : at+size : at+size]
}

// keep publishes the content of record i, unless another process has published it. It does not
// publish data that is not the whole content, such as the one of a damaged member.
func (s *sharedContents) keep(i int, data []byte) error {
	if s.room(i) == 0 || s.memory.Flag(i) || int64(len(data)) != s.samples[i].size {
		return nil
	}
	if err := s.memory.Write(s.place(i), data); err != nil {
		return fmt.Errorf("memory shared on this host: %w", err)
	}
	s.memory.SetFlag(i)
	return nil
}

// tryKeep is keep for a content that can be read again. It logs the first error.
func (s *sharedContents) tryKeep(i int, data []byte) {
	if err := s.keep(i, data); err != nil {
		s.failed.Do(func() { s.log.Warn("samples are read from the archive each time", "error", err) })
	}
}

// complete is the number of the flag that says that all contents are published.
func (s *sharedContents) complete() int { return len(s.samples) }

// close gives this process's part of the memory back.
func (s *sharedContents) close() {
	if s != nil {
		s.memory.Close()
	}
}

// share makes the contents of x shared with other processes of the host, if Config.ShareOnHost asks
// for it and the system allows it.
func (x *Index) share(ctx context.Context, c *Config) {
	if !c.ShareOnHost {
		return
	}
	if !x.identified() {
		c.Logger.Warn("the samples in memory are not shared with other processes: the index has no checksums, and the " +
			"archive has no time by which processes could tell that it was replaced")
		return
	}
	s, err := shareContents(ctx, x, c.MaxSampleBytes, c.Logger)
	if err != nil {
		notShared(c, err)
		return
	}
	x.memory.shared = s
}

// identified reports whether SharedName tells the archive from one that replaces it.
func (x *Index) identified() bool {
	for i := range x.samples {
		r := &x.samples[i]
		if r.kind == archive.Regular && r.flags&recordSummed == 0 && x.shards[r.shard].info.ModTime().IsZero() {
			return false
		}
	}
	return true
}

// shareHeld moves contents that are held in this process's memory to the shared memory. If one of
// them is missing, the next process reads the archive.
func (x *Index) shareHeld(ctx context.Context, c *Config) {
	x.share(ctx, c)
	if x.memory.shared == nil {
		return
	}
	s := x.memory.shared
	whole := true
	for i, data := range x.memory.held {
		if err := s.keep(i, data); err != nil {
			notShared(c, err)
			x.memory.shared = nil
			s.close()
			return
		}
		whole = whole && (s.room(i) == 0 || s.memory.Flag(i))
	}
	if whole {
		s.memory.SetFlag(s.complete())
	}
	x.memory.held = nil
	x.memory.arena.Free()
	x.memory.arena = nil
}

// turn waits for this process's turn to read all samples. It returns ErrStopped if the archive's
// context ends. If the process that reads is stopped, or the memory cannot be locked, every process
// reads: that costs only time.
func (s *sharedContents) turn(a *archive.Archive, c *Config) (end func(), err error) {
	first, stop := context.WithCancel(a.Context())
	stop() // so Lock does not wait
	if unlock, err := s.memory.Lock(first); err == nil {
		return unlock, nil
	}
	s.log.Info("waiting for the process of this host that reads the samples", "archive", a.Path())
	for before := s.published(); ; {
		ctx, cancel := context.WithCancel(a.Context())
		stall := c.stallAfter()
		go func() {
			select {
			case <-stall:
				cancel()
			case <-ctx.Done():
			}
		}()
		unlock, err := s.memory.Lock(ctx)
		stalled := ctx.Err() != nil
		cancel()
		switch {
		case err == nil:
			return unlock, nil
		case a.Context().Err() != nil:
			return nil, archive.ErrStopped
		case !stalled:
			s.log.Info("processes of this host do not wait for each other's reading", "error", err)
			return func() {}, nil
		}
		now := s.published()
		if now == before {
			s.log.Warn("the process that reads the samples makes no progress: this one reads them too", "archive", a.Path())
			return func() {}, nil
		}
		before = now
	}
}

// published returns the number of contents that are published.
func (s *sharedContents) published() (n int) {
	for i := range s.samples {
		if s.memory.Flag(i) {
			n++
		}
	}
	return n
}

// readAllShared reads all samples, as hold does, unless another process has read them. One process
// reads at a time. If it is killed, another one reads.
func (x *Index) readAllShared(a *archive.Archive, c *Config) error {
	s := x.memory.shared
	end, err := s.turn(a, c)
	if err != nil {
		return err
	}
	defer end()
	if s.memory.Flag(s.complete()) {
		return nil
	}
	var buffer []byte
	for i := range x.samples {
		r := &x.samples[i]
		if r.kind != archive.Regular || r.size == 0 || r.size > s.limit {
			continue
		}
		if int64(cap(buffer)) < r.size {
			buffer = make([]byte, r.size+r.size/2)
		}
		content := buffer[:r.size]
		if err := x.readForward(a, i, content); err != nil {
			return err
		}
		if x.memory.shared != nil {
			err := s.keep(i, content)
			if err == nil {
				continue
			}
			notShared(c, err)
			x.unshare(i)
		}
		x.memory.held[i] = x.memory.arena.Clone(content)
	}
	if err := a.ReadToEnd(); err != nil {
		return err
	}
	if x.memory.shared != nil {
		s.memory.SetFlag(s.complete())
	}
	return nil
}

// unshare copies the contents of the first n records to this process's memory, and leaves the
// shared memory.
func (x *Index) unshare(n int) {
	s := x.memory.shared
	x.memory.arena = arena.New() // Close frees it
	x.memory.held = make([][]byte, len(x.samples))
	for i := range n {
		if data := s.of(i); data != nil {
			x.memory.held[i] = x.memory.arena.Clone(data)
		}
	}
	x.memory.shared = nil
	s.close()
}

// notShared warns that this process has a copy of the samples.
func notShared(c *Config, err error) {
	c.Logger.Warn("the samples in memory are not shared with other processes", "error", err)
}
