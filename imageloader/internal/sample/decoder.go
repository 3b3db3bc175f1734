package sample

import (
	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Codecs makes decoders. [Library] makes the real ones. Tests of order and threads use others.
type Codecs interface {
	// Header reads the header of an image as a Decoder reads it. It is safe for concurrent use.
	Header(data []byte) (imagecapi.Info, error)
	NewDecoder(maxPixels int64) (Decoder, error)
}

// Decoder decodes compressed bytes to the pixels that a geometry selects. It is not safe for
// concurrent use. An error with the code imagecapi.CodeDecode or imagecapi.CodeUnsupported reports
// a problem with the image. Any other error reports a problem with the machine.
type Decoder interface {
	Header(data []byte) (imagecapi.Info, error)
	Decode(data []byte, g *imagecapi.Geometry, dst []byte, stride int) error
	Close()
}

// damageDecoder is a decoder that can tolerate damage.
type damageDecoder interface {
	SetDamaged(p DamagePolicy) error
	// Tolerated returns the damage of the last decoded image, or "" if it had none.
	Tolerated() string
}

// NewDecoder returns a decoder. If the decoder supports policies for damaged images, NewDecoder
// sets the policy p.
func NewDecoder(c Codecs, maxPixels int64, p DamagePolicy) (Decoder, error) {
	d, err := c.NewDecoder(maxPixels)
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

// Tolerated returns the damage of the last image that d decoded, or "" if it had none.
func Tolerated(d Decoder) string {
	if t, ok := d.(damageDecoder); ok {
		return t.Tolerated()
	}
	return ""
}

// Library makes the decoders of package codec.
type Library struct{}

// NewDecoder returns a decoder that rejects images of more than maxPixels pixels.
func (Library) NewDecoder(maxPixels int64) (Decoder, error) { return codec.New(maxPixels) }

// Header reads an image's header.
func (Library) Header(data []byte) (imagecapi.Info, error) { return codec.Header(data) }
