package system

import (
	"os"
	"syscall"
	"time"
)

// Sleep blocks the calling thread for d, or less if a signal arrives. It is for polling at
// intervals of less than a millisecond. time.Sleep takes at least a millisecond while no goroutine
// runs, because the Go runtime then waits in epoll_wait, which counts milliseconds. Sleep is late
// by the thread's timer slack: see SetTimerSlack.
func Sleep(d time.Duration) {
	t := syscall.NsecToTimespec(int64(d))
	_ = syscall.Nanosleep(&t, nil) // the only possible error is that a signal arrived
}

// SetTimerSlack sets the time by which the kernel may delay the end of the calling thread's sleeps,
// to end several at once. The default is 50 microseconds. The caller's goroutine must be locked to
// its thread.
func SetTimerSlack(d time.Duration) error {
	const setTimerSlack = 29 // PR_SET_TIMERSLACK
	if _, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, setTimerSlack, uintptr(d), 0); errno != 0 {
		return os.NewSyscallError("prctl", errno)
	}
	return nil
}
