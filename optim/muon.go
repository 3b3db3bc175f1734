package optim

import (
	"fmt"
	"math"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// Muon orthogonalises the updates of matrices, by PyTorch's formula (torch.optim.Muon), where g is
// the gradient and p the parameter, a matrix with R rows and C columns:
//
//	v = Momentum*v + (1-Momentum)*g
//	u = Momentum*v + (1-Momentum)*g, or u = v with NoNesterov
//	u = u / max(|u|, Eps)
//	NSSteps times: u = a*u + (b*A + c*A*A)*u, with A = u*uᵀ (u is transposed if R > C)
//	p = p - LR*WeightDecay*p
//	p = p - LR*√max(1, R/C)*u, or LR*0.2*√max(R, C)*u with MatchAdamW
//
// The iteration runs in bfloat16 whatever the parameter's dtype, once for all matrices of a shape.
//
// Parameters that are not matrices, such as biases, norms and convolution kernels, are updated by
// [AdamW] with separate options, in further groups. Embeddings and the last layer are matrices but
// should use AdamW too: list them in AdamW.Groups.
//
// The state is v, which PyTorch calls momentum_buffer, and AdamW's state. If there are parameters
// of both kinds, PyTorch needs two optimizers for this state.
type Muon struct{ engine }

// MuonOptions are the options of [NewMuon].
type MuonOptions struct {
	LR             float64     // learning rate; 0 stands for 0.001
	WeightDecay    float64     // 0 stands for 0.1
	NoWeightDecay  bool        // turns weight decay off
	Momentum       float64     // 0 stands for 0.95
	NoNesterov     bool        // uses the velocity itself as the update
	NSCoefficients *[3]float64 // a, b and c; nil stands for {3.4445, -4.775, 2.0315}
	NSSteps        int         // below 100; 0 stands for 5
	Eps            float64     // 0 stands for 1e-7
	MatchAdamW     bool        // scales updates to AdamW's size, so that learning rates tuned for AdamW fit

	// Groups holds further matrices. Each group has its own options.
	Groups []Group

	// AdamW has the options for those parameters in params that are not matrices, and for
	// AdamW.Groups, whose parameters may have any shape. Its fields KeepGradients, Capturable and
	// Maximize are not used.
	AdamW AdamWOptions

	// KeepGradients makes Step keep the gradients until ZeroGrad. By default Step drops them.
	KeepGradients bool

	// Capturable keeps the learning rates in tensors on the parameters' device, so that a captured
	// Step follows SetLR. All parameters of a group must be on one device. The tensors are float32.
	Capturable bool

	// MasterWeights keeps and updates float32 copies of 16-bit parameters, with float32 gradients
	// and state: see the package documentation.
	MasterWeights bool
}

// NewMuon returns an optimizer for the parameters and the groups. All parameters must be leaves.
// The caller keeps ownership of them. The optimizer's groups are, in this order: the matrices of
// params, o.Groups, the other parameters of params, and o.AdamW.Groups. Empty groups are left out.
func NewMuon(params []*torch.Tensor, o MuonOptions) (*Muon, error) {
	m := &Muon{engine{name: "Muon", common: common{keep: o.KeepGradients, capturable: o.Capturable,
		masters: o.MasterWeights}}}
	decay, err := decoupled(m.name, o.WeightDecay, o.NoWeightDecay, 0.1)
	if err != nil {
		return nil, err
	}
	o.LR, o.Momentum, o.Eps = orDefault(o.LR, 0.001), orDefault(o.Momentum, 0.95), orDefault(o.Eps, 1e-7)
	coefficients := [3]float64{3.4445, -4.775, 2.0315}
	if o.NSCoefficients != nil {
		coefficients = *o.NSCoefficients
	}
	o.NSCoefficients = &coefficients
	if o.NSSteps == 0 {
		o.NSSteps = 5
	}
	if err := check(m.name, option{"LR", o.LR, 0}, option{"WeightDecay", decay, 0}, option{"Momentum", o.Momentum, 0},
		option{"Eps", o.Eps, 0}, option{"NSSteps", float64(o.NSSteps), 100}); err != nil {
		return nil, err
	}
	for _, c := range coefficients {
		if !finite(c) {
			return nil, fmt.Errorf("optim.NewMuon: NSCoefficients are %v: they must be finite: %w",
				coefficients, cuda.ErrInvalidArgument)
		}
	}
	adam, adamCommon, err := o.AdamW.rule(m.name + ": AdamW")
	if err != nil {
		return nil, err
	}
	adam.maximize = false
	matrices, others := split(params)
	if err := m.add(muonRule{o}, common{lr: o.LR, decay: decay}, all(matrices, o.Groups)...); err != nil {
		return nil, err
	}
	for i, g := range m.groups {
		for _, s := range g.slots {
			if s.param.Err() == nil && len(s.param.Shape()) != 2 {
				return nil, fmt.Errorf("optim.NewMuon: Groups: parameter %d of group %d has shape %v and "+
					"is no matrix: give it in AdamW.Groups: %w",
					s.index, i, s.param.Shape(), cuda.ErrInvalidArgument)
			}
		}
	}
	if err := m.add(adam, adamCommon, all(others, o.AdamW.Groups)...); err != nil {
		return nil, err
	}
	if err := m.build(); err != nil {
		return nil, err
	}
	return m, nil
}

// split separates matrices from parameters of other shapes. Parameters that failed count as others.
func split(params []*torch.Tensor) (matrices, others []*torch.Tensor) {
	for _, p := range params {
		if p.Err() == nil && len(p.Shape()) == 2 {
			matrices = append(matrices, p)
		} else {
			others = append(others, p)
		}
	}
	return matrices, others
}

type muonRule struct{ o MuonOptions }

func (r muonRule) states() []string { return []string{"momentum_buffer"} }

func (r muonRule) start(g *group, s *slot) error { return g.zeros(s) }

func (r muonRule) dense(bool) bool { return false }

func (r muonRule) skips(*batch) bool { return false }

func (r muonRule) options() map[string]any {
	var adjust any
	if r.o.MatchAdamW {
		adjust = "match_rms_adamw"
	}
	return map[string]any{
		"momentum": r.o.Momentum, "nesterov": !r.o.NoNesterov, "ns_coefficients": *r.o.NSCoefficients,
		"eps": r.o.Eps, "ns_steps": r.o.NSSteps, "adjust_lr_fn": adjust,
	}
}

func (r muonRule) step(b *batch) error {
	velocity := b.state(0)
	if err := torch.ForeachLerp_(velocity, b.grads, 1-r.o.Momentum); err != nil {
		return err
	}
	update := velocity
	if !r.o.NoNesterov {
		var err error
		if update, err = b.own(torch.ForeachLerp(b.grads, velocity, r.o.Momentum)); err != nil {
			return err
		}
	}
	if err := b.decayParams(); err != nil {
		return err
	}
	for _, alike := range b.byShape() {
		if err := r.apply(b, pick(update, alike), pick(b.params, alike)); err != nil {
			return err
		}
	}
	return nil
}

// apply subtracts the orthogonalised updates from matrices of one shape.
func (r muonRule) apply(b *batch, update, params []*torch.Tensor) error {
	scope := torch.NewScope("optim.Muon.Step")
	defer scope.Close()
	x := scope.Own(torch.Stack(update, 0))
	if err := x.Err(); err != nil {
		return err
	}
	rows, columns := x.Shape()[1], x.Shape()[2]
	factor := math.Sqrt(max(1, float64(rows)/float64(columns)))
	if r.o.MatchAdamW {
		factor = 0.2 * math.Sqrt(float64(max(rows, columns)))
	}
	// Make the updates contiguous, because the updates of tall matrices are transposed: foreach
	// operators run a kernel per tensor if an update's layout differs from the parameter's.
	updates, err := r.orthogonalise(x, rows > columns).ToDType(b.dtype).Contiguous(torch.Contiguous).Unbind(0)
	if err != nil {
		return err
	}
	return b.subtract(params, updates, factor, true)
}

// orthogonalise runs the Newton-Schulz iteration on a stack of matrices. The results belong to the
// scope of x.
func (r muonRule) orthogonalise(x *torch.Tensor, tall bool) *torch.Tensor {
	x = x.ToDType(torch.BFloat16)
	if tall {
		x = x.Transpose(1, 2)
	}
	x = x.Div(x.NormDim(2, []int64{1, 2}, true).ClampMin(r.o.Eps))
	c := r.o.NSCoefficients
	for range r.o.NSSteps {
		gram := x.BMM(x.Transpose(1, 2))
		x = x.BAddBMM(gram.BAddBMM(gram, gram, c[1], c[2]), x, c[0], 1)
	}
	if tall {
		x = x.Transpose(1, 2)
	}
	return x
}
