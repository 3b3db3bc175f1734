package nn

import (
	"fmt"
	"strings"
	"sync"
	"text/tabwriter"

	"github.com/torchstream/torchstream/torch"
)

// SummaryTable describes the modules of a model.
type SummaryTable struct {
	Rows []SummaryRow // in the order of names in State, containers before their parts
	// Parameters is the number of elements of all parameters; Trainable excludes frozen parameters.
	// A shared tensor counts once, in the first row that has it.
	Parameters, Trainable int64
	Bytes                 int64 // of all parameters and buffers
}

// SummaryRow is one module.
type SummaryRow struct {
	Path       string // "layer2.0.conv1", "" for the model itself
	Kind       string // "Conv2d"
	Output     []int64
	Calls      int   // number of runs; also 0 for a custom module outside a Sequential
	Parameters int64 // elements of the module's direct parameters, without its children's
}

// Summary runs m on the input and returns a table of its modules: output shapes and numbers of
// parameters. Print it with fmt.Println.
//
// The forward pass records no graph for backward. It runs in evaluation mode (see [Eval]), so
// running statistics and random generators do not change. The input has the model's device and the
// shape of a batch; its values do not matter. No other goroutine may run the model at the same
// time.
func Summary(m Module, input *torch.Tensor) (*SummaryTable, error) {
	if m == nil {
		return nil, torch.Fail("nn.Summary", errNoModule).Err()
	}
	if err := Err(m); err != nil {
		return nil, err
	}
	r := &recorder{outputs: map[output]*SummaryRow{}}
	walk("", m, func(_ string, m Module, _ Parts) {
		if l, ok := m.(layered); ok {
			l.base().watch.Store(r)
		}
	})
	defer walk("", m, func(_ string, m Module, _ Parts) {
		if l, ok := m.(layered); ok {
			l.base().watch.Store(nil)
		}
	})
	defer Eval(m)()
	if err := r.run(m, input); err != nil {
		return nil, err
	}
	t := &SummaryTable{}
	t.add(r, "", m, output{}, map[*torch.Tensor]bool{})
	return t, nil
}

// output identifies a module. If the module is a layer, child is "". Otherwise layer is its
// Sequential or Parallel, and child is its name there.
type output struct {
	layer *layer
	child string
}

// recorder collects the outputs of a forward pass.
type recorder struct {
	mu      sync.Mutex
	outputs map[output]*SummaryRow // guarded by mu; only Output and Calls are set
}

func (r *recorder) record(l *layer, child string, shape []int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	row := r.outputs[output{l, child}]
	if row == nil {
		row = &SummaryRow{}
		r.outputs[output{l, child}] = row
	}
	row.Output = shape
	row.Calls++
}

func (r *recorder) run(m Module, input *torch.Tensor) error {
	scope := torch.NewScope("nn.Summary")
	defer scope.Close()
	y := m.Forward(scope.Own(input.Detach()).NoGrad())
	if err := y.Err(); err != nil {
		return err
	}
	if l, ok := m.(layered); !ok {
		r.record(nil, "", y.Shape())
	} else if _, ok := r.outputs[output{l.base(), ""}]; !ok {
		r.record(l.base(), "", y.Shape())
	}
	return nil
}

// add appends the rows of m and of all modules in it. at is the key of m if m is not a layer.
func (t *SummaryTable) add(r *recorder, path string, m Module, at output, seen map[*torch.Tensor]bool) {
	if m == nil {
		return
	}
	var own *layer
	if l, ok := m.(layered); ok {
		own = l.base()
		at = output{own, ""}
	}
	row := SummaryRow{Path: path, Kind: kindOf(m)}
	if ran := r.outputs[at]; ran != nil {
		row.Output, row.Calls = ran.Output, ran.Calls
	}
	parts := m.Parts()
	for _, p := range parts.Parameters {
		n, bytes := count(p.Tensor, seen)
		row.Parameters += n
		t.Parameters += n
		t.Bytes += bytes
		if p.Tensor.RequiresGrad() {
			t.Trainable += n
		}
	}
	for _, p := range parts.Buffers {
		_, bytes := count(p.Tensor, seen)
		t.Bytes += bytes
	}
	t.Rows = append(t.Rows, row)
	for _, c := range parts.Modules {
		name := c.Name
		if path != "" {
			name = path + "." + c.Name
		}
		t.add(r, name, c.Module, output{own, c.Name}, seen)
	}
}

// count returns the elements and bytes of a tensor that is not yet in seen, and adds it to seen.
func count(p *torch.Tensor, seen map[*torch.Tensor]bool) (elements, bytes int64) {
	if seen[p] {
		return 0, 0
	}
	seen[p] = true
	elements = p.Elements()
	return elements, elements * int64(p.DType().Size())
}

// String formats the table.
func (t *SummaryTable) String() string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "layer\ttype\toutput\tparameters")
	for _, r := range t.Rows {
		path, shape, count := r.Path, "-", "-"
		if path == "" {
			path = "(model)"
		}
		if r.Calls > 0 {
			shape = fmt.Sprint(r.Output)
		}
		if r.Calls > 1 {
			shape += fmt.Sprintf(" x%d", r.Calls)
		}
		if r.Parameters > 0 {
			count = thousands(r.Parameters)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", path, r.Kind, shape, count)
	}
	w.Flush()
	fmt.Fprintf(&b, "%s parameters, %s of them trainable; %.1f MiB with buffers",
		thousands(t.Parameters), thousands(t.Trainable), float64(t.Bytes)/(1<<20))
	return b.String()
}

// thousands formats 1234567 as "1,234,567".
func thousands(n int64) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
