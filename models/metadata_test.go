package models_test

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

func TestMetadataIsReadAsItWasWritten(t *testing.T) {
	for _, want := range []models.Metadata{
		{Model: "resnet18", Classes: []string{"cat", "dög \"x\""}, Size: 224},
		{Model: "vit_b_16", Classes: []string{"a"}, Size: 32, Upright: true},
		{Model: "resnet18", Classes: []string{"a", "b"}, Size: 64, MultiLabel: true},
	} {
		got, err := models.ParseMetadata(want.Strings())
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("got %+v, %v, want %+v, nil", got, err, want)
		}
		if tr := got.Transform(); tr.ApplyEXIFOrientation != want.Upright {
			t.Errorf("got transform %+v, want size %d, upright %t", tr, want.Size, want.Upright)
		}
	}
}

func TestProbabilitiesFollowTheKindOfLabels(t *testing.T) {
	logits, err := torch.FromSlice([]float32{0, 0, 2, -2}, 2, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer logits.Close()
	// 1/(1+e^-x), and for two classes 1/(1+e^-(x-y))
	for multi, want := range map[bool][]float64{false: {0.5, 0.5, 0.982014, 0.017986},
		true: {0.5, 0.5, 0.880797, 0.119203}} {
		p := models.Metadata{MultiLabel: multi}.Probabilities(logits)
		got, err := p.Float64s()
		if err != nil {
			t.Fatal(err)
		}
		p.Close()
		for i := range want {
			if math.Abs(got[i]-want[i]) > 1e-6 {
				t.Errorf("MultiLabel %t: got %v, want %v", multi, got, want)
			}
		}
	}
}

func TestMetadataErrorNamesWhatIsMissing(t *testing.T) {
	whole := models.Metadata{Model: "resnet18", Classes: []string{"a"}, Size: 64}.Strings()
	for key, wrong := range map[string]string{"model": "gpt2", "classes": "[]", "size": "big"} {
		about := map[string]string{}
		for k, v := range whole {
			about[k] = v
		}
		about[key] = wrong
		_, err := models.ParseMetadata(about)
		var e *models.MetadataError
		if !errors.As(err, &e) || len(e.Missing) != 1 || !strings.Contains(e.Missing[0], key) {
			t.Errorf("%s %q: got error %v, want a *MetadataError that names %q alone", key, wrong, err, key)
		}
	}
}

// The opened network computes what the saved one did.
func TestOpenMakesTheSavedNetwork(t *testing.T) {
	m := models.Metadata{Model: "mobilenet_v3_small", Classes: []string{"a", "b", "c"}, Size: 64, Upright: true}
	net, err := m.NewModel()
	if err != nil {
		t.Fatal(err)
	}
	defer nn.Close(net)
	folder := t.TempDir()
	path := filepath.Join(folder, "best.safetensors")
	if err := nn.Save(path, net, m.Strings()); err != nil {
		t.Fatal(err)
	}
	c, err := models.Open(path, cuda.CPU)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if !reflect.DeepEqual(c.Metadata, m) {
		t.Errorf("got metadata %+v, want %+v", c.Metadata, m)
	}
	nn.Train(net, false)
	x, err := torch.Ones(cuda.CPU, torch.Float32, 2, 3, 64, 64)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	scope := torch.NewScope("logits")
	defer scope.Close()
	in := x.In(scope).NoGrad()
	want, err := net.Forward(in).Float32s()
	if err != nil {
		t.Fatal(err)
	}
	got, err := c.Net.Forward(in).Float32s()
	if err != nil || !reflect.DeepEqual(got, want) || len(got) != 2*3 {
		t.Errorf("got logits %v, %v, want %v, nil", got, err, want)
	}
}

func TestOpenRefusesFilesThatDescribeNoClassifier(t *testing.T) {
	folder := t.TempDir()
	if _, err := models.Open(filepath.Join(folder, "none.pt"), cuda.CPU); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got error %v, want fs.ErrNotExist", err)
	}
	net := nn.NewLinear(2, 2, nn.LinearOptions{})
	defer nn.Close(net)
	save := func(name string, about map[string]string) string {
		path := filepath.Join(folder, name)
		if err := nn.Save(path, net, about); err != nil {
			t.Fatal(err)
		}
		return path
	}
	plain := save("plain.safetensors", nil)
	if _, err := models.Open(plain, cuda.CPU); !errors.As(err, new(*models.MetadataError)) ||
		!strings.Contains(err.Error(), plain) {
		t.Errorf("got error %v, want a *MetadataError with %q", err, plain)
	}
	other := save("other.safetensors", models.Metadata{Model: "resnet18", Classes: []string{"a"}, Size: 64}.Strings())
	if _, err := models.Open(other, cuda.CPU); err == nil || !strings.Contains(err.Error(), other) {
		t.Errorf("got error %v, want one with %q", err, other)
	}
	huge := save("huge.safetensors", models.Metadata{Model: "vit_b_16", Classes: []string{"a"}, Size: 1 << 40}.Strings())
	if _, err := models.Open(huge, cuda.CPU); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("got error %v, want cuda.ErrInvalidArgument", err)
	}
	if list, err := os.ReadDir(folder); err != nil || len(list) != 3 {
		t.Errorf("got %d files, %v, want 3, nil", len(list), err)
	}
}

// The tree has PyTorch's notation and the names of the state_dict.
func TestNetworksPrintAsTrees(t *testing.T) {
	net, err := models.ByName("resnet18", models.Options{NumClasses: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer nn.Close(net)
	got := fmt.Sprint(net)
	for _, want := range []string{"ResNet(\n  (conv1): Conv2d([64 3 7 7])\n", "\n  (layer1): Sequential(\n    (0-1): 2 x residualBlock(\n",
		"\n  (fc): Linear([2 512])\n)"} {
		if !strings.Contains(got, want) {
			t.Errorf("got\n%s\nwant it with %q", got, want)
		}
	}
}
