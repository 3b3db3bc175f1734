package serve_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/serve"
	"github.com/torchstream/torchstream/torch"
)

// newUnitDecoder returns a decoder whose device decodes. On the CPU it runs the arithmetic of the
// GPU's kernels.
func newUnitDecoder(t testing.TB, o serve.Options) *serve.Decoder {
	t.Helper()
	o.OnDevice = o.Device != cuda.CPU
	d := newDecoder(t, o)
	if !o.OnDevice {
		if err := serve.OpenUnits(d, max(o.Concurrent, 1)); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

// uploads returns images of every format, most of which only the host decodes. It also returns
// damaged images (overwritten bytes, truncated, trailing bytes) and text files.
func uploads(t testing.TB) (images [][]byte) {
	t.Helper()
	files, err := filepath.Glob("../cshim/test/data/*.*")
	if err != nil || len(files) < 20 {
		t.Fatal(err, files)
	}
	for _, file := range files {
		if filepath.Ext(file) == ".txt" {
			continue
		}
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		images = append(images, data)
		if filepath.Ext(file) != ".jpg" {
			continue
		}
		for i := range 8 { // mostly in the scan
			broken := bytes.Clone(data)
			at := len(data)/3 + i*len(data)/13
			copy(broken[at:], []byte{byte(37 * i), 0xFF, byte(0xD0 + i), byte(i), 0x55}[:1+i%5])
			images = append(images, broken)
		}
		images = append(images, data[:len(data)*2/3], data[:len(data)-2], append(bytes.Clone(data), "behind"...))
	}
	return append(images, nil, []byte("text"), []byte("\xff\xd8\xff\xe0"))
}

// same compares the batches and the errors of two calls.
func same(t *testing.T, what string, got, want *torch.Tensor, gotErr, wantErr error) {
	t.Helper()
	if fmt.Sprint(gotErr) != fmt.Sprint(wantErr) {
		t.Errorf("%s: the error is %v, want %v", what, gotErr, wantErr)
	}
	var a, b decode.Errors
	if errors.As(gotErr, &a); errors.As(wantErr, &b) && len(a) == len(b) {
		for i := range a {
			if a[i].Error() != b[i].Error() || a[i].Offset != b[i].Offset {
				t.Errorf("%s: %v, want %v", what, a[i], b[i])
			}
		}
	}
	if (got == nil) != (want == nil) {
		t.Fatalf("%s: a batch: %v, want %v", what, got != nil, want != nil)
	}
	if got != nil && !bytes.Equal(contents(t, got), contents(t, want)) {
		t.Errorf("%s: other values", what)
	}
}

// TestDeviceDecodesAsHost checks that a batch has the same bits and the same errors whether the
// device or the host decodes it.
func TestDeviceDecodesAsHost(t *testing.T) {
	images := append(photos(t), uploads(t)...)
	half := transform.Train(48)
	half.DType, half.Contiguous = torch.BFloat16, true
	ops := transform.Train(40)
	ops.Ops = []transform.Op{transform.ColorJitter{Brightness: 0.4, Contrast: 0.4, Hue: 0.1}, transform.RandomErasing{}}
	host := transform.Eval(48, 40)
	host.Ops = []transform.Op{transform.GaussianNoise{}}
	for name, c := range map[string]struct {
		transform transform.Transform
		device    bool // whether the device decodes some
	}{
		"evaluation": {transform.Eval(80, 64), true},
		"training":   {half, true},
		"bytes":      {transform.Transform{Resize: 40, Size: 32, Bytes: true}, true},
		"operations": {ops, true},
		"the host's": {host, false},
	} {
		for _, device := range devices() {
			t.Run(name+" on "+device.String(), func(t *testing.T) {
				o := serve.Options{Decode: decode.Options{Transform: c.transform, Seed: 5}, Device: device}
				plain, d := newDecoder(t, o), newUnitDecoder(t, o)
				scope := torch.NewScope("test")
				defer scope.Close()
				// Different images follow each other, so that stale pixels are detected.
				for size := 1; size <= 64; size *= 4 {
					for first := 0; first+size <= len(images) && first < 6*size; first += size {
						part := images[first:][:size]
						want, wantErr := plain.Batch(t.Context(), scope, part...)
						got, gotErr := d.Batch(t.Context(), scope, part...)
						same(t, fmt.Sprintf("images %d to %d", first, first+size-1), got, want, gotErr, wantErr)
					}
				}
				want, wantErr := plain.Batch(t.Context(), scope, images...)
				got, gotErr := d.Batch(t.Context(), scope, images...)
				same(t, "all images", got, want, gotErr, wantErr)
				st := d.Stats()
				if decoded := st.Decoded > int64(len(images)/2); decoded != c.device || c.device &&
					(st.DecodedAgain == 0 || st.DecodedAgain == st.Decoded) {
					t.Errorf("%+v", st)
				}
				if st.DeviceBytes < 256<<20 || st.PinnedBytes < 32<<20 || plain.Stats() != (serve.Stats{}) {
					t.Errorf("%+v, and %+v without", st, plain.Stats())
				}
			})
		}
	}
}

// TestDeviceFaultInLastGoodImageIsAnError checks that there is no batch if the device finds that
// the last good image is faulty too.
func TestDeviceFaultInLastGoodImageIsAnError(t *testing.T) {
	whole, err := os.ReadFile("../cshim/test/data/444.jpg")
	if err != nil {
		t.Fatal(err)
	}
	broken := bytes.Clone(whole)
	for i := len(broken) / 2; i < len(broken)-2; i++ {
		broken[i] = 0x55
	}
	for _, device := range devices() {
		d := newUnitDecoder(t, serve.Options{Device: device, Decode: decode.Options{Damaged: decode.Refuse}})
		before := torch.LiveTensors()
		for _, c := range []struct {
			images [][]byte
			faults []int
		}{
			{[][]byte{broken}, []int{0}},
			{[][]byte{nil, broken}, []int{0, 1}},
			{[][]byte{broken, whole, nil, broken}, []int{0, 2, 3}},
		} {
			x, err := d.Batch(t.Context(), nil, c.images...)
			var faults decode.Errors
			if !errors.As(err, &faults) || len(faults) != len(c.faults) ||
				(x == nil) != (len(faults) == len(c.images)) {
				t.Fatalf("%v, %v", x, err)
			}
			for i, f := range faults {
				if f.Image != c.faults[i] || f.Err == nil {
					t.Errorf("%v, want image %d", f, c.faults[i])
				}
			}
			if x != nil {
				x.Close()
			}
		}
		if st := d.Stats(); st.Decoded != 5 || st.DecodedAgain != 4 {
			t.Errorf("%v: %+v, want st.Decoded = 5, st.DecodedAgain = 4", device, st)
		}
		if n := torch.LiveTensors(); n != before {
			t.Errorf("%v: %d tensors are open, %d before", device, n, before)
		}
	}
}

// planned returns the images that the decoder sends to its device.
func planned(t testing.TB, d *serve.Decoder, images [][]byte) (list [][]byte) {
	t.Helper()
	for _, image := range images {
		before := d.Stats()
		x, err := d.Batch(t.Context(), nil, image)
		if err != nil {
			t.Fatal(err)
		}
		x.Close()
		if after := d.Stats(); after.Decoded > before.Decoded && after.DecodedAgain == before.DecodedAgain {
			list = append(list, image)
		}
	}
	if len(list) < 4 {
		t.Fatalf("the device decodes %d of %d images, want at least 4", len(list), len(images))
	}
	return list
}

// TestHostDecodesBeyondDeviceLimits checks that the host decodes images beyond the unit's limits of
// number and size.
func TestHostDecodesBeyondDeviceLimits(t *testing.T) {
	// Zeros after the last pixel belong to the scan.
	padded := func(image []byte, zeros int) []byte {
		end := len(image) - 2
		return slices.Concat(image[:end], make([]byte, zeros), image[end:])
	}
	for _, device := range devices() {
		o := serve.Options{Device: device, Decode: decode.Options{Transform: transform.Eval(40, 32)}}
		plain, d := newDecoder(t, o), newUnitDecoder(t, o)
		images := planned(t, d, photos(t))
		var many [][]byte
		for i := range serve.MaxPlanned + 40 {
			many = append(many, images[i%len(images)])
		}
		scope := torch.NewScope("test")
		defer scope.Close()
		for _, c := range []struct {
			name   string
			images [][]byte
			want   int64 // number of images sent to the device
		}{
			{"many", many, serve.MaxPlanned},
			{"one too large", [][]byte{images[1], padded(images[0], serve.PlansBytes), images[2]}, 2},
		} {
			before := d.Stats().Decoded
			want, wantErr := plain.Batch(t.Context(), scope, c.images...)
			got, gotErr := d.Batch(t.Context(), scope, c.images...)
			same(t, c.name, got, want, gotErr, wantErr)
			if n := d.Stats().Decoded - before; n != c.want {
				t.Errorf("%s: the device got %d of %d images, want %d", c.name, n, len(c.images), c.want)
			}
		}
	}
}

// TestOnDeviceWaitsForATurn checks that a call waits while all units are taken, and that the end of
// its context and Close both end that wait.
func TestOnDeviceWaitsForATurn(t *testing.T) {
	images := photos(t)[:2]
	for _, device := range devices() {
		d := newUnitDecoder(t, serve.Options{Device: device, Concurrent: 1})
		release, err := serve.TakeUnit(d)
		if err != nil {
			t.Fatal(err)
		}
		cause := errors.New("the client has gone")
		ctx, cancel := context.WithCancelCause(t.Context())
		ended, closed := make(chan error), make(chan error)
		go func() { ended <- second(d.Batch(ctx, nil, images...)) }()
		go func() { closed <- second(d.Batch(t.Context(), nil, images...)) }()
		cancel(cause)
		if err := <-ended; !errors.Is(err, cause) {
			t.Errorf("%v: %v, want the context's cause", device, err)
		}
		d.Close()
		if err := <-closed; !errors.Is(err, decode.ErrClosed) {
			t.Errorf("%v: %v, want ErrClosed", device, err)
		}
		release()
	}
}

// TestStatsAfterClose checks that the memory of a closed decoder is 0, and that the counts stay.
func TestStatsAfterClose(t *testing.T) {
	for _, device := range devices() {
		d := newUnitDecoder(t, serve.Options{Device: device, Concurrent: 2})
		images := planned(t, d, photos(t))
		before := d.Stats()
		release, err := serve.TakeUnit(d)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
		if st := d.Stats(); st.DeviceBytes != before.DeviceBytes/2 ||
			st.PinnedBytes != before.PinnedBytes/2 || st.DeviceBytes == 0 {
			t.Errorf("%v: %+v while a call has one of two units, %+v before", device, st, before)
		}
		release()
		if st := d.Stats(); st != (serve.Stats{Decoded: before.Decoded,
			DecodedAgain: before.DecodedAgain}) || st.Decoded < int64(len(images)) {
			t.Errorf("%v: %+v, %+v before", device, st, before)
		}
	}
}

// TestConcurrentDeviceCallsTakeTurns checks that concurrent calls take turns, and that each gets
// its own images. Close runs at the same time.
func TestConcurrentDeviceCallsTakeTurns(t *testing.T) {
	images := photos(t)
	o := serve.Options{Device: devices()[len(devices())-1], Concurrent: 2,
		Decode: decode.Options{Transform: transform.Eval(40, 32)}}
	plain, d := newDecoder(t, o), newUnitDecoder(t, o)
	want := valuesOf(t, plain, images)
	var all sync.WaitGroup
	for g := range 8 {
		all.Go(func() {
			for i := range 20 {
				if g == 7 && i == 10 {
					d.Close()
				}
				at := (3*g + i) % len(images)
				x, err := d.Batch(t.Context(), nil, images[at])
				if errors.Is(err, decode.ErrClosed) {
					return
				}
				if err != nil {
					t.Error(err)
					return
				}
				if !bytes.Equal(contents(t, x), want[at]) {
					t.Errorf("goroutine %d: other values of image %d", g, at)
				}
				x.Close()
			}
		})
	}
	all.Wait()
	if _, err := d.Batch(t.Context(), nil, images[0]); !errors.Is(err, decode.ErrClosed) {
		t.Errorf("after Close: %v, want the error %v", err, decode.ErrClosed)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

func TestOnDeviceIsRefused(t *testing.T) {
	for words, o := range map[string]serve.Options{
		"OnDevice: the device is the CPU": {OnDevice: true, Device: cuda.CPU},
		"Concurrent is -1":                {OnDevice: true, Concurrent: -1},
		"Concurrent is 65":                {Concurrent: 65},
	} {
		if _, err := serve.NewDecoder(o); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v", words, err)
		}
	}
	if _, err := serve.NewDecoder(serve.Options{OnDevice: true, Device: cuda.CPU}); !errors.Is(err, cuda.ErrNoDevice) {
		t.Error(err)
	}
}

// TestDeviceBatchesKeepTheirImagesOnBusyStreams runs several goroutines on separate streams that
// have a backlog. Each batch has the values of its own images, although units and pixel memory are
// reused before the streams run.
func TestDeviceBatchesKeepTheirImagesOnBusyStreams(t *testing.T) {
	device := cudatest.RequireGPUs(t, 1)[0]
	o := serve.Options{Device: device, Decode: decode.Options{Transform: transform.Eval(80, 64)}}
	plain, d := newDecoder(t, o), newUnitDecoder(t, o)
	images := planned(t, d, photos(t))
	before := d.Stats().Decoded
	batchesAreOrdered(t, d, images, valuesOf(t, plain, images), 200*time.Millisecond)
	if n := d.Stats().Decoded - before; n != 80 {
		t.Errorf("the device got %d images, want 80", n)
	}
}
