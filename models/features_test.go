package models_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// TestLastLayerOfFeaturesGivesTheLogits checks one network of each family. The expected widths are
// the widths of torchvision's last layers.
func TestLastLayerOfFeaturesGivesTheLogits(t *testing.T) {
	for name, c := range map[string]struct {
		width int64
		last  func(nn.Module) nn.Module
	}{
		"resnet18":           {512, func(m nn.Module) nn.Module { return m.(*models.ResNet).FC }},
		"vit_b_16":           {768, func(m nn.Module) nn.Module { return m.(*models.ViT).Head }},
		"convnext_tiny":      {768, func(m nn.Module) nn.Module { return lastOf(m.(*models.ConvNeXt).Classifier) }},
		"efficientnet_b0":    {1280, func(m nn.Module) nn.Module { return lastOf(m.(*models.EfficientNet).Classifier) }},
		"mobilenet_v3_small": {1024, func(m nn.Module) nn.Module { return lastOf(m.(*models.MobileNetV3).Classifier) }},
	} {
		t.Run(name, func(t *testing.T) {
			scope := torch.NewScope("test")
			defer scope.Close()
			net, err := models.ByName(name, models.Options{NumClasses: 3, ImageSize: imageSize(name)})
			if err != nil {
				t.Fatal(err)
			}
			defer nn.Close(net)
			nn.Train(net, false)
			last := c.last(net).(*nn.Linear)
			if err := nn.Initialise(last.Weight, nn.Normal(0, 1)); err != nil {
				t.Fatal(err)
			}
			features, err := models.Features(net)
			if err != nil {
				t.Fatal(err)
			}
			x, err := torch.TensorOptions{Device: cuda.CPU, DType: torch.Float32, Scope: scope}.Randn(2, 3, 32, 32)
			if err != nil {
				t.Fatal(err)
			}
			x = x.NoGrad()
			vectors := features.Forward(x)
			if shape := vectors.Shape(); !slices.Equal(shape, []int64{2, c.width}) {
				t.Fatalf("got vectors %v, %v, want [2 %d]", shape, vectors.Err(), c.width)
			}
			got, err := last.Forward(vectors).Float32s()
			if err != nil {
				t.Fatal(err)
			}
			want, err := net.Forward(x).Float32s()
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(got, want) || slices.Max(want) == slices.Min(want) {
				t.Errorf("the last layer of the features gives %v, want the different logits %v", got, want)
			}
		})
	}
}

func imageSize(model string) int {
	if model == "vit_b_16" {
		return 32
	}
	return 0
}

func lastOf(head nn.Module) nn.Module {
	layers := head.(*nn.Sequential).Parts().Modules
	return layers[len(layers)-1].Module
}

func TestFeaturesOfALanguageModelAreAnError(t *testing.T) {
	if _, err := models.Features(&models.GPT2{}); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("got %v, want ErrInvalidArgument", err)
	}
}
