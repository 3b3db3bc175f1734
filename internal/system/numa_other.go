//go:build !linux

package system

// OnNode calls f. bound is false.
func OnNode(_ Node, f func() error) (bound bool, err error) { return false, f() }
