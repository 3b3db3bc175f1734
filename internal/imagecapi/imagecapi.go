//go:build linux

// Package imagecapi binds the C header cshim/include/torchstream_image.h, function by function,
// with Go types and errors: image decoding, augmentation and inflate. Its library does not need
// LibTorch. The package adds no policy. internal/capi binds the rest of the shim.
//
// One goroutine at a time may use an object (a decoder, an augmenter, an inflater), on any OS
// thread. C keeps no pointer beyond the call and never calls back into Go. The functions are
// therefore marked noescape and nocallback, so that their arguments can live on the caller's stack.
package imagecapi

/*
#cgo CFLAGS: -I${SRCDIR}/../../cshim/include
#include "torchstream_image.h"
*/
import "C"

import (
	"sync"
	"sync/atomic"

	_ "github.com/torchstream/torchstream/cshim/include" // the headers, for go mod vendor
	"github.com/torchstream/torchstream/internal/library"
)

//go:generate go run ../trampoline . ../../cshim/include/torchstream_image.h

// LibraryName is the file name of the image library.
const LibraryName = "libtorchstream_image.so"

// The version of torchstream in the headers.
const (
	versionMajor = C.TS_VERSION_MAJOR
	versionMinor = C.TS_VERSION_MINOR
	versionPatch = C.TS_VERSION_PATCH
)

// loaded is true once every function can be called.
var loaded atomic.Bool

// Check loads the image library, if it is not loaded yet. If that fails, it returns an error that
// wraps [CodeNoLibrary]. Functions that need no object call it.
func Check() error {
	if loaded.Load() {
		return nil
	}
	return load()
}

var load = sync.OnceValue(func() error {
	_, err := OpenLibrary(library.Here(Version()), LibraryName, "ts_image_abi_version", C.TS_IMAGE_ABI_VERSION, bind)
	loaded.Store(err == nil)
	return err
})

// JPEGVersion returns the name and version of the JPEG library, for example "libjpeg-turbo 2.1.5",
// or "" without the image library.
func JPEGVersion() string {
	if Check() != nil {
		return ""
	}
	return C.GoString(C.ts_jpeg_version())
}
