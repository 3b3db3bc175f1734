package torch

import "github.com/torchstream/torchstream/internal/capi"

// Numerics are LibTorch's switches between speed, precision and reproducibility. [Tensor.Numerics]
// gives them to a tensor and what is computed from it, and [SetProcessNumerics] to everything else.
type Numerics struct {
	// MatmulTF32 lets float32 products on a GPU round their operands to TF32, which has 10 bits of
	// mantissa; false at the start.
	MatmulTF32 bool
	// ConvolutionTF32 lets float32 convolutions and recurrent layers on a GPU do so; true at the
	// start.
	ConvolutionTF32 bool
	// Benchmark makes cuDNN measure its convolutions for each new shape and take the fastest; false
	// at the start. It pays where shapes repeat. LibTorch keeps what it measured for each OS thread
	// that calls cuDNN, of which there are at most 20 and one of backward, so each of them measures
	// once.
	Benchmark bool
	// Deterministic makes operators use deterministic kernels, and fail if they have none; false at
	// the start. Products on a GPU then need CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment.
	Deterministic bool
}

// Numerics returns a marked handle to the same tensor, with the same owner. Operators with a marked
// operand run under these switches, all of them instead of the process's, and mark their results.
// Backward of a marked tensor runs the whole pass under its switches, also the parts of the graph
// whose operators ran under others, and the gradients that hooks get are marked. Replays of a graph
// keep the switches of the operators that were captured. Operands of one operator that are marked
// with different switches are an error. Numerics makes no call to LibTorch.
//
//	loss := net.Forward(batch.Images.Numerics(torch.Numerics{MatmulTF32: true})).CrossEntropy(batch.Labels)
//	err := loss.Backward()
//
// LibTorch has one value of each switch in the process, which operators read on the host. So
// operators, and the nodes of backward passes, take turns with those under different switches: one
// waits until those inside have been issued, on the CPU until they are computed. Those under equal
// switches, the process's included, run at the same time. While all are equal that costs nothing
// that can be measured; where goroutines compete under different ones, each turn costs the host
// some microseconds. The turns are fair. Go code that a pass calls (hooks, the Backward of a
// [Function]) has no turn and may wait for any goroutine. Copies, and operators that only read
// values, take no turn. An operator that must wait for a GPU within itself, such as one that checks
// for a singular matrix, keeps its turn meanwhile: if that GPU waits for work of another goroutine
// under other switches, such as a collective of two GPUs of one process, they wait for each other.
func (t *Tensor) Numerics(n Numerics) *Tensor {
	return t.mark("Numerics", numericsMarks, marks(capi.OwnNumerics(n.switches())))
}

// NoNumerics returns a handle to the same tensor without the mark of [Tensor.Numerics]: its
// operators run under the switches of the process.
func (t *Tensor) NoNumerics() *Tensor { return t.mark("NoNumerics", numericsMarks, 0) }

// ProcessNumerics returns the switches of the process.
func ProcessNumerics() (Numerics, error) {
	switches, err := capi.Numerics()
	if err != nil {
		return Numerics{}, opError("ProcessNumerics", nil, err)
	}
	return numericsFrom(switches), nil
}

// SetProcessNumerics replaces the switches of the process, under which operators without a mark of
// [Tensor.Numerics] run. Call it before the first operator; operators of other goroutines that run
// meanwhile see either setting. It waits as an operator does for those under other switches.
func SetProcessNumerics(n Numerics) error {
	if err := capi.SetNumerics(n.switches()); err != nil {
		return opError("SetProcessNumerics", nil, err)
	}
	return nil
}

// switches returns n in the form of package capi.
func (n Numerics) switches() (switches int32) {
	for _, s := range []struct {
		on   bool
		flag int32
	}{
		{n.MatmulTF32, capi.NumericsMatmulTF32}, {n.ConvolutionTF32, capi.NumericsConvolutionTF32},
		{n.Benchmark, capi.NumericsBenchmark}, {n.Deterministic, capi.NumericsDeterministic},
	} {
		if s.on {
			switches |= s.flag
		}
	}
	return switches
}

func numericsFrom(switches int32) Numerics {
	return Numerics{
		MatmulTF32: switches&capi.NumericsMatmulTF32 != 0, ConvolutionTF32: switches&capi.NumericsConvolutionTF32 != 0,
		Benchmark: switches&capi.NumericsBenchmark != 0, Deterministic: switches&capi.NumericsDeterministic != 0,
	}
}
