// Command 11-distributed trains a network on several GPUs from one archive, with one process per
// GPU. The loader deals the samples to the ranks, and every rank computes the same weights. Without
// a launcher, it is a job of one process.
//
//	go build -o 11-distributed ./examples/11-distributed
//	./11-distributed -arch resnet18                                 alone
//	examples/launch/loop.sh 4 ./11-distributed -arch resnet18       four processes of a shell
//	torchrun --nproc-per-node=4 --no-python ./11-distributed -arch resnet18
//	srun ./11-distributed -arch resnet18                            see examples/launch/slurm.sbatch
//	mpirun -n 4 ./11-distributed -arch resnet18
//
// Without -arch it trains a small network, which takes two processes on two CPU cores a few
// seconds:
//
//	examples/launch/loop.sh 2 ./11-distributed -cpu
//
// With -checkpoint it resumes an earlier run, with the same or another number of processes, and
// without losing or repeating a sample of the epoch:
//
//	examples/launch/loop.sh 3 ./11-distributed -cpu -checkpoint last.pt -every 10    kill it
//	examples/launch/loop.sh 2 ./11-distributed -cpu -checkpoint last.pt -every 10
//
// SIGTERM to any process makes all of them write the checkpoint and exit.
//
// With -timeline it draws some steps of all processes on one clock, and names a straggler.
package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/examples/internal/lesson"
	"github.com/torchstream/torchstream/imagefeed"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/interrupt"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/trace"
	"github.com/torchstream/torchstream/train"
)

type options struct {
	archive, arch, save, checkpoint, timeline string
	size, batch, epochs, every                int
	rate                                      float64
	bfloat16                                  bool
	seed                                      uint64
	dist                                      distributed.Options
	onStep                                    func(step) error // set by a test
}

// step describes a rank's training step.
type step struct {
	rank, epoch, batch int // batch is the number of batches of the epoch so far
	net                nn.Module
	images             *torch.Tensor
	info               imageloader.Info
	loss               *torch.Tensor
}

// grace is the job's time limit for its checkpoint after SIGTERM. Schedulers kill after 30 s.
const grace = 25 * time.Second

// errTerminated is the cause when a signal has ended the job.
var errTerminated = errors.New("terminated")

func main() {
	var o options
	flag.StringVar(&o.archive, "archive", lesson.TrainArchive, "images to learn from")
	flag.StringVar(&o.arch, "arch", "", "one of torchstream's models, such as resnet50 (default: a small network)")
	flag.StringVar(&o.save, "save", "", "write the weights to this `file`, on rank 0")
	flag.StringVar(&o.checkpoint, "checkpoint", "",
		"go on from this `file` if it exists, and write it: after each epoch, -every so many steps, and at SIGTERM")
	flag.StringVar(&o.timeline, "timeline", "", "draw the steps 4 to 8 of all ranks to this .svg, .png or .json `file`")
	flag.IntVar(&o.every, "every", 0, "steps between checkpoints (default: an epoch)")
	flag.IntVar(&o.size, "size", 32, "pixels per side of an image")
	flag.IntVar(&o.batch, "batch", 24, "images in a batch, of all ranks together")
	flag.IntVar(&o.epochs, "epochs", 5, "epochs")
	flag.Float64Var(&o.rate, "lr", 0.02, "learning rate")
	flag.BoolVar(&o.bfloat16, "bfloat16", false, "forward pass and reduction in bfloat16")
	flag.BoolVar(&o.dist.CPU, "cpu", false, "train on the CPU")
	flag.BoolVar(&o.dist.Debug, "debug", false, "compare the collectives of all ranks")
	flag.DurationVar(&o.dist.Timeout, "timeout", 0, "of a collective (default 5m)")
	flag.Uint64Var(&o.seed, "seed", 1, "of parameters and batches")
	lesson.Usage(flag.CommandLine, "11-distributed [options]", "Trains a network with several processes, "+
		"one for each GPU; started alone, with one. torchrun, srun and mpirun start it too.")
	flag.Parse()
	if env, err := distributed.ReadEnvironment(os.Getenv); err == nil && env.Warning != "" { // Init returns err
		fmt.Fprintln(os.Stderr, "11-distributed: warning:", env.Warning)
	}
	ctx, stop := interrupt.Context(grace)
	_, err := run(ctx, o, os.Stdout)
	stop()
	switch {
	case errors.Is(err, errTerminated):
		os.Exit(interrupt.Status)
	case err != nil:
		fmt.Fprintln(os.Stderr, "11-distributed:", message(err))
		os.Exit(1)
	}
}

// message returns the text that a rank prints about its failure. Only one rank prints the full
// reason why the job has ended.
func message(err error) string {
	var e *distributed.Error
	if !errors.As(err, &e) || e.Culprit < 0 {
		return err.Error()
	}
	speaker := 0
	if e.Culprit == 0 {
		speaker = 1
	}
	if e.Rank == speaker || e.Rank == e.Culprit {
		return err.Error()
	}
	return fmt.Sprintf("rank %d ends with the job: rank %d is at fault, and rank %d says why", e.Rank,
		e.Culprit, speaker)
}

// result holds a rank's results.
type result struct {
	losses  []float64 // mean per epoch, over all ranks
	weights string    // a checksum
}

func (o *options) check() error {
	switch {
	case o.every < 0 || o.every > 0 && o.checkpoint == "":
		return fmt.Errorf("-every %d: want 0 or more, with -checkpoint", o.every)
	case o.epochs < 0:
		return fmt.Errorf("-epochs %d: want 0 or more", o.epochs)
	case o.batch < 1:
		return fmt.Errorf("-batch %d: want 1 or more", o.batch)
	case o.size < 1:
		return fmt.Errorf("-size %d: want 1 or more", o.size)
	}
	return nil
}

// run trains until all epochs are complete or its context ends. When the context ends, all ranks
// stop after the same step.
func run(terminated context.Context, o options, out io.Writer) (r *result, err error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	defer func() {
		if errors.Is(err, errTerminated) {
			fmt.Fprintln(out, "11-distributed:", errTerminated)
		}
	}()
	// Before the first step a signal ends the job immediately.
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(terminated))
	defer cancel(nil)
	atOnce := context.AfterFunc(terminated, func() { cancel(errTerminated) })
	world, err := distributed.Init(ctx, o.dist)
	if err != nil {
		return nil, err
	}
	var t trainer
	defer func() {
		err = errors.Join(err, world.Close())
		if t.saving != nil { // after an error the last checkpoint is still useful
			<-t.saving.Done()
		}
	}()
	if world.Rank() != 0 {
		out = io.Discard
	}
	ranks := "ranks"
	if world.Size() == 1 {
		ranks = "rank"
	}
	fmt.Fprintf(out, "%d %s, rank 0 on %v\n", world.Size(), ranks, world.Device())
	if o.batch%world.Size() != 0 {
		return nil, fmt.Errorf("-batch %d: %d ranks cannot share it equally", o.batch, world.Size())
	}

	// Every rank reads the same archive, and gets different samples of the same order.
	feed, err := imagefeed.Open(ctx, o.archive, imagefeed.Options{
		Loader: imageloader.Options{BatchSize: o.batch / world.Size(), Transform: imageloader.Train(o.size),
			Shuffle: true, Seed: o.seed, Rank: world.Rank(), World: world.Size()},
		Prefetcher: prefetcher.Options{Device: world.Device()}})
	if err != nil {
		return nil, lesson.ExplainMissing(err, "11-distributed", "-archive", o.archive)
	}
	defer feed.Close()
	if err := train.CheckRanks(world, feed.Loader); err != nil {
		return nil, err
	}

	// Ranks draw different random numbers. The parameters are rank 0's.
	if err := torch.ManualSeed(o.seed + uint64(world.Rank())); err != nil {
		return nil, err
	}
	net, err := network(o.arch, len(feed.Loader.Classes()))
	if err != nil {
		return nil, err
	}
	defer nn.Close(net)
	if err := nn.To(net, world.Device()); err != nil {
		return nil, err
	}
	t = trainer{options: o, world: world, feed: feed, net: net}
	var parallel distributed.DataParallelOptions
	if o.bfloat16 {
		parallel.ReduceDType = torch.BFloat16
	}
	if t.parallel, err = distributed.NewDataParallel(world, net, parallel); err != nil {
		return nil, err
	}
	defer t.parallel.Close()
	if t.opt, err = optim.NewSGD(nn.Parameters(net), optim.SGDOptions{LR: o.rate, Momentum: 0.9}); err != nil {
		return nil, err
	}
	defer t.opt.Close()

	if err := t.begin(ctx, out); err != nil {
		return nil, err
	}
	t.stop = distributed.NewFlag(world)
	defer t.stop.Close()
	if atOnce() {
		defer context.AfterFunc(terminated, t.stop.Raise)()
	}
	r = &result{}
	if r.losses, err = t.epochs(ctx, out); err != nil {
		return nil, err
	}
	return r, r.compare(world, net)
}

// finish writes the output files.
func (t *trainer) finish(out io.Writer) error {
	if err := t.written(); err != nil {
		return err
	}
	if err := t.lastSteps(out); err != nil {
		return err
	}
	if t.options.save == "" || t.world.Rank() != 0 {
		return nil
	}
	return nn.Save(t.options.save, t.net, nil)
}

// network returns a model by its name, or a small one. The small one normalises each image
// separately, so that it learns the same with any number of ranks. A BatchNorm would depend on the
// images of its rank.
func network(arch string, classes int) (nn.Module, error) {
	if arch != "" {
		return models.ByName(arch, models.Options{NumClasses: classes})
	}
	block := func(in, out int) nn.Module {
		return nn.NewSequential(nn.NewConv2d(in, out, 3, nn.Conv2dOptions{Stride: 2, Padding: 1, NoBias: true}),
			nn.NewGroupNorm(4, out, nn.GroupNormOptions{}), nn.NewReLU())
	}
	return nn.NewSequential(block(3, 16), block(16, 32), block(32, 64), nn.NewAdaptiveAvgPool2d(1), nn.NewFlatten(),
		nn.NewLinear(64, classes, nn.LinearOptions{})), nil
}

type trainer struct {
	options
	world    *distributed.Group
	feed     *imagefeed.Feed
	net      nn.Module
	parallel *distributed.DataParallel
	opt      optim.Optimizer
	stop     *distributed.Flag // raised when a rank has been told to leave
	state    train.Checkpoint
	saving   *train.Saving // the checkpoint being written, or nil
	first    int           // the epoch to start with
	steps    int           // of this process
	rec      *trace.Recorder
}

// begin resumes from the checkpoint, if there is one.
func (t *trainer) begin(ctx context.Context, out io.Writer) error {
	t.state = train.Checkpoint{Model: t.net, Optimizer: t.opt, Device: t.world.Device(), World: t.world}
	if t.checkpoint == "" {
		return nil
	}
	if err := t.state.Load(t.checkpoint); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	if err := t.state.RestoreLoader(ctx, t.feed.Loader); err != nil {
		return err
	}
	if place := t.state.Loader; place != nil {
		t.first = place.Epoch()
		fmt.Fprintf(out, "goes on in epoch %d after batch %d\n", t.first+1, place.Batches())
	}
	return nil
}

// save waits for the previous checkpoint, and then starts to write a new one.
func (t *trainer) save() (err error) {
	if err := t.written(); err != nil || t.checkpoint == "" {
		return err
	}
	t.saving, err = t.state.SaveAsync(t.checkpoint)
	return err
}

// written waits for the checkpoint that is being written, if any.
func (t *trainer) written() error {
	if t.saving == nil {
		return nil
	}
	s := t.saving
	t.saving = nil
	return s.Wait()
}

// epochs trains until the last epoch, prints a line for each, finishes the training, and returns
// the losses.
func (t *trainer) epochs(ctx context.Context, out io.Writer) (losses []float64, err error) {
	for epoch := t.first; epoch < t.options.epochs; epoch++ {
		start := time.Now()
		loss, images, err := t.epoch(ctx, epoch)
		if err != nil {
			return nil, err
		}
		if images > 0 { // the checkpoint may be at the end of an epoch
			losses = append(losses, loss)
			fmt.Fprintf(out, "epoch %d: loss %.4f, %.0f images/s\n", epoch+1, loss,
				float64(images)/time.Since(start).Seconds())
		}
	}
	return losses, t.finish(out)
}

// epoch trains on all batches. It returns the mean loss and the number of images, over all ranks.
func (t *trainer) epoch(ctx context.Context, epoch int) (loss float64, images int, err error) {
	sums, err := torch.Zeros(t.world.Device(), torch.Float64, 2) // of losses, and of images
	if err != nil {
		return 0, 0, err
	}
	defer sums.Close()
	steps := 0
	for batch, err := range t.feed.Epoch(ctx, epoch) {
		if err != nil {
			return 0, 0, err
		}
		if err := t.step(epoch, batch, sums); err != nil {
			return 0, 0, err
		}
		steps++
		if err := t.afterwards(steps); err != nil {
			return 0, 0, err
		}
	}
	if steps > 0 {
		if err := t.save(); err != nil {
			return 0, 0, err
		}
	}
	if err := t.world.AllReduce(sums, distributed.Sum); err != nil {
		return 0, 0, err
	}
	values, err := sums.Float64s()
	if err != nil || values[1] == 0 {
		return 0, 0, err
	}
	return values[0] / values[1], int(values[1]), nil
}

// step trains on a batch.
func (t *trainer) step(epoch int, batch *imagefeed.Batch, sums *torch.Tensor) error {
	x := batch.Images
	if t.bfloat16 {
		x = x.Autocast(torch.BFloat16)
	}
	loss := t.net.Forward(x).CrossEntropy(batch.Labels)
	if err := t.parallel.Backward(loss); err != nil {
		return err
	}
	if err := t.opt.Step(); err != nil {
		return err
	}
	t.state.Loader = &batch.Info.State
	// The sums stay on the device, so the host does not wait for each batch.
	losses, counts := sums.Narrow(0, 0, 1), sums.Narrow(0, 1, 1)
	err := errors.Join(losses.Add_(loss.Detach().MulScalar(float64(batch.N))).Err(),
		counts.AddScalar_(float64(batch.N)).Err(),
		losses.Close(), counts.Close())
	if err != nil || t.onStep == nil {
		return err
	}
	return t.onStep(step{t.world.Rank(), epoch, batch.Info.State.Batches(), t.net, batch.Images, batch.Info, loss})
}

// afterwards writes a checkpoint when one is due. If a rank was told to leave, it ends the job
// after the same step on all ranks.
func (t *trainer) afterwards(steps int) error {
	leave, err := t.stop.Sync()
	if err != nil {
		return err
	}
	if leave {
		if err := t.save(); err != nil {
			return fmt.Errorf("the checkpoint of a job that was told to leave: %w", err)
		}
		if err := t.written(); err != nil {
			return fmt.Errorf("the checkpoint of a job that was told to leave: %w", err)
		}
		return errTerminated
	}
	if t.timeline != "" {
		if err := t.record(); err != nil {
			return err
		}
	}
	if t.every > 0 && steps%t.every == 0 {
		return t.save()
	}
	return nil
}

// A timeline shows these steps of this process. Earlier ones load libraries and select kernels.
const firstDrawn, lastDrawn = 4, 8

// record records some steps on every rank, and draws them on rank 0.
func (t *trainer) record() (err error) {
	t.steps++
	switch {
	case t.steps == firstDrawn-1 && t.rec == nil:
		t.rec, err = trace.Start(trace.Options{})
	case t.steps == lastDrawn:
		err = t.draw()
	}
	return err
}

// lastSteps draws the recorded steps of a run that ends before its timeline is complete.
func (t *trainer) lastSteps(out io.Writer) error {
	switch {
	case t.timeline == "":
		return nil
	case t.steps < firstDrawn:
		fmt.Fprintf(out, "-timeline %s is not written: it shows the steps %d to %d, and the training has %d\n", t.timeline,
			firstDrawn, lastDrawn, t.steps)
		if t.rec == nil {
			return nil
		}
		_, err := t.rec.Stop()
		return err
	}
	return t.draw()
}

// draw ends the recording on every rank, and draws the timeline on rank 0.
func (t *trainer) draw() error {
	tr, err := t.rec.Stop()
	if err != nil {
		return err
	}
	offset, _, err := distributed.ClockOffset(t.world)
	if err != nil {
		return err
	}
	tr.Begin = tr.Begin.Add(offset) // rank 0's clock
	all, err := distributed.AllGatherObject(t.world, tr)
	if err == nil && t.world.Rank() == 0 {
		err = trace.Ranks(all).WriteFile(t.timeline, trace.PictureOptions{})
	}
	t.timeline = "" // once
	return err
}

// compare requires that all ranks have the same weights.
func (r *result) compare(world *distributed.Group, net nn.Module) error {
	sum := sha256.New()
	for _, p := range nn.Parameters(net) {
		onCPU := p.Detach().To(cuda.CPU)
		b, err := onCPU.Bytes()
		sum.Write(b) // the bytes are the tensor's memory
		if err := errors.Join(err, onCPU.Close()); err != nil {
			return err
		}
	}
	r.weights = fmt.Sprintf("%x", sum.Sum(nil))
	all, err := distributed.AllGatherObject(world, r.weights)
	if err != nil {
		return err
	}
	for rank, other := range all {
		if other != all[0] {
			return fmt.Errorf("rank %d has other weights than rank 0", rank)
		}
	}
	return nil
}
