package sample

import (
	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/internal/assembly"
)

// BadSamplePolicy selects how the loader treats bad samples. Package imageloader documents it.
type BadSamplePolicy = assembly.Policy

// The policies.
const (
	Fail       = assembly.Fail
	Skip       = assembly.Skip
	Substitute = assembly.Substitute
)

// DamagePolicy selects which damaged images are bad samples. Package imageloader documents it.
type DamagePolicy = codec.DamagePolicy
