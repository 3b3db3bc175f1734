//go:build linux

package prefetcher

import (
	"context"
	"math"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
)

// describedSource is a rawSource that describes its finish.
type describedSource struct {
	rawSource
	output tensor.Spec
	finish tensor.Finish
}

func (s *describedSource) Outputs() []tensor.Spec {
	n := int64(s.size())
	image := s.output
	image.Name, image.Shape = "images", []int64{3, n, n}
	return []tensor.Spec{image, {Name: "labels", DType: tensor.Int64}}
}

func (s *describedSource) Finishes() []tensor.Finish { return []tensor.Finish{s.finish, {}} }

// The prefetcher executes a Describer's finish: the arithmetic, the dtype, the layout.
func TestDescribedFinish(t *testing.T) {
	mean, std := []float32{0.1, 0.2, 0.3}, []float32{0.5, 0.6, 0.7}
	for _, c := range []struct {
		name      string
		output    tensor.Spec
		finish    tensor.Finish
		tolerance float64
	}{
		{"channels last", tensor.Spec{DType: tensor.Float32, MemoryFormat: tensor.ChannelsLast},
			tensor.Finish{Mean: mean, Std: std}, 1e-5},
		{"contiguous", tensor.Spec{DType: tensor.Float32}, tensor.Finish{Mean: mean, Std: std}, 1e-5},
		{"bfloat16", tensor.Spec{DType: tensor.BFloat16, MemoryFormat: tensor.ChannelsLast},
			tensor.Finish{Mean: mean, Std: std}, 0.02},
		{"bytes, channels last", tensor.Spec{DType: tensor.Uint8, MemoryFormat: tensor.ChannelsLast},
			tensor.Finish{}, 0},
		{"bytes, contiguous", tensor.Spec{DType: tensor.Uint8}, tensor.Finish{}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			onDevices(t, func(t *testing.T, device cuda.Device) {
				source := &describedSource{rawSource: rawSource{samples: 7, batch: 3}, output: c.output,
					finish: c.finish}
				feed, err := New(source, Options{Device: device})
				if err != nil {
					t.Fatal(err)
				}
				defer feed.Close()
				first := 0
				for batch, err := range feed.Epoch(context.Background(), 0) {
					if err != nil {
						t.Fatal(err)
					}
					if batch.Images.DType() != c.output.DType || !batch.Images.IsContiguous(c.output.MemoryFormat) {
						t.Errorf("batch of %v, channels last %v", batch.Images.DType(),
							batch.Images.IsContiguous(tensor.ChannelsLast))
					}
					values, err := batch.Images.ToDType(torch.Float32).To(cuda.CPU).Float32s()
					if err != nil {
						t.Fatal(err)
					}
					pixels := len(values) / batch.N / 3
					for i, have := range values {
						n, channel := i/(3*pixels), i/pixels%3
						want := float64(value(0, first+n))
						if c.finish.Mean != nil {
							want = (want/255 - float64(mean[channel])) / float64(std[channel])
						}
						if math.Abs(float64(have)-want) > c.tolerance {
							t.Fatalf("sample %d, channel %d: %v, want %v", first+n, channel, have, want)
						}
					}
					first += batch.N
				}
				if first != 7 {
					t.Errorf("%d samples, want 7", first)
				}
				if s := feed.Stats(); s.FinishTime <= 0 {
					t.Errorf("the finish took %v, want above 0", s.FinishTime)
				}
			})
		})
	}
}

// New rejects a finish that does not match its field before it allocates anything.
func TestMismatchedFinishIsRejected(t *testing.T) {
	for _, c := range []struct {
		name          string
		field, output tensor.Spec
		finish        tensor.Finish
		says          string
	}{
		{"no bytes", tensor.Spec{DType: tensor.Float32, Shape: []int64{4, 5, 3}},
			tensor.Spec{Shape: []int64{3, 4, 5}}, tensor.Finish{}, "needs uint8 [H W C]"},
		{"two dimensions", tensor.Spec{Shape: []int64{4, 5}}, tensor.Spec{Shape: []int64{4, 5}},
			tensor.Finish{}, "needs uint8 [H W C]"},
		{"another shape", tensor.Spec{Shape: []int64{4, 5, 3}}, tensor.Spec{Shape: []int64{3, 5, 4}},
			tensor.Finish{}, "[3 4 5], not [3 5 4]"},
		{"floats without a mean", tensor.Spec{Shape: []int64{4, 5, 3}},
			tensor.Spec{DType: tensor.Float32, Shape: []int64{3, 4, 5}}, tensor.Finish{}, "float32 needs Mean and Std"},
		{"two means", tensor.Spec{Shape: []int64{4, 5, 3}}, tensor.Spec{DType: tensor.Float32, Shape: []int64{3, 4, 5}},
			tensor.Finish{Mean: make([]float32, 2), Std: make([]float32, 3)},
			"2 values of Mean and 3 of Std for 3 channels"},
		{"five channels", tensor.Spec{Shape: []int64{4, 5, 5}},
			tensor.Spec{DType: tensor.Float32, Shape: []int64{5, 4, 5}},
			tensor.Finish{Mean: make([]float32, 5), Std: make([]float32, 5)}, "5 channels: there are 1 to 4"},
		{"integers", tensor.Spec{Shape: []int64{4, 5, 3}}, tensor.Spec{DType: tensor.Int64, Shape: []int64{3, 4, 5}},
			tensor.Finish{Mean: make([]float32, 3), Std: make([]float32, 3)}, "bfloat16, not int64"},
		{"bytes with a mean", tensor.Spec{Shape: []int64{4, 5, 3}}, tensor.Spec{Shape: []int64{3, 4, 5}},
			tensor.Finish{Mean: make([]float32, 3), Std: make([]float32, 3)}, "bfloat16, not uint8"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := finishes([]tensor.Spec{c.field}, []tensor.Spec{c.output}, []tensor.Finish{c.finish}, []bool{true})
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v, want %q", err, c.says)
			}
		})
	}
	if _, err := finishes(make([]tensor.Spec, 2), make([]tensor.Spec, 2), make([]tensor.Finish, 1),
		make([]bool, 2)); err == nil {
		t.Error("finishes with one finish for two fields: got no error, want one")
	}
}
