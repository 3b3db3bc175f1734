package cli

import (
	"github.com/torchstream/torchstream/imageloader/transform"
)

// policies lists the values of -policy.
const policies = "none, randaugment, trivialaugment, autoaugment, or simclr (colour jitter, greyscale, blur)"

// ParsePolicy parses -policy.
func ParsePolicy(name string) ([]transform.Op, error) {
	switch name {
	case "none":
		return nil, nil
	case "randaugment":
		return []transform.Op{transform.RandAugment{}}, nil
	case "trivialaugment":
		return []transform.Op{transform.TrivialAugmentWide{}}, nil
	case "autoaugment":
		return []transform.Op{transform.AutoAugment{}}, nil
	case "simclr": // Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", for 224 pixels
		return []transform.Op{
			transform.RandomApply{Ops: []transform.Op{transform.ColorJitter{Brightness: 0.8, Contrast: 0.8,
				Saturation: 0.8, Hue: 0.2}}, P: 0.8},
			transform.RandomGrayscale{P: 0.2},
			transform.RandomApply{Ops: []transform.Op{transform.GaussianBlur{KernelSize: [2]int{23, 23}}}, P: 0.5},
		}, nil
	}
	return nil, Usagef("there is no policy %q: none, randaugment, trivialaugment, autoaugment and simclr "+
		"are known", name)
}
