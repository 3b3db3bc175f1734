package imageloader

import (
	"encoding/binary"
	"math"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// TestFinish fills tensors of Fields' form, finishes them into tensors of Outputs' form on the CPU, and compares with the arithmetic.
func TestFinish(t *testing.T) {
	data := fakeArchive(t, 10, nil)
	path := writeFile(t, "a.tar", data)
	for name, transform := range map[string]Transform{
		"default":    Train(6),
		"contiguous": {Size: 6, Resize: 8, Contiguous: true, Mean: [3]float32{0.1, 0.2, 0.3}, Std: [3]float32{0.5, 0.6, 0.7}},
		"bfloat16":   {Size: 6, Resize: 8, DType: torch.BFloat16},
	} {
		t.Run(name, func(t *testing.T) {
			l := openFake(t, path, Options{BatchSize: 10, Transform: transform})
			got, err := collect(t, l, 0, 1)
			if err != nil {
				t.Fatal(err)
			}
			fields, outputs := l.Fields(), l.Outputs()
			if fields[0].Bytes() != 6*6*3 || fields[1].Bytes() != 8 || outputs[0].Name != "images" || outputs[1].Name != "labels" {
				t.Fatalf("%+v, %+v", fields, outputs)
			}
			src, err := torch.FromBytes(got[0].images, 10, 6, 6, 3)
			if err != nil {
				t.Fatal(err)
			}
			defer src.Close()
			dst, err := torch.EmptySpec(cuda.CPU, outputs[0], 10)
			if err != nil {
				t.Fatal(err)
			}
			defer dst.Close()
			labels, err := torch.FromInt64s(got[0].labels, 10)
			if err != nil {
				t.Fatal(err)
			}
			defer labels.Close()
			if err := l.Finish([]*torch.Tensor{dst, labels}, []*torch.Tensor{src, labels}); err != nil {
				t.Fatal(err)
			}
			values, err := dst.Float32s()
			if err != nil {
				t.Fatal(err)
			}
			tolerance := 1e-5
			if transform.DType == torch.BFloat16 {
				tolerance = 0.02
			}
			for n := range 10 {
				for c := range 3 {
					for i := range 36 {
						pixel := got[0].images[(n*36+i)*3+c]
						want := (float64(pixel)/255 - float64(l.o.Transform.Mean[c])) / float64(l.o.Transform.Std[c])
						if have := float64(values[(n*3+c)*36+i]); math.Abs(have-want) > tolerance {
							t.Fatalf("image %d, channel %d, pixel %d: %v, want %v", n, c, i, have, want)
						}
					}
				}
			}
			if err := l.Finish(nil, nil); err == nil {
				t.Error("no tensors are no error")
			}
		})
	}
}

// TestFinishBytes: the bytes come out as they went in, in both layouts.
func TestFinishBytes(t *testing.T) {
	path := writeFile(t, "a.tar", fakeArchive(t, 10, nil))
	for _, contiguous := range []bool{false, true} {
		l := openFake(t, path, Options{BatchSize: 10, Transform: Transform{Size: 6, Resize: 8, Bytes: true, Contiguous: contiguous}})
		got, err := collect(t, l, 0, 1)
		if err != nil {
			t.Fatal(err)
		}
		src, err := torch.FromBytes(got[0].images, 10, 6, 6, 3)
		if err != nil {
			t.Fatal(err)
		}
		defer src.Close()
		spec := l.Outputs()[0]
		if spec.DType != torch.Uint8 || (spec.MemoryFormat == torch.Contiguous) != contiguous {
			t.Errorf("%+v", spec)
		}
		dst, err := torch.EmptySpec(cuda.CPU, spec, 10)
		if err != nil {
			t.Fatal(err)
		}
		defer dst.Close()
		if err := l.Finish([]*torch.Tensor{dst, nil}, []*torch.Tensor{src, nil}); err != nil {
			t.Fatal(err)
		}
		floats := dst.ToDType(torch.Float32)
		defer floats.Close()
		values, err := floats.Float32s()
		if err != nil {
			t.Fatal(err)
		}
		for n := range 10 {
			for c := range 3 {
				for i := range 36 {
					if have, want := values[(n*3+c)*36+i], float32(got[0].images[(n*36+i)*3+c]); have != want {
						t.Fatalf("contiguous %v: image %d, channel %d, pixel %d: %v, want %v", contiguous, n, c, i, have, want)
					}
				}
			}
		}
	}
}

// TestLabelBytes: labels lie in memory as the machine reads them.
func TestLabelBytes(t *testing.T) {
	var p [8]byte
	for _, label := range []int{0, 1, 999, 1 << 40, -1} {
		putLabel(p[:], label)
		if got := int64(binary.NativeEndian.Uint64(p[:])); got != int64(label) {
			t.Errorf("%d became %d", label, got)
		}
	}
}
