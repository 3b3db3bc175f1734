package imageloader

import (
	"reflect"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/tensor"
)

// TestFinishFollowsTheTransform: fields, outputs and the work between them follow from the
// transform.
func TestFinishFollowsTheTransform(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 10, nil))
	mean, std := [3]float32{0.1, 0.2, 0.3}, [3]float32{0.5, 0.6, 0.7}
	imageNetMean, imageNetStd := []float32{0.485, 0.456, 0.406}, []float32{0.229, 0.224, 0.225}
	for _, c := range []struct {
		name      string
		transform Transform
		output    tensor.Spec
		finish    tensor.Finish
	}{
		{"default", Train(6), tensor.Spec{DType: tensor.Float32, MemoryFormat: tensor.ChannelsLast},
			tensor.Finish{Mean: imageNetMean, Std: imageNetStd}},
		{"contiguous", Transform{Size: 6, Resize: 8, Contiguous: true, Mean: mean, Std: std},
			tensor.Spec{DType: tensor.Float32}, tensor.Finish{Mean: mean[:], Std: std[:]}},
		{"bfloat16", Transform{Size: 6, Resize: 8, DType: tensor.BFloat16},
			tensor.Spec{DType: tensor.BFloat16, MemoryFormat: tensor.ChannelsLast},
			tensor.Finish{Mean: imageNetMean, Std: imageNetStd}},
		{"bytes", Transform{Size: 6, Resize: 8, Bytes: true},
			tensor.Spec{DType: tensor.Uint8, MemoryFormat: tensor.ChannelsLast}, tensor.Finish{}},
		{"bytes, contiguous", Transform{Size: 6, Resize: 8, Bytes: true, Contiguous: true},
			tensor.Spec{DType: tensor.Uint8}, tensor.Finish{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := openFake(t, path, Options{BatchSize: 10, Transform: c.transform})
			labels := tensor.Spec{Name: "labels", DType: tensor.Int64}
			c.output.Name, c.output.Shape = "images", []int64{3, 6, 6}
			if got, want := l.Fields(), []tensor.Spec{{Name: "images", DType: tensor.Uint8,
				Shape: []int64{6, 6, 3}}, labels}; !reflect.DeepEqual(got, want) {
				t.Errorf("fields %+v, want %+v", got, want)
			}
			if got, want := l.Outputs(), []tensor.Spec{c.output, labels}; !reflect.DeepEqual(got, want) {
				t.Errorf("outputs %+v, want %+v", got, want)
			}
			if got, want := l.Finishes(), []tensor.Finish{c.finish, {}}; !reflect.DeepEqual(got, want) {
				t.Errorf("finishes %+v, want %+v", got, want)
			}
		})
	}
}
