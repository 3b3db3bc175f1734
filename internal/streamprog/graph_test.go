package streamprog

import (
	"errors"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

const graphs = false

// graphed is a graph of the machine.
type graphed struct{}

func (m *machine) capture(o Op) (graphed, error) { return graphed{}, errors.New("no graphs") }
func (g graphed) replay(s cuda.Stream) error     { return nil }
func (g graphed) close() error                   { return nil }

// copyPeer copies between two devices, or two streams of one.
func (m *machine) copyPeer(o Op) error {
	return torch.CopyPeer([]*torch.Tensor{m.tensors[o.Dst]}, m.streams[o.Other], []*torch.Tensor{m.tensors[o.A]}, m.streams[o.Stream])
}
