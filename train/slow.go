package train

import (
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// sayIfSlow warns once if the steps compute on the CPU in a 16-bit dtype for which LibTorch has no
// fast kernels. Such a run ends without an error, but takes 4 to 270 times as long as in float32.
func (s *Stepper) sayIfSlow(device cuda.Device) {
	if s.looked || device != cuda.CPU || s.o.Log == nil {
		return
	}
	s.looked = true
	switch s.halfDType() {
	case torch.Float16:
		s.o.Log.Warn("train: float16 on a CPU is many times slower than float32 in LibTorch: use " +
			"BFloat16 on a CPU with AVX512, or float32, or a GPU")
	case torch.BFloat16:
		if !bfloat16IsFast() {
			s.o.Log.Warn("train: bfloat16 on this CPU, without AVX512, is many times slower than " +
				"float32 in LibTorch: use float32, a CPU with AVX512, or a GPU")
		}
	}
}

// halfDType returns the 16-bit dtype of the steps, or float32.
func (s *Stepper) halfDType() torch.DType {
	half := func(d torch.DType) bool { return d == torch.Float16 || d == torch.BFloat16 }
	if half(s.o.Autocast) {
		return s.o.Autocast
	}
	for _, p := range s.params {
		if half(p.DType()) {
			return p.DType()
		}
	}
	return torch.Float32
}

// bfloat16IsFast reports whether LibTorch's oneDNN kernels compute in bfloat16 on this CPU. These
// kernels need AVX512, and environment variables can disable them. A LibTorch without oneDNN lacks
// the operator that reports this. bfloat16IsFast then returns true, because a warning might be
// wrong.
func bfloat16IsFast() bool {
	answer, err := torch.CallValues("mkldnn::_is_mkldnn_bf16_supported")
	return err != nil || answer[0] == true
}
