package safefile

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/torchstream/torchstream/internal/system"
)

// ErrNoLocks is wrapped by NewClaim's error if the file system cannot lock files.
var ErrNoLocks = errors.New("its file system cannot lock files")

// BusyError is returned by NewClaim and Claimed if another holder has the claim.
type BusyError struct {
	Path   string // the claim's file
	Holder string // "process 12 on host-3 since 2026-01-31 10:11:12"
}

func (e *BusyError) Error() string { return fmt.Sprintf("%s is held by %s", e.Path, e.Holder) }

// claimMagic is the start of a claim file's text.
const claimMagic = "in use by "

// maxClaim is the maximum length of that text.
const maxClaim = 512

// Claim is a file with at most one holder at a time, among all processes on all hosts that see the
// file. The kernel releases the claim when its process ends. The file then remains until the next
// holder removes it.
type Claim struct{ file *os.File }

// NewClaim creates the file at path, unless it exists, and claims it. The error is a *BusyError if
// another holder has the claim. It wraps ErrNoLocks if the file system cannot lock files. Otherwise
// it says why the file cannot be created. A file of another kind is not changed.
func NewClaim(path string) (*Claim, error) { return newClaim(path, exclusively) }

// Claimed returns a *BusyError if the claim has a holder, and nil otherwise, even if the file
// cannot be read. It creates no file.
func Claimed(path string) error {
	f, err := os.OpenFile(path, os.O_RDONLY|system.NoFollow|system.NonBlock, 0)
	if err != nil {
		return nil
	}
	defer f.Close() // releases the lock; only read
	if system.TryShare(f.Fd()) != syscall.EWOULDBLOCK {
		return nil
	}
	return busy(f)
}

func exclusively(f *os.File) error { return system.TryLock(f.Fd()) }

func newClaim(path string, lock func(*os.File) error) (*Claim, error) {
	// Retry, because a single failure means little: Claimed holds a lock for microseconds, and a
	// holder that ends removes the file.
	const tries, pause = 20, 5 * time.Millisecond
	for try := 1; ; try++ {
		c, err := tryClaim(path, lock)
		if err == nil || try == tries || !errors.As(err, new(*BusyError)) && !errors.Is(err, errRemoved) {
			return c, err
		}
		time.Sleep(pause)
	}
}

// errRemoved means that the holder removed the file before it could be locked.
var errRemoved = errors.New("the file was removed meanwhile")

func tryClaim(path string, lock func(*os.File) error) (_ *Claim, err error) {
	const flags = os.O_RDWR | os.O_CREATE | system.NoFollow | system.NonBlock
	f, err := os.OpenFile(path, flags|os.O_EXCL, 0o666)
	made := err == nil
	if errors.Is(err, os.ErrExist) {
		f, err = os.OpenFile(path, flags, 0o666)
	}
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
		if made { // an existing file may have a holder that got a lock
			_ = os.Remove(path)
		}
		return nil, fmt.Errorf("%s: %w (%w)", path, ErrNoLocks, err)
	}
	if !Names(f.Name(), f) {
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

// busy returns the error for a file that another holder has locked.
func busy(f *os.File) error {
	text := make([]byte, maxClaim)
	n, _ := f.ReadAt(text, 0) // io.EOF, or no text
	line, _, _ := strings.Cut(string(text[:n]), "\n")
	holder, ok := strings.CutPrefix(line, claimMagic)
	if !ok {
		holder = "another process" // it has not written its name yet
	}
	return &BusyError{f.Name(), holder}
}

// Release removes the file and releases the claim.
func (c *Claim) Release() error {
	var err error
	if Names(c.file.Name(), c.file) { // the file at the path may be somebody else's by now
		err = os.Remove(c.file.Name())
	}
	return errors.Join(err, c.file.Close())
}
