package epoch

import "fmt"

const maxNice = 19 // the maximum of nice(2)

// Threads are the workers of an epoch.
type Threads struct {
	Workers    int
	Nice       int   // increment of the workers' niceness (nice(2))
	CPUs       []int // CPUs on which workers may run; empty: all
	QueueBytes int64 // maximum number of compressed bytes between reading and decoding
}

// Check returns an error if workers cannot get the niceness and the CPUs.
func (t *Threads) Check() error {
	if t.Nice < 0 || t.Nice > maxNice {
		return fmt.Errorf("imageloader: Options.WorkerNice is %d, not in 0 to %d", t.Nice, maxNice)
	}
	if len(t.CPUs) == 0 {
		return nil
	}
	return t.checkCPUs()
}
