package optim

import (
	"errors"

	"github.com/torchstream/torchstream/torch"
)

// ErrNoGradients is in the error of a Step that finds no gradient on any parameter: the program did
// not call Backward, or the loss does not depend on the parameters.
var ErrNoGradients = errors.New("no parameter has a gradient")

// Optimizer is the interface of the optimizers of this package. Only one goroutine at a time may
// use an Optimizer.
type Optimizer interface {
	// Step updates the parameters from their gradients. It returns ErrNoGradients if there are
	// none.
	Step() error
	// ZeroGrad drops the gradients of all parameters.
	ZeroGrad() error
	// Groups returns the groups with their initial learning rates and weight decays.
	Groups() []Group
	// LRs returns the current learning rate of each group.
	LRs() []float64
	// SetLR sets one learning rate for all groups, or one for each group.
	SetLR(rates ...float64) error
	// State returns the state of the optimizer: see [State].
	State() (State, error)
	// LoadState replaces the state of the optimizer.
	LoadState(s State) error
	// Close frees the state. The next Step starts without state.
	Close() error
}

// Group is a list of parameters with separate options. A zero field selects the optimizer's
// option.
type Group struct {
	Params        []*torch.Tensor
	LR            float64 // learning rate; 0 stands for the optimizer's
	WeightDecay   float64 // 0 stands for the optimizer's
	NoWeightDecay bool    // turns weight decay off, as is common for biases and norms
}
