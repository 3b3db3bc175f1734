package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/collectives"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/torch"
)

// distReport is the output of distributed.
type distReport struct {
	Device      string             `json:"device"`
	Ranks       int                `json:"ranks"`
	LibTorch    string             `json:"libtorch"`
	Method      string             `json:"method"`
	Collectives []*collectives.Row `json:"collectives"`
	Train       []*distTrainRow    `json:"train"`
	Fed         []*distFedRow      `json:"fed,omitempty"` // with -archive
	// Sharded compares the kinds of state that ranks may shard.
	Sharded []*distShardedRow `json:"sharded,omitempty"`
	// PythonNote says why PyTorch's figures are missing.
	PythonNote string `json:"python_note,omitempty"`
}

// distTrainRow compares ranks that train one model together with ranks that each train a separate
// model.
type distTrainRow struct {
	Model    string  `json:"model"`
	Batch    int     `json:"batch"` // per rank
	Mode     string  `json:"mode"`  // "eager" or "graph"
	Alone    float64 `json:"alone_images_s_each"`
	Together float64 `json:"together_images_s_each"`
	// Linear is the rate together divided by the rate alone.
	Linear  float64      `json:"of_linear"`
	PyTorch *distTorchDP `json:"pytorch,omitempty"`
}

// distTorchDP holds PyTorch's images per second and rank: alone, with default
// DistributedDataParallel, and with static_graph and gradient_as_bucket_view.
type distTorchDP struct {
	Alone        float64 `json:"alone"`
	DDP          float64 `json:"ddp"`
	Static       float64 `json:"ddp_static"`
	Linear       float64 `json:"ddp_of_linear"`
	StaticLinear float64 `json:"ddp_static_of_linear"`
}

// distBench runs the measurements of distributed.
type distBench struct {
	trainBench
	collectives.Bench
	measured []collectives.Collective
	steps    int
	bf16     bool
	// shardedSteps is the number of steps per round of the sharding benchmarks.
	shardedSteps int
	share        bool
}

// benchDistributed measures collectives and data-parallel training. Without a launcher it starts
// the ranks itself. Ranks that a launcher started measure together.
func benchDistributed(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set := cli.Flags("torchstream-lab distributed", "Measures collectives, and training steps of ranks "+
		"that average their gradients beside ranks that do not, and of a GPT-2 whose\n"+
		"optimizer state, gradients and parameters the ranks divide, on data that lie on the device. "+
		"Without a launcher it starts -ranks processes\n"+
		"on this machine, and then those of PyTorch, if a python3 can import its torch.", stderr)
	b := distBench{trainBench: trainBench{memory: fedMemory}}
	// Without a GPU the benchmark takes a minute at most.
	models, batches, mib, size, steps := "resnet50,resnet18", "256,32", 1024, 224, 40
	sharded, sequences, context, shardedSteps := "gpt2-medium", 8, 1024, 10
	if cuda.DeviceCount() == 0 {
		models, batches, mib, size, steps = "resnet18", "8", 16, 64, 5
		sharded, sequences, context, shardedSteps = tinyGPT, 2, 64, 3
	}
	ranks := set.Int("ranks", max(cuda.DeviceCount(), 1), "processes to start")
	asJSON := set.Bool("json", false, "print one JSON object")
	names := set.String("models", models, "the networks; empty for none")
	sizes := set.String("batches", batches, "images in a batch of a rank")
	measured := set.String("collectives", collectives.Names(), "the collectives; empty for none")
	largest := set.Int("mib", mib, "size of the largest collective, in MiB")
	cpu := set.Bool("cpu", false, "measure the CPU and Gloo")
	set.IntVar(&b.size, "size", size, "pixels of an image's side")
	set.IntVar(&b.steps, "steps", steps, "steps of a round")
	set.IntVar(&b.Rounds, "rounds", 3, "rounds, of which the best counts")
	gpts := set.String("sharded", sharded,
		"the GPT-2s whose memory the ranks divide, "+tinyGPT+" for a quick look; empty for none")
	set.IntVar(&sequences, "sequences", sequences, "sequences in a batch of a rank, for a GPT-2")
	set.IntVar(&b.context, "context", context, "tokens of a sequence, for a GPT-2")
	set.IntVar(&b.shardedSteps, "sharded-steps", shardedSteps, "steps of a round, for a GPT-2")
	python := set.String("python", "python3", "the Python whose torch is the peer; empty for none")
	set.StringVar(&b.archive, "archive", "",
		"`FILE` (.tgz, .tar, .zip): feed the first batch size of every network of images from it too")
	set.IntVar(&b.workers, "workers", 0, "with -archive: a rank's goroutines that decode (default: the number of CPUs)")
	decode := set.String("decode", "host",
		"with -archive, where images are decoded: host, device, or auto, which is the device if it can")
	set.BoolVar(&b.share, "share", true, "with -archive: the ranks share the images that they hold in memory")
	set.Int64Var(&b.memory, "memory", fedMemory, "with -archive: `MB` of compressed images; a .tgz that fits in is held in memory")
	set.BoolVar(&b.bf16, "bfloat16", false, "reduce gradients in bfloat16")
	threads := cli.ThreadsOption(set)
	graphs := set.Bool("graphs", true, "on a GPU, measure steps as graphs too")
	if err := cli.Parse(set, args, 0); err != nil {
		return err
	}
	b.noGraphs = !*graphs
	b.NoGraphs = b.noGraphs
	if min(*ranks, *largest, b.steps, b.Rounds, sequences, b.shardedSteps) < 1 {
		return errors.New("distributed: -ranks, -mib, -steps, -rounds, -sequences and -sharded-steps must be 1 or more")
	}
	if err := cli.CheckSize(b.size, 1); err != nil {
		return err
	}
	if b.context < 1 || b.context > 1024 {
		return errors.New("distributed: -context must be from 1 to 1024, the positions of a GPT-2")
	}
	var err error
	if b.measured, err = collectives.Parse(*measured); err != nil {
		return err
	}
	if b.decode, err = cli.ParseDecode(*decode); err != nil {
		return err
	}
	if err := cli.SetThreads(*threads); err != nil {
		return err
	}
	environment, err := distributed.ReadEnvironment(os.Getenv)
	if err != nil {
		return err
	}
	if environment.Launcher == "none" && *ranks > 1 {
		report, err := b.startAll(ctx, *ranks, args, *python, *cpu, stderr)
		if err != nil {
			return err
		}
		return report.write(stdout, *asJSON)
	}
	if b.World, err = distributed.Init(ctx, distributed.Options{CPU: *cpu}); err != nil {
		return err
	}
	report, err := b.measureAll(ctx, *names, *sizes, *largest)
	if err == nil {
		err = b.measureSharded(*gpts, sequences, report)
	}
	if err == nil && b.World.Rank() == 0 {
		err = report.write(stdout, *asJSON)
	}
	return errors.Join(err, b.World.Close())
}

// startAll measures in separate processes, first this program's and then PyTorch's.
func (b *distBench) startAll(ctx context.Context, ranks int, args []string, python string, cpu bool,
	stderr io.Writer) (*distReport, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	var report distReport
	ours := func(ctx context.Context) *exec.Cmd {
		return exec.CommandContext(ctx, self, append([]string{"distributed", "-json"}, args...)...)
	}
	if err := collectives.StartRanks(ctx, ranks, ours, &out, stderr); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(out.Bytes(), &report); err != nil {
		return nil, fmt.Errorf("distributed: cannot read what rank 0 printed: %w", err)
	}
	if python == "" {
		report.PythonNote = "left out by -python"
	} else if err := b.comparePyTorch(ctx, ranks, python, cpu, &report); err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		report.PythonNote = err.Error()
	}
	return &report, nil
}

// comparePyTorch adds PyTorch's figures.
func (b *distBench) comparePyTorch(ctx context.Context, ranks int, python string, cpu bool, report *distReport) error {
	device := "cuda"
	if cpu || cuda.DeviceCount() == 0 {
		device = "cpu"
	}
	type dividedRow struct {
		Model string   `json:"model"`
		Batch int      `json:"batch"`
		Ways  []string `json:"ways"`
	}
	type collectiveJob struct {
		Name  string `json:"name"`
		Bytes int64  `json:"bytes"`
		Calls int    `json:"calls"`
	}
	type measured struct {
		Collectives  []collectiveJob `json:"collectives"`
		Replays      int             `json:"replays"` // graph replays in a round
		Steps        int             `json:"steps"`
		Rounds       int             `json:"rounds"`
		Sharded      []dividedRow    `json:"sharded"`
		ShardedSteps int             `json:"sharded_steps"`
	}
	job := struct {
		peerJob
		Dist measured `json:"dist"`
	}{peerJob{Device: device, Size: b.size, Context: b.context, Rows: []peerRow{}, Threads: torch.NumThreads()},
		measured{[]collectiveJob{}, collectives.Replays, b.steps, b.Rounds, []dividedRow{}, b.shardedSteps}}
	for _, row := range report.Collectives {
		job.Dist.Collectives = append(job.Dist.Collectives,
			collectiveJob{row.Name, row.Bytes, collectives.Calls(row.Bytes)})
	}
	for _, row := range report.Train {
		if row.Mode == "eager" {
			job.Rows = append(job.Rows, peerRow{Model: row.Model, Batch: row.Batch})
		}
	}
	for _, row := range report.Sharded {
		if row.Way == shardedWays[0] && row.Mode == "eager" {
			job.Dist.Sharded = append(job.Dist.Sharded, dividedRow{row.Model, row.Batch, shardedWays})
		}
	}
	text, err := json.Marshal(job)
	if err != nil {
		return err
	}
	if python, err = absolutePython(python); err != nil {
		return err
	}
	theirs := func(ctx context.Context) *exec.Cmd {
		c := exec.CommandContext(ctx, python, "-c", pytorchTrain, string(text))
		c.Dir = os.TempDir() // in a clone of this project Python would import the folder torch
		return c
	}
	var out bytes.Buffer
	var complaint lockedBuffer
	if err := collectives.StartRanks(ctx, ranks, theirs, &out, &complaint); err != nil {
		return pythonFailure(python, err, complaint.Bytes())
	}
	var peer distPeer
	if err := json.Unmarshal(out.Bytes(), &peer); err != nil {
		return fmt.Errorf("%s: cannot read what it printed: %w", python, err)
	}
	peer.fill(report)
	if len(peer.Errors) > 0 {
		return fmt.Errorf("%s: %s", python, strings.Join(peer.Errors, "; "))
	}
	if !strings.HasPrefix(peer.Torch, report.LibTorch) {
		report.PythonNote = "another LibTorch: torch " + peer.Torch
	}
	return nil
}

// distPeer is the output of PyTorch's ranks.
type distPeer struct {
	Torch       string                        `json:"torch"`
	Collectives []*collectives.Times          `json:"collectives"`
	Rates       map[string]float64            `json:"rates"`
	Sharded     map[string]*distShardedFigure `json:"sharded"`
	Errors      []string                      `json:"errors"`
}

// fill adds PyTorch's figures to the rows of the report.
func (peer *distPeer) fill(report *distReport) {
	for i, row := range report.Collectives[:min(len(report.Collectives), len(peer.Collectives))] {
		if row.PyTorch = peer.Collectives[i]; row.PyTorch != nil {
			row.PyTorch.BusGBps = row.BusGBps * row.MS / row.PyTorch.MS
		}
	}
	for _, row := range report.Train {
		rate := func(way string) float64 { return peer.Rates[fmt.Sprintf("%s/%d/%s", row.Model, row.Batch, way)] }
		if alone := rate("alone"); alone > 0 && row.Mode == "eager" {
			ddp, static := rate("ddp"), rate("ddp_static")
			row.PyTorch = &distTorchDP{alone, ddp, static, ddp / alone, static / alone}
		}
	}
	for _, row := range report.Sharded {
		if row.Mode != "eager" {
			continue
		}
		row.PyTorch = peer.Sharded[fmt.Sprintf("%s/%d/%s", row.Model, row.Batch, row.Way)]
	}
}

// lockedBuffer collects the output of several processes. It does not embed the buffer, because
// io.Copy would call ReadFrom without the lock.
type lockedBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

// Bytes returns the output. The processes must have ended.
func (b *lockedBuffer) Bytes() []byte { return b.text.Bytes() }

func (b *distBench) measureAll(ctx context.Context, names, sizes string, largest int) (*distReport, error) {
	b.device = b.World.Device()
	b.Device = b.device
	name, err := cli.DeviceName(b.device)
	if err != nil {
		return nil, err
	}
	r := &distReport{
		Device: name, Ranks: b.World.Size(), LibTorch: capi.LibTorchVersion(),
		Method: fmt.Sprintf("the slowest rank of the best of %d rounds, of 20 to 200 collectives or %d "+
			"steps of %d x %d pixels", b.Rounds, b.steps, b.size, b.size),
	}
	for _, c := range b.measured {
		for mib := 1; mib <= largest; mib *= 4 {
			row, err := b.Measure(c, int64(mib)<<20)
			if err != nil {
				return nil, fmt.Errorf("distributed: %s of %d MiB: %w", c.Name, mib, err)
			}
			r.Collectives = append(r.Collectives, row)
		}
	}
	if names == "" {
		return r, nil
	}
	for model := range strings.SplitSeq(names, ",") {
		for i, text := range strings.Split(sizes, ",") {
			batch, err := strconv.Atoi(text)
			if err != nil || batch < 1 {
				return nil, fmt.Errorf("distributed: -batches %q: want numbers of 1 or more", sizes)
			}
			for _, mode := range b.modes() {
				row, err := b.train(model, batch, mode)
				if err != nil {
					return nil, err
				}
				r.Train = append(r.Train, row)
			}
			if i > 0 || b.archive == "" {
				continue
			}
			row, err := b.fed(ctx, model, batch)
			if err != nil {
				return nil, fmt.Errorf("distributed: %s from %s: %w", model, b.archive, err)
			}
			r.Fed = append(r.Fed, row)
		}
	}
	return r, nil
}

// train measures a network on this rank alone, and then with the other ranks.
func (b *distBench) train(model string, batch int, mode string) (*distTrainRow, error) {
	row := &distTrainRow{Model: model, Batch: batch, Mode: mode}
	for _, rate := range []*float64{&row.Alone, &row.Together} {
		s, err := b.step(row, rate == &row.Together)
		if err != nil {
			return nil, fmt.Errorf("distributed: %s, batch %d, %s: %w", model, batch, mode, err)
		}
		*rate = float64(batch) / s
	}
	row.Linear = row.Together / row.Alone
	return row, nil
}

// step returns the seconds per step.
func (b *distBench) step(row *distTrainRow, together bool) (seconds float64, err error) {
	err = b.withTrainee(row.Model, row.Mode, together, func(t *trainee, scope *torch.Scope) error {
		input, target, err := t.data(scope, row.Batch, b.size, b.context)
		if err != nil {
			return err
		}
		step := t.call(input, target)
		for range 5 { // warm-up: plans, graphs, buckets
			if err := step(); err != nil {
				return err
			}
		}
		seconds, err = b.Best(b.steps, step)
		return err
	})
	return seconds, err
}

// withTrainee calls fn with a network, either alone or with the other ranks.
func (b *distBench) withTrainee(model, mode string, together bool, fn func(*trainee, *torch.Scope) error) (err error) {
	// LibTorch plans cuDNN's convolutions once per thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var around func(func() error) error
	var parallel *distributed.DataParallel
	t, err := b.newTraineeAround(model, mode, func(pass func() error) error {
		if around == nil {
			return pass()
		}
		return around(pass)
	})
	if err != nil {
		return err
	}
	scope := torch.NewScope("distributed")
	defer func() {
		err = errors.Join(err, t.step.Close()) // frees graphs before the objects they captured
		if parallel != nil {
			err = errors.Join(err, parallel.Close())
		}
		err = errors.Join(err, scope.Close(), t.close())
	}()
	if together {
		var o distributed.DataParallelOptions
		if b.bf16 {
			o.ReduceDType = torch.BFloat16
		}
		if parallel, err = distributed.NewDataParallel(b.World, t.net, o); err != nil {
			return err
		}
		around = parallel.Around
	}
	return fn(t, scope)
}

func (r *distReport) write(out io.Writer, asJSON bool) error {
	if asJSON {
		return cli.WriteJSON(out, r)
	}
	return r.table(out)
}

func (r *distReport) table(out io.Writer) error {
	fmt.Fprintf(out, "%s on %s, LibTorch %s; %s\n", printable.Counted(r.Ranks, "rank", "ranks"), r.Device,
		r.LibTorch, r.Method)
	if err := r.collectivesTable(out); err != nil {
		return err
	}
	w := printable.NewTable(out, tabwriter.AlignRight)
	if len(r.Train) > 0 {
		fmt.Fprintln(w, "\nmodel\tbatch\tmode\timages/s alone\ttogether\tof linear\tPyTorch "+
			"alone\tDDP\tof linear\twith its static graph\t")
	}
	for _, row := range r.Train {
		theirs := "-\t-\t-\t-"
		if p := row.PyTorch; p != nil {
			theirs = fmt.Sprintf("%.0f\t%.0f\t%.1f %%\t%.1f %%", p.Alone, p.DDP, 100*p.Linear, 100*p.StaticLinear)
		}
		fmt.Fprintf(w, "%s\t%d\t%s\t%.0f\t%.0f\t%.1f %%\t%s\t\n", row.Model, row.Batch, row.Mode, row.Alone,
			row.Together, 100*row.Linear, theirs)
	}
	if err := errors.Join(w.Flush(), r.fedTable(out), r.shardedTable(out)); err != nil {
		return err
	}
	if r.PythonNote != "" {
		_, err := fmt.Fprintf(out, "\nPyTorch: %s\n", r.PythonNote)
		return err
	}
	return nil
}
