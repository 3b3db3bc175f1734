//go:build linux

package imageloader

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"image"
	"image/draw"
	"image/jpeg"
	_ "image/png"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/decodeplan"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// archiveVariable names a .tar, .tar.gz or .zip for the benchmarks. Without it BenchmarkEpoch makes
// images of noise.
const archiveVariable = "TORCHSTREAM_BENCH_ARCHIVE"

func benchArchive(b *testing.B) string {
	if path := os.Getenv(archiveVariable); path != "" {
		return path
	}
	rng := rand.New(rand.NewPCG(1, 1))
	var members []archivetest.Member
	for i := range 100 {
		m := image.NewRGBA(image.Rect(0, 0, 300+rng.IntN(300), 300+rng.IntN(200)))
		v := 128
		for k := range m.Pix { // similar neighbours, as in a photograph
			v = min(255, max(0, v+rng.IntN(31)-15))
			m.Pix[k] = byte(v)
		}
		members = append(members, archivetest.Member{Name: fmt.Sprintf("train/class%d/%d.jpg", i%10, i),
			Data: archivetest.JPEG(b, m)})
	}
	return archivetest.WriteFile(b, "bench.tgz", archivetest.Gzip(b, archivetest.Tar(b, members...)))
}

// BenchmarkEpoch measures whole epochs. An op is one image, and cpu-µs/op is the process's user and
// system time.
func BenchmarkEpoch(b *testing.B) {
	path := benchArchive(b)
	for _, c := range []struct {
		name      string
		transform Transform
	}{{"train", Train(224)}, {"eval", Eval(256, 224)}} {
		b.Run(c.name, func(b *testing.B) {
			l, err := Open(path, Options{BatchSize: 64, Transform: c.transform, Shuffle: true})
			if err != nil {
				b.Fatal(err)
			}
			defer l.Close()
			b.ReportAllocs()
			before := cpu(b)
			b.ResetTimer()
			n := 0
			for epoch := 0; n < b.N; epoch++ {
				for batch, err := range l.Epoch(context.Background(), epoch) {
					if err != nil {
						b.Fatal(err)
					}
					if n += batch.N; n >= b.N {
						break
					}
				}
			}
			b.StopTimer()
			b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "img/s")
			b.ReportMetric((cpu(b)-before)/float64(n), "cpu-µs/op")
		})
	}
}

// BenchmarkOpenZip opens a zip of 100,000 stored members. It reports the CPU time of Open, and the
// bytes of Go's heap that the open loader keeps.
func BenchmarkOpenZip(b *testing.B) {
	const n = 100_000
	path := zipOfEmpty(b, n)
	kept := func() float64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc)
	}
	spent, bytes := 0.0, 0.0
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		heap, before := kept(), cpu(b)
		l, err := Open(path, Options{})
		if err != nil {
			b.Fatal(err)
		}
		spent += cpu(b) - before
		bytes += kept() - heap
		if err := l.Close(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(spent*1000/float64(b.N)/n, "cpu-ns/member")
	b.ReportMetric(bytes/float64(b.N)/n, "B/member")
}

// cpu returns the process's user and system time in µs.
func cpu(b *testing.B) float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return float64(u.Utime.Sec+u.Stime.Sec)*1e6 + float64(u.Utime.Usec+u.Stime.Usec)
}

// largePhotographs returns JPEGs of 3000 x 2250 pixels and quality 85, 4:2:0. They are tiled from
// photographs of examples/data.
func largePhotographs(b *testing.B, n int) (files [][]byte) {
	b.Helper()
	f, err := os.Open("../examples/data/photos-train.tgz")
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		b.Fatal(err)
	}
	var photos []image.Image
	for r := tar.NewReader(z); ; {
		if _, err := r.Next(); err == io.EOF {
			break
		} else if err != nil {
			b.Fatal(err)
		}
		photo, _, err := image.Decode(r)
		if err != nil {
			b.Fatal(err)
		}
		photos = append(photos, photo)
	}
	rng := rand.New(rand.NewPCG(1, 1))
	for range n {
		large := image.NewRGBA(image.Rect(0, 0, 3000, 2250))
		for y := 0; y < 2250; {
			bottom := 2250
			for x := 0; x < 3000; {
				photo := photos[rng.IntN(len(photos))]
				size := photo.Bounds()
				draw.Draw(large, image.Rect(x, y, x+size.Dx(), y+size.Dy()), photo, size.Min, draw.Src)
				x, bottom = x+size.Dx(), min(bottom, y+size.Dy())
			}
			y = bottom
		}
		var file bytes.Buffer
		if err := jpeg.Encode(&file, large, &jpeg.Options{Quality: 85}); err != nil {
			b.Fatal(err)
		}
		files = append(files, file.Bytes())
	}
	return files
}

// BenchmarkDCTScaling decodes large photographs with and without Transform.DCTScaling, in turn. An
// op decodes one image both ways. dB is the peak signal-to-noise ratio of the scaled image's
// pixels.
func BenchmarkDCTScaling(b *testing.B) {
	files := largePhotographs(b, 2)
	for _, c := range []struct {
		name      string
		transform Transform
	}{{"train 224", Train(224)}, {"train 96", Train(96)}, {"eval 224", Eval(256, 224)}, {"eval 96", Eval(110, 96)}} {
		b.Run(c.name, func(b *testing.B) {
			var spent [2]float64 // CPU µs
			var squares, values float64
			compiled, err := transform.Compile(c.transform)
			if err != nil {
				b.Fatal(err)
			}
			d, err := sample.Library{}.NewDecoder(0)
			if err != nil {
				b.Fatal(err)
			}
			defer d.Close()
			rng := rand.New(rand.NewPCG(1, 1))
			size := c.transform.Size
			for i := 0; b.Loop(); i++ {
				data := files[i%len(files)]
				info, err := d.Header(data)
				if err != nil {
					b.Fatal(err)
				}
				var g imagecapi.Geometry
				if err := compiled.Geometry(rng, &info, &g); err != nil {
					b.Fatal(err)
				}
				var pixels [2][]byte
				for k := range pixels {
					way := (k + i) % 2
					pixels[way] = make([]byte, 3*size*size)
					g.DCTScaling = way == 1
					began := cpu(b)
					if err := d.Decode(data, &g, pixels[way], 3*size); err != nil {
						b.Fatal(err)
					}
					spent[way] += cpu(b) - began
				}
				for k, v := range pixels[0] {
					difference := float64(v) - float64(pixels[1][k])
					squares += difference * difference
				}
				values += float64(len(pixels[0]))
			}
			for way, name := range []string{"whole-cpu-ms", "scaled-cpu-ms"} {
				b.ReportMetric(spent[way]/1000/float64(b.N), name)
			}
			b.ReportMetric(20*math.Log10(255/math.Sqrt(squares/values)), "dB")
		})
	}
}

// BenchmarkFillPlans measures the host's part of epochs whose images a GPU decodes. It reads an
// archive with random access and writes plans to slots, which are dropped. An op is one image, and
// cpu-µs/op is the process's user and system time. As in a prefetcher, the slots are together
// larger than a processor's caches. The members of a .tgz stay compressed, as for a consumer that
// inflates, and member/op is their share. mapped/op is the share of images whose compressed bytes
// are left to the GPU, which reads them from the mapped archive.
func BenchmarkFillPlans(b *testing.B) {
	path := benchArchive(b)
	for _, workers := range []int{2, 4, 16} {
		b.Run(fmt.Sprintf("workers %d", workers), func(b *testing.B) { benchmarkFillPlans(b, path, workers, true) })
		b.Run(fmt.Sprintf("first pass, workers %d", workers),
			func(b *testing.B) { benchmarkFillPlans(b, path, workers, false) })
	}
}

// benchmarkFillPlans measures epochs with known entry points, or with none. Without them every
// epoch is like a first one.
func benchmarkFillPlans(b *testing.B, path string, workers int, known bool) {
	const batch, slots = 256, 4
	o := Options{BatchSize: batch, Transform: Train(224), Shuffle: true, ShuffleBytes: 16 << 20,
		Workers: workers, IndexFile: filepath.Join(b.TempDir(), "index")}
	var l *Loader
	// An epoch finds the entry points, and one of a later process verifies them. Of a zip, each
	// process finds them.
	for process := range 2 {
		var err error
		if l, err = Open(path, o); err != nil {
			b.Fatal(err)
		}
		defer l.Close()
		if !known {
			break
		}
		for _, err := range l.Epoch(context.Background(), 0) {
			if err != nil {
				b.Fatal(err)
			}
		}
		if process == 0 {
			l.Close() // saves them
		}
	}
	bytes, err := l.devicePlanner().PlanBytes()
	if err != nil {
		b.Fatal(err)
	}
	staging, rooms := l.devicePlanner().MemberBytes()
	type slot struct {
		fields [][]byte
		plans  decodeplan.Plans
	}
	free, lent := make(chan *slot, slots), make(chan *slot, slots)
	for range slots {
		free <- &slot{[][]byte{make([]byte, batch*224*224*3), make([]byte, batch*8)},
			decodeplan.Plans{Memory: alignedBytes(max(bytes, staging)), Rows: make([]decodeplan.Row, batch),
				Register: func([]byte) (func() error, error) { return func() error { return nil }, nil },
				Rooms:    rooms}}
	}
	n, used, members, mapped := 0, 0, 0, 0
	enough := errors.New("enough")
	epoch := 1
	run := func(images int) {
		n, used, members, mapped = 0, 0, 0, 0
		for ; n < images; epoch++ {
			err := l.devicePlanner().FillPlans(context.Background(), epoch,
				consumerFuncs{func(ctx context.Context) (decodeplan.Slot, error) {
					select {
					case s := <-free:
						lent <- s
						return decodeplan.Slot{Images: s.fields[0], Labels: s.fields[1], Plans: &s.plans}, nil
					case <-ctx.Done():
						return decodeplan.Slot{}, context.Cause(ctx)
					}
				}, func(rows int, _ any) error {
					s := <-lent
					n += rows
					used += s.plans.Used
					for _, r := range s.plans.Rows[:rows] {
						if r.Member.InputBytes > 0 {
							members++
						}
						if r.Member.From != nil || r.File.From != nil {
							mapped++
						}
					}
					free <- s
					if n >= images {
						return enough
					}
					return nil
				}})
			if err != nil && err != enough {
				b.Fatal(err)
			}
			for len(lent) > 0 {
				free <- <-lent
			}
		}
	}
	run(max(2*slots*batch, 2*l.Len())) // writes every page of the slots, and keeps the heads of files
	b.ReportAllocs()
	before := cpu(b)
	b.ResetTimer()
	run(b.N)
	b.StopTimer()
	b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "img/s")
	b.ReportMetric((cpu(b)-before)/float64(n), "cpu-µs/op")
	b.ReportMetric(float64(used)/float64(n), "plan-B/op")
	b.ReportMetric(float64(members)/float64(n), "member/op")
	b.ReportMetric(float64(mapped)/float64(n), "mapped/op")
}
