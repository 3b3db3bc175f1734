package safefile

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

// claimVariable is an environment variable with the path of the claim that TestClaimHolder's
// process holds.
const claimVariable = "TORCHSTREAM_TEST_CLAIM"

// TestClaimHolder is the process that TestClaimEndsWithItsProcess kills.
func TestClaimHolder(t *testing.T) {
	path := os.Getenv(claimVariable)
	if path == "" {
		t.Skip("TestClaimEndsWithItsProcess runs it")
	}
	c, err := NewClaim(path)
	fmt.Println("held:", err)
	os.Stdin.Read(make([]byte, 1)) // blocks until the process is killed
	if err := c.Release(); err != nil {
		t.Error(err)
	}
}

// checkBusy checks that an error names this host and the process pid as the holder.
func checkBusy(t *testing.T, err error, pid int) {
	t.Helper()
	host, hostErr := os.Hostname()
	if hostErr != nil {
		t.Fatal(hostErr)
	}
	want := fmt.Sprintf(`^process %d on %s since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d$`, pid, regexp.QuoteMeta(host))
	var busy *BusyError
	if !errors.As(err, &busy) || !regexp.MustCompile(want).MatchString(busy.Holder) {
		t.Errorf("error %v, want a *BusyError whose holder matches %s", err, want)
	}
}

func TestClaimHasOneHolder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "claim")
	if err := Claimed(path); err != nil {
		t.Errorf("without a file: %v, want nil", err)
	}
	for range 2 { // a claim is free again after Release
		c, err := NewClaim(path)
		if err != nil {
			t.Fatal(err)
		}
		_, err = NewClaim(path)
		checkBusy(t, err, os.Getpid())
		checkBusy(t, Claimed(path), os.Getpid())
		if err := c.Release(); err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("after Release: %v, want no file", err)
		}
	}
}

func TestClaimEndsWithItsProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "claim")
	command := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestClaimHolder$")
	command.Env = append(os.Environ(), claimVariable+"="+path)
	input, err := command.StdinPipe() // stays open, so that the process waits
	if err != nil {
		t.Fatal(err)
	}
	defer input.Close()
	out, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "held: <nil>\n" {
		t.Fatalf("the process says %q, %v", line, err)
	}
	_, err = NewClaim(path)
	checkBusy(t, err, command.Process.Pid)
	if err := command.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = command.Wait() // killed
	if err := Claimed(path); err != nil {
		t.Errorf("Claimed after the kill: %v, want nil", err)
	}
	c, err := NewClaim(path)
	if err != nil {
		t.Fatalf("NewClaim after the kill: %v, want nil", err)
	}
	checkBusy(t, Claimed(path), os.Getpid())
	if err := c.Release(); err != nil {
		t.Error(err)
	}
}

func TestClaimLeavesAnotherFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "claim")
	if err := os.WriteFile(path, []byte("notes"), 0o666); err != nil {
		t.Fatal(err)
	}
	if _, err := NewClaim(path); err == nil ||
		!strings.Contains(err.Error(), "is a file of another kind, and only a claim") {
		t.Errorf("error %v, want one that refuses the file", err)
	}
	if text, err := os.ReadFile(path); string(text) != "notes" {
		t.Errorf("the file has %q, %v, want %q", text, err, "notes")
	}
}

func TestClaimWithoutLocksIsErrNoLocks(t *testing.T) {
	path := filepath.Join(t.TempDir(), "claim")
	c, err := newClaim(path, func(*os.File) error { return syscall.ENOLCK })
	if c != nil || !errors.Is(err, ErrNoLocks) || !errors.Is(err, syscall.ENOLCK) {
		t.Errorf("%v, error %v, want no claim, ErrNoLocks and ENOLCK", c, err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v, want no file", err)
	}
}

// A claim that gets no lock leaves the file of a holder that has one.
func TestClaimWithoutLocksLeavesTheHoldersFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "claim")
	holder, err := NewClaim(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := newClaim(path, func(*os.File) error { return syscall.ENOLCK }); !errors.Is(err, ErrNoLocks) {
		t.Errorf("got error %v, want ErrNoLocks", err)
	}
	if err := Claimed(path); !errors.As(err, new(*BusyError)) {
		t.Errorf("got error %v, want the holder's *BusyError", err)
	}
	if err := holder.Release(); err != nil {
		t.Error(err)
	}
}

// The end of a claim leaves a file that replaced the claim's.
func TestReleaseLeavesAnotherClaimsFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "claim")
	first, err := NewClaim(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	second, err := NewClaim(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Release(); err != nil {
		t.Error(err)
	}
	if err := Claimed(path); !errors.As(err, new(*BusyError)) {
		t.Errorf("got error %v, want the second claim's *BusyError", err)
	}
	if err := second.Release(); err != nil {
		t.Error(err)
	}
}

// If the holder removes the file between opening and locking, NewClaim creates it again.
func TestClaimOfARemovedFileIsMadeAnew(t *testing.T) {
	path, removed := filepath.Join(t.TempDir(), "claim"), false
	c, err := newClaim(path, func(f *os.File) error {
		if !removed {
			removed = true
			if err := os.Remove(path); err != nil {
				t.Error(err)
			}
		}
		return exclusively(f)
	})
	if err != nil {
		t.Fatal(err)
	}
	checkBusy(t, Claimed(path), os.Getpid())
	if err := c.Release(); err != nil {
		t.Error(err)
	}
}

// A holder that has not written its name yet is busy too, and the error says whose file it is.
func TestClaimOfAHolderWithoutANameIsBusy(t *testing.T) {
	path := filepath.Join(t.TempDir(), "claim")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := exclusively(f); err != nil {
		t.Fatal(err)
	}
	_, err = NewClaim(path)
	for name, err := range map[string]error{"NewClaim": err, "Claimed": Claimed(path)} {
		var busy *BusyError
		if !errors.As(err, &busy) || busy.Path != path || busy.Holder != "another process" ||
			err.Error() != path+" is held by another process" {
			t.Errorf("%s: got error %v, want a *BusyError of %s by another process", name, err, path)
		}
	}
}

func TestClaimInAMissingFolderIsAnError(t *testing.T) {
	path := filepath.Join(t.TempDir(), "none", "claim")
	if c, err := NewClaim(path); c != nil || !errors.Is(err, os.ErrNotExist) || errors.Is(err, ErrNoLocks) {
		t.Errorf("got claim %v, error %v, want ErrNotExist alone", c, err)
	}
}
