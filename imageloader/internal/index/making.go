package index

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

const (
	// makingSuffix ends the name of the lock file of a process that makes an index. The name looks
	// like an unfinished index, so patterns of shards and sweep recognise it.
	makingSuffix = ".making.tmp"
	makingMagic  = "torchstream makes an index: " // starts the file
	makingBytes  = 128                            // of its text
	makingFailed = "there is no index"            // the text of a process that leaves none

	makingTick  = 100 * time.Millisecond // how often a waiting process looks
	makingBeat  = time.Second            // how often the process that makes the index says so
	makingStall = 30 * time.Second       // of silence, after which another process takes over
	makingLog   = 10 * time.Second       // how often a waiting process logs

	// makingTurns and makingTurn bound the wait for a turn to remove a name. A turn takes
	// microseconds, but another program may have locked the folder for long.
	makingTurns = 100
	makingTurn  = 10 * time.Millisecond

	// makingRounds bounds how often a process locks a file that has lost its name. Normally another
	// process has just removed the file, once or twice. On a file system that changes a file's
	// number at each call, it would happen without end.
	makingRounds = 100
)

// making is the right to make the index of an archive. One process has it at a time, and others
// that open the archive wait for the index.
//
// The right is a lock on a file next to the index. The system releases the lock when the process
// ends, however it ends. While the process runs, it keeps writing into the file, so that others can
// tell a stopped process from a busy one. Releasing the right removes the file. A killed process
// leaves the file, and the next process that makes the index removes it.
type making struct {
	path    string
	file    *os.File
	archive *archive.Archive
	config  *Config
	read    atomic.Int64 // bytes of the archive
	stop    chan struct{}
	beating sync.WaitGroup
}

// makeOrWait waits for the right to make an index of the archive. It returns the right, or the
// index if another process has made it meanwhile.
//
// Both are nil if no file can be locked, or if another process has found that the index can't be
// made or written. Each process then reads the archive itself. If wait is false, makeOrWait returns
// nothing instead of waiting. The caller calls end.
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

// openMaking opens the lock file in the first usable place of the index. It returns nil if there is
// none.
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

// await waits until the lock is free, or the file has lost its name. It removes the name itself
// when the lock's holder gives no more signs.
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
			m.removeName() // if it stays, it is as good as locked
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

// stallAfter starts a timer for the next sign of the process that makes the index.
func (c *Config) stallAfter() <-chan time.Time {
	if c.stall != nil {
		return c.stall()
	}
	return time.After(makingStall)
}

func (m *making) context() context.Context { return m.archive.Context() }

// removeName removes the file's name, if it still is the file's. Processes that remove names take
// turns by a lock on the folder, so that none removes the file of a process that has just taken
// over. Where the folder cannot be locked, two processes may then make the index, as they would
// without the lock.
func (m *making) removeName() {
	if folder, err := os.Open(filepath.Dir(m.path)); err == nil {
		defer folder.Close() // unlocks it; it was only locked
		for range makingTurns {
			if syscall.Flock(int(folder.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != syscall.EWOULDBLOCK {
				break
			}
			time.Sleep(makingTurn)
		}
	}
	if m.named() {
		_ = os.Remove(m.path)
	}
}

// named reports whether the open file still has its name.
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

// say writes a text into the file. If writing fails, the others get no sign and take over.
func (m *making) say(text string) {
	_, _ = m.file.WriteAt(fmt.Appendf(nil, "%-*s\n", makingBytes-1, makingMagic+text), 0)
}

// begin starts the goroutine that reports that the process runs.
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

// progress returns a Config that also reports the progress of the walk to the waiting processes. m
// may be nil.
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

// end releases the right. If there is no index, and the process was not told to stop, the waiting
// processes read the archive themselves. Waiting for each other would take longer. m may be nil.
func (m *making) end(indexed bool) {
	if m == nil {
		return
	}
	close(m.stop)
	m.beating.Wait()
	if !indexed && m.context().Err() == nil {
		m.say(makingFailed)
	}
	m.removeName()     // if it stays, the next process locks it
	_ = m.file.Close() // only its text was written
}

// busy reports whether another process has locked the file. Otherwise it locks the file until the
// file is closed. A file system without locks leaves the file unlocked.
func busy(f *os.File) bool {
	locked, err := tryLock(f)
	return err == nil && !locked
}
