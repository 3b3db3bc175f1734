package imageloader

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

const maxNice = 19 // of nice(2)

// checkThreads returns an error if workers can't have the niceness and the CPUs of the options.
func (o *Options) checkThreads() error {
	if o.WorkerNice < 0 || o.WorkerNice > maxNice {
		return fmt.Errorf("imageloader: Options.WorkerNice is %d, not in 0 to %d", o.WorkerNice, maxNice)
	}
	if len(o.WorkerCPUs) == 0 {
		return nil
	}
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		return fmt.Errorf("imageloader: Options.WorkerCPUs: asking which CPUs this process may use: %w", err)
	}
	for _, c := range o.WorkerCPUs {
		if c < 0 || !allowed.IsSet(c) {
			return fmt.Errorf("imageloader: Options.WorkerCPUs: this process may not use CPU %d; it has %d CPUs: see taskset -p %d", c, allowed.Count(), unix.Getpid())
		}
	}
	return nil
}

// settle gives the calling goroutine a thread of its own, with the niceness and the CPUs that the
// options ask for. leave undoes it. Lowering the niceness again takes a privilege: without it, the
// thread ends with its goroutine.
func (o *Options) settle() (leave func(), err error) {
	if o.WorkerNice == 0 && len(o.WorkerCPUs) == 0 {
		return func() {}, nil
	}
	runtime.LockOSThread()
	var before unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		return nil, fmt.Errorf("imageloader: asking for a worker's CPUs: %w", err)
	}
	// The system call returns 20 - niceness. On Linux niceness and CPUs are the calling thread's.
	priority, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
	if err != nil {
		return nil, fmt.Errorf("imageloader: asking for a worker's niceness: %w", err)
	}
	nice := 20 - priority
	leave = func() {
		if unix.SchedSetaffinity(0, &before) == nil && (o.WorkerNice == 0 || unix.Setpriority(unix.PRIO_PROCESS, 0, nice) == nil) {
			runtime.UnlockOSThread()
		}
	}
	if len(o.WorkerCPUs) > 0 {
		var set unix.CPUSet
		for _, c := range o.WorkerCPUs {
			set.Set(c)
		}
		if err := unix.SchedSetaffinity(0, &set); err != nil {
			leave()
			return nil, fmt.Errorf("imageloader: Options.WorkerCPUs %v: %w", o.WorkerCPUs, err)
		}
	}
	if o.WorkerNice > 0 {
		if err := unix.Setpriority(unix.PRIO_PROCESS, 0, min(maxNice, nice+o.WorkerNice)); err != nil {
			leave()
			return nil, fmt.Errorf("imageloader: Options.WorkerNice %d: %w", o.WorkerNice, err)
		}
	}
	return leave, nil
}
