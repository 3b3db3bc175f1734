package train_test

import (
	"bytes"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

// slowWithoutAVX512 is the environment variable of the process in which oneDNN must not use AVX512.
const slowWithoutAVX512 = "TORCHSTREAM_TEST_WITHOUT_AVX512"

// Training in float16 on the CPU, and in bfloat16 where LibTorch has no kernels for it, warns once.
func TestSlowDTypesOnTheCPUWarnOnce(t *testing.T) {
	answer, err := torch.CallValues("mkldnn::_is_mkldnn_bf16_supported")
	if err != nil {
		t.Skip("LibTorch has no oneDNN: ", err)
	}
	fast := answer[0].(bool)
	const float16, bfloat16 = "float16 on a CPU is many times slower", "bfloat16 on this CPU, without " +
		"AVX512, is many times slower"
	for name, c := range map[string]struct {
		autocast, parameters torch.DType
		want                 string
	}{
		"float32": {0, torch.Float32, ""}, "autocast to float16": {torch.Float16, torch.Float32, float16},
		"autocast to bfloat16": {torch.BFloat16, torch.Float32, bfloat16},
		"float16":              {0, torch.Float16, float16}, "bfloat16": {0, torch.BFloat16, bfloat16},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSmall(t, cuda.CPU)
			x := s.x
			if c.parameters != torch.Float32 {
				if err := nn.ToDType(s.net, c.parameters); err != nil {
					t.Fatal(err)
				}
				x = kept(t, s.x.ToDType(c.parameters))
				defer x.Close()
			}
			var log bytes.Buffer
			step, err := train.NewStepper(train.StepperOptions{Model: s.net, Optimizer: s.opt,
				Autocast: c.autocast, Log: slog.New(slog.NewTextHandler(&log, nil))})
			if err != nil {
				t.Fatal(err)
			}
			defer step.Close()
			for range 2 {
				if _, _, err := step.Step(x, s.y); err != nil {
					t.Fatal(err)
				}
			}
			want := c.want
			if want == bfloat16 && fast {
				want = ""
			}
			if text := log.String(); want == "" && text != "" || want != "" &&
				(strings.Count(text, "level=WARN") != 1 || !strings.Contains(text, want)) {
				t.Errorf("the log is %q, want one warning with %q", text, want)
			}
		})
	}
	if os.Getenv(slowWithoutAVX512) != "" {
		if fast {
			t.Error("oneDNN computes in bfloat16, want it not to without AVX512")
		}
		return
	}
	command := exec.Command(os.Args[0], "-test.run=^TestSlowDTypesOnTheCPUWarnOnce$")
	command.Env = append(os.Environ(), slowWithoutAVX512+"=1", "ONEDNN_MAX_CPU_ISA=AVX2", "ATEN_CPU_CAPABILITY=avx2")
	if text, err := command.CombinedOutput(); err != nil {
		t.Errorf("without AVX512: %v\n%s\nwant no error", err, text)
	}
}
