package safefile

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"
)

// ErrNoLocks is in the error of NewClaim on a file system that cannot lock files.
var ErrNoLocks = errors.New("its file system cannot lock files")

// BusyError is the error of NewClaim and Claimed for a claim that somebody else holds.
type BusyError struct {
	Path   string // the claim's file
	Holder string // "process 12 on host-3 since 2026-01-31 10:11:12"
}

func (e *BusyError) Error() string { return fmt.Sprintf("%s is held by %s", e.Path, e.Holder) }

// claimMagic begins the text of a claim's file.
const claimMagic = "in use by "

// maxClaim is the maximum length of the text that is read.
const maxClaim = 512

// Claim is a file that one holder at a time has, in all processes of all hosts that see it. The
// kernel ends the claim with its process, whose file then stays until the next holder removes it.
type Claim struct{ file *os.File }

// NewClaim makes the file at the path, unless it is there, and holds it. The error is a *BusyError
// if somebody else holds it, wraps ErrNoLocks if the file system cannot say that, and otherwise
// says why the file cannot be made. A file of another kind stays as it is.
func NewClaim(path string) (*Claim, error) { return newClaim(path, exclusively) }

// Claimed returns a *BusyError if somebody holds the claim, and nil otherwise, also if it cannot be
// read. It makes no file.
func Claimed(path string) error {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil
	}
	defer f.Close() // ends the lock; only read
	if syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB) != syscall.EWOULDBLOCK {
		return nil
	}
	return busy(f)
}

func exclusively(f *os.File) error {
	return syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
}

func newClaim(path string, lock func(*os.File) error) (*Claim, error) {
	// Claimed has a lock for microseconds, and a holder that ends removes the file, so one failure
	// means nothing.
	const tries, pause = 20, 5 * time.Millisecond
	for try := 1; ; try++ {
		c, err := tryClaim(path, lock)
		if err == nil || try == tries || !errors.As(err, new(*BusyError)) && !errors.Is(err, errRemoved) {
			return c, err
		}
		time.Sleep(pause)
	}
}

// errRemoved is the error of a file that its holder removed before the lock was had.
var errRemoved = errors.New("the file was removed meanwhile")

func tryClaim(path string, lock func(*os.File) error) (_ *Claim, err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o666)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = f.Close() // err says more
		}
	}()
	if err := checkHead(f, path, Prefix("a claim", claimMagic)); err != nil {
		return nil, err
	}
	switch err := lock(f); {
	case err == syscall.EWOULDBLOCK:
		return nil, busy(f)
	case err != nil:
		_ = os.Remove(path) // nobody can hold it
		return nil, fmt.Errorf("%s: %w (%w)", path, ErrNoLocks, err)
	}
	if !named(f) {
		return nil, fmt.Errorf("%s: %w", path, errRemoved)
	}
	host, _ := os.Hostname()
	text := fmt.Sprintf("process %d on %s since %s\n", os.Getpid(), host, time.Now().Format(time.DateTime))
	if err := f.Truncate(0); err != nil {
		return nil, err
	}
	if _, err := f.WriteAt([]byte(claimMagic+text), 0); err != nil {
		return nil, err
	}
	return &Claim{f}, nil
}

// busy is the error of a file that somebody else has locked.
func busy(f *os.File) error {
	text := make([]byte, maxClaim)
	n, _ := f.ReadAt(text, 0) // the end of the file, or no text
	line, _, _ := strings.Cut(string(text[:n]), "\n")
	holder, ok := strings.CutPrefix(line, claimMagic)
	if !ok {
		holder = "another process" // which has not written its name yet
	}
	return &BusyError{f.Name(), holder}
}

// named reports whether the open file is still the one at its path.
func named(f *os.File) bool {
	at, err := os.Lstat(f.Name())
	if err != nil {
		return false
	}
	info, err := f.Stat()
	return err == nil && os.SameFile(at, info)
}

// Release removes the file and ends the claim.
func (c *Claim) Release() error {
	return errors.Join(os.Remove(c.file.Name()), c.file.Close())
}
