package nn

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/torchstream/torchstream/torch"
)

// Tree returns the module tree of m as text, in PyTorch's notation: kinds, names, and the shapes of
// the first parameters. It folds equal neighbours, and reads no values from a device. The String
// methods of this package's modules return it. A module of a program gets one with
//
//	func (n *Net) String() string { return nn.Tree(n) }
//
// If a module has the method Unwrap() nn.Module, Tree prints the kind of the module that the method
// returns.
//
// A Linear prints as
//
//	Linear([10 512])
//
// and a network of two layers as
//
//	Sequential(
//	  (0): Linear([32 2])
//	  (1): ReLU()
//	)
func Tree(m Module) string {
	var b strings.Builder
	writeTree(&b, m, "")
	return b.String()
}

func writeTree(b *strings.Builder, m Module, indent string) {
	b.WriteString(kindOf(m) + "(")
	if m == nil {
		b.WriteByte(')')
		return
	}
	parts := m.Parts()
	if len(parts.Modules) == 0 {
		b.WriteString(shapeOf(parts.Parameters) + ")")
		return
	}
	b.WriteByte('\n')
	texts := make([]string, len(parts.Modules))
	for i, c := range parts.Modules {
		var text strings.Builder
		writeTree(&text, c.Module, indent+"  ")
		texts[i] = text.String()
	}
	for first := 0; first < len(texts); {
		end := first + 1
		for end < len(texts) && texts[end] == texts[first] && follows(parts.Modules[end-1], parts.Modules[end]) {
			end++
		}
		name, times := parts.Modules[first].Name, ""
		if end > first+1 {
			name, times = name+"-"+parts.Modules[end-1].Name, strconv.Itoa(end-first)+" x "
		}
		fmt.Fprintf(b, "%s  (%s): %s%s\n", indent, name, times, texts[first])
		first = end
	}
	b.WriteString(indent + ")")
}

// follows reports whether the names of two children are consecutive numbers.
func follows(a, b Child) bool {
	i, err := strconv.Atoi(a.Name)
	j, err2 := strconv.Atoi(b.Name)
	return err == nil && err2 == nil && j == i+1
}

// shapeOf returns the shape of the first parameter, or "".
func shapeOf(parameters []torch.Named) string {
	if len(parameters) == 0 || parameters[0].Tensor.Err() != nil {
		return ""
	}
	return fmt.Sprint(parameters[0].Tensor.Shape())
}

// The modules print as trees.

func (m *Conv1d) String() string                  { return Tree(m) }
func (m *Conv2d) String() string                  { return Tree(m) }
func (m *Conv3d) String() string                  { return Tree(m) }
func (m *ConvTranspose1d) String() string         { return Tree(m) }
func (m *ConvTranspose2d) String() string         { return Tree(m) }
func (m *ConvTranspose3d) String() string         { return Tree(m) }
func (m *BatchNorm) String() string               { return Tree(m) }
func (m *InstanceNorm) String() string            { return Tree(m) }
func (m *LayerNorm) String() string               { return Tree(m) }
func (m *RMSNorm) String() string                 { return Tree(m) }
func (m *GroupNorm) String() string               { return Tree(m) }
func (m *Linear) String() string                  { return Tree(m) }
func (m *Embedding) String() string               { return Tree(m) }
func (m *EmbeddingBag) String() string            { return Tree(m) }
func (m *PReLU) String() string                   { return Tree(m) }
func (m *Dropout) String() string                 { return Tree(m) }
func (m *function) String() string                { return Tree(m) }
func (m *LSTM) String() string                    { return Tree(m) }
func (m *GRU) String() string                     { return Tree(m) }
func (m *RNN) String() string                     { return Tree(m) }
func (m *LSTMCell) String() string                { return Tree(m) }
func (m *GRUCell) String() string                 { return Tree(m) }
func (m *RNNCell) String() string                 { return Tree(m) }
func (m *MultiheadAttention) String() string      { return Tree(m) }
func (m *TransformerEncoder) String() string      { return Tree(m) }
func (m *TransformerDecoder) String() string      { return Tree(m) }
func (m *TransformerEncoderLayer) String() string { return Tree(m) }
func (m *TransformerDecoderLayer) String() string { return Tree(m) }
func (m *Sequential) String() string              { return Tree(m) }
func (m *Parallel) String() string                { return Tree(m) }
func (m *Graphed) String() string                 { return Tree(m) }
func (f Func) String() string                     { return Tree(f) }
