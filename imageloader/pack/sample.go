package pack

import (
	"archive/tar"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/klauspost/compress/gzip"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// maxSide is the maximum of an image's side after resizing, in pixels.
const maxSide = 32768

// packed is a sample in the form in which a shard contains it.
type packed struct {
	sample  int
	data    []byte // tar records, compressed in a .tgz
	resized bool
	bad     *sample.Error // nil: a good sample
}

// worker packs samples: it makes the records of a shard. It belongs to one goroutine.
type worker struct {
	o       *Options
	in      *input
	names   *namer
	classes []string
	reader  *reader
	decoder sample.Decoder // nil: images are copied without decoding
	encoder encoder        // for Options.Side
	pixels  []byte
	gzip    *gzip.Writer
}

func newWorker(p *packing) (*worker, error) {
	w := &worker{o: &p.o, in: p.in, names: p.names, classes: p.in.x.Classes(), reader: p.in.newReader()}
	if p.o.Check || p.o.Side > 0 {
		var err error
		if w.decoder, err = sample.NewDecoder(sample.Library{}, p.in.rules.MaxPixels, p.in.damaged); err != nil {
			w.close()
			return nil, fmt.Errorf("pack: no decoder: %w", err)
		}
	}
	if p.o.Side > 0 {
		var err error
		if w.encoder, err = newEncoder(); err != nil {
			w.close()
			return nil, fmt.Errorf("pack: no encoder: %w", err)
		}
	}
	if p.o.Format == TarGzip {
		w.gzip = newGzip()
	}
	return w, nil
}

func (w *worker) close() {
	w.reader.close()
	if w.decoder != nil {
		w.decoder.Close()
	}
	w.encoder.close()
}

// pack packs sample i.
func (w *worker) pack(i int) (packed, error) {
	of := w.in.x.Sample(i)
	s := sample.Sample{Name: of.Name, Index: i, Label: of.Label}
	p := packed{sample: i}
	data, bad, err := w.read(&s, of.Kind, of.Size)
	if bad != nil || err != nil {
		p.bad = bad
		return p, err
	}
	format := codec.Sniff(data)
	if format == "" {
		p.bad = w.in.rules.NotImage(&s, data)
		return p, nil
	}
	again, bad, err := w.image(&s, data)
	if bad != nil || err != nil {
		p.bad = bad
		return p, err
	}
	stem, extension := w.names.name(i, of.Name, w.classes[of.Label])
	switch {
	case again != nil:
		data, p.resized = again, true
		if !isJPEG(extension) {
			extension = ".jpg"
		}
	case extension == "" && (w.names.web || w.names.listed):
		extension = extensionOf(format)
	}
	var b bytes.Buffer
	b.Grow(len(data) + 4<<10)
	t := tar.NewWriter(&b)
	if err := writeMember(t, stem+extension, data); err != nil {
		return p, err
	}
	if p.bad, err = w.others(t, &s, stem); p.bad != nil || err != nil {
		return p, err
	}
	if err := t.Flush(); err != nil { // pads the last member
		return p, err
	}
	p.data, err = w.compress(b.Bytes())
	return p, err
}

// read reads the image of a sample.
func (w *worker) read(s *sample.Sample, kind archive.Kind, size int64) ([]byte, *sample.Error, error) {
	if bad := w.in.rules.Member(s, kind, size); bad != nil {
		return nil, bad, nil
	}
	data, err := w.reader.image(s.Index)
	if err == nil {
		return data, nil, nil
	}
	if bad := w.in.rules.Content(s, s.Name, err); bad != nil {
		return nil, bad, nil
	}
	return nil, nil, err
}

// others writes the member with the class, or the further members of a WebDataset sample.
func (w *worker) others(t *tar.Writer, s *sample.Sample, stem string) (*sample.Error, error) {
	if w.names.web && !w.names.fromWeb {
		class := w.classes[s.Label]
		if !w.names.numbered {
			return nil, writeMember(t, stem+".cls", []byte(class))
		}
		text, err := json.Marshal(map[string]any{"label": s.Label, "name": strings.ToValidUTF8(class, "\ufffd")})
		return nil, cmp.Or(err, writeMember(t, stem+".cls", []byte(strconv.Itoa(s.Label))),
			writeMember(t, stem+".json", text))
	}
	members := w.in.groups.of(s.Index)
	for i := range members {
		m := &members[i]
		other := sample.Sample{Name: m.name, Index: s.Index}
		if m.kind != archive.Regular || m.size > w.in.rules.MaxBytes {
			return w.in.rules.Member(&other, m.kind, m.size), nil
		}
		data, err := w.reader.content(m)
		if err != nil {
			if bad := w.in.rules.Content(s, m.name, err); bad != nil {
				return bad, nil
			}
			return nil, err
		}
		if codec.Sniff(data) != "" {
			switch {
			case !w.names.web:
				return nil, fmt.Errorf("pack: %s: %q is a second image of the sample %q, and would become a "+
					"sample in a directory: use -format webdataset", w.in.rules.File, m.name, s.Name)
			case w.o.Side > 0:
				return nil, fmt.Errorf("pack: %s: %q is a second image of the sample %q, and would keep its "+
					"size while the sample is resized: pack without -side", w.in.rules.File, m.name, s.Name)
			}
		}
		_, base := split(m.name)
		_, extension := cut(base, bytes.IndexByte([]byte(base), '.'))
		if err := writeMember(t, stem+extension, data); err != nil {
			return nil, err
		}
	}
	return nil, nil
}

func writeMember(t *tar.Writer, name string, data []byte) error {
	h := &tar.Header{Typeflag: tar.TypeReg, Name: name, Size: int64(len(data)), Mode: 0o644}
	if err := t.WriteHeader(h); err != nil {
		return fmt.Errorf("pack: %q: %w", name, err)
	}
	_, err := t.Write(data)
	return err
}

// compress returns the bytes as a gzip member if the format is TarGzip, and otherwise unchanged.
func (w *worker) compress(data []byte) ([]byte, error) {
	if w.gzip == nil {
		return data, nil
	}
	var b bytes.Buffer
	b.Grow(len(data))
	w.gzip.Reset(&b)
	_, err := w.gzip.Write(data)
	err = errors.Join(err, w.gzip.Close())
	return b.Bytes(), err
}

// image checks an image, and returns its resized JPEG, or nil if the image stays as it is.
func (w *worker) image(s *sample.Sample, data []byte) ([]byte, *sample.Error, error) {
	info, err := codec.Header(data)
	if err != nil {
		bad, fatal := w.in.rules.Decoding(s, err)
		return nil, bad, fatal
	}
	if bad := w.in.rules.Header(s, &info); bad != nil || w.decoder == nil {
		return nil, bad, nil
	}
	width, height := scaled(info.Width, info.Height, int32(w.o.Side))
	turned := w.o.Upright && info.Orientation > 1
	g := imagecapi.Geometry{CropWidth: info.Width, CropHeight: info.Height, ResizeWidth: width, ResizeHeight: height,
		DCTScaling: true}
	stays := width == info.Width && height == info.Height && !turned
	switch {
	case stays: // decoded only to detect damage
		g.ResizeWidth, g.ResizeHeight = 8, 8
	case max(width, height) > maxSide:
		return nil, w.in.rules.Bad(s, sample.TooLarge, fmt.Errorf("it would have %d x %d pixels, over %d a side",
			width, height, maxSide)), nil
	case turned:
		g.Orientation = info.Orientation
		if info.Orientation >= 5 { // width and height are exchanged
			g.CropWidth, g.CropHeight = info.Height, info.Width
			g.ResizeWidth, g.ResizeHeight = height, width
		}
	}
	g.WindowWidth, g.WindowHeight = g.ResizeWidth, g.ResizeHeight
	stride := 3 * int(g.WindowWidth)
	if n := stride * int(g.WindowHeight); cap(w.pixels) < n {
		w.pixels = make([]byte, n)
	}
	pixels := w.pixels[:stride*int(g.WindowHeight)]
	if err := w.decoder.Decode(data, &g, pixels, stride); err != nil {
		bad, fatal := w.in.rules.Decoding(s, err)
		return nil, bad, fatal
	}
	if stays {
		return nil, nil, nil
	}
	orientation := info.Orientation
	if turned {
		orientation = 1
	}
	again, err := w.encoder.encode(pixels, int(g.WindowWidth), int(g.WindowHeight), w.o.Quality, orientation)
	return again, nil, err
}

// scaled returns the size of an image whose shorter side becomes side, as torchvision's Resize
// computes it. The size does not change if side is 0, or if the shorter side is at most side.
func scaled(width, height, side int32) (int32, int32) {
	short, long := min(width, height), max(width, height)
	if side == 0 || short <= side {
		return width, height
	}
	long = int32(int64(side) * int64(long) / int64(short))
	if width <= height {
		return side, long
	}
	return long, side
}

// newGzip returns a fast compressor. A slower one would save no space, because JPEGs are already
// compressed.
func newGzip() *gzip.Writer {
	w, _ := gzip.NewWriterLevel(nil, gzip.BestSpeed) // this level is valid
	return w
}
