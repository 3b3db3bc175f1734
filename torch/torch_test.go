package torch_test

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

func TestMain(m *testing.M) {
	if err := torch.SetNumThreads(1); err != nil { // the tensors here are tiny
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func must(t testing.TB, x *torch.Tensor, err error) *torch.Tensor {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.Close() })
	return x
}

func floats(t testing.TB, data []float32, shape ...int64) *torch.Tensor {
	t.Helper()
	x, err := torch.FromFloat32s(data, shape...)
	return must(t, x, err)
}

func ints(t testing.TB, data []int64, shape ...int64) *torch.Tensor {
	t.Helper()
	x, err := torch.FromInt64s(data, shape...)
	return must(t, x, err)
}

// leaf is a tensor that requires gradients.
func leaf(t testing.TB, data []float32, shape ...int64) *torch.Tensor {
	t.Helper()
	x := floats(t, data, shape...)
	if err := x.SetRequiresGrad(true); err != nil {
		t.Fatal(err)
	}
	return x
}

func wantValues(t testing.TB, x *torch.Tensor, want ...float64) {
	t.Helper()
	got, err := x.Float64s()
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != len(want) {
		t.Fatalf("got %v, want %v", got, want)
	}
	for i := range got {
		if math.Abs(got[i]-want[i]) > 1e-5*(1+math.Abs(want[i])) {
			t.Fatalf("got %v, want %v", got, want)
		}
	}
}

func here(t testing.TB) (file string, line int) {
	_, file, line, ok := runtime.Caller(1)
	if !ok {
		t.Fatal("no caller")
	}
	return filepath.Base(file), line
}

func TestErrorNamesOperatorOperandsAndCaller(t *testing.T) {
	x, y := floats(t, make([]float32, 6), 2, 3), floats(t, make([]float32, 20), 4, 5)
	file, line := here(t)
	bad := x.MatMul(y) // the line after
	err := bad.ReLU().Add(x).Sum().Backward()
	var e *torch.Error
	if !errors.As(err, &e) {
		t.Fatalf("got %v", err)
	}
	if e.Op != "MatMul" || filepath.Base(e.File) != file || e.Line != line+1 {
		t.Errorf("got %s at %s:%d, want MatMul at %s:%d", e.Op, e.File, e.Line, file, line+1)
	}
	want := fmt.Sprintf("torch: MatMul(float32[2 3] cpu, float32[4 5] cpu) at %s:%d: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", file, line+1)
	if err.Error() != want {
		t.Errorf("got  %s\nwant %s", err, want)
	}
}

func TestErrors(t *testing.T) {
	x := floats(t, []float32{1, 2}, 2)
	closed, err := torch.Ones(cuda.CPU, torch.Float32, 2)
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	scope := torch.NewScope("batch 7")
	scoped := x.In(scope)
	scope.Close()
	var none *torch.Tensor
	var zero torch.Tensor
	cases := []struct {
		name string
		do   func() error
		is   error
		text string
	}{
		{"nil operand", func() error { return x.Add(nil).Err() }, cuda.ErrInvalidArgument, "Add(float32[2] cpu, nil)"},
		{"nil receiver", func() error { return none.Add(x).Err() }, cuda.ErrInvalidArgument, "Add(nil, float32[2] cpu)"},
		{"nil receiver of a sink", func() error { return none.Backward() }, cuda.ErrInvalidArgument, "Backward(nil)"},
		{"zero tensor", func() error { return zero.Add(x).Err() }, torch.ErrClosed, "Tensor is zero"},
		{"closed operand", func() error { return x.Add(closed).Err() }, torch.ErrClosed, "Add(float32[2] cpu, closed)"},
		{"closed in a sink", func() error { _, err := closed.Float32s(); return err }, torch.ErrClosed, "Float32s(closed)"},
		{"ended scope", func() error { return scoped.ReLU().Err() }, torch.ErrClosed, `scope "batch 7" has ended`},
		{"ended scope in a sink", func() error { return scoped.Backward() }, torch.ErrClosed, `scope "batch 7" has ended`},
		{"closed scope", func() error { return x.In(scope).Err() }, torch.ErrClosed, `scope "batch 7" has ended`},
		{"nil scope", func() error { return x.In(nil).Err() }, cuda.ErrInvalidArgument, "scope"},
		{"zero scope", func() error { return x.In(new(torch.Scope)).Err() }, cuda.ErrInvalidArgument, "scope"},
		{"own on a nil scope", func() error { return (*torch.Scope)(nil).Own(x).Err() }, cuda.ErrInvalidArgument, "scope"},
		{"no such device", func() error { _, err := torch.Zeros(99, torch.Float32, 2); return err }, cuda.ErrNoDevice, "cuda:99"},
		{"no such device in To", func() error { return x.To(99).Err() }, cuda.ErrNoDevice, "99"},
		{"a device that is none", func() error { return x.To(-7).Err() }, nil, "To"},
		{"no such dtype", func() error { _, err := torch.Zeros(cuda.CPU, 99, 2); return err }, nil, "Zeros"},
		{"no such dtype in ToDType", func() error { return x.ToDType(99).Err() }, nil, "ToDType"},
		{"negative size", func() error { _, err := torch.Zeros(cuda.CPU, torch.Float32, -2); return err }, nil, "Zeros"},
		{"size overflow", func() error { _, err := torch.Zeros(cuda.CPU, torch.Float32, 1<<62, 1<<62); return err }, nil, "Zeros"},
		{"too large", func() error { _, err := torch.Zeros(cuda.CPU, torch.Float32, 1<<50); return err }, cuda.ErrOutOfMemory, "Zeros"},
		{"data and shape differ", func() error { _, err := torch.FromFloat32s([]float32{1, 2, 3}, 2); return err }, cuda.ErrInvalidArgument, "FromFloat32s"},
		{"nil in a list", func() error { return torch.Cat([]*torch.Tensor{x, nil}, 0).Err() }, cuda.ErrInvalidArgument, "operand 2 is nil"},
		{"empty list", func() error { return torch.Cat(nil, 0).Err() }, nil, "Cat"},
		{"many operands", func() error { return torch.Cat(append(make([]*torch.Tensor, 20), x), 0).Err() }, cuda.ErrInvalidArgument, "13 more"},
		{"first of two errors", func() error { return x.Add(nil).Add(x.MatMul(nil)).Err() }, cuda.ErrInvalidArgument, "Add("},
		{"several elements", func() error { _, err := x.Float64(); return err }, cuda.ErrInvalidArgument, "Float64(float32[2] cpu)"},
		{"more elements than memory", func() error { _, err := x.Narrow(0, 0, 1).Expand(1 << 60).Float32s(); return err }, cuda.ErrOutOfMemory, "Float32s"},
		{"floats as ints", func() error { _, err := x.Int64s(); return err }, cuda.ErrInvalidArgument, "ToDType"},
		{"nothing to differentiate", func() error { return x.Sum().Backward() }, nil, "Backward"},
		{"backward of a vector", func() error { return leaf(t, []float32{1, 2}).MulScalar(2).Backward() }, nil, "Backward"},
		{"gradient of another shape", func() error {
			return leaf(t, []float32{1, 2}).MulScalar(2).BackwardWith(torch.BackwardOptions{Gradient: floats(t, []float32{1})})
		}, cuda.ErrInvalidArgument, "Backward"},
		{"integer parameter", func() error { return ints(t, []int64{1}).SetRequiresGrad(true) }, cuda.ErrInvalidArgument, "SetRequiresGrad"},
		{"in place on a leaf", func() error { return leaf(t, []float32{1}).Add_(x).Err() }, nil, "leaf Variable"},
		{"empty pool window", func() error { return x.MaxPool2d(nil, torch.MaxPool2dOptions{}).Err() }, nil, "MaxPool2d"},
		{"class out of range", func() error {
			return floats(t, []float32{1, 2}, 1, 2).CrossEntropy(ints(t, []int64{5})).Err()
		}, nil, "CrossEntropy"},
		{"copy batch", func() error {
			return torch.CopyBatch(cuda.Stream{}, nil, []*torch.Tensor{x}, nil, nil)
		}, cuda.ErrInvalidArgument, "1 destinations and 0 sources"},
		{"Fail", func() error { return torch.Fail("mine", errors.ErrUnsupported).Add(x).Err() }, errors.ErrUnsupported, "torch: mine() at torch_test.go:"},
		{"Fail without an error", func() error { return torch.Fail("mine", nil).Err() }, cuda.ErrInvalidArgument, "mine"},
		{"no threads", func() error { return torch.SetNumThreads(0) }, cuda.ErrInvalidArgument, "0 threads"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			err := c.do()
			if err == nil {
				t.Fatal("no error")
			}
			if c.is != nil && !errors.Is(err, c.is) {
				t.Errorf("%v is not %v", err, c.is)
			}
			if !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v does not say %q", err, c.text)
			}
		})
	}
	wantValues(t, x, 1, 2)
}

// Every method is called on a nil, a zero, a failed and a closed tensor, with zero arguments: none
// may panic, and those that can return an error or a tensor say what was wrong.
func TestNothingPanics(t *testing.T) {
	closed, err := torch.Ones(cuda.CPU, torch.Float32, 2)
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	scope := torch.NewScope("x")
	ended := floats(t, []float32{1}).In(scope)
	scope.Close()
	live := floats(t, []float32{1, 2})
	harmless := map[string]bool{"Close": true, "Scope": true, "RequiresGrad": true, "Err": true} // on a closed tensor, say
	tensor, failure := reflect.TypeFor[*torch.Tensor](), reflect.TypeFor[error]()
	for name, x := range map[string]*torch.Tensor{"nil": nil, "zero": {}, "failed": torch.Fail("x", errors.ErrUnsupported), "closed": closed, "ended": ended, "live": live} {
		v := reflect.ValueOf(x)
		for i := range v.NumMethod() {
			m, method := v.Method(i), tensor.Method(i).Name
			var args []reflect.Value
			for j := range m.Type().NumIn() {
				if m.Type().IsVariadic() && j == m.Type().NumIn()-1 {
					break
				}
				args = append(args, reflect.Zero(m.Type().In(j)))
			}
			results := m.Call(args)
			if name == "live" || harmless[method] || (method == "NoGrad" && (name == "closed" || name == "ended")) {
				continue
			}
			for _, r := range results {
				switch r.Type() {
				case tensor:
					if r.IsNil() || r.Interface().(*torch.Tensor).Err() == nil {
						t.Errorf("%s on a %s tensor: no error", method, name)
					}
				case failure:
					if r.IsNil() {
						t.Errorf("%s on a %s tensor: no error", method, name)
					}
				}
			}
		}
	}
}

func TestInPlaceFailureLeavesTheTarget(t *testing.T) {
	x := floats(t, []float32{1, 2, 3})
	if x.Add_(floats(t, []float32{1, 2})).Err() == nil {
		t.Fatal("no error")
	}
	if x.Add_(x.MatMul(nil)).Err() == nil {
		t.Fatal("no error")
	}
	if err := x.Err(); err != nil {
		t.Fatal(err)
	}
	if got := x.Add_(x); got != x {
		t.Fatalf("an in-place operator returned %v", got)
	}
	wantValues(t, x, 2, 4, 6)
}

func TestCloseIsIdempotent(t *testing.T) {
	before := settled()
	x, err := torch.Ones(cuda.CPU, torch.Float32, 2)
	if err != nil {
		t.Fatal(err)
	}
	marked := x.NoGrad()
	for range 3 {
		if err := x.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := marked.Add(marked).Err(); !errors.Is(err, torch.ErrClosed) {
		t.Errorf("the marked handle of a closed tensor: %v", err)
	}
	if live := torch.LiveTensors(); live != before {
		t.Errorf("%d references more than before", live-before)
	}
	if x.Shape() != nil || x.DType() != -1 || x.Device() != cuda.CPU || x.Elements() != 0 {
		t.Error("a closed tensor has a shape")
	}
}

// Goroutines use a tensor while another closes it: each use gives the value or ErrClosed, and the
// reference is freed once. Run with -race, and under the address sanitizer, this is the proof of
// the handle's counting.
func TestCloseRacesWithOperators(t *testing.T) {
	for _, scoped := range []bool{false, true} {
		t.Run(fmt.Sprintf("scoped=%v", scoped), func(t *testing.T) {
			before := settled()
			y := floats(t, []float32{1, 2, 3, 4})
			for range 50 {
				x, err := torch.Ones(cuda.CPU, torch.Float32, 4)
				if err != nil {
					t.Fatal(err)
				}
				stop := x.Close
				if scoped {
					s := torch.NewScope("race")
					x = s.Own(x)
					stop = s.Close
				}
				var wg sync.WaitGroup
				start := make(chan struct{})
				for range 4 {
					wg.Go(func() {
						<-start
						for {
							z := x.Add(y)
							if err := z.Err(); err != nil {
								if !errors.Is(err, torch.ErrClosed) {
									t.Error(err)
								}
								return
							}
							v, err := z.Float32s()
							if err != nil {
								if !errors.Is(err, torch.ErrClosed) { // its scope may have ended meanwhile
									t.Error(err)
								}
							} else if v[3] != 5 {
								t.Errorf("got %v", v)
							}
							z.Close()
						}
					})
				}
				wg.Go(func() {
					<-start
					runtime.Gosched()
					stop()
				})
				close(start)
				wg.Wait()
			}
			y.Close()
			if live := torch.LiveTensors(); live != before {
				t.Errorf("%d references more than before", live-before)
			}
		})
	}
}

// collect runs the garbage collector until done, or long enough to say that it will not be.
func collect(done func() bool) bool {
	for range 1000 {
		if done() {
			return true
		}
		runtime.GC()
		runtime.Gosched()
	}
	return done()
}

// settled frees what earlier tests left to the garbage collector and returns how many references
// there are.
func settled() int64 {
	last, same := torch.LiveTensors(), 0
	for same < 3 {
		ran := make(chan struct{})
		runtime.AddCleanup(new(*int), func(ran chan struct{}) { close(ran) }, ran)
		runtime.GC()
		<-ran // the collector's cleanups are being run
		runtime.Gosched()
		if n := torch.LiveTensors(); n == last {
			same++
		} else {
			last, same = n, 0
		}
	}
	return last
}

func TestGarbageCollectorIsTheNet(t *testing.T) {
	before, caught := settled(), torch.Caught()
	func() {
		for range 10 {
			if _, err := torch.Ones(cuda.CPU, torch.Float32, 2); err != nil {
				t.Fatal(err)
			}
		}
		s := torch.NewScope("forgotten")
		x, err := torch.Ones(cuda.CPU, torch.Float32, 2)
		if err != nil {
			t.Fatal(err)
		}
		x = s.Own(x)
		for range 4 {
			x = x.Add(x)
		}
		x.Close()
	}()
	if !collect(func() bool { return torch.LiveTensors() == before }) {
		t.Errorf("%d references are left", torch.LiveTensors()-before)
	}
	if got := torch.Caught() - caught; got != 14 {
		t.Errorf("caught %d, want the 10 without a scope and the 4 open ones of the scope", got)
	}
}

// A tensor keeps its scope alive: a program that dropped the Scope itself goes on.
func TestReachableTensorKeepsItsScope(t *testing.T) {
	x := floats(t, []float32{1, 2}).In(torch.NewScope("dropped"))
	for range 5 {
		runtime.GC()
	}
	wantValues(t, x.Add(x), 2, 4)
	runtime.KeepAlive(x)
}

func TestScope(t *testing.T) {
	old, young := torch.NewScope("old"), torch.NewScope("young")
	defer old.Close()
	w := floats(t, []float32{1, 2})
	a, b := w.In(old), w.In(young)
	for name, c := range map[string]struct {
		x    *torch.Tensor
		want *torch.Scope
	}{
		"none with none":     {w.Add(w), nil},
		"none with old":      {w.Add(a), old},
		"old with none":      {a.Add(w), old},
		"old with young":     {a.Add(b), young},
		"young with old":     {b.Add(a), young},
		"in a list":          {torch.Cat([]*torch.Tensor{w, b, a}, 0), young},
		"marked":             {a.NoGrad().Mul(b), young},
		"optional operand":   {w.Reshape(1, 2).Linear(w.Reshape(1, 2), a.Sum().Reshape(1)), old},
		"kept":               {b.Keep(), nil},
		"kept, then used":    {b.Keep().Add(a), old},
		"in the other scope": {b.In(old), old},
		"a second result":    {func() *torch.Tensor { _, i := b.MaxDim(0, false); return i }(), young},
	} {
		if err := c.x.Err(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got := c.x.Scope(); got != c.want {
			t.Errorf("%s: joined %q, want %q", name, got.Name(), c.want.Name())
		}
		if c.x.Scope() == nil {
			c.x.Close()
		}
	}
	kept, sum := b.Keep(), b.Sum()
	defer kept.Close()
	owned := young.Own(floats(t, []float32{3}))
	if young.Len() < 3 {
		t.Errorf("the scope owns %d", young.Len())
	}
	for range 2 {
		if err := young.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if young.Len() != 0 {
		t.Errorf("the closed scope owns %d", young.Len())
	}
	wantValues(t, kept, 1, 2)
	wantValues(t, a, 1, 2)
	for _, x := range []*torch.Tensor{b, sum, owned, b.NoGrad(), young.Own(floats(t, []float32{1}))} {
		if _, err := x.Float32s(); !errors.Is(err, torch.ErrClosed) || !strings.Contains(err.Error(), `"young"`) {
			t.Errorf("after the scope: %v", err)
		}
	}
	if err := a.Add(b).Err(); !errors.Is(err, torch.ErrClosed) {
		t.Errorf("with an operand of the ended scope: %v", err)
	}
}

func TestScopeFreesEverything(t *testing.T) {
	before := settled()
	s := torch.NewScope("many")
	x, err := torch.Ones(cuda.CPU, torch.Float32, 2)
	if err != nil {
		t.Fatal(err)
	}
	x = s.Own(x)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			y := x
			for i := range 200 {
				z := y.Add(x)
				if i%3 == 0 && y != x {
					y.Close() // before the scope does
				}
				y = z
			}
			if err := y.Err(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got := torch.LiveTensors() - before; got != int64(s.Len()) || got < 8*100 {
		t.Errorf("%d references, %d in the scope", got, s.Len())
	}
	s.Close()
	if live := torch.LiveTensors(); live != before {
		t.Errorf("%d references are left", live-before)
	}
}

// A scope that lives long does not grow when its tensors are closed one by one.
func TestLongScope(t *testing.T) {
	s := torch.NewScope("long")
	defer s.Close()
	x := floats(t, []float32{1}).In(s)
	before := settled()
	for range 5000 {
		x.Add(x).Close()
	}
	if live, n := torch.LiveTensors(), s.Len(); live != before || n != 1 {
		t.Errorf("%d references more, %d in the scope", live-before, n)
	}
	wantValues(t, x, 1)
}

// What the package is for: a training loop without a Close holds as much after 10,000 turns as
// after one, and leaves nothing to the garbage collector.
func TestTrainingLoopIsFlat(t *testing.T) {
	w, b := leaf(t, []float32{0.5, -0.5, 0.25, 0.1}, 2, 2), leaf(t, []float32{0, 0}, 2)
	data, target := floats(t, []float32{1, 2, 3, 4, 5, 6}, 3, 2), floats(t, make([]float32, 6), 3, 2)
	settled()
	caught, after := torch.Caught(), int64(0)
	for turn := range 10_000 {
		scope := torch.NewScope("turn")
		x := data.In(scope)
		loss := x.MatMul(w).Add(b).ReLU().MSELoss(target)
		if err := loss.Backward(); err != nil {
			t.Fatal(err)
		}
		for _, p := range []*torch.Tensor{w, b} {
			g := p.In(scope).Grad()
			if err := p.NoGrad().AddScaled_(g, -0.001).Err(); err != nil {
				t.Fatal(err)
			}
		}
		if err := torch.ClearGrads(w, b); err != nil {
			t.Fatal(err)
		}
		scope.Close()
		if turn == 0 {
			after = torch.LiveTensors()
		}
	}
	if live := torch.LiveTensors(); live != after {
		t.Errorf("%d references after one turn, %d after 10,000", after, live)
	}
	runtime.GC()
	if got := torch.Caught(); got != caught {
		t.Errorf("%d tensors were left to the garbage collector", got-caught)
	}
}

func TestBackward(t *testing.T) {
	w := leaf(t, []float32{2, 3})
	x := floats(t, []float32{5, 7})
	if g := w.Grad(); g != nil {
		t.Fatalf("a gradient before backward: %v", g)
	}
	for range 2 {
		if err := w.Mul(x).Sum().Backward(); err != nil {
			t.Fatal(err)
		}
	}
	g := w.Grad()
	defer g.Close()
	wantValues(t, g, 10, 14) // added up
	if err := torch.ClearGrads(w, x); err != nil {
		t.Fatal(err)
	}
	if g := w.Grad(); g != nil {
		t.Fatal("a gradient after ClearGrads")
	}
	if err := w.Mul(x).BackwardWith(torch.BackwardOptions{Gradient: floats(t, []float32{1, 10})}); err != nil {
		t.Fatal(err)
	}
	g = w.Grad()
	defer g.Close()
	wantValues(t, g, 5, 70)
	if err := w.SetGrad(x); err != nil {
		t.Fatal(err)
	}
	g = w.Grad()
	defer g.Close()
	wantValues(t, g, 5, 7)
	if err := w.SetGrad(nil); err != nil || w.Grad() != nil {
		t.Fatalf("SetGrad(nil): %v", err)
	}
	loss := w.Square().Sum()
	if err := loss.BackwardWith(torch.BackwardOptions{RetainGraph: true}); err != nil {
		t.Fatal(err)
	}
	if err := loss.Backward(); err != nil {
		t.Fatal(err)
	}
	if loss.Backward() == nil {
		t.Fatal("a third backward over a freed graph")
	}
}

// Autograd has its own references: closing what forward computed does not disturb backward.
func TestScopeEndsBetweenForwardAndBackward(t *testing.T) {
	w := leaf(t, []float32{2, 3})
	scope := torch.NewScope("forward")
	loss := w.In(scope).Square().Exp().Log().Sum().Keep() // d/dw = 2w
	defer loss.Close()
	scope.Close()
	if err := loss.Backward(); err != nil {
		t.Fatal(err)
	}
	g := w.Grad()
	defer g.Close()
	wantValues(t, g, 4, 6)
}

func TestNoGradTravelsWithTheData(t *testing.T) {
	w, b := leaf(t, []float32{1, 2, 3, 4}, 2, 2), leaf(t, []float32{1, 1})
	x := floats(t, []float32{1, 0}, 1, 2)
	if y := x.Linear(w, b); !y.RequiresGrad() {
		t.Fatal("nothing was recorded without the mark")
	}
	marked := x.NoGrad()
	y := marked.Linear(w, b)
	for name, z := range map[string]*torch.Tensor{
		"result": y, "result's result": y.Mul(w), "list": torch.Cat([]*torch.Tensor{b, y.Reshape(2)}, 0), "kept": y.Keep(), "parameter": w.NoGrad(),
		"both results": func() *torch.Tensor { v, _ := y.Add(b).MaxDim(1, false); return v.Add(w) }(),
	} {
		if err := z.Err(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if z.RequiresGrad() {
			t.Errorf("%s requires gradients", name)
		}
	}
	if err := y.Sum().Backward(); err == nil {
		t.Error("backward through what was not recorded")
	}
	if !w.RequiresGrad() {
		t.Error("the parameter itself lost its gradients")
	}
	// In place: a leaf may be changed under the mark, whichever operand has it, and the mark
	// travels on.
	step := floats(t, []float32{1, 1})
	if err := b.Sub_(step).Err(); err == nil {
		t.Error("a leaf was changed in place while recording")
	}
	if err := b.NoGrad().Sub_(step).Err(); err != nil {
		t.Error(err)
	}
	got := b.Sub_(step.NoGrad()).MulScalar_(2)
	if err := got.Err(); err != nil {
		t.Error(err)
	}
	wantValues(t, b, -2, -2)
	if !b.RequiresGrad() || got.RequiresGrad() {
		t.Error("the mark is not where it belongs")
	}
	if err := x.Linear(w, b).Sum().Backward(); err != nil {
		t.Fatal(err)
	}
}

func TestConcurrentBackward(t *testing.T) {
	x := floats(t, []float32{1, 2, 3, 4}, 2, 2)
	var wg sync.WaitGroup
	for i := range 8 {
		w := leaf(t, []float32{float32(i), 1, 1, float32(i)}, 2, 2)
		wg.Go(func() {
			for range 100 {
				s := torch.NewScope("turn")
				if err := x.In(s).MatMul(w).Sum().Backward(); err != nil {
					t.Error(err)
				}
				s.Close()
			}
			g := w.Grad()
			defer g.Close()
			v, err := g.Float32s()
			if err != nil || !reflect.DeepEqual(v, []float32{400, 400, 600, 600}) {
				t.Errorf("got %v, %v", v, err)
			}
		})
	}
	wg.Wait()
}

func TestCreateAndRead(t *testing.T) {
	for _, d := range []torch.DType{torch.Uint8, torch.Int8, torch.Int16, torch.Int32, torch.Int64, torch.Float16, torch.Float32, torch.Float64, torch.Bool, torch.BFloat16} {
		t.Run(d.String(), func(t *testing.T) {
			x, err := torch.Ones(cuda.CPU, d, 2, 3)
			must(t, x, err)
			if x.DType() != d || !reflect.DeepEqual(x.Shape(), []int64{2, 3}) || x.Device() != cuda.CPU || x.Elements() != 6 {
				t.Errorf("got %v", x)
			}
			wantValues(t, x, 1, 1, 1, 1, 1, 1)
			b, err := x.Bytes()
			if err != nil || len(b) != 6*d.Size() {
				t.Errorf("%d bytes, %v", len(b), err)
			}
			v, err := x.Sum().Float64()
			if err != nil || v != 6 {
				t.Errorf("sum %v, %v", v, err)
			}
		})
	}
	spec := torch.Spec{Name: "images", DType: torch.Float32, Shape: []int64{3, 4, 5}, MemoryFormat: torch.ChannelsLast}
	x, err := torch.EmptySpec(cuda.CPU, spec, 2)
	must(t, x, err)
	if !reflect.DeepEqual(x.Shape(), []int64{2, 3, 4, 5}) || !x.IsContiguous(torch.ChannelsLast) || x.IsContiguous(torch.Contiguous) || spec.Bytes() != 240 {
		t.Errorf("got %v %v", x.Shape(), x.Strides())
	}
	scalar, err := torch.Full(cuda.CPU, torch.Int64, 41)
	must(t, scalar, err)
	if v, err := scalar.AddInt(1).Int64(); v != 42 || err != nil || scalar.AddInt(1).DType() != torch.Int64 || len(scalar.Shape()) != 0 {
		t.Errorf("got %v, %v", v, err)
	}
	r, err := torch.Arange(4)
	if got, err := must(t, r, err).Int64s(); err != nil || !reflect.DeepEqual(got, []int64{0, 1, 2, 3}) {
		t.Errorf("got %v, %v", got, err)
	}
	u, err := torch.FromBytes([]byte{1, 2, 255})
	if got, err := must(t, u, err).Int64s(); err != nil || !reflect.DeepEqual(got, []int64{1, 2, 255}) {
		t.Errorf("got %v, %v", got, err)
	}
	empty := floats(t, nil, 0, 3)
	if got, err := empty.Float32s(); err != nil || len(got) != 0 {
		t.Errorf("got %v, %v", got, err)
	}
	transposed := floats(t, []float32{1, 2, 3, 4, 5, 6}, 2, 3).T()
	wantValues(t, transposed, 1, 4, 2, 5, 3, 6)
	if _, err := transposed.Bytes(); err == nil {
		t.Error("the memory of a transposed tensor")
	}
}

func TestRandomIsSeeded(t *testing.T) {
	draw := func() []float32 {
		if err := torch.ManualSeed(3); err != nil {
			t.Fatal(err)
		}
		a, err := torch.Rand(cuda.CPU, torch.Float32, 3)
		must(t, a, err)
		b, err := torch.Randn(cuda.CPU, torch.Float32, 3)
		must(t, b, err)
		v, err := torch.Cat([]*torch.Tensor{a, b}, 0).Float32s()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	if a, b := draw(), draw(); !reflect.DeepEqual(a, b) {
		t.Errorf("%v and %v", a, b)
	}
}

func TestFromMemory(t *testing.T) {
	p, err := cuda.NewPinned(16)
	if errors.Is(err, cuda.ErrNoDevice) {
		t.Skip("no pinned memory without a GPU")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	x, err := torch.FromMemory(p.Bytes(), torch.Int32, 4)
	must(t, x, err)
	p.Bytes()[4] = 7
	if got, err := x.Int64s(); err != nil || !reflect.DeepEqual(got, []int64{0, 7, 0, 0}) {
		t.Errorf("got %v, %v", got, err)
	}
	if _, err := torch.FromMemory(p.Bytes(), torch.Int32, 5); err == nil {
		t.Error("more elements than memory")
	}
}

func TestCopyFrom(t *testing.T) {
	w := leaf(t, []float32{0, 0, 0, 0}, 2, 2)
	if err := w.CopyFrom(ints(t, []int64{1, 2}), torch.CopyOptions{}); err != nil {
		t.Fatal(err)
	}
	wantValues(t, w, 1, 2, 1, 2)
	if !w.RequiresGrad() || w.CopyFrom(ints(t, []int64{1, 2, 3}), torch.CopyOptions{}) == nil || w.CopyFrom(nil, torch.CopyOptions{}) == nil {
		t.Error("the leaf changed, or a copy of another shape passed")
	}
}

func TestSetData(t *testing.T) {
	w := leaf(t, []float32{1, 2})
	if err := w.SetData(floats(t, []float32{3, 4, 5})); err != nil {
		t.Fatal(err)
	}
	if err := w.Square().Sum().Backward(); err != nil {
		t.Fatal(err)
	}
	g := w.Grad()
	defer g.Close()
	wantValues(t, g, 6, 8, 10)
}

func TestNormalizeImages(t *testing.T) {
	src, err := torch.FromBytes([]byte{0, 51, 102, 255, 204, 153}, 1, 1, 2, 3)
	must(t, src, err)
	mean, std := []float32{0, 0.2, 0.4}, []float32{1, 0.5, 0.25}
	for _, f := range []torch.MemoryFormat{torch.Contiguous, torch.ChannelsLast} {
		dst, err := torch.EmptySpec(cuda.CPU, torch.Spec{DType: torch.Float32, Shape: []int64{3, 1, 2}, MemoryFormat: f}, 1)
		must(t, dst, err)
		if err := torch.NormalizeImages(dst, src, mean, std); err != nil {
			t.Fatal(err)
		}
		wantValues(t, dst, 0, 1, 0, 1.2, 0, 0.8)
	}
	if err := torch.NormalizeImages(src, src, mean, std); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("got %v", err)
	}
}

func TestString(t *testing.T) {
	big, err := torch.Ones(cuda.CPU, torch.Float32, 1000, 1000)
	must(t, big, err)
	none, err := torch.Ones(cuda.CPU, torch.Float32, 0)
	must(t, none, err)
	scalar, err := torch.Full(cuda.CPU, torch.Float32, 2.5)
	must(t, scalar, err)
	scope := torch.NewScope("s")
	scope.Close()
	before := settled()
	for _, c := range []struct {
		x    *torch.Tensor
		want string
	}{
		{floats(t, []float32{1, 2, 3, 4, 5, 6}, 2, 3), "float32[2 3] cpu: 1 2 3 4 5 6"},
		{floats(t, []float32{1, 2, 3, 4, 5, 6, 7, 8, 9}, 3, 3), "float32[3 3] cpu: 1 2 3 4 5 6 ..."},
		{leaf(t, []float32{0.123456789}), "float32[1] cpu: 0.12346"},
		{ints(t, []int64{7}), "int64[1] cpu: 7"},
		{scalar, "float32[] cpu: 2.5"},
		{none, "float32[0] cpu"},
		{big, "float32[1000 1000] cpu: 1 1 1 1 1 1 ..."},
		{nil, "torch.Tensor: torch: invalid argument: the tensor is nil"},
	} {
		if got := c.x.String(); got != c.want {
			t.Errorf("got %q, want %q", got, c.want)
		}
	}
	if live := torch.LiveTensors() - before; live != 4 { // the cases' own
		t.Errorf("printing left %d references", live-4)
	}
	if got := floats(t, []float32{1}).In(scope).String(); !strings.Contains(got, "has ended") {
		t.Errorf("got %q", got)
	}
}

func TestLists(t *testing.T) {
	s := torch.NewScope("lists")
	defer s.Close()
	x := floats(t, []float32{1, 2, 3, 4, 5}).In(s)
	split, err := x.Split(2, 0)
	if err != nil || len(split) != 3 || split[0].Scope() != s {
		t.Fatalf("Split: %v, %v", split, err)
	}
	wantValues(t, split[1], 3, 4)
	wantValues(t, split[2], 5)
	chunks, err := x.Chunk(2, 0)
	if err != nil || len(chunks) != 2 {
		t.Fatalf("Chunk: %v, %v", chunks, err)
	}
	wantValues(t, chunks[0], 1, 2, 3)
	rows, err := x.Unbind(0)
	if err != nil || len(rows) != 5 {
		t.Fatalf("Unbind: %v, %v", rows, err)
	}
	rows[3].MulScalar_(10) // a view
	wantValues(t, x, 1, 2, 3, 40, 5)
	norms, err := torch.ForeachNorm([]*torch.Tensor{x, split[0]}, 1)
	if err != nil || len(norms) != 2 {
		t.Fatalf("ForeachNorm: %v, %v", norms, err)
	}
	wantValues(t, norms[0], 51)
	wantValues(t, norms[1], 3)
	more, err := torch.ForeachMulTensor(split[:2], norms[1])
	if err != nil || len(more) != 2 {
		t.Fatalf("ForeachMulTensor: %v, %v", more, err)
	}
	wantValues(t, more[0], 3, 6)
	if none, err := torch.ForeachNorm(nil, 2); err == nil && len(none) != 0 {
		t.Errorf("the norms of nothing: %v", none)
	}
	var e *torch.Error
	if parts, err := x.Split(0, 7); !errors.As(err, &e) || e.Op != "Split" || parts != nil {
		t.Errorf("Split of dimension 7: %v, %v", parts, err)
	}
	if _, err := torch.Fail("before", cuda.ErrInvalidArgument).Unbind(0); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("of a failed tensor: %v", err)
	}
}
