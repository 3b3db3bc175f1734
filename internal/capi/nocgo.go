//go:build !linux || !cgo

package capi

import "github.com/torchstream/torchstream/internal/imagecapi"

// Check returns an error that wraps [CodeNoLibrary]: this build cannot call the libraries.
// stubs_gen.go declares the other functions.
func Check() error { return imagecapi.Check() }
