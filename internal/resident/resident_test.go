//go:build linux

package resident

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// Written memory becomes resident, and is no longer resident after it is freed.
func TestBytesFollowMemory(t *testing.T) {
	const size = 256 << 20
	read := func() int64 {
		t.Helper()
		n, err := Bytes()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := read()
	memory, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	for at := 0; at < size; at += os.Getpagesize() {
		memory[at] = 1
	}
	during := read()
	if err := unix.Munmap(memory); err != nil {
		t.Fatal(err)
	}
	after := read()
	// The rest of the process may change by a quarter of it meanwhile.
	if grown, shrunk := during-before, during-after; before <= 0 || grown < size*3/4 || grown > size*5/4 ||
		shrunk < size*3/4 || shrunk > size*5/4 {
		t.Errorf("%d bytes, %d with %d more, %d without, want a quarter of the size as the largest error",
			before, during, size, after)
	}
}

// A mapping larger than the limit is refused, a smaller one is not, and without it neither is.
func TestLimit(t *testing.T) {
	const more = 256 << 20
	try := func(bytes int) error {
		memory, err := unix.Mmap(-1, 0, bytes, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON)
		if err != nil {
			return err
		}
		return unix.Munmap(memory)
	}
	restore, err := Limit(more)
	if err != nil {
		t.Fatal(err)
	}
	small, large := try(more/4), try(more+1)
	if err := restore(); err != nil {
		t.Fatal(err)
	}
	if small != nil || !errors.Is(large, unix.ENOMEM) {
		t.Errorf("%v and %v under the limit, want nil, %v", small, large, unix.ENOMEM)
	}
	if err := try(more + 1); err != nil {
		t.Errorf("without the limit: %v, want no error", err)
	}
}

func TestParseRefusesOtherTexts(t *testing.T) {
	if n, err := parse("7 3 1 1 0 1 0\n", 1); err != nil || n != 3*int64(os.Getpagesize()) {
		t.Errorf("%d, %v, want %v, nil", n, err, 3*int64(os.Getpagesize()))
	}
	for _, text := range []string{"", "7", "7 x"} {
		if n, err := parse(text, 1); err == nil {
			t.Errorf("%q is %d, want an error", text, n)
		}
	}
}
