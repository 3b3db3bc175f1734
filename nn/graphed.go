package nn

import (
	"sync"

	"github.com/torchstream/torchstream/torch"
)

// Graphed runs a module's forward and backward passes as CUDA graphs within eager training.
// [torch.GraphedModule] documents this, and which calls run eagerly instead. A call also runs
// eagerly in evaluation mode, and while a part of the module is in another mode than in the first
// training call.
//
// A Graphed replaces its module in the network. It has the parameters and buffers of the module,
// under the same names, so optimizers and checkpoints see no difference.
type Graphed struct {
	layer
	switchable
	module Module
	graph  *torch.GraphedModule
	parts  []interface{ training() bool }

	mu    sync.Mutex
	modes string // modes of the parts in the first training call; guarded by mu
}

// NewGraphed returns the module with graphs for its passes. Close the result after use. The module
// must be complete and its parameters must not move: call To first.
func NewGraphed(m Module, o torch.GraphedModuleOptions) *Graphed {
	g := &Graphed{module: m}
	g.create("Graphed")
	walk("", m, func(_ string, part Module, _ Parts) {
		if s, ok := part.(interface{ training() bool }); ok {
			g.parts = append(g.parts, s)
		}
	})
	g.graph = torch.NewGraphedModule(func(in []*torch.Tensor) ([]*torch.Tensor, error) {
		y := m.Forward(in[0])
		return []*torch.Tensor{y}, y.Err()
	}, Parameters(m), o)
	return g
}

// Parts returns the parts of the module.
func (g *Graphed) Parts() Parts { return g.module.Parts() }

// SetTraining sets the mode of the module itself; [Train] also sets the mode of its parts.
func (g *Graphed) SetTraining(training bool) {
	g.switchable.SetTraining(training)
	if m, ok := g.module.(Moder); ok {
		m.SetTraining(training)
	}
}

// Forward computes the module's output.
func (g *Graphed) Forward(x *torch.Tensor) *torch.Tensor {
	if x.Err() != nil || !g.training() || !g.sameModes() {
		return g.result(g.module.Forward(x), x)
	}
	out, err := g.graph.Forward(x)
	if err != nil {
		return g.result(torch.Fail("nn.Graphed", err), x)
	}
	return g.result(out[0], x)
}

// sameModes reports whether the parts have the same modes as in the first call.
func (g *Graphed) sameModes() bool {
	modes := make([]byte, len(g.parts)+1)
	for i, p := range g.parts {
		if p.training() {
			modes[i] = 1
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.modes == "" {
		g.modes = string(modes)
	}
	return g.modes == string(modes)
}

// Stats returns the counts of the calls in training mode.
func (g *Graphed) Stats() torch.GraphedModuleStats { return g.graph.Stats() }

// Close frees the graphs. Forward then fails with torch.ErrClosed in training mode.
func (g *Graphed) Close() error { return g.graph.Close() }
