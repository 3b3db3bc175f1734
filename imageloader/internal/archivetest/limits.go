package archivetest

import (
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/torchstream/torchstream/internal/system"
)

// Within ends the program if the test hangs or uses more than 10 seconds of CPU time, the limit for
// bad input. Waiting for a core does not count.
func Within(t *testing.T) {
	t.Helper()
	const limit, patience = 10 * time.Second, 10 * time.Minute
	begun, before := time.Now(), cpuTime()
	var timer *time.Timer
	var ended atomic.Bool
	set := make(chan struct{})
	timer = time.AfterFunc(limit, func() {
		if <-set; ended.Load() {
			return
		}
		took := (cpuTime() - before) / time.Duration(runtime.GOMAXPROCS(0))
		if took < limit && time.Since(begun) < patience {
			timer.Reset(limit - took)
			return
		}
		buf := make([]byte, 1<<20)
		panic(fmt.Sprintf("%s hangs:\n%s", t.Name(), buf[:runtime.Stack(buf, true)]))
	})
	close(set)
	t.Cleanup(func() {
		ended.Store(true)
		timer.Stop()
	})
}

// cpuTime returns the CPU time of the process on all cores.
func cpuTime() time.Duration {
	cpu, _, err := system.Usage()
	if err != nil {
		return 0
	}
	return cpu
}

// NoLeaks checks at the end of the test that no goroutine and no open file is left.
func NoLeaks(t *testing.T) {
	t.Helper()
	time.AfterFunc(time.Hour, func() {}).Stop() // the first timer opens files for Go's poller
	goroutines, files := runtime.NumGoroutine(), openFiles(t)
	t.Cleanup(func() {
		for range 30_000 { // goroutines end a moment after their last action
			if runtime.NumGoroutine() <= goroutines && openFiles(t) <= files {
				break
			}
			time.Sleep(time.Millisecond)
		}
		if n := runtime.NumGoroutine(); n > goroutines {
			buf := make([]byte, 1<<20)
			t.Errorf("%d goroutines are left, %d before:\n%s", n, goroutines, buf[:runtime.Stack(buf, true)])
		}
		if n := openFiles(t); n > files {
			t.Errorf("%d files are open, %d before", n, files)
		}
	})
}

func openFiles(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip("no /proc: ", err)
	}
	return len(list)
}
