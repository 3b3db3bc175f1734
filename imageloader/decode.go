package imageloader

import (
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// codec makes decoders. The real one is shimCodec; tests of order and threads use
// their own.
type codec interface {
	index.Codec // reads headers as a decoder does, in any goroutine
	newDecoder(maxPixels int64) (decoder, error)
}

// decoder turns compressed bytes into the pixels that a geometry asks for; used by one goroutine at
// a time. Errors with the codes imagecapi.CodeDecode and imagecapi.CodeUnsupported are the image's
// fault, others the machine's.
type decoder interface {
	header(data []byte) (imagecapi.Info, error)
	decode(data []byte, g *imagecapi.Geometry, dst []byte, stride int) error
	close()
}

// damageDecoder is a decoder that can tolerate damage.
type damageDecoder interface {
	setDamaged(p DamagePolicy) error
	// tolerated returns the damage of the image that was decoded last, or "" if it had none.
	tolerated() string
}

// newDecoder makes a decoder with the policy for damaged images, where the codec knows damage.
func newDecoder(c codec, maxPixels int64, p DamagePolicy) (decoder, error) {
	d, err := c.newDecoder(maxPixels)
	if err != nil {
		return nil, err
	}
	if t, ok := d.(damageDecoder); ok {
		if err := t.setDamaged(p); err != nil {
			d.close()
			return nil, err
		}
	}
	return d, nil
}

// tolerated returns the damage of the image that a decoder has decoded last, or "" if it had none.
func tolerated(d decoder) string {
	if t, ok := d.(damageDecoder); ok {
		return t.tolerated()
	}
	return ""
}

// shimCodec decodes JPEG, PNG, WebP, AVIF and HEIC with the image library, other formats with
// rareFormat.
type shimCodec struct{}

func (shimCodec) newDecoder(maxPixels int64) (decoder, error) {
	if err := imagecapi.Check(); err != nil {
		return nil, err
	}
	d, err := imagecapi.NewDecoder(maxPixels)
	if err != nil {
		return nil, err
	}
	return &shimDecoder{d: d, maxPixels: maxPixels}, nil
}

type shimDecoder struct {
	d         *imagecapi.Decoder
	maxPixels int64
	strict    *imagecapi.Decoder // of JPEGs inside other files, without tolerance of damage; nil before the first
	rgb       []byte             // pixels of a rare format; reused
	// rare reports whether the last image had a rare format, which the image library does not
	// decode.
	rare bool
}

func (shimCodec) Header(data []byte) (imagecapi.Info, error) { return shimDecoder{}.header(data) }

func (shimDecoder) header(data []byte) (imagecapi.Info, error) {
	if f := rare(data); f != nil {
		return f.header(data)
	}
	return imagecapi.Header(data)
}

func (s *shimDecoder) decode(data []byte, g *imagecapi.Geometry, dst []byte, stride int) error {
	f := rare(data)
	if s.rare = f != nil; s.rare {
		pixels, width, height, err := f.pixels(data, s.room, s.jpeg)
		if err != nil {
			return err
		}
		return imagecapi.Resize(s.d, pixels, width, height, 3*width, g, dst, stride)
	}
	return imagecapi.Decode(s.d, data, g, dst, stride)
}

func (s *shimDecoder) setDamaged(p DamagePolicy) error {
	return imagecapi.SetDamage(s.d, map[DamagePolicy]int32{
		Warned: imagecapi.DamageWarn, Partial: imagecapi.DamagePartial, Refuse: imagecapi.DamageRefuse,
	}[p])
}

func (s *shimDecoder) tolerated() string {
	if s.rare {
		return ""
	}
	return imagecapi.Tolerated(s.d)
}

func (s *shimDecoder) close() {
	imagecapi.FreeDecoder(s.d)
	if s.strict != nil {
		imagecapi.FreeDecoder(s.strict)
	}
}

// jpeg decodes the top left part of a JPEG inside a file of another format.
func (s *shimDecoder) jpeg(data []byte, width, height int, dst []byte, stride int) (err error) {
	if s.strict == nil {
		if s.strict, err = imagecapi.NewDecoder(s.maxPixels); err != nil {
			return err
		}
	}
	w, h := int32(width), int32(height)
	g := imagecapi.Geometry{CropWidth: w, CropHeight: h, ResizeWidth: w, ResizeHeight: h, WindowWidth: w, WindowHeight: h}
	return imagecapi.Decode(s.strict, data, &g, dst, stride)
}

// maxRoom is the memory that a decoder keeps even if the next images are far smaller.
const maxRoom = 16 << 20

// room returns memory for the pixels of an image. Its content is undefined.
func (s *shimDecoder) room(bytes int) []byte {
	if cap(s.rgb) < bytes || cap(s.rgb) > max(4*bytes, maxRoom) {
		s.rgb = nil // so that it can be collected before more is allocated
		s.rgb = make([]byte, bytes)
	}
	return s.rgb[:bytes]
}

// statsDecoder is a decoder that knows what became of its images.
type statsDecoder interface {
	stats() (imagecapi.Stats, error)
}

func (s *shimDecoder) stats() (imagecapi.Stats, error) { return imagecapi.DecoderStats(s.d) }

// entryPointDecoder is a decoder that knows entry points.
type entryPointDecoder interface {
	// decodeByEntryPoints is decode with a blob of entry points. *proof is 0, or the proof that an
	// earlier call or decodeMakingEntryPoints has returned for these bytes; 0 has the blob compared
	// with the image, and sets the proof. With nil the blob's own digests are enough.
	decodeByEntryPoints(data []byte, g *imagecapi.Geometry, dst []byte, stride int, blob []byte, proof *uint64) error
	// decodeMakingEntryPoints is decode, and makes a blob of n bytes in buffer. There is none if n
	// is 0 or over len(buffer).
	decodeMakingEntryPoints(data []byte, g *imagecapi.Geometry, dst []byte, stride int, buffer []byte) (n int, proof uint64, err error)
}

func (s *shimDecoder) decodeByEntryPoints(data []byte, g *imagecapi.Geometry, dst []byte, stride int, blob []byte, proof *uint64) error {
	s.rare = false
	return imagecapi.DecodeEntries(s.d, data, g, dst, stride, blob, proof)
}

func (s *shimDecoder) decodeMakingEntryPoints(data []byte, g *imagecapi.Geometry, dst []byte, stride int, buffer []byte) (int, uint64, error) {
	s.rare = false
	return imagecapi.DecodeMakeEntries(s.d, data, g, dst, stride, 0, buffer)
}
