//go:build linux

package prefetcher

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"image"
	"image/jpeg"
	"image/png"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"unsafe"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/decodeplan"
	"github.com/torchstream/torchstream/internal/parquettest"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
)

// decodeArchive writes an archive of photographs of several sizes, and of images that only the host
// decodes: PNG files, damaged files, and JPEGs that are too small for entry points.
func decodeArchive(t *testing.T, photos int) string { return decodeArchiveOf(t, photos, "set.tar") }

// decodeArchiveOf writes the archive of decodeArchive in the format of its name: a .tar, a .tgz,
// stored.zip, or a .zip of deflated members.
func decodeArchiveOf(t *testing.T, photos int, name string) string {
	t.Helper()
	rng := rand.New(rand.NewPCG(5, 6))
	path := filepath.Join(t.TempDir(), name)
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	write, finish := newMemberWriter(t, file, name)
	add := func(name string, data []byte) {
		if err := write(name, data); err != nil {
			t.Fatal(err)
		}
	}
	for i := range photos {
		width, height := 200+rng.IntN(200), 150+rng.IntN(250)
		if i%11 == 10 {
			width, height = 20, 30
		}
		m := image.NewRGBA(image.Rect(0, 0, width, height))
		for p := range m.Pix {
			m.Pix[p] = byte(p/4*(i+3)/7 + rng.IntN(40))
		}
		var b bytes.Buffer
		if i%9 == 8 {
			err = png.Encode(&b, m)
		} else {
			err = jpeg.Encode(&b, m, &jpeg.Options{Quality: 60 + i%40})
		}
		if err != nil {
			t.Fatal(err)
		}
		name := fmt.Sprintf("set/%c/%03d", 'a'+i%4, i)
		add(name+".jpg", b.Bytes())
		if i%13 == 12 {
			add(name+"-damaged.jpg", b.Bytes()[:b.Len()/3])
		}
	}
	if err := errors.Join(finish(), file.Close()); err != nil {
		t.Fatal(err)
	}
	return path
}

// newParquetWriter is newMemberWriter for a Parquet file with pages of seven images. The directory
// of a member is its class, a, b, c or d.
func newParquetWriter(t *testing.T, to io.Writer) (add func(name string, data []byte) error, finish func() error) {
	classes := []string{"a", "b", "c", "d"}
	var rows []parquettest.Row
	add = func(name string, data []byte) error {
		label := slices.Index(classes, path.Base(path.Dir(name)))
		rows = append(rows, parquettest.Row{Path: name, Image: string(data), Label: label})
		return nil
	}
	return add, func() error {
		_, err := to.Write(parquettest.File(t, rows, parquettest.Layout{Classes: classes, Group: 40, Page: 7}))
		return err
	}
}

// newMemberWriter returns functions that add a member to an archive, and that finish the archive.
func newMemberWriter(t *testing.T, to io.Writer, name string) (add func(name string, data []byte) error, finish func() error) {
	switch {
	case filepath.Ext(name) == ".parquet":
		return newParquetWriter(t, to)
	case name == "stored.zip":
		return newZipWriter(to, zip.Store)
	case filepath.Ext(name) == ".zip":
		return newZipWriter(to, zip.Deflate)
	}
	end := func() error { return nil }
	if filepath.Ext(name) == ".tgz" {
		z := gzip.NewWriter(to)
		to, end = z, z.Close
	}
	w := tar.NewWriter(to)
	add = func(name string, data []byte) error {
		err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(data))})
		if err == nil {
			_, err = w.Write(data)
		}
		return err
	}
	return add, func() error { return errors.Join(w.Close(), end()) }
}

// decoderFeed returns a prefetcher whose device decodes.
type decoderFeed func(*testing.T, Source) *Prefetcher

func onGPU(t *testing.T, source Source) *Prefetcher {
	return newFeed(t, source, Options{Decode: Device})
}

// epochValues returns the elements and the labels of the batches of an epoch.
func epochValues(t *testing.T, p *Prefetcher, epoch int) (values [][]float32, labels [][]int64) {
	t.Helper()
	for b, err := range p.Epoch(t.Context(), epoch) {
		if err != nil {
			t.Fatal(err)
		}
		v, err := b.Images.ToDType(torch.Float32).Float32s()
		if err != nil {
			t.Fatal(err)
		}
		l, err := b.Labels.Int64s()
		if err != nil {
			t.Fatal(err)
		}
		values, labels = append(values, v), append(labels, l)
	}
	return values, labels
}

// newLoader opens a loader of the archive with a separate index.
func newLoader(t *testing.T, path string, o imageloader.Options) *imageloader.Loader {
	t.Helper()
	o.IndexFile = filepath.Join(t.TempDir(), "index")
	o.BatchSize, o.Shuffle, o.Workers = 16, true, 4
	l, err := imageloader.Open(path, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// deviceOps has steps that a GPU runs. mixedOps also has steps that only the host runs.
var (
	deviceOps = []transform.Op{transform.RandAugment{NumOps: 3}, transform.AugMix{},
		transform.ColorJitter{Brightness: 0.4, Contrast: 0.4, Saturation: 0.4, Hue: 0.1},
		transform.RandomCrop{Padding: [4]int{4, 4, 4, 4}}, transform.GaussianBlur{KernelSize: [2]int{9, 5}},
		transform.RandomErasing{}}
	mixedOps = []transform.Op{transform.TrivialAugmentWide{},
		transform.RandomApply{Ops: []transform.Op{transform.GaussianNoise{}}, P: 0.3},
		transform.RandomErasing{Random: true, P: 0.2}}
)

// TestGPUDecodeEqualsTheHost checks that batches decoded by the GPU equal batches decoded by the
// host, to the bit, for every finish, and after epochs that were left early.
func TestGPUDecodeEqualsTheHost(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	decodeEqualsTheHost(t, onGPU)
}

func decodeEqualsTheHost(t *testing.T, decoder decoderFeed) {
	path := decodeArchive(t, 150)
	train, eval := imageloader.Train(64), imageloader.Eval(90, 72)
	raw, half, bicubic := train, eval, train
	raw.Bytes, raw.DType = true, tensor.Uint8
	half.DType = tensor.BFloat16
	half.Contiguous = true
	bicubic.Interpolation = transform.Bicubic
	augmented, mixed := train, train
	augmented.Ops, mixed.Ops = deviceOps, mixedOps
	for _, test := range []struct {
		name   string
		o      imageloader.Transform
		policy imageloader.BadSamplePolicy
	}{
		{"train", train, imageloader.Skip}, {"eval", eval, imageloader.Substitute}, {"bytes", raw, imageloader.Skip},
		{"bfloat16", half, imageloader.Skip}, {"bicubic", bicubic, imageloader.Substitute},
		{"operations", augmented, imageloader.Skip}, {"operations of both", mixed, imageloader.Substitute},
	} {
		t.Run(test.name, func(t *testing.T) {
			if testing.Short() && test.name != "operations of both" {
				t.Skip("its goroutines are those of the other rows")
			}
			o := imageloader.Options{Transform: test.o, BadSamples: test.policy}
			plain, l := newLoader(t, path, o), newLoader(t, path, o)
			nothingLeft(t, func() {
				host := newFeed(t, plain, Options{})
				device := decoder(t, l)
				sameEpochs(t, host, device, 0, 3)
				st := device.Stats()
				min, max := int64(3*100), int64(math.MaxInt64)
				if test.name == "operations of both" {
					min, max = 3*40, 3*120
				}
				if st.Decoded < min || st.Decoded > max || st.DecodedAgain != 0 || st.DecoderBytes == 0 {
					t.Errorf("%+v, want st.Decoded from %v to %v, st.DecodedAgain "+
						"= 0, st.DecoderBytes not 0", st, min, max)
				}
				if st := host.Stats(); st.Decoded != 0 || st.DecoderBytes != 0 {
					t.Errorf("the host's: %+v, want st.Decoded = 0, st.DecoderBytes = 0", st)
				}
				closeFeed(t, host)
				closeFeed(t, device)
				l.Close() // it pins the archive for the device
			})
		})
	}
}

// TestGPUDecodeOnSomeMultiprocessors: a bound on the multiprocessors does not change a batch.
func TestGPUDecodeOnSomeMultiprocessors(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	path := decodeArchive(t, 100)
	o := imageloader.Options{Transform: imageloader.Train(64), BadSamples: imageloader.Skip}
	plain, l := newLoader(t, path, o), newLoader(t, path, o)
	nothingLeft(t, func() {
		host, device := newFeed(t, plain, Options{}), newFeed(t, l, Options{Decode: Device, DecodeMultiprocessors: 20})
		sameEpochs(t, host, device, 0, 3)
		if st := device.Stats(); st.DecodeMultiprocessors < 8 || st.DecodeMultiprocessors > 20 ||
			st.Decoded < 100 || st.DecodedAgain != 0 {
			t.Errorf("%+v, want st.DecodeMultiprocessors at least 8, st.DecodeMultiprocessors at most "+
				"20, st.Decoded at least 100, st.DecodedAgain = 0", st)
		}
		if st := host.Stats(); st.DecodeMultiprocessors != 0 {
			t.Errorf("the host's: %+v, want 0", st)
		}
		closeFeed(t, host)
		closeFeed(t, device)
		l.Close() // it pins the archive for the device
	})
	if _, err := New(plain, Options{Decode: Device, DecodeMultiprocessors: 1}); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("a bound of 1: %v, want the error %v", err, cuda.ErrInvalidArgument)
	}
}

// TestSanitizerOfBoundedDecoding checks that the stream sanitizer finds nothing when decoding is
// bounded to a part of the GPU, which has its own streams.
func TestSanitizerOfBoundedDecoding(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	l := newLoader(t, decodeArchive(t, 60),
		imageloader.Options{Transform: imageloader.Train(64), BadSamples: imageloader.Skip})
	cudatest.NoFindings(t)
	p := newFeed(t, l, Options{Decode: Device, DecodeMultiprocessors: 20})
	for epoch := range 3 {
		for b, err := range p.Epoch(t.Context(), epoch) {
			if err != nil {
				t.Fatal(err)
			}
			sum := b.Images.Sum() // on the consumer's stream
			if err := sum.Err(); err != nil {
				t.Fatal(err)
			}
			sum.Close()
		}
	}
	st := p.Stats()
	closeFeed(t, p)
	if st.Decoded < 40 || st.DecodeMultiprocessors != 16 {
		t.Errorf("%+v, want st.Decoded at least 40, st.DecodeMultiprocessors = 16", st)
	}
}

// compressed returns the compressed bytes in a plan. The test damages only these: the decoder
// trusts all other parts of a plan.
func compressed(plan []byte) ([]byte, error) {
	// offsets in Plan of cshim/src/jpeg/plan.h, and kScanSlack
	const scanAt, scanBytes, stepsAt, slack = 288, 296, 424, 16
	end := int(binary.LittleEndian.Uint32(plan[stepsAt:]))
	if end == 0 {
		end = len(plan)
	}
	at, n := int(binary.LittleEndian.Uint32(plan[scanAt:])), int(binary.LittleEndian.Uint32(plan[scanBytes:]))
	if want := decodeplan.Aligned(at + n + slack); n == 0 || at < scanBytes || want != end {
		return nil, fmt.Errorf("a plan of %d bytes with %d compressed ones at %d: cshim/src/jpeg/plan.h "+
			"has changed", len(plan), n, at)
	}
	return plan[at : at+n], nil
}

// searched reports whether a plan has no entry points. The device then has nothing to compare the
// bytes with, so damaged bytes may decode to other pixels without an error.
func searched(plan []byte) bool {
	const subsequences = 300 // in Plan of cshim/src/jpeg/plan.h
	return binary.LittleEndian.Uint32(plan[subsequences:]) != 0
}

// corruptingSource damages the plans of some rows of every batch, unless they are of whole scans.
type corruptingSource struct {
	*imageloader.Loader
	rng     *rand.Rand
	rows    func(batch, row int) bool // the rows to damage
	hits    int
	members int // the number of hits that are compressed members
}

func (s *corruptingSource) Planner() decodeplan.Planner {
	return corruptingPlanner{s, s.Loader.Planner()}
}

// corruptingPlanner is the planner of a corruptingSource.
type corruptingPlanner struct {
	*corruptingSource
	decodeplan.Planner
}

func (s corruptingPlanner) FillPlans(ctx context.Context, epoch int, to decodeplan.Consumer) error {
	return s.Planner.FillPlans(ctx, epoch, &corruptingConsumer{Consumer: to, s: s.corruptingSource})
}

// corruptingConsumer damages plans on their way to a consumer.
type corruptingConsumer struct {
	decodeplan.Consumer
	s     *corruptingSource
	mu    sync.Mutex
	lent  []*decodeplan.Plans
	batch int
}

func (c *corruptingConsumer) Lend(ctx context.Context) (decodeplan.Slot, error) {
	slot, err := c.Consumer.Lend(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lent = append(c.lent, slot.Plans)
	return slot, err
}

func (c *corruptingConsumer) Deliver(n int, info any) error {
	c.mu.Lock()
	plans := c.lent[0]
	c.lent = c.lent[1:]
	c.mu.Unlock()
	for row := range plans.Rows[:n] {
		p := &plans.Rows[row]
		if p.Bytes == 0 || !c.s.rows(c.batch, row) || searched(plans.Memory[p.At:][:p.Bytes]) {
			continue
		}
		c.s.hits++
		data, err := c.s.bytes(plans, p)
		if err != nil {
			return err
		}
		for i := range data {
			if i%5 == 0 {
				data[i] = byte(c.s.rng.Uint32())
			}
		}
	}
	c.batch++
	return c.Consumer.Deliver(n, info)
}

// bytes returns the bytes of a row to be damaged. If the device reads the row's member from the
// archive, bytes moves the member instead.
func (s *corruptingSource) bytes(plans *decodeplan.Plans, p *decodeplan.Row) ([]byte, error) {
	if p.Member.InputBytes == 0 {
		return compressed(plans.Memory[p.At : p.At+p.Bytes])
	}
	m := &p.Member
	if m.From != nil {
		s.members++
		m.From = (*byte)(unsafe.Add(unsafe.Pointer(m.From), -7)) // in a header, or in an earlier member
		return nil, nil
	}
	if m.WindowBytes > 10 && s.rng.IntN(3) == 0 {
		return plans.Memory[p.At+m.Window:][:m.WindowBytes], nil // damage that decoding may not read
	}
	s.members++
	return plans.Memory[p.At+m.Input:][:m.InputBytes], nil
}

// TestGPUDecodeHandsDamageBack: images whose bytes are damaged on their way to the device are
// decoded again, and disturb no neighbour. The damaged images are at every position of a batch,
// alone and next to each other.
func TestGPUDecodeHandsDamageBack(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	decodeHandsDamageBack(t, onGPU)
}

func decodeHandsDamageBack(t *testing.T, decoder decoderFeed) {
	path := decodeArchive(t, 150)
	for name, rows := range map[string]func(batch, row int) bool{
		"one in each batch": func(batch, row int) bool { return row == batch%16 },
		"every second one":  func(batch, row int) bool { return row%2 == batch%2 },
		"all":               func(int, int) bool { return true },
	} {
		t.Run(name, func(t *testing.T) {
			if testing.Short() && name != "every second one" {
				t.Skip("its goroutines are those of the other rows")
			}
			o := imageloader.Options{Transform: imageloader.Train(64), BadSamples: imageloader.Skip, Repeat: 2}
			plain, l := newLoader(t, path, o), newLoader(t, path, o)
			source := &corruptingSource{Loader: l, rng: rand.New(rand.NewPCG(1, 2)), rows: rows}
			nothingLeft(t, func() {
				host, device := newFeed(t, plain, Options{}), decoder(t, source)
				for epoch := range 3 {
					want, _ := epochValues(t, host, epoch)
					got, _ := epochValues(t, device, epoch)
					for i := range want {
						if !slices.Equal(got[i], want[i]) {
							t.Errorf("batch %d of epoch %d is another one", i, epoch)
						}
					}
				}
				if st := device.Stats(); source.hits == 0 || st.DecodedAgain != int64(source.hits) ||
					st.Decoded <= st.DecodedAgain && name != "all" {
					t.Errorf("%d images are damaged: %+v", source.hits, st)
				}
				closeFeed(t, host)
				closeFeed(t, device)
				l.Close() // it pins the archive for the device
			})
		})
	}
}

// TestGPUDecodeOrder runs a consumer that is slower than the decoders, so that finishes are late.
// No batch may overwrite the decoded images of an earlier batch, and no images may be read before
// they are decoded. The stream sanitizer checks every edge, too.
func TestGPUDecodeOrder(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	for _, name := range []string{"set.tar", "set.tgz", "deflated.zip"} {
		t.Run(name, func(t *testing.T) { decodeInOrder(t, decodeArchiveOf(t, 150, name)) })
	}
}

func decodeInOrder(t *testing.T, path string) {
	o := imageloader.Options{Transform: imageloader.Train(160), BadSamples: imageloader.Skip, ShuffleBytes: 1 << 16}
	plain, l := newLoader(t, path, o), newLoader(t, path, o)
	stream, err := cuda.NewStream(0, cuda.StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var sanitizer *cuda.Sanitizer
	if cuda.RunningSanitizer() == nil {
		if sanitizer, err = cuda.StartSanitizer(cuda.SanitizerOptions{}); err != nil {
			t.Fatal(err)
		}
		defer sanitizer.Stop()
	}
	// sums returns a number for each sample of an epoch, computed behind a consumer's other work.
	sums := func(p *Prefetcher, epoch int) (all []float32) {
		var results []*torch.Tensor
		if err := cuda.WithStream(stream, func() error {
			s := newStrained(t)
			defer s.close()
			for b, err := range p.Epoch(t.Context(), epoch) {
				if err != nil {
					return err
				}
				s.compute(b)
				sum := b.Images.Abs().Reshape(int64(b.N), -1).SumDim([]int64{1}, false).Keep()
				if err := sum.Err(); err != nil {
					return err
				}
				results = append(results, sum)
			}
			for _, r := range results {
				v, err := r.Float32s()
				if err != nil {
					return err
				}
				all = append(all, v...)
				r.Close()
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return all
	}
	host, device := newFeed(t, plain, Options{}), newFeed(t, l, Options{Decode: Device})
	for epoch := range 6 {
		if got, want := sums(device, epoch), sums(host, epoch); !slices.Equal(got, want) {
			t.Errorf("epoch %d has other images, got %v, want %v", epoch, got, want)
		}
	}
	closeFeed(t, host)
	closeFeed(t, device)
	if sanitizer != nil {
		for _, f := range sanitizer.Findings() {
			if !f.Kind.Note() {
				t.Errorf("found in a correct program:\n%v", &f)
			}
		}
	}
}

// TestGPUDecodeFlagsOfAnAbandonedBatch checks the order of flags after an epoch was left early. One
// decoder may still work on a batch of that epoch when the other decoder gets the next batch of the
// same slot.
func TestGPUDecodeFlagsOfAnAbandonedBatch(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	l := newLoader(t, decodeArchive(t, 40),
		imageloader.Options{Transform: imageloader.Train(64), BadSamples: imageloader.Skip})
	for _, err := range l.Epoch(t.Context(), 0) { // finds the entry points
		if err != nil {
			t.Fatal(err)
		}
	}
	cudatest.NoFindings(t)
	s, err := newSlots(l)
	if err != nil {
		t.Fatal(err)
	}
	if s.decode, err = newDecoding(l, s); err != nil {
		t.Fatal(err)
	}
	s.depth, s.hosts = 1, 2
	d := &gpuDevice{slots: s, starved: &starved{device: 0}}
	driven := make(chan error)
	go func() { // Open locks its thread
		driven <- func() error {
			if err := d.Open(); err != nil {
				return err
			}
			// The first batches of an epoch, in both host slots.
			enough := errors.New("enough")
			var counts []int
			lent := 0
			err := s.decode.fill(context.Background(), 1, s, func(ctx context.Context) (int, error) {
				if lent == s.hosts {
					<-ctx.Done()
					return 0, context.Cause(ctx)
				}
				lent++
				return lent - 1, nil
			}, func(n int, _ any) error {
				if counts = append(counts, n); len(counts) == s.hosts {
					return enough
				}
				return nil
			})
			if !errors.Is(err, enough) {
				return err
			}
			for host, n := range counts {
				copied, err := d.NewEvent(true)
				if err != nil {
					return err
				}
				defer copied.Close()
				if err := errors.Join(d.Copy(0, host, n, nil, copied), d.Finish(0, host, n)); err != nil {
					return err
				}
				if len(s.decode.slots[0].rows) == 0 {
					return fmt.Errorf("batch %d has no plans", host)
				}
			}
			return d.Close(nil)
		}()
	}()
	if err := <-driven; err != nil {
		t.Fatal(err)
	}
}

// TestGPUDecodeOnTwoGPUs: two prefetchers of one process decode at the same time, each on a
// different GPU, and both get the host's batches.
func TestGPUDecodeOnTwoGPUs(t *testing.T) {
	gpus := cudatest.RequireGPUs(t, 2)
	path := decodeArchive(t, 150)
	o := imageloader.Options{Transform: imageloader.Train(64), BadSamples: imageloader.Skip}
	host := newFeed(t, newLoader(t, path, o), Options{})
	want := make([][][]float32, 4)
	for epoch := range want {
		want[epoch], _ = epochValues(t, host, epoch)
	}
	closeFeed(t, host)
	var all sync.WaitGroup
	for _, gpu := range gpus[:2] {
		device := newFeed(t, newLoader(t, path, o), Options{Device: gpu, Decode: Device})
		all.Go(func() {
			for epoch := range want {
				batch := 0
				for b, err := range device.Epoch(t.Context(), epoch) {
					if err != nil {
						t.Error(err)
						return
					}
					v, err := b.Images.ToDType(torch.Float32).Float32s()
					if err != nil || batch >= len(want[epoch]) || !slices.Equal(v, want[epoch][batch]) {
						t.Errorf("%v: batch %d of epoch %d is another one (%v)", gpu, batch, epoch, err)
						return
					}
					batch++
				}
				if batch != len(want[epoch]) {
					t.Errorf("%v: epoch %d has %d batches, want %d", gpu, epoch, batch, len(want[epoch]))
				}
			}
			if st := device.Stats(); st.Decoded < 3*100 || st.DecodedAgain != 0 {
				t.Errorf("%v: %+v, want st.Decoded at least %v, st.DecodedAgain = 0", gpu, st, 3*100)
			}
		})
		defer closeFeed(t, device)
	}
	all.Wait()
}

// TestGPUDecodeBesideCaptures: a loop captures and replays graphs while its prefetcher decodes.
func TestGPUDecodeBesideCaptures(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	path := decodeArchive(t, 150)
	o := imageloader.Options{Transform: imageloader.Train(64), BadSamples: imageloader.Skip}
	host, device := newFeed(t, newLoader(t, path, o), Options{}), newFeed(t, newLoader(t, path, o),
		Options{Decode: Device})
	count, err := torch.Zeros(0, torch.Float32, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer count.Close()
	captures := 0
	for epoch := range 4 {
		want, _ := epochValues(t, host, epoch)
		for b, err := range device.Epoch(t.Context(), epoch) {
			if err != nil {
				t.Fatal(err)
			}
			graph, err := cuda.Capture(cuda.CaptureOptions{},
				func() error { return count.NoGrad().AddScalar_(1).Err() })
			if err != nil {
				t.Fatal(err)
			}
			captures++
			v, err := b.Images.Float32s()
			if err != nil || !slices.Equal(v, want[b.Index]) {
				t.Errorf("batch %d of epoch %d: error %v or other images, want the host's images", b.Index,
					epoch, err)
			}
			if err := graph.Replay(cuda.DefaultStream(0)); err != nil {
				t.Error(err)
			}
			graph.Close()
		}
	}
	if v, err := count.Float32s(); err != nil || v[0] != float32(captures) {
		t.Errorf("%v after %d replays (%v), want no error, v[0] = %v", v, captures, err, float32(captures))
	}
	if st := device.Stats(); st.Decoded < 3*100 || st.DecodedAgain != 0 {
		t.Errorf("%+v, want st.Decoded at least %v, st.DecodedAgain = 0", st, 3*100)
	}
	closeFeed(t, host)
	closeFeed(t, device)
}
