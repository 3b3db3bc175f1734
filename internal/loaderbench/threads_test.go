package loaderbench

import (
	"os"
	"runtime"
	"testing"
	"time"
)

// TestThreadsSince checks that a thread's time is counted under its name, as user time, and that
// the time of other threads is not.
func TestThreadsSince(t *testing.T) {
	named, burn, burnt := make(chan error), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(burnt)
		runtime.LockOSThread() // the thread ends with the goroutine
		named <- os.WriteFile("/proc/thread-self/comm", []byte("a (hot) one"), 0)
		for range burn {
			for begun := time.Now(); time.Since(begun) < 10*time.Millisecond; {
			}
			named <- nil
		}
	}()
	if err := <-named; err != nil {
		t.Fatal(err)
	}
	before, err := threadTimes()
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	var hot threadsRow
	for hot.UserCores == 0 && time.Since(began) < 20*time.Second {
		burn <- struct{}{}
		<-named
		rows, err := threadsSince(before, time.Second)
		if err != nil {
			t.Fatal(err)
		}
		for _, row := range rows {
			if row.Name == "a (hot) one" {
				hot = row
			}
		}
	}
	close(burn)
	<-burnt
	const tick = 0.01 // seconds: the kernel counts whole ticks, so a difference may be one too long
	if hot.Threads != 1 || hot.UserCores <= 0 || hot.UserCores > time.Since(began).Seconds()+tick {
		t.Errorf("%+v", hot)
	}
}

func TestParseThreadTime(t *testing.T) {
	got, err := parseThreadTime([]byte("77 (a) b (c) R 1 2 3 4 5 6 7 8 9 10 250 31 0 0 20 0 9\n"))
	if want := (threadTime{"a) b (c", 2500 * time.Millisecond, 310 * time.Millisecond}); err != nil || got != want {
		t.Errorf("%v, %v, want %v, nil", got, err, want)
	}
	for _, stat := range []string{"", "77 (a", "77 ) (", "77 (a) R 1 2 3",
		"77 (a) R 1 2 3 4 5 6 7 8 9 10 x 31", "77 (a) R 1 2 3 4 5 6 7 8 9 10 250 x"} {
		if got, err := parseThreadTime([]byte(stat)); err == nil {
			t.Errorf("%q: %v, want an error", stat, got)
		}
	}
}
