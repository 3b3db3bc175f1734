// Package imagecapi binds the C header cshim/include/torchstream_image.h, function by function,
// with Go types and errors: image decoding, augmentation and inflate. Its library needs no
// LibTorch. The package makes no policy. internal/capi binds the rest of the shim.
//
// One goroutine at a time may use an object (a decoder, an augmenter, an inflater), on any OS
// thread. C keeps no pointer beyond the call and never calls back into Go. The functions are
// therefore marked noescape and nocallback, so that their arguments can live on the caller's stack.
package imagecapi

/*
#cgo CFLAGS: -I${SRCDIR}/../../cshim/include
#cgo LDFLAGS: -L${SRCDIR}/../../cshim/build/lib -ltorchstream_image -Wl,-rpath,${SRCDIR}/../../cshim/build/lib
#include "torchstream_image.h"
*/
import "C"

import (
	"fmt"
	"sync"
)

// Check returns an error if the loaded library has another ABI version than this package. Functions
// that create an object call it, so that a program with a wrong library fails before it has one.
var Check = sync.OnceValue(func() error {
	if got := int(C.ts_image_abi_version()); got != C.TS_IMAGE_ABI_VERSION {
		return &Error{CodeInternal, "ts_image_abi_version",
			fmt.Sprintf("libtorchstream_image.so has ABI version %d, this program needs %d: rebuild it with `make image`", got, C.TS_IMAGE_ABI_VERSION)}
	}
	return nil
})

// JPEGVersion returns the name and version of the JPEG library, for example "libjpeg-turbo 2.1.5".
func JPEGVersion() string { return C.GoString(C.ts_jpeg_version()) }
