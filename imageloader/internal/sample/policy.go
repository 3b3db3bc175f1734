package sample

import (
	"strconv"

	"github.com/torchstream/torchstream/imageloader/internal/codec"
)

// BadSamplePolicy selects how the loader treats bad samples. Package imageloader documents it.
type BadSamplePolicy int

// The policies.
const (
	Fail BadSamplePolicy = iota
	Skip
	Substitute
)

func (p BadSamplePolicy) String() string {
	switch p {
	case Fail:
		return "fail"
	case Skip:
		return "skip"
	case Substitute:
		return "substitute"
	}
	return "BadSamplePolicy(" + strconv.Itoa(int(p)) + ")"
}

// DamagePolicy selects which damaged images are bad samples. Package imageloader documents it.
type DamagePolicy = codec.DamagePolicy
