//go:build !linux

package freeport

// reserve does nothing: only Linux has abstract sockets, whose names disappear with the process.
func reserve(int) error { return nil }
