package imageloader

import (
	"fmt"
	"time"

	"github.com/torchstream/torchstream/torch"
)

// Fields describes what Fill writes, for one sample: "images" is uint8 [Size, Size, 3] (rows, columns, RGB) and "labels" is int64 [], or
// float32 [classes] with Transform.Mix.
func (l *Loader) Fields() []torch.Spec {
	size := int64(l.o.Transform.Size)
	return []torch.Spec{
		{Name: "images", DType: torch.Uint8, Shape: []int64{size, size, 3}},
		l.labels(),
	}
}

func (l *Loader) labels() torch.Spec {
	if len(l.o.Transform.Mix) > 0 {
		return torch.Spec{Name: "labels", DType: torch.Float32, Shape: []int64{int64(len(l.Classes()))}}
	}
	return torch.Spec{Name: "labels", DType: torch.Int64}
}

// Outputs describes what Finish makes of it, for one sample: "images" is [3, Size, Size] of Transform.DType, normalised (or uint8 with Transform.Bytes), in channels-last memory unless
// Transform.Contiguous is set; "labels" stays as it is.
func (l *Loader) Outputs() []torch.Spec {
	t := &l.o.Transform
	size := int64(t.Size)
	format := torch.ChannelsLast
	if t.Contiguous {
		format = torch.Contiguous
	}
	return []torch.Spec{
		{Name: "images", DType: t.DType, Shape: []int64{3, size, size}, MemoryFormat: format},
		l.labels(),
	}
}

// Finish normalises a batch that lies on the device: src holds n rows of Fields, dst n rows of Outputs. It enqueues one kernel on the current stream, and neither blocks
// nor allocates.
func (l *Loader) Finish(dst, src []*torch.Tensor) error {
	if len(dst) != 2 || len(src) != 2 {
		return fmt.Errorf("imageloader: Finish got %d and %d tensors, not 2 and 2: images and labels", len(dst), len(src))
	}
	began := time.Now()
	defer func() { l.counters.finish.Add(int64(time.Since(began))) }()
	t := &l.o.Transform
	if t.Bytes {
		channelsFirst := src[0].Permute(0, 3, 1, 2)
		defer channelsFirst.Close()
		return dst[0].CopyFrom(channelsFirst, torch.CopyOptions{})
	}
	return torch.NormalizeImages(dst[0], src[0], t.Mean[:], t.Std[:])
}
