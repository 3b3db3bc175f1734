package nn

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// RunLengths is like Run, for padded sequences: sequence i of the batch has lengths[i] steps, 1 to
// L. The outputs [L N directions*hidden] are 0 after a sequence's end. The returned states are the
// states after each sequence's last step. The second direction of a bidirectional layer starts at
// that step. In PyTorch, pack_padded_sequence, the layer and pad_packed_sequence compute the same
// result. The lengths may be in any order. RunLengths sorts the batch by length; on a GPU it waits
// until the order has been copied to the device.
func (l *LSTM) RunLengths(x *torch.Tensor, lengths []int, hidden, cell *torch.Tensor) (y, lastHidden,
	lastCell *torch.Tensor) {
	y, last := l.runLengths("lstm.data", x, lengths, hidden, cell)
	return y, last[0], last[1]
}

// RunLengths is like Run, for padded sequences of the given lengths: see [LSTM.RunLengths].
func (g *GRU) RunLengths(x *torch.Tensor, lengths []int, hidden *torch.Tensor) (y, lastHidden *torch.Tensor) {
	y, last := g.runLengths("gru.data", x, lengths, hidden)
	return y, last[0]
}

// RunLengths is like Run, for padded sequences of the given lengths: see [LSTM.RunLengths].
func (r *RNN) RunLengths(x *torch.Tensor, lengths []int, hidden *torch.Tensor) (y, lastHidden *torch.Tensor) {
	op := "rnn_tanh.data"
	if r.relu {
		op = "rnn_relu.data"
	}
	y, last := r.runLengths(op, x, lengths, hidden)
	return y, last[0]
}

// runLengths computes the operator for padded sequences and one or two states.
func (r *recurrent) runLengths(op string, x *torch.Tensor, lengths []int,
	states ...*torch.Tensor) (y *torch.Tensor, last []*torch.Tensor) {
	inputs := append([]*torch.Tensor{x}, states...)
	fail := func(err error) (*torch.Tensor, []*torch.Tensor) {
		bad := r.result(torch.Fail("nn."+r.kind, err), inputs...)
		return bad, slices.Repeat([]*torch.Tensor{bad}, len(states))
	}
	t := &temporaries{}
	defer t.close()
	begin := make([]*torch.Tensor, len(states))
	for i, state := range states {
		s, own, err := r.start(x, state)
		t.own(own)
		if err != nil {
			return fail(err)
		}
		begin[i] = s
	}
	if err := r.join(x); err != nil {
		return fail(err)
	}
	b, err := r.sortLengths(x, lengths, t)
	if err != nil {
		return fail(err)
	}
	for i, s := range begin {
		begin[i] = t.own(b.sorted(s, 1))
	}
	packed, _ := torch.Call("_pack_padded_sequence", t.own(b.sorted(x, b.dim)), b.lengths, r.o.BatchFirst)
	data, sizes := t.own(packed[0]), t.own(packed[1])
	var hx any = begin[0]
	if len(begin) > 1 {
		hx = begin
	}
	out, _ := torch.Call(op, data, sizes, hx, r.weights(), !r.o.NoBias, r.layers, r.o.Dropout, r.training(),
		r.ways == 2)
	for i := range out {
		t.own(out[i])
	}
	padded, _ := torch.Call("_pad_packed_sequence", out[0], sizes, r.o.BatchFirst, 0.0, x.Shape()[1-b.dim])
	t.own(padded[0])
	t.own(padded[1])
	for _, s := range out[1:] {
		last = append(last, b.restored(s, 1))
	}
	return r.result(b.restored(padded[0], b.dim), inputs...), last
}

// temporaries are the tensors that a function closes when it returns.
type temporaries struct{ all []*torch.Tensor }

func (t *temporaries) own(x *torch.Tensor) *torch.Tensor {
	t.all = append(t.all, x)
	return x
}

func (t *temporaries) close() {
	for _, x := range t.all {
		x.Close()
	}
}

// sortedBatch holds a batch's sequences sorted from the longest to the shortest, as LibTorch
// requires.
type sortedBatch struct {
	dim            int           // the batch dimension of x
	lengths        *torch.Tensor // int64 [N] on the CPU, longest first
	order, inverse *torch.Tensor // int64 [N] on the device of x
}

// sortLengths checks the lengths. t owns the tensors of the result.
func (r *recurrent) sortLengths(x *torch.Tensor, lengths []int, t *temporaries) (b sortedBatch, err error) {
	shape := x.Shape()
	b.dim = 1
	if r.o.BatchFirst {
		b.dim = 0
	}
	n, longest := shape[b.dim], shape[1-b.dim]
	if int64(len(lengths)) != n || n == 0 {
		return b, fmt.Errorf("%d lengths for a batch of %d sequences: %w", len(lengths), n, cuda.ErrInvalidArgument)
	}
	if slices.Min(lengths) < 1 || int64(slices.Max(lengths)) > longest {
		return b, fmt.Errorf("the lengths %v: each must be from 1 to %d: %w", lengths, longest, cuda.ErrInvalidArgument)
	}
	order, inverse, sorted := make([]int64, n), make([]int64, n), make([]int64, n)
	for i := range order {
		order[i] = int64(i)
	}
	slices.SortStableFunc(order, func(i, j int64) int { return cmp.Compare(lengths[j], lengths[i]) })
	for at, i := range order {
		inverse[i], sorted[at] = int64(at), int64(lengths[i])
	}
	for _, f := range []struct {
		to     **torch.Tensor
		values []int64
		device cuda.Device
	}{{&b.lengths, sorted, cuda.CPU}, {&b.order, order, x.Device()}, {&b.inverse, inverse, x.Device()}} {
		host, err := torch.FromInt64s(f.values)
		if err != nil {
			return b, err
		}
		t.own(host)
		*f.to = t.own(host.To(f.device))
	}
	return b, nil
}

func (b sortedBatch) sorted(x *torch.Tensor, dim int) *torch.Tensor {
	return x.IndexSelect(int64(dim), b.order)
}

func (b sortedBatch) restored(x *torch.Tensor, dim int) *torch.Tensor {
	return x.IndexSelect(int64(dim), b.inverse)
}
