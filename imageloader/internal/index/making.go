package index

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

const (
	// makingSuffix ends the name of the file that a process locks while it makes an index. The name
	// is one of an unfinished index, so patterns of shards and sweep know it.
	makingSuffix = ".making.tmp"
	makingMagic  = "torchstream makes an index: " // begins the file
	makingBytes  = 128                            // of its text
	makingFailed = "there is no index"            // the text of a process that leaves none

	makingTick  = 100 * time.Millisecond // how often a waiting process looks
	makingBeat  = time.Second            // how often the process that makes the index says so
	makingStall = 30 * time.Second       // of silence, after which another process takes over
	makingLog   = 10 * time.Second       // how often a waiting process logs

	// makingRounds bounds how often a process locks a file that has lost its name. Once or twice
	// another process has just removed it; for ever, where the file system gives a file other
	// numbers at each call.
	makingRounds = 100
)

// making is the right to make the index of an archive, which one process has at a time. Others
// that open the archive wait for the index. The right is a lock, which the system releases when
// the process ends in whatever way, on a file beside the index. The process writes into the file
// as long as it runs, so that others tell a stopped process from a busy one. The file goes with
// the right. A killed process leaves it, and the next one that makes the index removes it.
type making struct {
	path    string
	file    *os.File
	archive *archive.Archive
	config  *Config
	read    atomic.Int64 // bytes of the archive
	stop    chan struct{}
	beating sync.WaitGroup
}

// makeOrWait returns the right to make an index of the archive, for which it waits, or the index
// that another process has made meanwhile. Both are nil where no file can be locked, and after
// another process has found that no index can be made or written: then each process reads the
// archive for itself. If wait is false, makeOrWait returns nothing in place of waiting. The caller
// calls end.
func makeOrWait(a *archive.Archive, c *Config, wait bool) (*making, *Index, error) {
	for range makingRounds {
		m := openMaking(a, c)
		if m == nil {
			return nil, nil, nil
		}
		if busy(m.file) {
			var err error
			if wait {
				err = m.await()
			}
			if !wait || err != nil {
				_ = m.file.Close() // nothing was written
				return nil, nil, err
			}
		}
		named, failed := m.named(), false
		if !named { // its process has removed it, or another one that takes over
			failed = strings.Contains(m.said(), makingFailed)
			_ = m.file.Close() // nothing was written
		}
		if wait {
			l := loading{a: a, c: c, again: true}
			if x, err := l.search(); x != nil || err != nil {
				if named {
					m.end(true)
				}
				return nil, x, err
			}
		}
		if named {
			m.begin()
			return m, nil, nil
		}
		if failed {
			return nil, nil, nil
		}
	}
	c.Logger.Warn("the lock of the index has another file each time: the archive is read without it", "archive", a.Path())
	return nil, nil, nil
}

// openMaking opens the file to be locked in the first place of the index where it can, or returns
// nil.
func openMaking(a *archive.Archive, c *Config) *making {
	for _, path := range indexPaths(c, a) {
		makeCacheFolder(path)
		path += makingSuffix
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
		if err != nil {
			continue
		}
		m := &making{path: path, file: f, archive: a, config: c, stop: make(chan struct{})}
		info, err := f.Stat()
		if err == nil && info.Mode().IsRegular() && (info.Size() == 0 || strings.HasPrefix(m.said(), makingMagic)) {
			return m
		}
		_ = f.Close() // another program's file, which stays as it is
	}
	return nil
}

// await waits until the lock is free, or the file has no name any more. It removes the name itself
// when the process that has the lock says nothing any more.
func (m *making) await() error {
	log := m.config.Logger.With("archive", m.archive.Path(), "lock", m.path)
	began, logged := time.Now(), time.Now()
	said, stall := m.said(), m.config.stallAfter()
	log.Info("waiting for the index that another process makes", "process", said)
	tick := time.NewTicker(makingTick)
	defer tick.Stop()
	for {
		select {
		case <-m.context().Done():
			return archive.ErrStopped
		case <-stall:
			log.Warn("the process that makes the index says nothing any more: another one takes over", "process", said)
			if m.named() {
				_ = os.Remove(m.path) // if it stays, it is as good as locked
			}
			return nil
		case <-tick.C:
		}
		if !busy(m.file) || !m.named() {
			return nil
		}
		if now := m.said(); now != said {
			said, stall = now, m.config.stallAfter()
		}
		if time.Since(logged) >= makingLog {
			logged = time.Now()
			log.Info("still waiting for the index", "process", said, "seconds", time.Since(began).Seconds())
		}
	}
}

// stallAfter begins to wait for a sign of the process that makes the index.
func (c *Config) stallAfter() <-chan time.Time {
	if c.stall != nil {
		return c.stall()
	}
	return time.After(makingStall)
}

func (m *making) context() context.Context { return m.archive.Context() }

// named reports whether the open file still has its name. A process that is about to remove the
// name asks first, but others may remove and make the file in between: then two processes make the
// index, as they did without the lock.
func (m *making) named() bool {
	at, err := os.Lstat(m.path)
	if err != nil {
		return false
	}
	info, err := m.file.Stat()
	return err == nil && os.SameFile(at, info)
}

// said returns the text in the file.
func (m *making) said() string {
	text := make([]byte, makingBytes)
	n, _ := m.file.ReadAt(text, 0) // the end of the file, or no text
	return strings.TrimSpace(string(text[:n]))
}

// say writes a text into the file. An error is silence, after which others take over.
func (m *making) say(text string) {
	_, _ = m.file.WriteAt(fmt.Appendf(nil, "%-*s\n", makingBytes-1, makingMagic+text), 0)
}

// begin begins to say that the process runs.
func (m *making) begin() {
	began := time.Now()
	say := func() {
		m.say(fmt.Sprintf("process %d, %d of %d bytes, %.0f s", os.Getpid(), m.read.Load(), m.archive.Info().Size(), time.Since(began).Seconds()))
	}
	say()
	m.beating.Go(func() {
		tick := time.NewTicker(makingBeat)
		defer tick.Stop()
		for {
			select {
			case <-m.stop:
				return
			case <-tick.C:
				say()
			}
		}
	})
}

// progress returns a Config that also tells the others how far the walk is. m may be nil.
func (m *making) progress(c Config) Config {
	if m == nil {
		return c
	}
	also := c.Progress
	c.Progress = func(p archive.Progress) {
		m.read.Store(p.Bytes)
		if also != nil {
			also(p)
		}
	}
	return c
}

// end returns the right. If there is no index, and the process was not told to stop, those that
// wait read the archive for themselves: waiting for each other would take them longer. m may be
// nil.
func (m *making) end(indexed bool) {
	if m == nil {
		return
	}
	close(m.stop)
	m.beating.Wait()
	if !indexed && m.context().Err() == nil {
		m.say(makingFailed)
	}
	if m.named() {
		_ = os.Remove(m.path) // if it stays, the next process locks it
	}
	_ = m.file.Close() // only its text was written
}

// busy reports whether another process has locked the file. It locks the file otherwise, until the
// file is closed, but on file systems without locks.
func busy(f *os.File) bool {
	locked, err := tryLock(f)
	return err == nil && !locked
}
