package imageloader

import (
	"context"
	"fmt"
	"image"
	"math/rand/v2"
	"os"
	"syscall"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// archiveVariable names a .tar or .tar.gz for the benchmarks. Without it BenchmarkEpoch makes
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
		members = append(members, archivetest.Member{Name: fmt.Sprintf("train/class%d/%d.jpg", i%10, i), Data: archivetest.JPEG(b, m)})
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

// cpu returns the process's user and system time in µs.
func cpu(b *testing.B) float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return float64(u.Utime.Sec+u.Stime.Sec)*1e6 + float64(u.Utime.Usec+u.Stime.Usec)
}
