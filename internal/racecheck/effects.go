package racecheck

import "strings"

// Effect is an operator's effect on an argument.
type Effect uint8

const (
	None  Effect = iota // no tensor
	Reads               // its elements
	// Views means that a result may be a view of the argument. The operator then reads no element.
	// If the result has other memory, the operator reads the argument.
	Views
	Writes
	Metadata // reads sizes and dtype alone
)

// Operator describes an operator's effects, as declared by its schema.
type Operator struct {
	Name string   // with the overload: "aten::add.Tensor"
	Args []Effect // by parameter
}

// Effects reads the alias annotations of a LibTorch schema: "aten::add_.Tensor(Tensor(a!) self,
// Tensor other, *, Scalar alpha=1) -> Tensor(a!)".
func Effects(schema string) Operator {
	name, rest, _ := strings.Cut(schema, "(")
	o := Operator{Name: name}
	base, _, _ := strings.Cut(strings.TrimPrefix(name, "aten::"), ".")
	for _, arg := range arguments(rest) {
		if arg == "*" {
			continue
		}
		o.Args = append(o.Args, effect(base, arg))
	}
	return o
}

// inPlaceViews change the sizes and strides of their first argument but no element, although their
// schemas declare a write.
var inPlaceViews = map[string]bool{
	"as_strided_": true, "detach_": true, "requires_grad_": true, "resize_": true, "set_": true,
	"squeeze_": true, "swapaxes_": true, "swapdims_": true,
	"t_": true, "transpose_": true, "unsqueeze_": true,
}

func effect(base, arg string) Effect {
	annotation, ok := strings.CutPrefix(arg, "Tensor")
	switch {
	case !ok:
		return None
	case inPlaceViews[base], strings.HasPrefix(base, "new_"), strings.HasSuffix(base, "_like"):
		return Metadata
	case !strings.HasPrefix(annotation, "("):
		return Reads
	}
	annotation, _, _ = strings.Cut(annotation, ")")
	if strings.Contains(annotation, "!") {
		return Writes
	}
	return Views
}

// arguments splits a schema's arguments, from after its first parenthesis to the matching one, at
// the commas outside further brackets and quotes.
func arguments(text string) (args []string) {
	depth, start, quote := 0, 0, byte(0)
	for i := range len(text) {
		switch c := text[i]; {
		case quote != 0:
			if c == quote {
				quote = 0
			}
		case c == '"' || c == '\'':
			quote = c
		case c == '(' || c == '[':
			depth++
		case (c == ')' || c == ']') && depth > 0:
			depth--
		case c == ')' || c == ',' && depth == 0:
			if arg := strings.TrimSpace(text[start:i]); arg != "" {
				args = append(args, arg)
			}
			if c == ')' {
				return args
			}
			start = i + 1
		}
	}
	return args
}
