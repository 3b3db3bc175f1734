//go:build !linux

package system

// OnNode calls f.
func OnNode(_ Node, f func() error) error { return f() }
