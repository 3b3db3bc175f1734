package imageloader

import (
	"slices"

	"github.com/torchstream/torchstream/tensor"
)

// Fields describes what Fill writes, for one sample: "images" is uint8 [Size, Size, 3] (rows,
// columns, RGB) and "labels" is int64 [], or float32 [classes] with Transform.Mix. With
// Options.Masks the second field is "masks" instead, of Masks.DType [Size, Size]; with
// Options.Target "labels" is float32 [TargetWidth], and with Options.MultiLabel float32 [classes].
func (l *Loader) Fields() []tensor.Spec {
	size := int64(l.o.Transform.Size)
	return []tensor.Spec{
		{Name: "images", DType: tensor.Uint8, Shape: []int64{size, size, 3}},
		l.target(),
	}
}

// target describes the data that a network learns from a sample.
func (l *Loader) target() tensor.Spec {
	if m := &l.o.Masks; m.masked() {
		size := int64(l.o.Transform.Size)
		return tensor.Spec{Name: "masks", DType: m.DType, Shape: []int64{size, size}}
	}
	if width := l.targetWidth(); width > 0 {
		return tensor.Spec{Name: "labels", DType: tensor.Float32, Shape: []int64{int64(width)}}
	}
	if len(l.o.Transform.Mix) > 0 {
		return tensor.Spec{Name: "labels", DType: tensor.Float32, Shape: []int64{int64(len(l.Classes()))}}
	}
	return tensor.Spec{Name: "labels", DType: tensor.Int64}
}

// Outputs describes the fields as they are on the device after the finish, for one sample: "images"
// is [3, Size, Size] of Transform.DType, normalised (or uint8 with Transform.Bytes), in
// channels-last memory unless Transform.Contiguous is set; the second field stays as it is.
func (l *Loader) Outputs() []tensor.Spec {
	t := &l.o.Transform
	size := int64(t.Size)
	format := tensor.ChannelsLast
	if t.Contiguous {
		format = tensor.Contiguous
	}
	return []tensor.Spec{
		{Name: "images", DType: t.DType, Shape: []int64{3, size, size}, MemoryFormat: format},
		l.target(),
	}
}

// Finishes describes the work that makes Outputs of Fields: the prefetcher carries it out.
func (l *Loader) Finishes() []tensor.Finish {
	t := &l.o.Transform
	if t.Bytes {
		return make([]tensor.Finish, 2)
	}
	return []tensor.Finish{{Mean: slices.Clone(t.Mean[:]), Std: slices.Clone(t.Std[:])}, {}}
}
