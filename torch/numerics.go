package torch

import "github.com/torchstream/torchstream/internal/capi"

// Numerics are LibTorch's switches between speed, precision and reproducibility. [Tensor.Numerics]
// sets them for a tensor and all results computed from it. [SetProcessNumerics] sets them for
// everything else.
type Numerics struct {
	// MatmulTF32 lets float32 products on a GPU round their operands to TF32, which has 10 bits of
	// mantissa; false at the start.
	MatmulTF32 bool
	// ConvolutionTF32 does the same for float32 convolutions and recurrent layers on a GPU; true at
	// the start.
	ConvolutionTF32 bool
	// Benchmark makes cuDNN measure its convolutions for each new shape and use the fastest; false
	// at the start. It pays if shapes repeat. LibTorch keeps the measurements for each OS thread
	// that calls cuDNN. There are at most 20 such threads and one of backward, so each of them
	// measures once.
	Benchmark bool
	// Deterministic makes operators use deterministic kernels, and fail if they have none; false at
	// the start. Products on a GPU then need CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment.
	Deterministic bool
}

// Numerics returns a marked handle to the same tensor, with the same owner. Operators with a marked
// operand run under all of these switches instead of the process's, and mark their results.
// Backward of a marked tensor runs the whole pass under its switches, including parts of the graph
// whose operators ran under others, and marks the gradients that hooks get. Replays of a graph keep
// the switches of the captured operators. Operands of one operator that are marked with different
// switches are an error. Numerics makes no call to LibTorch.
//
//	loss := net.Forward(batch.Images.Numerics(torch.Numerics{MatmulTF32: true})).CrossEntropy(batch.Labels)
//	err := loss.Backward()
//
// LibTorch has one value of each switch in the process, which operators read on the host. Operators
// and nodes of backward passes under different switches therefore take turns. A turn ends when its
// operators have been issued to the GPU, or computed on the CPU. Operators under equal switches,
// including the process's, run at the same time. If all switches are equal, this has no measurable
// cost. If goroutines use different switches, each turn costs the host some microseconds. The turns
// are fair.
//
// Go code that a pass calls (hooks, the Backward of a [Function]) has no turn and may wait for any
// goroutine. Copies, and operators that only read values, take no turn. An operator that must wait
// for a GPU within itself, such as one that checks for a singular matrix, keeps its turn meanwhile.
// If that GPU waits for work that another goroutine must queue under other switches, as in a
// collective between two GPUs of one process, the two goroutines wait for each other forever.
func (t *Tensor) Numerics(n Numerics) *Tensor {
	return t.mark("Numerics", numericsMarks, marks(capi.OwnNumerics(n.switches())))
}

// NoNumerics returns a handle to the same tensor without the mark of [Tensor.Numerics]. Its
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
// [Tensor.Numerics] run. Call it before the first operator. Running operators of other goroutines
// see either setting. Like an operator, it waits for operators under other switches.
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
