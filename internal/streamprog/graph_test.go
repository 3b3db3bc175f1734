package streamprog

import (
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

const graphs = true

// capture captures a graph's operations on their streams.
func (m *machine) capture(o Op) (*cuda.Graph, error) {
	return cuda.Capture(cuda.CaptureOptions{Stream: m.streams[o.Stream]}, func() error {
		for _, op := range o.Body {
			if _, err := m.do(op); err != nil {
				return err
			}
		}
		return nil
	})
}

// copyPeer copies between two devices, or between two streams of one device.
func (m *machine) copyPeer(o Op) error {
	return torch.CopyPeer([]*torch.Tensor{m.tensors[o.Dst]}, m.streams[o.Other],
		[]*torch.Tensor{m.tensors[o.A]}, m.streams[o.Stream])
}
