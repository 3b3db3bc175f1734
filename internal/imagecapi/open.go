//go:build linux

package imagecapi

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

extern char torchstream_imagecapi_absent;
const char* torchstream_imagecapi_bind(void* library);

// Opens a library. On failure it returns NULL, and in why a description for the caller to free:
// dlerror answers only on the thread that failed.
static void* open_library(const char* path, char** why) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    const char* message = dlerror();
    *why = strdup(message != NULL ? message : "unknown error");
  }
  return library;
}

// Returns what a function without arguments of the library returns, -1 if there is no such
// function.
static int32_t call_version(void* library, const char* name) {
  int32_t (*version)(void);
  *(void**)&version = dlsym(library, name);
  return version != NULL ? version() : -1;
}
*/
import "C"

import (
	"strings"
	"unsafe"

	"github.com/torchstream/torchstream/internal/library"
)

// OpenLibrary finds and opens a shared library, and returns its path. The library stays open.
// versionOf names the function that returns the library's ABI version; want is the required
// version. bind gets dlopen's handle, and returns the name of a function that the library lacks, or
// "". An error is an [*Error] with [CodeNoLibrary]; bind has then changed nothing.
func OpenLibrary(search library.Search, name, versionOf string, want int,
	bind func(handle unsafe.Pointer) string) (path string, err error) {
	fail := func(message string) (string, error) {
		return "", &Error{Code: CodeNoLibrary, Origin: name, Message: message}
	}
	path = search.Find(name)
	if path == "" {
		if search.Library != "" {
			return fail(search.Missing(name))
		}
		path = name // a name for the dynamic loader's search
	}
	handle, why := open(path)
	switch {
	case handle == nil && path == name && strings.HasPrefix(why, name+":"):
		return fail(search.Missing(name))
	case handle == nil:
		return fail(search.Unusable(path, why))
	}
	v := C.CString(versionOf)
	defer C.free(unsafe.Pointer(v))
	have := int(C.call_version(handle, v))
	if have == -1 {
		return fail(search.Lacks(path, versionOf))
	}
	if have != want {
		return fail(search.OtherVersion(path, have, want))
	}
	if missing := bind(handle); missing != "" {
		return fail(search.Lacks(path, missing))
	}
	return path, nil
}

func open(path string) (handle unsafe.Pointer, why string) {
	p := C.CString(path)
	defer C.free(unsafe.Pointer(p))
	var message *C.char
	handle = C.open_library(p, &message)
	if handle == nil {
		why = C.GoString(message)
		C.free(unsafe.Pointer(message))
	}
	return handle, why
}

// bind fills the table of this package's functions.
func bind(handle unsafe.Pointer) string {
	if missing := C.torchstream_imagecapi_bind(handle); missing != nil {
		return C.GoString(missing)
	}
	return ""
}

// absent reports whether an error means that the library is not loaded. Functions return this error
// until the table is filled. It has no message, because only the library can make one.
func absent(e unsafe.Pointer) bool { return e == unsafe.Pointer(&C.torchstream_imagecapi_absent) }
