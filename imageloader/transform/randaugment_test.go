package transform

import (
	"fmt"
	"testing"
)

var policyNames = map[string]policyOp{
	"Identity": opIdentity, "ShearX": opShearX, "ShearY": opShearY, "TranslateX": opTranslateX,
	"TranslateY": opTranslateY, "Rotate": opRotate, "Brightness": opBrightness,
	"Color": opColor, "Contrast": opContrast, "Sharpness": opSharpness, "Posterize": opPosterize,
	"Solarize": opSolarize, "AutoContrast": opAutoContrast,
	"Equalize": opEqualize, "Invert": opInvert,
}

// TestPolicySteps: every operation of the policies at its strengths gives torchvision's bytes.
func TestPolicySteps(t *testing.T) {
	g := readGolden(t)
	if len(g.Steps) < 600 {
		t.Fatalf("only %d steps, want at least 600", len(g.Steps))
	}
	for _, s := range g.Steps {
		t.Run(fmt.Sprint(s[:4]), func(t *testing.T) {
			op, known := policyNames[s[1].(string)]
			if !known {
				t.Fatalf("what is %v?", s[1])
			}
			space, bins := &randSpace, 31
			switch s[0] {
			case "TrivialAugmentWide":
				space = &wideSpace
			case "AutoAugment":
				bins = 10
			}
			m := space.magnitude(op, int(s[2].(float64)), bins, g.Width, g.Height)
			if want := s[4].(float64); m != want {
				t.Errorf("%v: magnitude %v, want %v", s, m, want)
			}
			m *= s[3].(float64)
			got := checksum(t, uint64(g.Seed), g.Width, g.Height,
				func(p *program) { p.policy(op, m, DefaultInterpolation, nil) })
			if got != s[5] {
				t.Errorf("%v: %s, want %v", s, got, s[5])
			}
		})
	}
}
