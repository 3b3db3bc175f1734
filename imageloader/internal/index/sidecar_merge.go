package index

import (
	"errors"
	"io/fs"
	"os"
	"syscall"
	"time"

	"github.com/torchstream/torchstream/internal/system"
)

// lockWait limits the wait for one other process that is saving into the same file, because that
// process may have been stopped.
const lockWait = 10 * time.Second

// lockTick is the time between two tries to lock a file.
const lockTick = 10 * time.Millisecond

// current opens and locks the index file that is at path now. The processes of a distributed
// training run close their indexes at the same time, so another process may have replaced the file.
// Closing the file releases the lock. On a file system without locks, the file stays unlocked.
func (s *sidecar) current(path string) (now *sidecar, info fs.FileInfo, err error) {
	for {
		if now, err = openToLock(path); err != nil {
			return nil, nil, err
		}
		if err = lock(now.file, s.saving.deadline()); err == nil {
			info, err = now.file.Stat()
		}
		if err != nil {
			_ = now.file.Close() // err says more
			return nil, nil, err
		}
		if at, err := os.Stat(path); err == nil && os.SameFile(at, info) {
			return now, info, nil
		}
		_ = now.file.Close() // another process has just replaced this file, so the new one has to be locked
	}
}

// openToLock opens an index file for writing, because on NFS only a file that is open for writing
// can be locked exclusively. If the file is not writable, openToLock opens it for reading.
func openToLock(path string) (*sidecar, error) {
	f, err := os.OpenFile(path, os.O_RDWR|system.NonBlock, 0)
	if err != nil {
		return openSidecar(path)
	}
	return newSidecar(path, f)
}

// errBusy means that another process has held the lock for too long.
var errBusy = errors.New("another process is saving into the index")

// lock locks an open file exclusively. Closing the file releases the lock.
func lock(f *os.File, deadline <-chan time.Time) error {
	tick := time.NewTicker(lockTick)
	defer tick.Stop()
	for {
		locked, err := tryLock(f)
		if locked || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-deadline:
			return errBusy
		}
	}
}

// tryLock locks an open file exclusively, unless another process has locked it. Closing the file
// releases the lock. On a file system without locks, tryLock also returns true.
func tryLock(f *os.File) (locked bool, err error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return false, err
	}
	var failed error
	err = raw.Control(func(fd uintptr) { failed = system.TryLock(fd) })
	return err == nil && failed != syscall.EWOULDBLOCK && failed != syscall.EINTR, err
}

// deadline starts a timer that limits the wait for the process that is saving.
func (s *saving) deadline() <-chan time.Time {
	if s.wait != nil {
		return s.wait()
	}
	return time.After(lockWait)
}

// describesAs reports whether two index files have the same members, labels and checkpoints.
func (s *sidecar) describesAs(other *sidecar) bool {
	for _, kind := range append([]uint32{sectionShards, sectionDirs, sectionCounts}, largeSections...) {
		p, q := s.places[kind], other.places[kind]
		if p.crc != q.crc || p.size != q.size || p.count != q.count {
			return false
		}
	}
	return true
}

// adopt adds the checksums that only the other file has.
func (s *sums) adopt(other *sidecar) {
	theirs, err := other.loadSums()
	if err != nil {
		return // it has no readable checksums
	}
	for i := range min(len(s.known), len(theirs.known)) {
		s.known[i].CompareAndSwap(0, theirs.known[i].Load())
	}
}
