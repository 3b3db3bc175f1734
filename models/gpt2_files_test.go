package models_test

import (
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"testing"

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
					t.Errorf("%s, partial %v: logit %d is %v, and transformers has %v", file, partial, i, got[i], want[i])
					break
				}
			}
		}
	}
}

func smallGPT2Logits(t *testing.T, file string, partial bool) []float32 {
	t.Helper()
	net, err := models.NewGPT2(models.GPT2Options{VocabSize: 11, Positions: 8, Layers: 1, Heads: 2, Width: 4, Dropout: -1})
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
