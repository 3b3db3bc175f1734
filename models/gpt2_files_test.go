package models_test

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// A GPT-2 loads tied weights under the head's name, and names without "transformer.".
func TestGPT2LoadsPublishedNames(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("testdata", "gpt2-logits.json"))
	if err != nil {
		t.Fatal(err)
	}
	var want []float64
	if err := json.Unmarshal(text, &want); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{"gpt2-tied.safetensors", "gpt2-base.safetensors"} {
		for _, partial := range []bool{false, true} {
			got := smallGPT2Logits(t, file, partial)
			for i := range want {
				if math.Abs(float64(got[i])-want[i]) > 1e-5 {
					t.Errorf("%s, partial %v: logit %d is %v, and transformers has %v", file, partial, i,
						got[i], want[i])
					break
				}
			}
		}
	}
}

func smallGPT2Logits(t *testing.T, file string, partial bool) []float32 {
	t.Helper()
	net, err := models.NewGPT2(models.GPT2Options{VocabSize: 11, Positions: 8, Layers: 1, Heads: 2,
		Width: 4, Dropout: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer nn.Close(net)
	nn.Train(net, false)
	r, err := nn.LoadWith(filepath.Join("testdata", file), net, nn.LoadOptions{Partial: partial})
	if err != nil {
		t.Fatal(err)
	}
	if r.Share() != 1 || len(r.Unexpected) != 0 || len(r.Notes) == 0 {
		t.Errorf("%s: got %v, want all numbers, nothing unexpected and a note", file, r)
	}
	scope := torch.NewScope("logits")
	defer scope.Close()
	tokens, err := torch.FromSlice([]int64{0, 1, 2, 3, 4, 5})
	if err != nil {
		t.Fatal(err)
	}
	logits, err := net.Forward(scope.Own(tokens).View(1, 6).NoGrad()).Float32s()
	if err != nil {
		t.Fatal(err)
	}
	return logits
}

// The hub's first files of GPT-2 have the causal masks as tensors. transformers drops them.
func TestGPT2LeavesOutMasks(t *testing.T) {
	file, err := checkpoint.Open(filepath.Join("testdata", "gpt2-base.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	scope := torch.NewScope("file")
	defer scope.Close()
	var tensors []torch.Named
	for _, s := range file.Tensors() {
		read, err := file.Read(s.Name)
		if err != nil {
			t.Fatal(err)
		}
		tensors = append(tensors, torch.Named{Name: s.Name, Tensor: scope.Own(read)})
	}
	for name, shape := range map[string][]int64{"h.0.attn.bias": {1, 1, 8, 8}, "h.0.attn.masked_bias": {}} {
		mask, err := torch.Zeros(cuda.CPU, torch.Float32, shape...)
		if err != nil {
			t.Fatal(err)
		}
		tensors = append(tensors, torch.Named{Name: name, Tensor: scope.Own(mask)})
	}
	path := filepath.Join(t.TempDir(), "gpt2.safetensors")
	if err := checkpoint.Save(path, tensors, nil); err != nil {
		t.Fatal(err)
	}
	net, err := models.NewGPT2(models.GPT2Options{VocabSize: 11, Positions: 8, Layers: 1, Heads: 2,
		Width: 4, Dropout: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer nn.Close(net)
	for name, m := range map[string]nn.Module{"with a head": net, "without": net.Transformer()} {
		r, err := nn.LoadWith(path, m, nn.LoadOptions{})
		if err != nil {
			t.Fatalf("%s: %v, want no error", name, err)
		}
		note := "the network does not use these tensors of the file: \"h.0.attn."
		if text := r.String(); r.Share() != 1 || len(r.Unexpected) != 0 || !strings.Contains(text, note) ||
			!strings.Contains(text, "masked_bias") {
			t.Errorf("%s: got %q, want all numbers, nothing unexpected and %q", name, text, note)
		}
	}
}
