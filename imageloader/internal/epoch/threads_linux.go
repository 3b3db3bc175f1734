package epoch

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// checkCPUs returns an error if the process may not use the CPUs.
func (t *Threads) checkCPUs() error {
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		return fmt.Errorf("imageloader: Options.WorkerCPUs: asking which CPUs this process may use: %w", err)
	}
	for _, c := range t.CPUs {
		if c < 0 || !allowed.IsSet(c) {
			return fmt.Errorf("imageloader: Options.WorkerCPUs: this process may not use CPU %d; it has "+
				"%d CPUs: see taskset -p %d", c, allowed.Count(), unix.Getpid())
		}
	}
	return nil
}

// lock locks the calling goroutine to a thread, and sets the niceness and the CPUs of the thread.
// unlock restores the thread. Lowering the niceness again needs a privilege. Without that
// privilege, the thread ends when its goroutine ends.
func (t *Threads) lock() (unlock func(), err error) {
	if t.Nice == 0 && len(t.CPUs) == 0 {
		return func() {}, nil
	}
	runtime.LockOSThread()
	var before unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return nil, fmt.Errorf("imageloader: asking for a worker's CPUs: %w", err)
	}
	// The system call returns 20 - niceness. On Linux, niceness and CPUs belong to the calling
	// thread.
	priority, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
	if err != nil {
		return nil, fmt.Errorf("imageloader: asking for a worker's niceness: %w", err)
	}
	nice := 20 - priority
	unlock = func() {
		if unix.SchedSetaffinity(0, &before) == nil &&
			(t.Nice == 0 || unix.Setpriority(unix.PRIO_PROCESS, 0, nice) == nil) {
			runtime.UnlockOSThread()
		}
	}
	if len(t.CPUs) > 0 {
		var set unix.CPUSet
		for _, c := range t.CPUs {
			set.Set(c)
		}
		if err := unix.SchedSetaffinity(0, &set); err != nil {
			unlock()
			return nil, fmt.Errorf("imageloader: Options.WorkerCPUs %v: %w", t.CPUs, err)
		}
	}
	if t.Nice > 0 {
		if err := unix.Setpriority(unix.PRIO_PROCESS, 0, min(maxNice, nice+t.Nice)); err != nil {
			unlock()
			return nil, fmt.Errorf("imageloader: Options.WorkerNice %d: %w", t.Nice, err)
		}
	}
	return unlock, nil
}
