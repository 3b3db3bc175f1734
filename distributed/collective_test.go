package distributed

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// quick holds the options of ranks that are goroutines of one process and so share its cores.
var quick = Options{Timeout: 2 * time.Minute, Silence: time.Minute}

func expectValues(what string, t *torch.Tensor, want ...float64) error {
	got, err := t.Float64s()
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if !slices.Equal(got, want) {
		return fmt.Errorf("%s: %v, want %v", what, got, want)
	}
	return nil
}

// exercise runs every collective once on tensors of the device.
func exercise(g *Group, device cuda.Device) error {
	n, r := int64(g.Size()), float64(g.Rank())
	var errs []error
	try := func(what string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", what, err))
		}
	}
	sum := float64(n * (n - 1) / 2)
	ranks := make([]float64, n)
	for i := range ranks {
		ranks[i] = float64(i)
	}
	for op, want := range []float64{Sum: sum, Average: sum / float64(n), Product: 0, Min: 0, Max: float64(n - 1)} {
		op := Op(op)
		x := full(device, torch.Float64, r, 3)
		try("AllReduce", g.AllReduce(x, op))
		try("AllReduce", expectValues(op.String(), x, want, want, want))
		y := full(device, torch.Float64, r, 2)
		w, err := g.AllReduceAsync(y, op)
		try("AllReduceAsync", err)
		if err == nil {
			try("Wait", w.Wait())
			try("AllReduceAsync", expectValues(op.String(), y, want, want))
			try("Close", w.Close())
		}
		x.Close()
		y.Close()
	}
	for root := range g.Size() {
		x := full(device, torch.Float64, r, 2)
		try("Broadcast", g.Broadcast(x, root))
		try("Broadcast", expectValues("broadcast", x, float64(root), float64(root)))
		x.Close()
	}
	in := full(device, torch.Float64, r, 1)
	out := full(device, torch.Float64, -1, n)
	try("AllGather", g.AllGather(out, in))
	try("AllGather", expectValues("gathered", out, ranks...))

	part := full(device, torch.Float64, -1, 1)
	try("ReduceScatter", g.ReduceScatter(part, out, Sum))
	try("ReduceScatter", expectValues("part", part, r*float64(n)))
	try("ReduceScatter", expectValues("the input of ReduceScatter", out, ranks...))

	to := full(device, torch.Float64, r, n)
	try("AllToAll", g.AllToAll(out, to, AllToAllRows{}))
	try("AllToAll", expectValues("exchanged", out, ranks...))
	// Rank r sends i + 1 rows to rank i.
	rows := AllToAllRows{}
	var want []float64
	for i := range n {
		rows.In = append(rows.In, i+1)
		rows.Out = append(rows.Out, int64(r)+1)
		for range int(r) + 1 {
			want = append(want, float64(i))
		}
	}
	from := full(device, torch.Float64, r, n*(n+1)/2)
	ragged := full(device, torch.Float64, -1, n*(int64(r)+1))
	try("AllToAll", g.AllToAll(ragged, from, rows))
	try("AllToAll", expectValues("exchanged by rows", ragged, want...))

	if n > 1 {
		next, before := (g.Rank()+1)%g.Size(), (g.Rank()+g.Size()-1)%g.Size()
		mine, theirs := full(device, torch.Float64, r, 1), full(device, torch.Float64, -1, 1)
		if g.Rank() == 0 { // one rank must receive first
			try("Receive", g.Receive(theirs, before))
			try("Send", g.Send(mine, next))
		} else {
			try("Send", g.Send(mine, next))
			try("Receive", g.Receive(theirs, before))
		}
		try("Receive", expectValues("received", theirs, float64(before)))
		mine.Close()
		theirs.Close()
	}
	try("Barrier", g.Barrier())
	for _, x := range []*torch.Tensor{in, out, part, to, from, ragged} {
		x.Close()
	}
	return errors.Join(errs...)
}

func TestCollectives(t *testing.T) {
	for _, n := range []int{1, 2, 3} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			requireNone(t, inProcess(t, n, quick, func(g *Group) error { return exercise(g, cuda.CPU) }))
		})
	}
}

func TestOneProcessNeedsNothing(t *testing.T) {
	for _, name := range []string{"RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"} {
		t.Setenv(name, "")
	}
	g, err := Init(t.Context(), Options{CPU: true})
	if err != nil {
		t.Fatal(err)
	}
	if g.Rank() != 0 || g.Size() != 1 || g.Device() != cuda.CPU {
		t.Errorf("rank %d of %d on %v", g.Rank(), g.Size(), g.Device())
	}
	if err := exercise(g, cuda.CPU); err != nil {
		t.Error(err)
	}
	if err := g.Close(); err != nil {
		t.Error(err)
	}
	if err := g.Barrier(); !errors.Is(err, ErrClosed) {
		t.Errorf("a barrier after Close: %v, want the error %v", err, ErrClosed)
	}
}

func TestSubgroups(t *testing.T) {
	requireNone(t, inProcess(t, 3, quick, func(g *Group) error {
		sub, err := g.Subgroup(2, 0)
		if err != nil {
			return err
		}
		if g.Rank() == 1 {
			if sub.Rank() != -1 || !errors.Is(sub.Barrier(), ErrNotMember) {
				return fmt.Errorf("rank %d, %v", sub.Rank(), sub.Barrier())
			}
			return nil
		}
		if sub.Rank() != map[int]int{2: 0, 0: 1}[g.Rank()] || !slices.Equal(sub.Ranks(), []int{2, 0}) {
			return fmt.Errorf("rank %d of %v", sub.Rank(), sub.Ranks())
		}
		return exercise(sub, cuda.CPU)
	}))
}

func TestObjects(t *testing.T) {
	type object struct {
		Name string
		List []int64
	}
	requireNone(t, inProcess(t, 3, quick, func(g *Group) error {
		all, err := g.AllGatherBytes([]byte(strings.Repeat("x", 2*g.Rank())))
		if err != nil {
			return err
		}
		for r, b := range all {
			if string(b) != strings.Repeat("x", 2*r) {
				return fmt.Errorf("rank %d: %q", r, b)
			}
		}
		one, err := g.BroadcastBytes([]byte{byte(g.Rank())}, 2)
		if err != nil || !slices.Equal(one, []byte{2}) {
			return fmt.Errorf("%v, %w", one, err)
		}
		if none, err := g.BroadcastBytes(nil, 1); err != nil || len(none) != 0 {
			return fmt.Errorf("%v, %w", none, err)
		}
		objects, err := AllGatherObject(g, object{fmt.Sprint(g.Rank()), []int64{int64(g.Rank()), 1 << 60}})
		if err != nil || objects[1].Name != "1" || objects[2].List[0] != 2 || objects[0].List[1] != 1<<60 {
			return fmt.Errorf("%v, %w", objects, err)
		}
		shared, err := BroadcastObject(g, g.Rank(), 1)
		if err != nil || shared != 1 {
			return fmt.Errorf("%v, %w", shared, err)
		}
		return nil
	}))
}

// A call that every rank refuses has no effect on the group.
func TestRefusedCalls(t *testing.T) {
	requireNone(t, inProcess(t, 2, quick, func(g *Group) error {
		x := full(cuda.CPU, torch.Float64, 1, 2, 3)
		defer x.Close()
		short := full(cuda.CPU, torch.Float64, 1, 5)
		defer short.Close()
		gaps := x.Narrow(1, 0, 2)
		broken := torch.Fail("Broken", errors.New("is broken"))
		for name, refused := range map[string]struct {
			err  error
			says string
		}{
			"an unknown op":           {g.AllReduce(x, Op(9)), "unknown reduction"},
			"an unknown root":         {g.Broadcast(x, 2), "ranks are 0 to 1"},
			"a tensor with gaps":      {g.AllReduce(gaps, Sum), "not dense"},
			"a transposed tensor":     {g.AllGather(x, x.Transpose(0, 1)), "not contiguous"},
			"a gather of other sizes": {g.AllGather(short, x), "size times the elements"},
			"a scatter of others":     {g.ReduceScatter(short, x, Sum), "size times the elements"},
			"an unequal exchange":     {g.AllToAll(short, short, AllToAllRows{}), "cannot share equally"},
			"rows without their sum": {g.AllToAll(short, short,
				AllToAllRows{[]int64{1, 1}, []int64{4, 1}}), "its parts 2"},
			"rows for other ranks": {g.AllToAll(short, short, AllToAllRows{[]int64{5}, []int64{5}}),
				"a number for each rank"},
			"a send to itself":       {g.Send(x, g.Rank()), "two different ranks"},
			"a failed tensor":        {g.AllReduce(broken, Sum), "is broken"},
			"nil":                    {g.AllReduce(nil, Sum), "nil"},
			"an average of integers": {g.AllReduce(full(cuda.CPU, torch.Int64, 1, 1), Average), "floating point"},
		} {
			if refused.err == nil || !strings.Contains(refused.err.Error(), refused.says) {
				return fmt.Errorf("%s: %v, want %q", name, refused.err, refused.says)
			}
		}
		return exercise(g, cuda.CPU)
	}))
}

// A group is closed while another goroutine uses it.
func TestCloseBesideCalls(t *testing.T) {
	for range 5 {
		errs := inProcess(t, 2, quick, func(g *Group) error {
			x := full(cuda.CPU, torch.Float32, 1, 100)
			defer x.Close()
			begun, done := make(chan struct{}), make(chan error, 1)
			go func() {
				for n := 0; ; n++ {
					if err := g.AllReduce(x, Sum); err != nil {
						done <- err
						return
					}
					if n == 3 {
						close(begun)
					}
				}
			}()
			<-begun
			closing := g.Close()
			if err := <-done; !errors.Is(err, ErrClosed) && !errors.Is(err, ErrLeft) {
				return fmt.Errorf("the call: %w", err)
			}
			if closing != nil && !errors.Is(closing, ErrLeft) {
				return fmt.Errorf("Close: %w", closing)
			}
			return g.Close()
		})
		requireNone(t, errs)
	}
}
