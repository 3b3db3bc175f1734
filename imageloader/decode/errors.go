package decode

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// The kinds of an image's faults, for errors.Is.
var (
	ErrNotImage    = errors.New("not an image") // its first bytes match none of the formats, or it is empty
	ErrUnsupported = errors.New("unsupported")  // an image of a kind that is not supported
	ErrDamaged     = errors.New("damaged")      // the bytes are cut off or corrupt
	ErrTooLarge    = errors.New("too large")    // over a limit, named by a [LimitError]
	ErrRejected    = errors.New("rejected")     // a Func of Transform.Ops returned an error, or panicked
)

var (
	// ErrClosed is returned by the methods of a closed Decoder.
	ErrClosed = errors.New("decode: the decoder is closed")
	// ErrNoLibrary means that the image library is not installed, or has another version than this
	// program needs. The message gives the installed and the wanted version, and the command that
	// installs it.
	ErrNoLibrary error = imagecapi.CodeNoLibrary
)

// Errors lists the images of a call that are at fault, in the call's order. All other images were
// decoded. errors.Is and errors.As look into each element.
type Errors []*Error

func (e Errors) Error() string {
	if len(e) == 1 {
		return e[0].Error()
	}
	return fmt.Sprintf("%v (and %d more images)", e[0], len(e)-1)
}

// Unwrap returns the errors.
func (e Errors) Unwrap() []error {
	list := make([]error, len(e))
	for i, one := range e {
		list[i] = one
	}
	return list
}

// Error describes an image at fault.
type Error struct {
	Image int   // its position in the call
	Kind  error // ErrNotImage, ErrUnsupported, ErrDamaged, ErrTooLarge or ErrRejected
	Err   error // details; a *LimitError if the image is too large
	// Offset is the decoder's position in the image when it met the damage of ErrDamaged, in bytes
	// from the start of the image. It is at most the image's size. The damage is at or near this
	// byte, since decoders read ahead and count whole blocks. The error's text ends with this
	// offset. Offset is -1 for the other kinds. It is also -1 for parts of files whose decoder does
	// not report an offset: AVIF, HEIC, the bit streams of WebP, and the strips of a TIFF.
	Offset int64
}

func (e *Error) Error() string {
	return fmt.Sprintf("decode: image %d: %v: %v", e.Image, e.Kind, e.Err)
}

// Unwrap returns the kind and the details.
func (e *Error) Unwrap() []error { return []error{e.Kind, e.Err} }

// LimitError is a limit that an image exceeds.
type LimitError struct {
	Limit string // the field of Options: "MaxBytes", "MaxPixels" or "MaxMemory"; or "side"
	Value int64  // the image's value
	Max   int64
	unit  string
}

func (e *LimitError) Error() string {
	return fmt.Sprintf("%d %s, over the limit of %d", e.Value, e.unit, e.Max)
}

func fault(kind, err error) error { return &Error{Kind: kind, Err: err, Offset: -1} }

// faultOf returns err as a fault of an image, or nil if err is another error.
func faultOf(err error) *Error {
	f, _ := err.(*Error)
	return f
}

func tooLarge(limit string, value, most int64, unit string) error {
	return fault(ErrTooLarge, &LimitError{limit, value, most, unit})
}

// imageFault converts an error of decoding an image to an *Error. If the image is not at fault, it
// returns the error unchanged.
func imageFault(err error) error {
	var e *imagecapi.Error
	if !errors.As(err, &e) {
		return fmt.Errorf("decode: %w", err)
	}
	switch e.Code {
	case imagecapi.CodeDecode:
		return &Error{Kind: ErrDamaged, Err: errors.New(e.Message), Offset: e.Offset}
	case imagecapi.CodeUnsupported:
		return fault(ErrUnsupported, errors.New(e.Message))
	}
	return fmt.Errorf("decode: %w", err)
}

// together combines the errors of a call's images. If all errors are faults of images, it returns
// [Errors]. Otherwise it returns the first error that is not.
func together(failed []error) error {
	var faults Errors
	for _, err := range failed {
		if f := faultOf(err); f != nil {
			faults = append(faults, f)
		} else if err != nil {
			return err
		}
	}
	if faults == nil {
		return nil
	}
	return faults
}

// counter hands out the numbers 0, 1, 2, ... to goroutines.
type counter struct{ n atomic.Int64 }

func (c *counter) take() int { return int(c.n.Add(1)) - 1 }
