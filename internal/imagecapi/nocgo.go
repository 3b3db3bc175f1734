//go:build !linux || !cgo

package imagecapi

import (
	"errors"
	"runtime"

	"github.com/torchstream/torchstream/internal/library"
)

// Check returns an error that wraps [CodeNoLibrary] and errors.ErrUnsupported: this build cannot
// call the libraries. stubs_gen.go declares the other functions.
func Check() error {
	return notCallable{&Error{Code: CodeNoLibrary, Origin: "torchstream",
		Message: library.CannotCall(runtime.GOOS, runtime.GOARCH)}}
}

type notCallable struct{ failure *Error }

func (e notCallable) Error() string   { return e.failure.Error() }
func (e notCallable) Unwrap() []error { return []error{e.failure, errors.ErrUnsupported} }
