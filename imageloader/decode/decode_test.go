package decode_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"image"
	"image/png"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/imageloader/transform"
)

// corpus returns the other tests' images of all formats, in the order of their names.
func corpus(t testing.TB) (names []string, images [][]byte) {
	t.Helper()
	for _, folder := range []string{"../../cshim/test/data", "../testdata", "../testdata/features",
		"../testdata/formats", "../testdata/heif"} {
		files, err := os.ReadDir(folder)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			switch filepath.Ext(f.Name()) {
			case ".jpg", ".png", ".webp", ".gif", ".bmp", ".tiff", ".avif", ".heic":
				data, err := os.ReadFile(filepath.Join(folder, f.Name()))
				if err != nil {
					t.Fatal(err)
				}
				names, images = append(names, f.Name()), append(images, data)
			}
		}
	}
	if len(images) < 150 {
		t.Fatalf("only %d images, want at least 150", len(images))
	}
	return names, images
}

func newDecoder(t testing.TB, o decode.Options) *decode.Decoder {
	t.Helper()
	d, err := decode.New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// photo returns a JPEG with 4:2:0 subsampling.
func photo(t testing.TB) []byte { return file(t, "../../cshim/test/data/420.jpg") }

func file(t testing.TB, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// faulty returns the positions of the images that an error names.
func faulty(t testing.TB, err error) (list []int) {
	t.Helper()
	var faults decode.Errors
	if err != nil && !errors.As(err, &faults) {
		t.Fatal(err)
	}
	for _, f := range faults {
		list = append(list, f.Image)
	}
	return list
}

// TestPixelsEqualLoader: with the same transform and seed, images of every format are decoded to
// the loader's pixels. Decode's error names the images that the loader skips.
func TestPixelsEqualLoader(t *testing.T) {
	names, images := corpus(t)
	cut := len(images)
	for i := 0; i < cut; i += 5 { // damaged ones too
		names, images = append(names, "cut-"+names[i]), append(images, images[i][:len(images[i])*2/3])
	}
	var members []archivetest.Member
	for i, name := range names {
		members = append(members, archivetest.Member{Name: fmt.Sprintf("class/%03d-%s", i, name),
			Data: string(images[i])})
	}
	path := archivetest.WriteFile(t, "images.tar", archivetest.Tar(t, members...))
	upright := transform.Train(32)
	upright.ApplyEXIFOrientation, upright.Interpolation = true, transform.Bicubic
	augmented := transform.Train(24)
	augmented.Ops = []transform.Op{
		transform.ColorJitter{Brightness: 0.4, Contrast: 0.4}, transform.RandAugment{},
		transform.Func(func(rng *rand.Rand, p *transform.Pixels) error {
			p.Pix[0] = byte(rng.Uint32())
			return nil
		}),
	}
	reduced := transform.Eval(16, 16)
	reduced.DCTScaling = true
	for name, c := range map[string]struct {
		t       transform.Transform
		damaged decode.DamagePolicy
	}{
		"centre crop":             {transform.Eval(40, 32), decode.Warned},
		"centre crop, cut images": {transform.Eval(40, 32), decode.Partial},
		"random resized crop":     {upright, decode.Refuse},
		"operations":              {augmented, decode.Warned},
		"DCT scaling":             {reduced, decode.Warned},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := imageloader.Open(path, imageloader.Options{
				Transform: c.t, Seed: 7, Damaged: c.damaged, BadSamples: imageloader.Skip, NoIndex: true, BatchSize: 16,
			})
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			d := newDecoder(t, decode.Options{Transform: c.t, Seed: 7, Damaged: c.damaged})
			pixels := bytes.Repeat([]byte{0xa5}, len(images)*d.Bytes())
			bad := faulty(t, d.Decode(t.Context(), pixels, images...))
			good := make([]bool, len(images))
			for b, err := range l.Epoch(t.Context(), 0) {
				if err != nil {
					t.Fatal(err)
				}
				for j, s := range b.Samples {
					good[s.Index] = true
					if !bytes.Equal(b.Images[j*d.Bytes():][:d.Bytes()], pixels[s.Index*d.Bytes():][:d.Bytes()]) {
						t.Errorf("%s: other pixels than the loader's", s.Name)
					}
				}
			}
			var skipped []int
			for i, ok := range good {
				if !ok {
					skipped = append(skipped, i)
				}
			}
			if !slices.Equal(bad, skipped) {
				t.Errorf("at fault: %v, and the loader skips %v", bad, skipped)
			}
			if len(skipped) == 0 || len(skipped) > len(images)/3 {
				t.Errorf("%d of %d images are skipped, want len(skipped) at least 1, len(skipped) at "+
					"most %v", len(skipped), len(images), len(images)/3)
			}
			for _, i := range bad {
				if !bytes.Equal(pixels[i*d.Bytes():][:d.Bytes()], make([]byte, d.Bytes())) {
					t.Errorf("%s is at fault, and its pixels are not 0", names[i])
				}
			}
		})
	}
}

// TestWholeEqualsPillow: Whole returns the pixels of Pillow's convert("RGB"), in the given buffer
// if they fit.
func TestWholeEqualsPillow(t *testing.T) {
	list, err := os.ReadFile("../testdata/features/pixels.json")
	if err != nil {
		t.Fatal(err)
	}
	var want map[string][4]any // width, height, CRC-32 of the RGB bytes, orientation
	if err := json.Unmarshal(list, &want); err != nil {
		t.Fatal(err)
	}
	d := newDecoder(t, decode.Options{})
	var buffer []byte
	for name, w := range want {
		data, err := os.ReadFile(filepath.Join("../testdata", name))
		if err != nil {
			t.Fatal(err)
		}
		p, err := d.Whole(t.Context(), data, buffer)
		if err != nil {
			t.Errorf("%s: %v, want no error", name, err)
			continue
		}
		if p.Width != int(w[0].(float64)) || p.Height != int(w[1].(float64)) || p.Stride != 3*p.Width ||
			len(p.Pix) != p.Stride*p.Height {
			t.Errorf("%s: %d x %d, %d bytes, want %v", name, p.Width, p.Height, len(p.Pix), w)
		}
		if sum := fmt.Sprintf("%08x", crc32.ChecksumIEEE(p.Pix)); sum != w[2] {
			t.Errorf("%s: other pixels than Pillow's: %s, want %v", name, sum, w[2])
		}
		if cap(buffer) >= len(p.Pix) && &buffer[:1][0] != &p.Pix[0] {
			t.Errorf("%s: the buffer was not used", name)
		}
		buffer = p.Pix
	}
}

// TestWholeIsTurnedUpright: ApplyEXIFOrientation applies to whole images.
func TestWholeIsTurnedUpright(t *testing.T) {
	data, err := os.ReadFile("../../cshim/test/data/orientation-6.jpg")
	if err != nil {
		t.Fatal(err)
	}
	stored, err := newDecoder(t, decode.Options{}).Whole(t.Context(), data, nil)
	if err != nil {
		t.Fatal(err)
	}
	p, err := newDecoder(t, decode.Options{Transform: transform.Transform{ApplyEXIFOrientation: true}}).Whole(t.Context(), data, nil)
	if err != nil {
		t.Fatal(err)
	}
	if p.Width != stored.Height || p.Height != stored.Width || p.Width == p.Height {
		t.Fatalf("%d x %d, stored as %d x %d", p.Width, p.Height, stored.Width, stored.Height)
	}
	for y := range p.Height {
		for x := range p.Width { // orientation 6: the stored image turned clockwise
			if got, want := p.Pix[y*p.Stride+3*x:][:3], stored.Pix[(stored.Height-1-x)*stored.Stride+3*y:][:3]; !bytes.Equal(got, want) {
				t.Fatalf("pixel (%d, %d) is %v, want %v", x, y, got, want)
			}
		}
	}
}

func TestPlanarExchangesTheLayoutAlone(t *testing.T) {
	d, planar := newDecoder(t, decode.Options{}), newDecoder(t, decode.Options{Planar: true})
	pixels, planes := make([]byte, d.Bytes()), make([]byte, d.Bytes())
	if err := errors.Join(d.Decode(t.Context(), pixels, photo(t)),
		planar.Decode(t.Context(), planes, photo(t))); err != nil {
		t.Fatal(err)
	}
	n := d.Bytes() / 3
	for i, v := range pixels {
		if planes[i%3*n+i/3] != v {
			t.Fatalf("byte %d differs", i)
		}
	}
}

// TestKindsOfFaults: each fault has its kind. Its message describes the fault without the wording
// of the C functions.
func TestKindsOfFaults(t *testing.T) {
	jpeg := photo(t)
	failing := transform.Eval(32, 32)
	failing.Ops = []transform.Op{transform.Func(func(_ *rand.Rand, p *transform.Pixels) error {
		if p.Pix[0] > 255/2 {
			panic("white")
		}
		return errors.New("too dark")
	})}
	lossless := slices.Clone(jpeg)
	lossless[bytes.Index(jpeg, []byte{0xff, 0xc0})+1] = 0xc3
	for name, c := range map[string]struct {
		data  []byte
		o     decode.Options
		kind  error
		words string
	}{
		"no bytes": {nil, decode.Options{}, decode.ErrNotImage, "no bytes"},
		"text": {[]byte("<html></html>"), decode.Options{}, decode.ErrNotImage,
			`it begins with "<html></"`},
		"JPEG XL": {[]byte("\x00\x00\x00\x0cJXL \r\n\x87\n"), decode.Options{}, decode.ErrUnsupported,
			"a JPEG XL image, which is not decoded: convert it"},
		"cut off":           {jpeg[:len(jpeg)/2], decode.Options{}, decode.ErrDamaged, "truncated JPEG"},
		"cut in its header": {jpeg[:20], decode.Options{}, decode.ErrDamaged, "JPEG"},
		"lossless":          {lossless, decode.Options{}, decode.ErrUnsupported, "JPEG"},
		"bytes": {jpeg, decode.Options{MaxBytes: 100}, decode.ErrTooLarge,
			"bytes, over the limit of 100"},
		"pixels": {jpeg, decode.Options{MaxPixels: 99}, decode.ErrTooLarge,
			"pixels, over the limit of 99"},
		"memory": {jpeg, decode.Options{MaxMemory: 98}, decode.ErrTooLarge,
			"bytes of memory to decode it, over the limit of 98"},
		"an error of Func": {jpeg, decode.Options{Transform: failing}, decode.ErrRejected, ""},
	} {
		d := newDecoder(t, c.o)
		err := d.Decode(t.Context(), make([]byte, d.Bytes()), c.data)
		var e *decode.Error
		if !errors.As(err, &e) || !errors.Is(err, c.kind) || e.Kind != c.kind || e.Image != 0 ||
			!strings.Contains(err.Error(), c.words) ||
			strings.Contains(err.Error(), "ts_") {
			t.Errorf("%s: error %v, want %v with %q", name, err, c.kind, c.words)
		}
		var limit *decode.LimitError
		if errors.As(err, &limit) != (c.kind == decode.ErrTooLarge) || limit != nil && limit.Value <= limit.Max {
			t.Errorf("%s: limit %+v", name, limit)
		}
		if c.kind != decode.ErrRejected {
			if _, whole := d.Whole(t.Context(), c.data, nil); !errors.Is(whole, c.kind) {
				t.Errorf("%s, whole: %v, want the error %v", name, whole, c.kind)
			}
		}
	}
}

// TestPanickingFuncFailsItsImage: this includes panics in a goroutine of the decoder, which would
// otherwise crash the program.
func TestPanickingFuncFailsItsImage(t *testing.T) {
	o := decode.Options{Transform: transform.Eval(32, 32)}
	o.Transform.Ops = []transform.Op{transform.Func(func(*rand.Rand, *transform.Pixels) error { panic("broken") })}
	d := newDecoder(t, o)
	err := d.Decode(t.Context(), make([]byte, 2*d.Bytes()), photo(t), photo(t))
	if list := faulty(t, err); !slices.Equal(list, []int{0, 1}) || !errors.Is(err, decode.ErrRejected) ||
		!strings.Contains(err.Error(), "broken") {
		t.Error(err)
	}
}

// TestCallKeepsItsDecoder: a decoder whose caller no longer refers to it is not collected before
// the call's last image.
func TestCallKeepsItsDecoder(t *testing.T) {
	o := decode.Options{Transform: transform.Eval(32, 32), Workers: 1}
	o.Transform.Ops = []transform.Op{transform.Func(func(*rand.Rand, *transform.Pixels) error {
		// The cleanup of an object that is certainly unreachable tells when cleanups have run.
		for range 3 {
			cleaned := make(chan struct{})
			runtime.AddCleanup(&[64]byte{}, func(c chan struct{}) { close(c) }, cleaned)
			for collected := false; !collected; {
				runtime.GC()
				select {
				case <-cleaned:
					collected = true
				default:
					runtime.Gosched()
				}
			}
		}
		return nil
	})}
	d, err := decode.New(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Decode(t.Context(), make([]byte, 4*d.Bytes()), slices.Repeat([][]byte{photo(t)}, 4)...); err != nil {
		t.Error(err)
	}
}

func TestWrongOptionsAreNamed(t *testing.T) {
	mixed := transform.Train(32)
	mixed.Mix = []transform.BatchOp{transform.CutMix{}}
	for field, o := range map[string]decode.Options{
		"Transform: field Size": {Transform: transform.Transform{Size: -1}},
		"Transform: field Mix":  {Transform: mixed},
		"MaxBytes":              {MaxBytes: -1},
		"MaxPixels":             {MaxPixels: 1 << 40},
		"MaxMemory":             {MaxMemory: -1},
		"Workers":               {Workers: -1},
		"Damaged":               {Damaged: 9},
	} {
		if _, err := decode.New(o); err == nil || !strings.Contains(err.Error(), "Options."+field) {
			t.Errorf("%s: %v, want an error with %q", field, err, "Options."+field)
		}
	}
	d := newDecoder(t, decode.Options{})
	if err := d.Decode(t.Context(), make([]byte, 10), photo(t)); err == nil ||
		!strings.Contains(err.Error(), "dst has 10 bytes") {
		t.Error(err)
	}
	if err := d.Decode(t.Context(), nil); err != nil {
		t.Errorf("no images: %v, want no error", err)
	}
}

// gate is a step that counts its calls, and holds them until open is closed.
type gate struct {
	running, highest atomic.Int64
	begun, open      chan struct{}
}

func newGate() *gate { return &gate{begun: make(chan struct{}, 100), open: make(chan struct{})} }

func (g *gate) options() decode.Options {
	o := decode.Options{Transform: transform.Eval(32, 32), Workers: 2}
	o.Transform.Ops = []transform.Op{transform.Func(func(*rand.Rand, *transform.Pixels) error {
		n := g.running.Add(1)
		for h := g.highest.Load(); n > h && !g.highest.CompareAndSwap(h, n); h = g.highest.Load() {
		}
		g.begun <- struct{}{}
		<-g.open
		g.running.Add(-1)
		return nil
	})}
	return o
}

// TestLimitsHoldOverAllCalls: all calls together decode at most Workers images at a time, and no
// more than MaxMemory admits. A context ends the wait for either limit.
func TestLimitsHoldOverAllCalls(t *testing.T) {
	progressive, err := os.ReadFile("../../cshim/test/data/progressive.jpg")
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		memory  int64
		highest int64
	}{"workers": {0, 2}, "memory": {1, 1}} {
		t.Run(name, func(t *testing.T) {
			archivetest.Within(t)
			g := newGate()
			o := g.options()
			if c.memory != 0 { // as much as one image needs
				probe := newDecoder(t, decode.Options{MaxMemory: 1})
				_, err := probe.Whole(t.Context(), progressive, make([]byte, 1<<20))
				var limit *decode.LimitError
				if !errors.As(err, &limit) {
					t.Fatal(err)
				}
				o.MaxMemory = limit.Value
			}
			d := newDecoder(t, o)
			var calls sync.WaitGroup
			for range 3 {
				calls.Go(func() {
					if err := d.Decode(context.Background(), make([]byte, 2*d.Bytes()), progressive,
						progressive); err != nil {
						t.Error(err)
					}
				})
			}
			for range c.highest {
				<-g.begun
			}
			ctx, cancel := context.WithCancelCause(t.Context())
			stop := errors.New("the client is gone")
			ended := make(chan error)
			go func() { ended <- d.Decode(ctx, make([]byte, d.Bytes()), progressive) }()
			cancel(stop)
			if err := <-ended; !errors.Is(err, stop) {
				t.Errorf("a call that waits ends with %v, want the error %v", err, stop)
			}
			close(g.open)
			calls.Wait()
			if n := g.highest.Load(); n != c.highest {
				t.Errorf("%d images at a time, want %d", n, c.highest)
			}
		})
	}
}

func TestEndedContextDecodesNothing(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	d := newDecoder(t, decode.Options{})
	for n := range 3 {
		if err := d.Decode(ctx, make([]byte, n*d.Bytes()),
			slices.Repeat([][]byte{photo(t)}, n)...); n > 0 && !errors.Is(err, context.Canceled) {
			t.Errorf("%d images: %v", n, err)
		}
	}
}

// TestCloseWaitsForNothing: after Close, later calls fail, and an image that is being decoded is
// finished.
func TestCloseWaitsForNothing(t *testing.T) {
	archivetest.Within(t)
	archivetest.NoLeaks(t)
	g := newGate()
	d, err := decode.New(g.options())
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error)
	go func() { ended <- d.Decode(context.Background(), make([]byte, d.Bytes()), photo(t)) }()
	<-g.begun
	d.Close()
	d.Close()
	if err := d.Decode(t.Context(), make([]byte, d.Bytes()), photo(t)); !errors.Is(err, decode.ErrClosed) {
		t.Error(err)
	}
	if err := d.Decode(t.Context(), make([]byte, 2*d.Bytes()), photo(t), photo(t)); !errors.Is(err, decode.ErrClosed) {
		t.Error(err)
	}
	if _, err := d.Whole(t.Context(), photo(t), nil); !errors.Is(err, decode.ErrClosed) {
		t.Error(err)
	}
	close(g.open)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestOneImageAllocatesNothing(t *testing.T) {
	if underRace {
		t.Skip("the race detector allocates")
	}
	data, ctx := photo(t), t.Context()
	o := decode.Options{Transform: transform.Train(32), Planar: true}
	o.Transform.Ops = []transform.Op{transform.ColorJitter{Brightness: 0.4}}
	d := newDecoder(t, o)
	row, buffer := make([]byte, d.Bytes()), make([]byte, 1<<20)
	for what, decode := range map[string]func() error{
		"Decode": func() error { return d.Decode(ctx, row, data) },
		"Whole":  func() error { _, err := d.Whole(ctx, data, buffer); return err },
	} {
		if n := testing.AllocsPerRun(100, func() {
			if err := decode(); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("%s: %v allocations, want 0", what, n)
		}
	}
}

// FuzzDecode: any bytes are decoded to the same pixels twice, or fail with an error that blames the
// image. Limits hold.
func FuzzDecode(f *testing.F) {
	_, images := corpus(f)
	for _, data := range images {
		f.Add(data)
		f.Add(data[:len(data)/2])
	}
	const maxPixels = 1 << 16
	d := newDecoder(f, decode.Options{Transform: transform.Train(16), MaxBytes: 1 << 18,
		MaxPixels: maxPixels, MaxMemory: 4 << 20})
	f.Fuzz(func(t *testing.T, data []byte) {
		pixels := make([]byte, 2*d.Bytes())
		first, second := pixels[:d.Bytes()], pixels[d.Bytes():]
		err := d.Decode(t.Context(), first, data)
		if again := d.Decode(t.Context(), second, data); fmt.Sprint(err) != fmt.Sprint(again) ||
			!bytes.Equal(first, second) {
			t.Errorf("twice: %v and %v, or other pixels", err, again)
		}
		whole, wholeErr := d.Whole(t.Context(), data, nil)
		if len(whole.Pix) > 3*maxPixels {
			t.Errorf("%d x %d pixels, want at most %v", whole.Width, whole.Height, 3*maxPixels)
		}
		for _, err := range []error{err, wholeErr} {
			if err == nil {
				continue
			}
			var e *decode.Error
			if !errors.As(err, &e) ||
				!slices.Contains([]error{decode.ErrNotImage, decode.ErrUnsupported, decode.ErrDamaged,
					decode.ErrTooLarge}, e.Kind) ||
				e.Offset < -1 || e.Offset > int64(len(data)) {
				t.Error(err)
			}
		}
	})
}

// gray returns a PNG of black pixels.
func gray(t testing.TB, width, height int) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := png.Encode(&b, image.NewGray(image.Rect(0, 0, width, height))); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// An image with few pixels but a side over 65,535 fails with an error that blames the image,
// although no option limits the side. Whole refuses its size, and Decode refuses the size that it
// would be resized to.
func TestLongSideIsAFault(t *testing.T) {
	long := gray(t, 70000, 1)
	d := newDecoder(t, decode.Options{})
	_, err := d.Whole(t.Context(), long, nil)
	var limit *decode.LimitError
	if !errors.Is(err, decode.ErrTooLarge) || !errors.As(err, &limit) || limit.Limit != "side" ||
		!strings.HasSuffix(err.Error(), "too large: 70000 pixels a side, over the limit of 65535") {
		t.Errorf("Whole of 70000 x 1 pixels: got error %v, want the limit of a side", err)
	}
	pixels := bytes.Repeat([]byte{7}, 2*d.Bytes())
	err = d.Decode(t.Context(), pixels, long, photo(t))
	if list := faulty(t, err); !slices.Equal(list, []int{0}) || !errors.Is(err, decode.ErrUnsupported) ||
		!strings.Contains(err.Error(), "70000 x 1 pixels") {
		t.Errorf("Decode of 70000 x 1 pixels: got error %v, want image 0 to be unsupported", err)
	}
}

// TestMemoryFollowsTheTableOfDocs: an image counts against MaxMemory with the bytes a pixel of the
// table "Memory of decoding" in docs/imageloader.md. In every format, 256 bytes for each pixel of
// its width are added for what the table calls some rows.
func TestMemoryFollowsTheTableOfDocs(t *testing.T) {
	interlaced := gray(t, 64, 48)
	interlaced[28] = 1 // IHDR's last field
	binary.BigEndian.PutUint32(interlaced[29:], crc32.ChecksumIEEE(interlaced[12:29]))
	for name, c := range map[string]struct {
		data     []byte
		perPixel int64
	}{
		"a PNG":              {gray(t, 64, 48), 0},
		"an interlaced PNG":  {interlaced, 3},
		"a JPEG":             {photo(t), 0},
		"a progressive JPEG": {file(t, "../../cshim/test/data/progressive.jpg"), 6},
		"a BMP":              {file(t, "../testdata/formats/rgb.bmp"), 3},
	} {
		info, err := codec.Header(c.data)
		if err != nil {
			t.Fatal(err)
		}
		pixels := int64(info.Width) * int64(info.Height)
		for space, own := range map[int64]int64{0: 3, 3 * pixels: 0} {
			_, err = newDecoder(t, decode.Options{MaxMemory: 1}).Whole(t.Context(), c.data, make([]byte, space))
			var limit *decode.LimitError
			want := (c.perPixel+own)*pixels + 256*int64(info.Width)
			if !errors.As(err, &limit) || limit.Value != want {
				t.Errorf("%s of %d x %d pixels into %d bytes: got error %v, want one for %d bytes of memory", name,
					info.Width, info.Height, space, err, want)
			}
		}
	}
}

// TestWaitForMemoryEndsWithTheContext: a call that waits for other calls' memory ends with its
// context, and leaves the memory to later calls.
func TestWaitForMemoryEndsWithTheContext(t *testing.T) {
	data := photo(t)
	probe := newDecoder(t, decode.Options{MaxMemory: 1})
	var limit *decode.LimitError
	if _, err := probe.Whole(t.Context(), data, make([]byte, 1<<20)); !errors.As(err, &limit) {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		g := newGate()
		o := g.options()
		o.MaxMemory = limit.Value // of one image
		d, err := decode.New(o)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		first, waiting := make(chan error, 1), make(chan error, 1)
		decodeOne := func(ctx context.Context) error { return d.Decode(ctx, make([]byte, d.Bytes()), data) }
		go func() { first <- decodeOne(context.Background()) }()
		<-g.begun
		ctx, cancel := context.WithCancelCause(t.Context())
		stop := errors.New("the client is gone")
		go func() { waiting <- decodeOne(ctx) }()
		synctest.Wait() // until it waits for memory
		cancel(stop)
		if err := <-waiting; !errors.Is(err, stop) {
			t.Errorf("the call that waits: got error %v, want the cause of its context's end", err)
		}
		close(g.open)
		for name, err := range map[string]error{"the first call": <-first, "a later call": decodeOne(t.Context())} {
			if err != nil {
				t.Errorf("%s: got error %v, want none", name, err)
			}
		}
	})
}
