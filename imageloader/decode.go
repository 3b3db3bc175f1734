package imageloader

import (
	"sync/atomic"

	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// codecs makes decoders. The real one is shimCodec; tests of order and threads use their own.
type codecs interface {
	index.Codec // reads headers as a decoder does, in any goroutine
	newDecoder(maxPixels int64) (decoder, error)
}

// decoder turns compressed bytes into the pixels that a geometry asks for; used by one goroutine at
// a time. Errors with the codes imagecapi.CodeDecode and imagecapi.CodeUnsupported are the image's
// fault, others the machine's.
type decoder interface {
	Header(data []byte) (imagecapi.Info, error)
	Decode(data []byte, g *imagecapi.Geometry, dst []byte, stride int) error
	Close()
}

// damageDecoder is a decoder that can tolerate damage.
type damageDecoder interface {
	SetDamaged(p DamagePolicy) error
	// Tolerated returns the damage of the image that was decoded last, or "" if it had none.
	Tolerated() string
}

// newDecoder makes a decoder with the policy for damaged images, where the maker's decoders know
// damage.
func newDecoder(c codecs, maxPixels int64, p DamagePolicy) (decoder, error) {
	d, err := c.newDecoder(maxPixels)
	if err != nil {
		return nil, err
	}
	if t, ok := d.(damageDecoder); ok {
		if err := t.SetDamaged(p); err != nil {
			d.Close()
			return nil, err
		}
	}
	return d, nil
}

// tolerated returns the damage of the image that a decoder has decoded last, or "" if it had none.
func tolerated(d decoder) string {
	if t, ok := d.(damageDecoder); ok {
		return t.Tolerated()
	}
	return ""
}

// shimCodec makes decoders of package codec.
type shimCodec struct{}

func (shimCodec) newDecoder(maxPixels int64) (decoder, error) { return codec.New(maxPixels) }

func (shimCodec) Header(data []byte) (imagecapi.Info, error) { return codec.Header(data) }

// statsDecoder is a decoder that knows what became of its images.
type statsDecoder interface {
	Stats() (imagecapi.Stats, error)
}

// entryPointDecoder is a decoder that knows entry points. [codec.Decoder] says what the methods do.
type entryPointDecoder interface {
	DecodeByEntryPoints(data []byte, g *imagecapi.Geometry, dst []byte, stride int, blob []byte, proof *uint64) error
	DecodeMakingEntryPoints(data []byte, g *imagecapi.Geometry, dst []byte, stride int, buffer []byte) (n int, proof uint64, err error)
}

// planDecoder is a decoder that can plan what DecodeByEntryPoints would decode.
type planDecoder interface {
	PlanAugmented(data []byte, g *imagecapi.Geometry, blob []byte, proof *uint64, ops []imagecapi.AugmentOp, buffer []byte) (n int, err error)
	AppendPlan(data []byte, g *imagecapi.Geometry, blob []byte, proof *uint64, memory []byte, used *atomic.Uint64) (at, n int, err error)
	AppendScan(data []byte, g *imagecapi.Geometry, memory []byte, used *atomic.Uint64, search *imagecapi.Search) (at, n int, err error)
	PlanScan(data []byte, g *imagecapi.Geometry, ops []imagecapi.AugmentOp, search *imagecapi.Search, buffer []byte) (n int, err error)
	PlanPart(head []byte, fileBytes, scan int, g *imagecapi.Geometry, blob []byte, piece int, memory []byte, used *atomic.Uint64) (imagecapi.Part, error)
	Transcode(data, buffer []byte) (n int, err error)
	MakeEntryPoints(data []byte, spacing int, buffer []byte) (n int, proof uint64, err error)
	PlanHead(head []byte, fileBytes, scan int, g *imagecapi.Geometry, blob []byte, ops []imagecapi.AugmentOp, buffer []byte) (n int, err error)
}
