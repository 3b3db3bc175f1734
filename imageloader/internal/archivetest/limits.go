package archivetest

import (
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"
)

// Within ends the program if the test runs for longer than the 10 seconds that bad input may take.
func Within(t *testing.T) {
	t.Helper()
	timer := time.AfterFunc(10*time.Second, func() {
		buf := make([]byte, 1<<20)
		panic(fmt.Sprintf("%s hangs:\n%s", t.Name(), buf[:runtime.Stack(buf, true)]))
	})
	t.Cleanup(func() { timer.Stop() })
}

// NoLeaks checks at the end of the test that it has left no goroutine and no open file.
func NoLeaks(t *testing.T) {
	t.Helper()
	goroutines, files := runtime.NumGoroutine(), openFiles(t)
	t.Cleanup(func() {
		for range 2000 { // goroutines end a moment after their last action
			if runtime.NumGoroutine() <= goroutines {
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
