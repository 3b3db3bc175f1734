// Package imagecapi turns the C header cshim/include/torchstream_image.h, whose library needs no
// LibTorch, into Go types and errors, function by function, and decides nothing: compressed bytes
// to pixels, augmentation, and inflate. internal/capi does the same for the rest.
//
// An object (a decoder, an augmenter, an inflater) is used by one goroutine at a time; any OS
// thread may make the calls. C keeps no pointer that it gets here beyond the call and never calls
// back into Go, so the functions are marked noescape and nocallback, and their arguments can live
// on the caller's stack.
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

// Check reports whether the loaded library is the one that this package was written for. The
// functions that make the first object of their kind call it, so that no object can be made by
// another library.
var Check = sync.OnceValue(func() error {
	if got := int(C.ts_image_abi_version()); got != C.TS_IMAGE_ABI_VERSION {
		return &Error{CodeInternal, "ts_image_abi_version",
			fmt.Sprintf("libtorchstream_image.so has ABI version %d, this program needs %d: rebuild it with `make image`", got, C.TS_IMAGE_ABI_VERSION)}
	}
	return nil
})

// JPEGVersion names the JPEG library, for example "libjpeg-turbo 2.1.5".
func JPEGVersion() string { return C.GoString(C.ts_jpeg_version()) }
