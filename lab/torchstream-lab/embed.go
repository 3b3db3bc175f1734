package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/torchstream/torchstream/aoti"
	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// embedReport is the output of embed: rates are images a second, medians of the rounds.
type embedReport struct {
	Device   string  `json:"device"`
	Batch    int     `json:"batch"`
	Rounds   int     `json:"rounds"`
	Images   int64   `json:"images"` // of the archive
	Resident float64 `json:"resident_images_per_second"`
	Embed    float64 `json:"embed_images_per_second"`
	Share    float64 `json:"share"` // median of the rounds' shares
	// The same between the lines that embed prints, without its start. 0: the archive is too small.
	Steady      float64 `json:"steady_images_per_second"`
	SteadyShare float64 `json:"steady_share"`
}

// embedBench runs the measurements of embed.
type embedBench struct {
	program, model, archive string
	options                 []string // of torchstream embed
	batch, rounds           int
	length                  time.Duration
	report                  embedReport
}

// benchEmbed compares torchstream embed with the rate of its model on a batch that stays on the
// device.
func benchEmbed(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var b embedBench
	set := cli.Flags("torchstream-lab embed -model FILE -archive FILE",
		"Compares the rate of torchstream embed with that of its model alone on a batch that stays on the device, in turn.",
		stderr)
	set.StringVar(&b.model, "model", "", "`FILE`: a package (.pt2) of one input [N 3 H W], or a checkpoint of torchstream train")
	set.StringVar(&b.archive, "archive", "", "`FILE` of images, of which torchstream embed computes vectors")
	set.StringVar(&b.program, "torchstream", "bin/torchstream", "`PROGRAM` torchstream")
	set.IntVar(&b.batch, "batch", 32, "images of a batch")
	set.IntVar(&b.rounds, "rounds", 3, "rounds of both in turn")
	set.DurationVar(&b.length, "time", 2*time.Second, "how long the model runs alone")
	options := set.String("embed-options", "", "`OPTIONS` of torchstream embed, separated by blanks, such as -decode device")
	asJSON := set.Bool("json", false, "print one JSON object")
	if err := cli.Parse(set, args, 0); err != nil {
		return err
	}
	if b.model == "" || b.archive == "" || b.batch < 1 || b.rounds < 1 || b.length <= 0 {
		return cli.UsageError{Message: "embed needs -model FILE and -archive FILE, and -batch, -rounds and -time are more than 0"}
	}
	b.options = strings.Fields(*options)
	if err := errors.Join(cli.SpinBriefly(), b.measure(ctx)); err != nil {
		return err
	}
	if *asJSON {
		return cli.WriteJSON(stdout, b.report)
	}
	r := b.report
	_, err := fmt.Fprintf(stdout, "%s, batches of %d: the model alone %.1f images/s, torchstream embed of %s %.1f images/s, "+
		"%.1f %%; without its start %.1f, %.1f %% (medians of %s)\n", r.Device, r.Batch, r.Resident,
		printable.Counted(r.Images, "image", "images"), r.Embed, 100*r.Share, r.Steady, 100*r.SteadyShare,
		printable.Counted(r.Rounds, "round", "rounds"))
	return err
}

// residentModel is the model that embed runs, without the loader.
type residentModel struct {
	device cuda.Device
	input  torch.Spec // of an image
	most   int        // images in a batch; 0: any number
	run    func(ctx context.Context, x *torch.Tensor) error
	close  func() error
}

// openResident opens a package, or a checkpoint of torchstream train on the first GPU or the CPU.
func openResident(path string) (*residentModel, error) {
	if strings.HasSuffix(path, ".pt2") {
		return openResidentPackage(path)
	}
	file, err := checkpoint.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	about, err := models.ParseMetadata(file.Metadata())
	if err != nil {
		return nil, fmt.Errorf("%s: %w", printable.Name(path), err)
	}
	device, err := cli.PickDevice("")
	if err != nil {
		return nil, err
	}
	net, err := about.Load(file, device)
	if err != nil {
		return nil, err
	}
	used, err := models.Features(net)
	if err != nil {
		return nil, errors.Join(err, nn.Close(net))
	}
	size := int64(about.Size)
	return &residentModel{device: device, close: func() error { return nn.Close(net) },
		input: torch.Spec{DType: torch.Float32, Shape: []int64{3, size, size}, MemoryFormat: torch.ChannelsLast},
		run:   func(_ context.Context, x *torch.Tensor) error { return used.Forward(x).Err() }}, nil
}

func openResidentPackage(path string) (_ *residentModel, err error) {
	model, err := aoti.Load(path, aoti.Options{})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, model.Close())
		}
	}()
	if len(model.Inputs) != 1 || len(model.Inputs[0].Shape) != 4 {
		return nil, fmt.Errorf("%s: its inputs are %v, want images [N 3 H W]", printable.Name(path), model.Inputs)
	}
	in := model.Inputs[0]
	dtype, known := map[string]torch.DType{"float32": torch.Float32, "float16": torch.Float16,
		"bfloat16": torch.BFloat16}[in.DType]
	if !known {
		return nil, fmt.Errorf("%s: its input has the dtype %s, want a float", printable.Name(path), in.DType)
	}
	m := &residentModel{device: model.Device(), most: int(in.Shape[0].Max), close: model.Close,
		input: torch.Spec{DType: dtype, Shape: []int64{in.Shape[1].Max, in.Shape[2].Max, in.Shape[3].Max}},
		run: func(ctx context.Context, x *torch.Tensor) error {
			_, err := model.Run(ctx, x)
			return err
		}}
	if in.MemoryFormat == "channels_last" {
		m.input.MemoryFormat = torch.ChannelsLast
	}
	return m, nil
}

// measure runs the rounds.
func (b *embedBench) measure(ctx context.Context) (err error) {
	model, err := openResident(b.model)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, model.close()) }()
	if model.most > 0 {
		b.batch = min(b.batch, model.most)
	}
	folder, err := os.MkdirTemp("", "embed-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(folder)) }()
	var resident, embed, share, steady, steadyShare []float64
	for round := range b.rounds {
		alone, err := b.resident(ctx, model)
		if err != nil {
			return err
		}
		with, between, err := b.embed(ctx, filepath.Join(folder, fmt.Sprintf("%d.npy", round)))
		if err != nil {
			return err
		}
		resident, embed, share = append(resident, alone), append(embed, with), append(share, with/alone)
		steady, steadyShare = append(steady, between), append(steadyShare, between/alone)
	}
	b.report.Device, b.report.Batch, b.report.Rounds = model.device.String(), b.batch, b.rounds
	b.report.Resident, b.report.Embed, b.report.Share = median(resident), median(embed), median(share)
	b.report.Steady, b.report.SteadyShare = median(steady), median(steadyShare)
	return nil
}

// resident returns the rate of the model on one batch of random numbers. A GPU takes less power for
// zeros, and has a higher clock.
func (b *embedBench) resident(ctx context.Context, model *residentModel) (rate float64, err error) {
	x, err := torch.EmptySpec(model.device, model.input, int64(b.batch))
	if err != nil {
		return 0, err
	}
	defer x.Close()
	if err := x.Normal_(0, 1).Err(); err != nil {
		return 0, err
	}
	run := func() error {
		scope := torch.NewScope("resident")
		defer scope.Close()
		return model.run(ctx, x.In(scope).NoGrad())
	}
	wait := func() error {
		if model.device == cuda.CPU {
			return nil
		}
		return model.device.Synchronize()
	}
	for range 3 { // warm-up
		if err := run(); err != nil {
			return 0, err
		}
	}
	if err := wait(); err != nil {
		return 0, err
	}
	began, images := time.Now(), 0
	for time.Since(began) < b.length {
		for range 4 {
			if err := run(); err != nil {
				return 0, err
			}
			images += b.batch
		}
		if err := wait(); err != nil {
			return 0, err
		}
	}
	return float64(images) / time.Since(began).Seconds(), nil
}

// printedRate matches torchstream embed's report, and printedRows its lines of -log-every.
var (
	printedRate = regexp.MustCompile(`: (\d+) vectors? of \d+ numbers?, ([0-9.]+) images/s`)
	printedRows = regexp.MustCompile(`^(\d+) of \d+ images$`)
)

// imagesPerLine is about the number of images between two lines of torchstream embed.
const imagesPerLine = 4096

// embed returns the rate of torchstream embed: of the whole run, which its report has, and between
// its lines, which leaves the start out. The latter is 0 if there are too few lines.
func (b *embedBench) embed(ctx context.Context, out string) (whole, steady float64, err error) {
	args := append([]string{"embed", "-model", b.model, "-archive", b.archive, "-batch", strconv.Itoa(b.batch), "-o", out,
		"-log-every", strconv.Itoa(max(1, imagesPerLine/b.batch))}, b.options...)
	command := exec.CommandContext(ctx, b.program, args...)
	var failures bytes.Buffer
	command.Stderr = &failures
	stdout, err := command.StdoutPipe()
	if err != nil {
		return 0, 0, err
	}
	if err := command.Start(); err != nil {
		return 0, 0, err
	}
	var at []time.Time
	var rows []float64
	var last string
	for lines := bufio.NewScanner(stdout); lines.Scan(); {
		if found := printedRows.FindStringSubmatch(lines.Text()); found != nil {
			n, _ := strconv.ParseFloat(found[1], 64) // digits
			at, rows = append(at, time.Now()), append(rows, n)
			continue
		}
		last += lines.Text() + "\n"
	}
	if err := command.Wait(); err != nil {
		return 0, 0, fmt.Errorf("%s embed: %w: %s", b.program, err, printable.Text(last+failures.String()))
	}
	found := printedRate.FindStringSubmatch(last)
	if found == nil {
		return 0, 0, fmt.Errorf("%s embed printed no rate: %s", b.program, printable.Text(last+failures.String()))
	}
	if b.report.Images, err = strconv.ParseInt(found[1], 10, 64); err != nil {
		return 0, 0, err
	}
	const first, least = 1, 4 // the first line's time has the start
	if n := len(rows); n >= first+least {
		steady = (rows[n-1] - rows[first]) / at[n-1].Sub(at[first]).Seconds()
	}
	whole, err = strconv.ParseFloat(found[2], 64)
	return whole, steady, err
}
