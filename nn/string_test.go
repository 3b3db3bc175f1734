package nn

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/torch"
)

// Tree writes modules as PyTorch's print(net) does, but with shapes instead of options.
func TestModulesPrintAsTrees(t *testing.T) {
	block := func() Module {
		return NewSequential(NewConv2d(3, 3, 3, Conv2dOptions{NoBias: true}), NewBatchNorm2d(3, BatchNorm2dOptions{}))
	}
	net := NewSequential(block(), block(), NewReLU(), NewLinear(2, 5, LinearOptions{}), Func(nil), nil)
	t.Cleanup(func() { net.modules = net.modules[:4]; Close(net) })
	const want = `Sequential(
  (0-1): 2 x Sequential(
    (0): Conv2d([3 3 3 3])
    (1): BatchNorm2d([3])
  )
  (2): ReLU()
  (3): Linear([5 2])
  (4): Func()
  (5): nil()
)`
	if got := fmt.Sprint(net); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// Every module of this package has a String method that returns its tree. Without one, fmt would
// print addresses. The test reads the source, so it includes modules that are added later.
func TestEveryModuleHasAStringMethod(t *testing.T) {
	names, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	if len(names) == 0 {
		t.Skip("needs the sources")
	}
	forward, text := map[string]bool{}, map[string]bool{}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || f.Recv == nil {
				continue
			}
			of := strings.TrimPrefix(fmt.Sprint(receiver(f.Recv.List[0].Type)), "*")
			switch f.Name.Name {
			case "Forward":
				forward[of] = true
			case "String":
				text[of] = true
			}
		}
	}
	if len(forward) < 20 {
		t.Errorf("found %d modules, want at least 20", len(forward))
	}
	for of := range forward {
		if !text[of] {
			t.Errorf("%s has no String method: add it to string.go", of)
		}
	}
}

func receiver(t ast.Expr) any {
	switch t := t.(type) {
	case *ast.StarExpr:
		return receiver(t.X)
	case *ast.IndexExpr:
		return receiver(t.X)
	case *ast.Ident:
		return t.Name
	}
	return t
}

// mode and blind stand for a program's modules. The mode of a mode can be read, and the mode of a
// blind cannot.
type mode struct {
	Func
	on bool
}

func (m *mode) SetTraining(on bool) { m.on = on }
func (m *mode) Training() bool      { return m.on }

type blind struct {
	Func
	on bool
}

func (b *blind) SetTraining(on bool) { b.on = on }

func TestEvalRestoresTheModeOfEachModule(t *testing.T) {
	same := Func(func(x *torch.Tensor) *torch.Tensor { return x })
	frozen, dropout := NewDropout(0.5), NewDropout(0.5)
	readable, other, unreadable := &mode{same, true}, &mode{same, false}, &blind{same, true}
	net := NewSequential(frozen, dropout, readable, other, unreadable)
	frozen.SetTraining(false)
	restore := Eval(net)
	if frozen.training() || dropout.training() || readable.on || other.on || unreadable.on {
		t.Errorf("during Eval: got modes %t %t %t %t %t, want all false", frozen.training(), dropout.training(),
			readable.on, other.on, unreadable.on)
	}
	restore()
	if frozen.training() || !dropout.training() || !readable.on || other.on || !unreadable.on {
		t.Errorf("after Eval: got modes %t %t %t %t %t, want false true true false true", frozen.training(),
			dropout.training(), readable.on, other.on, unreadable.on)
	}
}
