//go:build !linux

package freeport

// reserve does nothing: only Linux has names that disappear with the process.
func reserve(int) error { return nil }
