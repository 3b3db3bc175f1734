package main

import (
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"text/tabwriter"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

// distShardedRow is one way for all ranks to train a GPT-2 with AdamW.
type distShardedRow struct {
	Model   string             `json:"model"`
	Batch   int                `json:"batch"`   // sequences per rank
	Context int                `json:"context"` // tokens per sequence
	Way     string             `json:"way"`     // one of shardedWays
	Mode    string             `json:"mode"`    // "eager" or "graph"
	Go      *distShardedFigure `json:"go"`
	PyTorch *distShardedFigure `json:"pytorch"`
}

// distShardedFigure holds the time per step, and on a GPU the memory of the rank that uses most.
type distShardedFigure struct {
	StepMS    float64 `json:"step_ms"`
	HeldBytes int64   `json:"held_bytes,omitempty"` // allocated between steps
	PeakBytes int64   `json:"peak_bytes,omitempty"` // allocated during a step, outside of graphs
	// ReservedBytes is LibTorch's peak of reserved device memory, including graphs.
	ReservedBytes int64 `json:"reserved_bytes,omitempty"`
}

// shardedWays lists what ranks shard: nothing, optimizer state, also gradients, also parameters.
// pytorch_train.py uses the same names.
var shardedWays = []string{"DataParallel", "ZeroRedundancyOptimizer", "FullyShardedDataParallel, stage 2",
	"FullyShardedDataParallel, stage 3",
	"FullyShardedDataParallel, stage 3, gathered in bfloat16"}

// tinyGPT is a GPT-2 for tests. Package models does not know its name.
const tinyGPT = "gpt2-tiny"

// newGPT makes the named GPT-2 on the CPU.
func newGPT(name string) (*models.GPT2, error) {
	if name == tinyGPT {
		return models.NewGPT2(models.GPT2Options{Layers: 2, Heads: 2, Width: 64})
	}
	net, err := models.ByName(name, models.Options{})
	if err != nil {
		return nil, err
	}
	gpt, ok := net.(*models.GPT2)
	if !ok {
		nn.Close(net)
		return nil, fmt.Errorf("%s is no GPT-2", name)
	}
	return gpt, nil
}

// gptEnds is the first and the last block of a GPT-2. One shared parameter turns tokens into
// vectors, and vectors into logits.
type gptEnds struct{ gpt *models.GPT2 }

func (e gptEnds) Forward(x *torch.Tensor) *torch.Tensor {
	if x.DType() == torch.Int64 {
		return e.gpt.Embed(x)
	}
	return e.gpt.Logits(x)
}

// Parts returns the parts of the transformer outside its layers.
func (e gptEnds) Parts() nn.Parts {
	var parts nn.Parts
	for _, c := range e.gpt.Transformer().Parts().Modules {
		if !strings.HasPrefix(c.Name, "h.") {
			parts.Modules = append(parts.Modules, c)
		}
	}
	return parts
}

// shardedGPT returns the GPT-2 as a chain of blocks.
func shardedGPT(gpt *models.GPT2) nn.Module {
	ends := distributed.NewShardedBlock(gptEnds{gpt})
	chain := []nn.Module{ends}
	for _, b := range gpt.Blocks() {
		chain = append(chain, distributed.NewShardedBlock(b))
	}
	return nn.NewSequential(append(chain, ends)...)
}

// shardedTrainee is a trainee that all ranks train together.
type shardedTrainee struct {
	trainee
	parallel *distributed.DataParallel             // nil if the parameters are sharded
	sharded  *distributed.FullyShardedDataParallel // nil if the parameters are not sharded
}

func (b *distBench) newShardedTrainee(model, way, mode string) (_ *shardedTrainee, err error) {
	t := &shardedTrainee{trainee: trainee{b: &b.trainBench, model: model}}
	defer func() {
		if err != nil {
			t.end()
		}
	}()
	gpt, err := newGPT(model)
	if err != nil {
		return nil, err
	}
	t.net = gpt
	adamW := func(params []*torch.Tensor) (optim.Optimizer, error) {
		return optim.NewAdamW(params, optim.AdamWOptions{LR: 1e-4, Capturable: true})
	}
	o := b.stepperOptions(model)
	o.Graph = mode == "graph"
	if stage, ok := strings.CutPrefix(way, "FullyShardedDataParallel, "); ok {
		options := distributed.FullyShardedOptions{KeepAfterForward: stage == "stage 2"}
		if strings.HasSuffix(stage, "bfloat16") {
			options.GatherDType = torch.BFloat16
			o.Autocast = torch.BFloat16 // also on the CPU
		}
		if t.sharded, err = distributed.NewFullyShardedDataParallel(b.World, shardedGPT(gpt), options); err != nil {
			return nil, err
		}
		o.Model, o.Backward = t.sharded, t.sharded.Around
		if t.opt, err = t.sharded.NewOptimizer(adamW); err != nil {
			return nil, err
		}
	} else {
		if err = nn.To(gpt, b.device); err != nil {
			return nil, err
		}
		if t.parallel, err = distributed.NewDataParallel(b.World, gpt, distributed.DataParallelOptions{}); err != nil {
			return nil, err
		}
		o.Model, o.Backward = gpt, t.parallel.Around
		if way == "ZeroRedundancyOptimizer" {
			t.opt, err = distributed.NewZeroRedundancyOptimizer(b.World, nn.Parameters(gpt), adamW)
		} else {
			t.opt, err = optim.NewAdamW(nn.Parameters(gpt), optim.AdamWOptions{LR: 1e-4, Capturable: true})
		}
		if err != nil {
			return nil, err
		}
	}
	o.Optimizer = t.opt
	t.step, err = train.NewStepper(o)
	return t, err
}

// end frees everything.
func (t *shardedTrainee) end() error {
	var errs []error
	if t.step != nil {
		errs = append(errs, t.step.Close())
	}
	if t.opt != nil {
		errs, t.opt = append(errs, t.opt.Close()), nil
	}
	if t.parallel != nil {
		errs = append(errs, t.parallel.Close())
	}
	if t.sharded != nil {
		errs = append(errs, t.sharded.Close())
	}
	return errors.Join(append(errs, t.close())...)
}

// measureSharded adds the rows of the networks in names, a comma-separated list.
func (b *distBench) measureSharded(names string, batch int, r *distReport) error {
	if names == "" {
		return nil
	}
	for model := range strings.SplitSeq(names, ",") {
		for _, mode := range b.modes() {
			for _, way := range shardedWays {
				row := &distShardedRow{Model: model, Batch: batch, Context: b.context, Way: way, Mode: mode}
				var err error
				if row.Go, err = b.shardedStep(model, batch, way, mode); err != nil {
					return fmt.Errorf("distributed: %s, %s, %s: %w", model, way, mode, err)
				}
				r.Sharded = append(r.Sharded, row)
			}
		}
	}
	return nil
}

func (b *distBench) shardedStep(model string, batch int, way, mode string) (_ *distShardedFigure, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	t, err := b.newShardedTrainee(model, way, mode)
	if err != nil {
		return nil, err
	}
	scope := torch.NewScope("distributed")
	defer func() { err = errors.Join(err, scope.Close(), t.end()) }()
	input, target, err := t.data(scope, batch, b.size, b.context)
	if err != nil {
		return nil, err
	}
	step := t.call(input, target)
	for range 5 {
		if err := step(); err != nil {
			return nil, err
		}
	}
	if b.device != cuda.CPU {
		if err := errors.Join(b.wait(), b.device.ResetPeak()); err != nil {
			return nil, err
		}
	}
	s, err := b.Best(b.shardedSteps, step)
	if err != nil {
		return nil, err
	}
	if stats := t.step.Stats(); mode == "graph" && stats.Replays < int64(b.shardedSteps*b.Rounds) {
		return nil, fmt.Errorf("%d of %d steps replayed a graph", stats.Replays, stats.Steps)
	}
	f := &distShardedFigure{StepMS: s * 1e3}
	if b.device == cuda.CPU {
		return f, nil
	}
	m, err := b.device.Memory()
	if err != nil {
		return nil, err
	}
	all, err := distributed.AllGatherObject(b.World, [3]int64{m.Allocated, m.PeakAllocated, m.PeakReserved})
	for _, m := range all {
		f.HeldBytes, f.PeakBytes, f.ReservedBytes = max(f.HeldBytes, m[0]), max(f.PeakBytes,
			m[1]), max(f.ReservedBytes, m[2])
	}
	return f, err
}

// shardedTable writes the rows.
func (r *distReport) shardedTable(out io.Writer) error {
	if len(r.Sharded) == 0 {
		return nil
	}
	fmt.Fprintf(out, "\n%d sequences of %d tokens a rank, AdamW; GiB: what the rank with most has "+
		"allocated between steps, at the maximum without the memory of graphs, and reserved\n\n",
		r.Sharded[0].Batch, r.Sharded[0].Context)
	w := printable.NewTable(out, tabwriter.AlignRight)
	fmt.Fprintln(w, "model\tway\tmode\tstep, ms\theld, GiB\tpeak, GiB\treserved\tPyTorch, ms\theld\tpeak\treserved\t")
	for _, row := range r.Sharded {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t\n", row.Model, row.Way, row.Mode, row.Go, row.PyTorch)
	}
	return w.Flush()
}

func (f *distShardedFigure) String() string {
	switch {
	case f == nil:
		return "-\t-\t-\t-"
	case f.PeakBytes == 0:
		return fmt.Sprintf("%.2f\t-\t-\t-", f.StepMS)
	}
	const gib = 1 << 30
	return fmt.Sprintf("%.2f\t%.2f\t%.2f\t%.2f", f.StepMS, float64(f.HeldBytes)/gib,
		float64(f.PeakBytes)/gib, float64(f.ReservedBytes)/gib)
}
