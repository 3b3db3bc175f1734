// Command 07-chargpt trains a small GPT on a text, byte by byte, and writes like it. It shows a
// prefetcher with a source that is no image, and generation with a key-value cache.
//
//	07-chargpt                       learn from docs/*.md, in the repository's root
//	07-chargpt -text FILE            learn from another text
//	07-chargpt -picture gpt.svg      draw the loss, and what the network writes
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/examples/internal/lesson"
	"github.com/torchstream/torchstream/examples/internal/study"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
)

type options struct {
	text, device, picture, prompt               string
	steps, batch, context, width, heads, layers int
	temperature                                 float64
	seed                                        uint64
}

func main() {
	var o options
	flag.StringVar(&o.text, "text", "docs/*.md", "learn from the files of this `pattern`")
	flag.StringVar(&o.device, "device", "", "cpu or cuda:N (default: the first GPU, or the CPU)")
	flag.StringVar(&o.picture, "picture", "", "draw the loss and a sample to this SVG `file`")
	flag.StringVar(&o.prompt, "prompt", "The ", "what the network continues")
	flag.IntVar(&o.steps, "steps", 1000, "steps of training")
	flag.IntVar(&o.batch, "batch", 16, "sequences in a batch")
	flag.IntVar(&o.context, "context", 96, "bytes of a sequence")
	flag.IntVar(&o.width, "width", 96, "size of a byte's vector")
	flag.IntVar(&o.heads, "heads", 4, "heads of an attention")
	flag.IntVar(&o.layers, "layers", 2, "blocks")
	flag.Float64Var(&o.temperature, "temperature", 0.7, "0 takes the most probable byte, 1 draws as the network says")
	flag.Uint64Var(&o.seed, "seed", 1, "of parameters, batches and text")
	lesson.Usage(flag.CommandLine, "07-chargpt [options]", "Trains a small GPT on a text, byte by byte, and writes like it.")
	flag.Parse()
	lesson.Run("07-chargpt", func(ctx context.Context) error {
		_, err := run(ctx, o, os.Stdout)
		return err
	})
}

// result is what a run learned.
type result struct {
	losses  []float64 // one of ten steps each, in bits a byte
	samples []string
}

func run(ctx context.Context, o options, out io.Writer) (*result, error) {
	device, err := study.Device(o.device)
	if err == nil {
		err = study.Positive(map[string]int{"steps": o.steps, "batch": o.batch, "context": o.context, "width": o.width, "heads": o.heads, "layers": o.layers})
	}
	if err != nil {
		return nil, err
	}
	source, err := read(o)
	if err != nil {
		return nil, err
	}
	if err := torch.ManualSeed(o.seed); err != nil {
		return nil, err
	}
	net, err := newGPT(len(source.symbols), o.width, o.heads, o.layers, o.context)
	if err != nil {
		return nil, err
	}
	defer nn.Close(net)
	if err := nn.To(net, device); err != nil {
		return nil, err
	}
	fmt.Fprintf(out, "%d bytes of text, %d different; %s\n", len(source.tokens), len(source.symbols), count(net))
	r := &result{}
	if err := train(ctx, o, net, source, device, r, out); err != nil {
		return nil, err
	}
	prompt, err := source.encode(o.prompt)
	if err != nil {
		return nil, err
	}
	nn.Train(net, false)
	for range 4 {
		tokens, err := net.generate(prompt, o.context-len(prompt), o.temperature, device)
		if err != nil {
			return nil, err
		}
		sample := readable(source.decode(tokens))
		r.samples = append(r.samples, sample)
		fmt.Fprintln(out, sample)
	}
	if o.picture == "" {
		return r, nil
	}
	title := fmt.Sprintf("07-chargpt: loss in bits a byte (%d bytes of text)", len(source.tokens))
	return r, study.Curves(o.picture, title, "x 10 steps", []study.Curve{{Name: "training", Values: r.losses}}, r.samples)
}

// readable returns what the network has written as one line of UTF-8. A character of several bytes
// may be cut off at the end, or be none.
func readable(written string) string {
	return strings.Join(strings.Fields(strings.ToValidUTF8(written, "\ufffd")), " ")
}

func read(o options) (*text, error) {
	paths, err := filepath.Glob(o.text)
	if err != nil {
		return nil, fmt.Errorf("-text %s: %w", o.text, err)
	}
	var data []byte
	for _, path := range paths {
		part, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		data = append(data, part...)
	}
	if len(paths) == 0 {
		return nil, fmt.Errorf("-text %s: no such file: name a text, or run in the repository's root", o.text)
	}
	return newText(data, o.context, o.batch, o.steps, o.seed)
}

func count(net nn.Module) string {
	n := int64(0)
	for _, p := range nn.Parameters(net) {
		n += p.Elements()
	}
	return fmt.Sprintf("%d parameters", n)
}

func train(ctx context.Context, o options, net *gpt, source *text, device cuda.Device, r *result, out io.Writer) error {
	feed, err := prefetcher.New(source, prefetcher.Options{Device: device})
	if err != nil {
		return err
	}
	defer feed.Close()
	opt, err := optim.NewAdamW(nn.Parameters(net), optim.AdamWOptions{LR: 2e-3})
	if err != nil {
		return err
	}
	defer opt.Close()
	rates, err := optim.NewScheduler(opt, optim.CosineLR{Steps: o.steps})
	if err != nil {
		return err
	}
	// The losses are summed on the device: total has no scope, so it outlives the batches.
	total, err := torch.Zeros(device, torch.Float32)
	if err != nil {
		return err
	}
	defer total.Close()
	step, every := 0, max(10, o.steps/100*10) // ten lines in all, or as many as there are losses
	for batch, err := range feed.Epoch(ctx, 0) {
		if err != nil {
			return err
		}
		logits := net.Forward(batch.Tensors()[0])
		loss := logits.Flatten(0, 1).CrossEntropy(batch.Tensors()[1].Flatten(0, 1))
		if err := loss.Backward(); err != nil {
			return err
		}
		if err := opt.Step(); err != nil {
			return err
		}
		if err := rates.Step(); err != nil {
			return err
		}
		if err := total.Add_(loss.NoGrad()).Err(); err != nil {
			return err
		}
		if step++; step%10 == 0 {
			sum, err := total.Float64()
			if err != nil {
				return err
			}
			total.Zero_()
			r.losses = append(r.losses, sum/10/math.Ln2)
		}
		if step%every == 0 {
			fmt.Fprintf(out, "step %d: %.2f bits a byte\n", step, r.losses[len(r.losses)-1])
		}
	}
	return nil
}
