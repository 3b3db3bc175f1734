package optim

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// String returns the optimizer's name, and each group's number of parameters, current learning
// rate, and options that are not zero, by PyTorch's names:
//
//	SGD(62 parameters, lr 0.1, momentum 0.9)
//
// Several groups have a line each. String reads nothing from a device.
func (e *engine) String() string {
	if len(e.groups) == 1 {
		return e.name + "(" + e.groups[0].describe() + ")"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s(\n", e.name)
	for i, g := range e.groups {
		fmt.Fprintf(&b, "  group %d: %s\n", i, g.describe())
	}
	b.WriteByte(')')
	return b.String()
}

func (g *group) describe() string {
	text := fmt.Sprintf("%d parameters, lr %v", len(g.params), g.lr)
	if g.decay != 0 {
		text += fmt.Sprintf(", weight_decay %v", g.decay)
	}
	options := g.rule.options()
	for _, name := range slices.Sorted(maps.Keys(options)) {
		switch v := options[name]; v {
		case 0.0, 0, false, "", nil:
		default:
			text += fmt.Sprintf(", %s %v", name, v)
		}
	}
	return text
}

// String returns the number of parameters and the options that are not zero. It reads nothing from
// a device.
func (g Group) String() string {
	text := fmt.Sprintf("Group(%d parameters", len(g.Params))
	if g.LR != 0 {
		text += fmt.Sprintf(", LR %v", g.LR)
	}
	if g.WeightDecay != 0 {
		text += fmt.Sprintf(", WeightDecay %v", g.WeightDecay)
	}
	if g.NoWeightDecay {
		text += ", NoWeightDecay"
	}
	return text + ")"
}
