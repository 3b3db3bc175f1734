package imageloader

import (
	"errors"
	"fmt"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// judge decides which samples are bad, and why. It is the only place that gives a [Reason].
type judge struct {
	path      string // of the archive
	maxBytes  int64  // Options.MaxSampleBytes
	maxPixels int64  // Options.MaxPixels
}

func newJudge(path string, o *Options) judge {
	return judge{path: archive.Shown(path), maxBytes: o.MaxSampleBytes, maxPixels: o.MaxPixels}
}

func (j *judge) bad(s *Sample, r Reason, err error) *SampleError {
	return &SampleError{File: j.path, Name: s.Name, Index: s.Index, Reason: r, Err: err}
}

// member judges a member by its kind and size, before its content is read; nil: its content can be
// read.
func (j *judge) member(s *Sample, kind archive.Kind, size int64) *SampleError {
	switch {
	case kind == archive.HardLink:
		return j.bad(s, NotRegular, errors.New("a hard link to another member; pack the archive with --hard-dereference"))
	case kind == archive.Symlink:
		return j.bad(s, NotRegular, errors.New("a symbolic link; pack the archive with --dereference"))
	case kind == archive.BrokenLink:
		return j.bad(s, NotRegular, errors.New("a symbolic link that leads nowhere; remove it, or bring back what it leads to"))
	case kind == archive.LinkLoop:
		return j.bad(s, NotRegular, errors.New("a symbolic link to a folder that it is in; remove it"))
	case kind == archive.Other:
		return j.bad(s, NotRegular, errors.New("a device or pipe, or a part of a file that began in another volume"))
	case kind == archive.Sparse:
		return j.bad(s, Sparse, errors.New("pack the archive without --sparse"))
	case size == 0:
		return j.bad(s, Empty, nil)
	case size > j.maxBytes:
		return j.bad(s, TooLarge, fmt.Errorf("%d bytes, over Options.MaxSampleBytes (%d)", size, j.maxBytes))
	}
	return nil
}

// notImage is the error of a member whose content is no image that is decoded, by its first bytes.
func (j *judge) notImage(s *Sample, data []byte) *SampleError {
	image, err := codec.NotDecoded(data)
	if image {
		return j.bad(s, Unsupported, err)
	}
	return j.bad(s, NotImage, err)
}

// header judges an image by its size in pixels; nil: it can be decoded.
func (j *judge) header(s *Sample, info *imagecapi.Info) *SampleError {
	if int64(info.Width)*int64(info.Height) <= j.maxPixels {
		return nil
	}
	return j.bad(s, TooLarge, fmt.Errorf("%d x %d pixels, over Options.MaxPixels (%d)", info.Width, info.Height, j.maxPixels))
}

// tolerated is the damage of an image that was decoded all the same.
func (j *judge) tolerated(s *Sample, damage string) *SampleError {
	return j.bad(s, Damaged, errors.New(damage))
}

// decoding judges an error of decoding or transforming an image. An error that is not the image's
// fault is fatal.
func (j *judge) decoding(s *Sample, err error) (bad *SampleError, fatal error) {
	var rejected transform.FuncError
	switch {
	case errors.As(err, &rejected):
		return j.bad(s, Rejected, rejected.Err), nil
	case errors.Is(err, errMaskSize):
		return j.bad(s, MaskSize, err), nil
	case errors.Is(err, imagecapi.CodeDecode):
		return j.bad(s, Damaged, plain(err)), nil
	case errors.Is(err, imagecapi.CodeUnsupported):
		return j.bad(s, Unsupported, plain(err)), nil
	}
	return nil, fmt.Errorf("imageloader: %s: decoding %q: %w", j.path, s.Name, err)
}

// plain leaves the message alone of an error of the image library: the name of a C function says
// nothing about the image, and the sample's reason has the words of its code.
func plain(err error) error {
	if library, ok := err.(*imagecapi.Error); ok {
		return plainError{library}
	}
	return err
}

type plainError struct{ library *imagecapi.Error }

func (e plainError) Error() string { return e.library.Message }
func (e plainError) Unwrap() error { return e.library }
