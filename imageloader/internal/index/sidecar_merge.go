package index

import (
	"errors"
	"io/fs"
	"os"
	"syscall"
	"time"
)

// lockWait is how long saving waits for each other process that saves into the same file. A process
// that is stopped while it saves holds up no other for longer.
const lockWait = 10 * time.Second

// lockTick is how often a lock is tried.
const lockTick = 10 * time.Millisecond

// current opens the index file that is now at a path, and locks it, since the processes
// of a host that train together close their indexes at the same time. Closing its file unlocks it.
// Where the file system has no locks the file is not locked.
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
		_ = now.file.Close() // another process has saved meanwhile: its file is the one to lock
	}
}

// openToLock opens an index file for writing, since NFS gives nobody else an exclusive lock, or for
// reading if nobody may write it.
func openToLock(path string) (*sidecar, error) {
	f, err := os.OpenFile(path, os.O_RDWR|syscall.O_NONBLOCK, 0)
	if err != nil {
		return openSidecar(path)
	}
	return newSidecar(path, f)
}

// errBusy is the error of a lock that another process has for too long.
var errBusy = errors.New("another process is saving into the index")

// lock locks an open file for this process alone, until it is closed.
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

// tryLock locks an open file for this process alone, until it is closed, unless another process has
// locked it. A file of a file system without locks counts as locked.
func tryLock(f *os.File) (locked bool, err error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return false, err
	}
	var failed error
	err = raw.Control(func(fd uintptr) { failed = syscall.Flock(int(fd), syscall.LOCK_EX|syscall.LOCK_NB) })
	return err == nil && failed != syscall.EWOULDBLOCK && failed != syscall.EINTR, err
}

// deadline starts a timer for the process that saves now.
func (s *saving) deadline() <-chan time.Time {
	if s.wait != nil {
		return s.wait()
	}
	return time.After(lockWait)
}

// describesAs reports whether two index files are of the same members, labels and checkpoints.
func (s *sidecar) describesAs(other *sidecar) bool {
	for _, kind := range append([]uint32{sectionShards, sectionDirs, sectionCounts}, largeSections...) {
		p, q := s.places[kind], other.places[kind]
		if p.crc != q.crc || p.size != q.size || p.count != q.count {
			return false
		}
	}
	return true
}

// adopt takes the checksums of contents that the other file has and this process does not know.
func (s *sums) adopt(other *sidecar) {
	theirs, err := other.loadSums()
	if err != nil {
		return // it has none that can be read
	}
	for i := range min(len(s.known), len(theirs.known)) {
		s.known[i].CompareAndSwap(0, theirs.known[i].Load())
	}
}
