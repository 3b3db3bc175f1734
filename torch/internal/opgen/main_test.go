package main

import (
	"strings"
	"testing"
)

var functions = natives(map[string]string{
	"add.Tensor":  "add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor",
	"add_.Tensor": "add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)",
	"cat":         "cat(Tensor[] tensors, int dim=0) -> Tensor",
	"sum.dim":     "sum.dim(Tensor self, int[1]? dim, bool keepdim=False) -> Tensor",
	"pool": "pool(Tensor self, int[2] size, int[2] stride=[], bool include=True, int ignore=-100) " +
		"-> (Tensor values, Tensor indices)",
	"split": "split(Tensor self, int n) -> Tensor[]",
	"parts": "parts(Tensor(a -> *) self) -> (Tensor[], Tensor)",
	"gates": "gates(Tensor input, Tensor[] hx, Tensor w) -> (Tensor, Tensor, Tensor)",
	"same":  "same(Tensor self, Tensor other, float[]? scale=None) -> bool",
	"draw":  "draw(Tensor self, Generator? generator=None) -> Tensor",
	"put_":  "put_(Tensor(a!) self, Tensor?[] indices, Tensor values, bool accumulate=False) -> Tensor(a!)",
	"put":   "put(Tensor self, Tensor?[] indices, Tensor values, bool accumulate=False) -> Tensor",
	"fit":   "fit(Tensor self) -> (Tensor a, Tensor b, Tensor c, Tensor d)",
	"odd":   "odd(Tensor self, Storage g) -> Tensor",
})

func natives(schemas map[string]string) map[string]native {
	all := map[string]native{}
	for name, s := range schemas {
		all[name] = native{s, name == "split"}
	}
	return all
}

func TestGenerateWritesMethods(t *testing.T) {
	for _, c := range []struct{ line, want string }{
		{"add.Tensor Add(other) -- a sum",
			"// Add returns a sum.\n//\n//\taten::add.Tensor(Tensor self, Tensor other, *, Scalar " +
				"alpha=1) -> Tensor\n" +
				"func (t *Tensor) Add(other *Tensor) *Tensor {\n\treturn opAdd.one([]*Tensor{t, other}, " +
				"[]capi.Arg{tensorArg(0), tensorArg(1)}, nil)\n}\n"},
		{"add.Tensor AddInt(other, alpha int) -- x", "func (t *Tensor) AddInt(other *Tensor, alpha " +
			"int64) *Tensor {\n\targs := []capi.Arg{tensorArg(0), tensorArg(1), intArg(alpha)}\n\treturn " +
			"opAddInt.one([]*Tensor{t, other}, args, nil)"},
		{"add_.Tensor Add_(other, alpha=2) -- x",
			"return opAdd_.self([]*Tensor{t, other}, []capi.Arg{tensorArg(0), tensorArg(1), intArg(2)}, nil)"},
		{"cat func Cat(tensors, dim) -- x", "func Cat(tensors []*Tensor, dim int64) *Tensor {\n\tin := " +
			"make([]*Tensor, 0, 16)\n\tat0 := len(in)\n\tin = append(in, tensors...)\n\treturn opCat.one(in,"},
		{"sum.dim SumDim(dim...) -- x", "func (t *Tensor) SumDim(dim ...int64) *Tensor {\n\tints := " +
			"make([]int64, 0, 16)\n\targs := []capi.Arg{tensorArg(0), noneArg()}\n\tif dim != nil {"},
		{"pool PoolWith(size, {stride, ignore?}) -- x",
			"type PoolOptions struct {\n\tStride []int64 // default []\n\tIgnore *int64  // default -100\n}"},
		{"split Split(n) -- x", "func (t *Tensor) Split(n int64) ([]*Tensor, error) {\n\treturn " +
			"opSplit.list([]*Tensor{t}, []capi.Arg{tensorArg(0), intArg(n)}, nil)"},
		{"pool Pool(size, {include?}) -- x", "if !(o.Include == nil) {\n\t\targs[3] = boolArg(*o.Include)"},
		{"gates Gates(hx, w) -- x", "func (t *Tensor) Gates(hx []*Tensor, w *Tensor) (*Tensor, *Tensor, " +
			"*Tensor) {\n\tin := make([]*Tensor, 0, 16)\n\tat0 := len(in)\n\tin = append(in, t)\n" +
			"\tat1 := len(in)\n\tin = append(in, hx...)\n\tat2 := len(in)\n\tin = append(in, w)\n" +
			"\treturn opGates.three(in, []capi.Arg{tensorArg(at0), tensorsArg(at1, len(hx)), tensorArg(at2)}, nil)"},
		{"same Same(other, scale) -- whether", "// Same reports whether.\n//\n//\taten::same(Tensor " +
			"self, Tensor other, float[]? scale=None) -> bool\nfunc (t *Tensor) Same(other *Tensor, " +
			"scale []float64) (bool, error) {"},
		{"same Same(other, scale) -- whether", "args := []capi.Arg{tensorArg(0), tensorArg(1), " +
			"noneArg()}\n\tif scale != nil {\n\t\targs[2], ints = floatsArg(ints, scale)\n\t}\n\treturn opSame.truth("},
		{"draw Draw({generator}) -- x", "use, err := o.Generator.arg()\n\tif err != nil {\n\t\treturn " +
			"failed(opError(\"Draw\", nil, err))\n\t}\n\tdefer o.Generator.release()\n\treturn " +
			"opDraw.one([]*Tensor{t}, []capi.Arg{tensorArg(0), use}, nil)"},
		{"put_ Put_(indices, values, {accumulate}) -- x\nput Put(indices, values, {accumulate}) -- x",
			"func (t *Tensor) Put(indices []*Tensor, values *Tensor, o PutOptions) *Tensor {"},
		{"put Put(indices, values) -- x", "put(Tensor self, Tensor?[] indices, Tensor values, bool " +
			"accumulate=False) -> Tensor\",\n\t\ttrue, false,\n\t}"},
		{"# ---- parts; of t\nsplit Split(n) -- x\ncat func Cat(tensors, dim) -- x", "false, true,\n\t},\n"},
		{"# ---- parts; of t\nsplit Split(n) -- x\ncat func Cat(tensors, dim) -- x",
			"//\n// Parts: [Tensor.Split], [Cat].\npackage torch\n"},
		{"fit Fit() -- x", "func (t *Tensor) Fit() (*Tensor, *Tensor, *Tensor, *Tensor) {\n\treturn opFit.four("},
		{"pool Pool(size) -- x", "func (t *Tensor) Pool(size []int64) (*Tensor, *Tensor) {"},
	} {
		t.Run(c.line, func(t *testing.T) {
			ops, err := parseList("list", "# comment\n\n"+c.line, functions)
			if err != nil {
				t.Fatal(err)
			}
			got, err := generate(ops)
			if err != nil || !strings.Contains(string(got), c.want) {
				t.Errorf("got %v\n%s\nwant it to contain %q", err, got, c.want)
			}
		})
	}
}

func TestCommentIsWrapped(t *testing.T) {
	long := strings.Repeat("word ", 30) + "end."
	for line := range strings.SplitSeq(strings.TrimSuffix(comment(long), "\n"), "\n") {
		if len(line) > 100 || !strings.HasPrefix(line, "// ") {
			t.Errorf("got the line %q, want at most 100 columns that begin with \"// \"", line)
		}
	}
	if got := strings.Join(strings.Fields(strings.ReplaceAll(comment(long), "//", "")), " "); got != long {
		t.Errorf("got %q, want the words of %q", got, long)
	}
}

func TestMistakesInTheListAreErrors(t *testing.T) {
	for line, want := range map[string]string{
		"add.Tensor Add(other)":                              "no description",
		"none None() -- x":                                   "LibTorch has no operator none",
		"add.Tensor -- x":                                    "no method",
		"add.Tensor Add -- x":                                "no argument list",
		"add.Tensor Add(another) -- x":                       `has no argument "another"`,
		"add.Tensor A(other) -- x\nadd.Tensor A(other) -- x": "list:2: duplicate method A",
		"add.Tensor Add() -- x":                              "must be in the list",
		"parts Parts() -- x":                                 "results ((Tensor[], Tensor)) are not supported",
		"odd Odd(g) -- x":                                    "Storage",
		"pool Pool(size, {include}) -- x":                    "false cannot stand for it",
		"add.Tensor Add(other, alpha=many) -- x":             `fixed value "many"`,
		"pool Pool({size}) -- x":                             "cannot be an option",
		"put_ Put_(indices, values, {accumulate}) -- x\npool Put(size, {stride}) -- x": "other options " +
			"of the name PutOptions",
	} {
		t.Run(want, func(t *testing.T) {
			ops, err := parseList("list", line, functions)
			if err == nil {
				_, err = generate(ops)
			}
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: got %v, want an error with %q", line, err, want)
			}
		})
	}
}
