// Package sample names the samples of an archive, determines which of them are bad, and defines the
// decoders that turn them into pixels. The other packages of the loader build on it.
package sample

import (
	"fmt"
)

// Sample identifies a row of a batch. Package imageloader documents it.
type Sample struct {
	Name  string // the member's path in the archive
	Index int    // number among the samples of the archive
	Label int    // 0 with masks, boxes or lists of labels
}

// Reason is the reason why a sample is bad.
type Reason string

// The reasons. Package imageloader documents them.
const (
	Damaged     Reason = "damaged"
	Unsupported Reason = "unsupported"
	NotImage    Reason = "not an image"
	Empty       Reason = "empty"
	TooLarge    Reason = "too large"
	NotRegular  Reason = "not a file"
	Sparse      Reason = "sparse storage"
	Rejected    Reason = "rejected"
	MaskSize    Reason = "mask size"
	WrongBoxes  Reason = "wrong boxes"
)

// Error reports a bad sample: a member in the directory of a class, or the mask or the boxes of an
// image, that can't be decoded. Package imageloader documents it as SampleError.
type Error struct {
	File   string // the archive
	Name   string // the member; if the mask or the boxes are bad, their member
	Index  int    // the sample's index
	Reason Reason
	Err    error // details; may be nil
}

func (e *Error) Error() string {
	s := fmt.Sprintf("imageloader: %s: sample %d, %q: %s", e.File, e.Index, e.Name, e.Reason)
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

func (e *Error) Unwrap() error { return e.Err }

// advice is added to an error that ends an epoch.
const advice = "(remove the member from the archive, or set Options.BadSamples to Skip or Substitute)"

// Fatal is an Error that ends an epoch under the policy Fail. Its text includes advice.
type Fatal struct{ Bad *Error }

func (e Fatal) Error() string { return e.Bad.Error() + " " + advice }
func (e Fatal) Unwrap() error { return e.Bad }
