// Command 12-weights runs a model whose parameters exceed the GPU's memory. They stay in files in
// host memory. A prefetcher copies one block after another to the device while the previous block
// computes. Only two blocks of parameters are on the device at a time, whatever the size of the
// model.
//
//	go run ./examples/12-weights                             # 12 small blocks, on a CPU too
//	go run ./examples/12-weights -device cuda -width 2048 -heads 16 -layers 32 \
//	    -batch 8 -prompt 512 -memory 3                       # 6 GiB of parameters in 3 GiB
//	go run ./examples/12-weights -timeline weights.svg       # and a picture of six blocks
//
// The model is a GPT-2 with random weights, which the example writes once, in shards. -weights also
// accepts the safetensors file of a published GPT-2: its tensors have the same names
// (h.0.ln_1.weight).
//
// A copy costs nothing as long as it takes less time than the computation of a block. Computing
// with a parameter of four bytes takes two operations per token of the batch. So with enough tokens
// in a batch, copies are free. The logits are bit-identical to the whole model's:
// TestLogitsAreThoseOfTheWholeModel compares them.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"strings"
	"time"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/examples/internal/lesson"
	"github.com/torchstream/torchstream/examples/internal/study"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/trace"
)

type options struct {
	device, weights, timeline                 string
	layers, width, heads, vocabulary, context int
	slots, batch, prompt, tokens              int
	memory                                    float64 // GiB; 0 means no limit
	seed                                      uint64
}

func main() {
	var o options
	flag.StringVar(&o.device, "device", "", "cpu, cuda or cuda:N (default: the first GPU, if there is one)")
	flag.StringVar(&o.weights, "weights", "", "safetensors `file` or index of shards; written if it does "+
		"not exist (default: one in this folder, named by -layers and -width)")
	flag.StringVar(&o.timeline, "timeline", "", "draw six blocks of the first pass to this .svg, .png or .json `file`")
	flag.Float64Var(&o.memory, "memory", 0,
		"limit the GPU's memory to so many `GiB`, and show that the whole model does not fit")
	flag.IntVar(&o.slots, "slots", 2, "blocks of parameters on the device")
	flag.IntVar(&o.layers, "layers", 12, "blocks of the model")
	flag.IntVar(&o.width, "width", 256, "size of a token's vector")
	flag.IntVar(&o.heads, "heads", 4, "heads of an attention")
	flag.IntVar(&o.vocabulary, "vocabulary", 1024, "different tokens")
	flag.IntVar(&o.context, "context", 1024, "positions")
	flag.IntVar(&o.batch, "batch", 4, "sequences")
	flag.IntVar(&o.prompt, "prompt", 64, "tokens of a sequence at the beginning")
	flag.IntVar(&o.tokens, "tokens", 8, "tokens to generate, each in one pass over the blocks")
	flag.Uint64Var(&o.seed, "seed", 1, "of weights and prompt")
	lesson.Usage(flag.CommandLine, "12-weights [options]", "Runs a model whose parameters stay in host "+
		"memory: a block is copied to the device while the one before it computes.")
	flag.Parse()
	lesson.Run("12-weights", func(ctx context.Context) error {
		_, err := run(ctx, o, os.Stdout)
		return err
	})
}

// result holds the results and measurements of a run.
type result struct {
	tokens          []int64 // of all sequences, including the prompt
	places          int     // memory locations used for blocks
	whole, resident int64   // bytes of parameters: in the model, and on the device at a time
	refused         bool    // the whole model exceeded the limit
	pass, copies    time.Duration
	waited          float64 // share of a pass that was spent waiting for blocks
	peak            int64   // bytes allocated on the GPU
}

func run(ctx context.Context, o options, out io.Writer) (r *result, err error) {
	device, err := o.check()
	if err != nil {
		return nil, err
	}
	if err := o.write(out); err != nil {
		return nil, err
	}
	m, err := open(o, device)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, m.close()) }()
	r = &result{whole: m.whole}
	if o.memory != 0 {
		if err := limit(device, o.memory); err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, device.LimitMemory(1)) }()
		if r.refused, err = refuses(device, m.whole); err != nil {
			return nil, err
		}
	}
	if err := m.start(o); err != nil {
		return nil, err
	}
	if err := m.measure(ctx, o, r); err != nil {
		return nil, err
	}
	return r, r.print(o, device, out)
}

func (o *options) check() (cuda.Device, error) {
	device, err := study.Device(o.device)
	switch {
	case err != nil:
		return 0, err
	case o.layers < 1 || o.vocabulary < 1 || o.batch < 1 || o.prompt < 1:
		return 0, fmt.Errorf("-layers %d, -vocabulary %d, -batch %d, -prompt %d: want 1 or more", o.layers,
			o.vocabulary, o.batch, o.prompt)
	case o.tokens < 2:
		return 0, fmt.Errorf("-tokens %d: want 2 or more, because the first pass is not timed", o.tokens)
	case o.prompt+o.tokens > o.context+1:
		return 0, fmt.Errorf("-prompt %d and -tokens %d: the model has %d positions: raise -context",
			o.prompt, o.tokens, o.context)
	case o.memory != 0 && device == cuda.CPU:
		return 0, errors.New("-memory limits the memory of a GPU, and the device is the CPU")
	}
	if o.weights == "" {
		o.weights = fmt.Sprintf("12-weights-%dx%d.safetensors.index.json", o.layers, o.width)
	}
	return device, trace.Window{File: o.timeline}.Check()
}

func (o *options) model(layers int) models.GPT2Options {
	return models.GPT2Options{VocabSize: o.vocabulary, Positions: o.context, Layers: layers, Heads: o.heads,
		Width: o.width}
}

// write writes the file of the whole model, unless it exists. Only this step needs host memory for
// all parameters at once.
func (o *options) write(out io.Writer) error {
	if _, err := os.Stat(o.weights); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	fmt.Fprintf(out, "writing random weights to %s\n", o.weights)
	if err := torch.ManualSeed(o.seed); err != nil {
		return err
	}
	net, err := models.NewGPT2(o.model(o.layers))
	if err != nil {
		return err
	}
	defer nn.Close(net)
	const shard = 1 << 30
	return checkpoint.SaveSharded(o.weights, nn.State(net.Transformer()), nil, shard)
}

// limit makes the allocator refuse more than the given number of GiB.
func limit(device cuda.Device, gib float64) error {
	m, err := device.Memory()
	if err != nil {
		return err
	}
	if err := device.LimitMemory(gib * (1 << 30) / float64(m.Total)); err != nil {
		return fmt.Errorf("-memory %g, of %.1f GiB: %w", gib, gibibytes(m.Total), err)
	}
	return nil
}

// refuses reports whether the device lacks memory for the given number of bytes.
func refuses(device cuda.Device, bytes int64) (bool, error) {
	t, err := torch.Empty(device, torch.Uint8, bytes)
	if errors.Is(err, cuda.ErrOutOfMemory) {
		return true, nil
	}
	return false, errors.Join(err, t.Close())
}

func gibibytes(n int64) float64 { return float64(n) / (1 << 30) }

// model is a GPT-2 whose blocks are read from a feed. One module serves as every block: each
// iteration of the feed's loop sets the module's parameters to the next block's.
type model struct {
	net    *models.GPT2  // has one block
	block  nn.Module     // of net
	state  []torch.Named // of block
	layers int
	device cuda.Device
	source *weights
	feed   *prefetcher.Prefetcher

	whole, fixed int64             // bytes of all parameters, and of those that stay on the device
	slots        map[uintptr]int64 // sizes of parameters by address: the memory used for blocks
}

// open makes the model, and loads the parameters that stay on the device: the embeddings and the
// last normalisation.
func open(o options, device cuda.Device) (*model, error) {
	net, err := models.NewGPT2(o.model(1))
	if err != nil {
		return nil, err
	}
	m := &model{net: net, block: net.Blocks()[0], layers: o.layers, device: device, slots: map[uintptr]int64{}}
	if err := m.read(o); err != nil {
		return nil, errors.Join(err, m.close())
	}
	return m, nil
}

func (m *model) read(o options) error {
	nn.Train(m.net, false)
	if err := nn.Freeze(m.net); err != nil {
		return err
	}
	file, err := checkpoint.Open(o.weights)
	if err != nil {
		return err
	}
	defer file.Close()
	if m.source, err = openWeights(file, m.block, m.layers); err != nil {
		return err
	}
	m.state = nn.State(m.block)
	for _, spec := range m.source.specs {
		m.whole += int64(m.layers) * spec.Bytes()
	}
	for _, p := range nn.State(m.net.Transformer()) {
		if strings.HasPrefix(p.Name, "h.") {
			continue // a block's parameter, read from the feed
		}
		bytes, err := stay(file, p, m.device)
		if err != nil {
			return err
		}
		m.fixed += bytes
	}
	m.whole += m.fixed
	return nil
}

// stay loads a parameter and moves it to the device.
func stay(file *checkpoint.File, p torch.Named, device cuda.Device) (bytes int64, err error) {
	spec := torch.Spec{DType: p.Tensor.DType(), Shape: p.Tensor.Shape()}
	t, err := mapTensor(file, p.Name, spec)
	if err != nil {
		return 0, err
	}
	defer t.Close()
	there := t.To(device)
	defer there.Close()
	return spec.Bytes(), p.Tensor.SetData(there)
}

// start starts the copies.
func (m *model) start(o options) (err error) {
	p := prefetcher.Options{Device: m.device, Depth: o.slots}
	if o.timeline != "" {
		p.Trace = trace.Window{File: o.timeline, Batches: 6}
	}
	m.feed, err = prefetcher.New(m.source, p)
	return err
}

func (m *model) close() error {
	var errs []error
	if m.feed != nil {
		errs = append(errs, m.feed.Close())
	}
	if m.source != nil {
		errs = append(errs, m.source.Close())
	}
	return errors.Join(append(errs, nn.Close(m.net))...)
}

// bind sets the block's parameters to a slot's memory, without a copy. They are valid until the end
// of the iteration. After the block's work, the prefetcher refills the slot.
func (m *model) bind(fields []*torch.Tensor) error {
	for i, p := range m.state {
		if err := p.Tensor.SetData(fields[i].Index(0)); err != nil { // [1 ...], a batch of one block
			return err
		}
		at, err := p.Tensor.Pointer()
		if err != nil {
			return err
		}
		m.slots[at] = m.source.specs[i].Bytes()
	}
	return nil
}

// generate extends the sequences of tokens [N T] by count tokens, always the most probable ones.
// Each token takes a pass over all blocks. generate calls seen with the logits of each pass. They
// are valid during that call. The caller closes the result.
func (m *model) generate(ctx context.Context, tokens *torch.Tensor, count int,
	seen func(pass int, logits *torch.Tensor) error) (*torch.Tensor, error) {
	tokens = tokens.Keep()
	var x *torch.Tensor // a block's result, which outlives the iteration
	defer func() { x.Close() }()
	pass := 0
	for batch, err := range m.feed.Epoch(ctx, 0) {
		if err == nil {
			err = m.bind(batch.Tensors())
		}
		if err != nil {
			tokens.Close()
			return nil, err
		}
		turn, number := batch.Scope(), batch.Info.(int)
		input := x
		if number == 0 {
			input = m.net.Embed(tokens.In(turn))
		}
		y := m.block.Forward(input.In(turn)).Keep()
		x.Close()
		x = y
		if number < m.layers-1 {
			continue
		}
		logits := m.net.Logits(x.In(turn))
		longer := torch.Cat([]*torch.Tensor{tokens.In(turn), logits.Index(torch.All, -1).ArgMax(1, true)}, 1).Keep()
		tokens.Close()
		tokens = longer
		err := tokens.Err()
		if err == nil {
			err = seen(pass, logits)
		}
		if err != nil {
			tokens.Close()
			return nil, err
		}
		if pass++; pass == count {
			break // also ends the source
		}
	}
	return tokens, nil
}

// measure generates tokens, and times all passes except the first, which loads kernels.
func (m *model) measure(ctx context.Context, o options, r *result) error {
	rng := rand.New(rand.NewPCG(o.seed, 0))
	drawn := make([]int64, o.batch*o.prompt)
	for i := range drawn {
		drawn[i] = rng.Int64N(int64(o.vocabulary))
	}
	host, err := torch.FromInt64s(drawn, int64(o.batch), int64(o.prompt))
	if err != nil {
		return err
	}
	defer host.Close()
	prompt := host.To(m.device)
	defer prompt.Close()
	if m.device != cuda.CPU {
		if err := m.device.ResetPeak(); err != nil {
			return err
		}
	}
	var began time.Time
	var before prefetcher.Stats
	tokens, err := m.generate(ctx, prompt, o.tokens, func(pass int, logits *torch.Tensor) error {
		if pass > 0 {
			return nil // the host starts the next pass without waiting for the device
		}
		_, err := logits.Index(0, 0, 0).Float64() // waits for the first pass
		began, before = time.Now(), m.feed.Stats()
		return err
	})
	if err != nil {
		return err
	}
	defer tokens.Close()
	r.tokens, err = tokens.Int64s() // waits for the last pass
	took, after := time.Since(began), m.feed.Stats()
	r.pass = took / time.Duration(o.tokens-1)
	r.copies = (after.CopyTime - before.CopyTime) / time.Duration(o.tokens-1)
	r.waited = float64(after.ConsumerWait-before.ConsumerWait) / float64(took)
	r.resident, r.places = m.fixed, len(m.slots)/len(m.state)
	for _, bytes := range m.slots {
		r.resident += bytes
	}
	if err == nil && m.device != cuda.CPU {
		var memory cuda.MemoryStats
		memory, err = m.device.Memory()
		r.peak = memory.PeakAllocated
	}
	return err
}

func (r *result) print(o options, device cuda.Device, out io.Writer) error {
	mib := func(bytes int64) string { return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20)) }
	ms := func(d time.Duration) string { return fmt.Sprintf("%.1f ms", float64(d.Microseconds())/1000) }
	fmt.Fprintf(out, "%d tokens after %d sequences of %d, on %v\n\n", o.tokens, o.batch, o.prompt, device)
	first := fmt.Sprint(r.tokens[o.prompt : o.prompt+o.tokens])
	fmt.Fprintf(out, "the first sequence goes on with the tokens %s\n\n", strings.Trim(first, "[]"))
	rows := [][]string{
		{"blocks", fmt.Sprint(o.layers)},
		{"parameters, to hold the model whole", mib(r.whole)},
		{fmt.Sprintf("parameters in memory at a time, with the places of %d blocks", r.places), mib(r.resident)},
		{"a pass over all blocks", ms(r.pass)},
		{"share of it that waited for parameters", fmt.Sprintf("%.1f %%", 100*r.waited)},
	}
	if device != cuda.CPU {
		rows = append(rows, []string{"its copies, beside the blocks' work", ms(r.copies)},
			[]string{"peak of allocated memory, with activations", mib(r.peak)})
	}
	if o.memory != 0 {
		fits := "fits, so lower -memory"
		if r.refused {
			fits = "out of memory"
		}
		rows = append(rows, []string{fmt.Sprintf("the whole model, with -memory %g", o.memory), fits})
	}
	return (&lesson.Lesson{Out: out}).Table(rows)
}
