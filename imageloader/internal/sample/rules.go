package sample

import (
	"errors"
	"fmt"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Rules determine which samples of an archive are bad, and why. They are safe for concurrent use.
type Rules struct {
	File      string // the archive, as messages show it
	MaxBytes  int64  // Options.MaxSampleBytes
	MaxPixels int64  // Options.MaxPixels
}

// Bad returns the error for a bad sample.
func (r *Rules) Bad(s *Sample, why Reason, err error) *Error {
	return &Error{File: r.File, Name: s.Name, Index: s.Index, Reason: why, Err: err}
}

// Member checks a member by its kind and size, before its content is read. It returns nil if the
// content can be read.
func (r *Rules) Member(s *Sample, kind archive.Kind, size int64) *Error {
	switch {
	case kind == archive.HardLink:
		return r.Bad(s, NotRegular,
			errors.New("a hard link to another member; pack the archive with --hard-dereference"))
	case kind == archive.Symlink:
		return r.Bad(s, NotRegular, errors.New("a symbolic link; pack the archive with --dereference"))
	case kind == archive.BrokenLink:
		return r.Bad(s, NotRegular,
			errors.New("a symbolic link that leads nowhere; remove it, or bring back what it leads to"))
	case kind == archive.LinkLoop:
		return r.Bad(s, NotRegular, errors.New("a symbolic link to a folder that it is in; remove it"))
	case kind == archive.Other:
		return r.Bad(s, NotRegular, errors.New("a device or pipe, or a part of a file that began in another volume"))
	case kind == archive.Sparse:
		return r.Bad(s, Sparse, errors.New("pack the archive without --sparse"))
	case kind == archive.Encrypted:
		return r.Bad(s, Unsupported,
			errors.New("it is encrypted; unpack the zip with its password, and pack it again without one"))
	case kind == archive.OtherMethod:
		return r.Bad(s, Unsupported, errors.New("it is neither stored nor deflated (`unzip -v` names its "+
			"method); pack the zip again with deflate"))
	case size == 0:
		return r.Bad(s, Empty, nil)
	case size > r.MaxBytes:
		return r.Bad(s, TooLarge, fmt.Errorf("%d bytes, over the limit of %d (Options.MaxSampleBytes)", size, r.MaxBytes))
	}
	return nil
}

// Content returns the error for a sample if err reports damage of its content alone, and nil
// otherwise. name is the damaged member: the sample's or its mask's.
func (r *Rules) Content(s *Sample, name string, err error) *Error {
	damage := archive.MemberDamage(err)
	if damage == nil {
		return nil
	}
	return &Error{File: r.File, Name: name, Index: s.Index, Reason: Damaged, Err: damage}
}

// NotImage returns the error for a member whose first bytes do not start a supported image.
func (r *Rules) NotImage(s *Sample, data []byte) *Error {
	image, err := codec.NotDecoded(data)
	if image {
		return r.Bad(s, Unsupported, err)
	}
	return r.Bad(s, NotImage, err)
}

// Header checks an image by its size in pixels. It returns nil if the image can be decoded.
func (r *Rules) Header(s *Sample, info *imagecapi.Info) *Error {
	if int64(info.Width)*int64(info.Height) <= r.MaxPixels {
		return nil
	}
	return r.Bad(s, TooLarge, fmt.Errorf("%d x %d pixels, over the limit of %d (Options.MaxPixels)", info.Width,
		info.Height, r.MaxPixels))
}

// Tolerated returns the error for an image that was decoded despite its damage.
func (r *Rules) Tolerated(s *Sample, damage string) *Error {
	return r.Bad(s, Damaged, errors.New(damage))
}

// Decoding classifies an error from decoding an image. It returns bad if the image is the cause,
// and fatal otherwise.
func (r *Rules) Decoding(s *Sample, err error) (bad *Error, fatal error) {
	switch {
	case errors.Is(err, imagecapi.CodeDecode):
		return r.Bad(s, Damaged, plain(err)), nil
	case errors.Is(err, imagecapi.CodeUnsupported):
		return r.Bad(s, Unsupported, plain(err)), nil
	}
	return nil, fmt.Errorf("imageloader: %s: decoding %q: %w", r.File, s.Name, err)
}

// plain removes the name of the C function from the text of an image library error. The name says
// nothing about the image, and the sample's reason already expresses the error code.
func plain(err error) error {
	if library, ok := err.(*imagecapi.Error); ok {
		return plainError{library}
	}
	return err
}

type plainError struct{ library *imagecapi.Error }

func (e plainError) Error() string { return e.library.Message }
func (e plainError) Unwrap() error { return e.library }
