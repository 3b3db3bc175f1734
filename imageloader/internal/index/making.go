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
	"github.com/torchstream/torchstream/internal/system"
)

const (
	// makingSuffix ends the name of the lock file of a process that builds an index. The name looks
	// like a temporary file of an index, so that patterns of shards skip it and sweep removes it.
	makingSuffix = ".making.tmp"
	makingMagic  = "torchstream makes an index: " // start of the file
	makingBytes  = 128                            // size of the text in the file
	makingFailed = "there is no index"            // the text of a process that ends without an index

	makingTick  = 100 * time.Millisecond // interval at which a waiting process checks
	makingBeat  = time.Second            // interval at which the process that builds the index writes into the file
	makingStall = 30 * time.Second       // time without a write, after which another process takes over
	makingLog   = 10 * time.Second       // interval at which a waiting process logs

	// makingTurns and makingTurn limit the wait for a turn to remove a name. A turn takes
	// microseconds, but another program may hold the folder's lock for a long time.
	makingTurns = 100
	makingTurn  = 10 * time.Millisecond

	// makingRounds limits how often a process locks a file that has then lost its name. Normally
	// that happens once or twice, because another process has just removed the file. On a file
	// system that changes a file's inode number at each call, it would happen every time.
	makingRounds = 100
)

// making is the right to build the index of an archive. Only one process has it at a time. Other
// processes that open the archive wait for the index.
//
// The right is a lock on a file next to the index. The system releases the lock when the process
// ends, even if it crashes. While the process runs, it keeps writing into the file, so that others
// can tell a stopped process from a busy one. Releasing the right removes the file. A killed
// process leaves the file behind, and the next process that builds the index removes it.
type making struct {
	path    string
	file    *os.File
	archive *archive.Archive
	config  *Config
	read    atomic.Int64 // bytes of the archive read so far
	stop    chan struct{}
	beating sync.WaitGroup
}

// makeOrWait waits for the right to build an index of the archive. It returns the right, or the
// index if another process has built it in the meantime. The caller calls end on the right.
//
// Both results are nil if no file can be locked, or if another process has found that the index
// can't be built or written. Each process then reads the archive by itself. If wait is false,
// makeOrWait returns nil instead of waiting.
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
				_ = m.file.Close() // only read
				return nil, nil, err
			}
		}
		named, failed := m.named(), false
		if !named { // removed by the process that held the lock, or by one that takes over
			failed = strings.Contains(m.said(), makingFailed)
			_ = m.file.Close() // only read
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
	c.Logger.Warn("the lock of the index has another file each time: the archive is read without it",
		"archive", a.Path())
	return nil, nil, nil
}

// openMaking opens the lock file next to the first index path that allows it. It returns nil if no
// path does.
func openMaking(a *archive.Archive, c *Config) *making {
	for _, path := range indexPaths(c, a) {
		makeCacheFolder(path)
		path += makingSuffix
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|system.NoFollow|system.NonBlock, 0o600)
		if err != nil {
			continue
		}
		m := &making{path: path, file: f, archive: a, config: c, stop: make(chan struct{})}
		info, err := f.Stat()
		if err == nil && info.Mode().IsRegular() && (info.Size() == 0 || strings.HasPrefix(m.said(), makingMagic)) {
			return m
		}
		_ = f.Close() // a file of another program, which must not be changed
	}
	return nil
}

// await waits until the lock is free, or until the file has lost its name. If the lock's holder
// writes nothing for too long, await removes the name itself.
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
			m.removeName() // if the name stays, the file still counts as locked
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

// stallAfter starts a timer for the next write of the process that builds the index.
func (c *Config) stallAfter() <-chan time.Time {
	if c.stall != nil {
		return c.stall()
	}
	return time.After(makingStall)
}

func (m *making) context() context.Context { return m.archive.Context() }

// removeName removes the file's name, if the name still belongs to this file. Processes lock the
// folder before they remove a name. Otherwise a process could remove the file of another process
// that has just taken over. If the folder can't be locked, two processes may build the index at the
// same time, as they would without a lock file.
func (m *making) removeName() {
	if folder, err := os.Open(filepath.Dir(m.path)); err == nil {
		defer folder.Close() // unlocks it
		for range makingTurns {
			if system.TryLock(folder.Fd()) != syscall.EWOULDBLOCK {
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
	n, _ := m.file.ReadAt(text, 0) // fails at the end of the file, or if the file has no text
	return strings.TrimSpace(string(text[:n]))
}

// say writes a text into the file. If that fails, another process will take over.
func (m *making) say(text string) {
	_, _ = m.file.WriteAt(fmt.Appendf(nil, "%-*s\n", makingBytes-1, makingMagic+text), 0)
}

// begin starts the goroutine that writes into the file at intervals.
func (m *making) begin() {
	began := time.Now()
	say := func() {
		m.say(fmt.Sprintf("process %d, %d of %d bytes, %.0f s", os.Getpid(), m.read.Load(),
			m.archive.Info().Size(), time.Since(began).Seconds()))
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

// progress returns a copy of c that also writes the progress of the walk into the file. m may be
// nil.
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

// end releases the right. indexed says whether there is an index. If there is none, although nobody
// told this process to stop, the waiting processes read the archive by themselves, because waiting
// for each other would take longer. m may be nil.
func (m *making) end(indexed bool) {
	if m == nil {
		return
	}
	close(m.stop)
	m.beating.Wait()
	if !indexed && m.context().Err() == nil {
		m.say(makingFailed)
	}
	m.removeName()     // if the name stays, the next process locks the file
	_ = m.file.Close() // no data to lose
}

// busy reports whether another process has locked the file. If no other process has, busy locks the
// file until the file is closed. On a file system without locks, the file stays unlocked.
func busy(f *os.File) bool {
	locked, err := tryLock(f)
	return err == nil && !locked
}
