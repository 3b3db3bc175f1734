package train

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/safefile"
	"github.com/torchstream/torchstream/internal/tfevents"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
)

// ErrStop, returned by a hook, ends the training in good order: Run saves last.pt and returns its
// report without an error.
var ErrStop = errors.New("train: stop")

// Config says what Run does. Model, Optimizer, Feed and Epochs are needed.
type Config struct {
	// Model is on Feed's device. Run gives it Batch.Images or, if the batches have none, their
	// first tensor. Modules whose parameters are all frozen stay in evaluation mode.
	Model     nn.Module
	Optimizer optim.Optimizer // of Model's parameters; SGD, Adam, ...
	Feed      *prefetcher.Prefetcher
	Epochs    int // the number of the last epoch, also of a run that resumes

	// Loader is the source of Feed, if that is a loader of images. Run then resumes at once by
	// Loader.Restore, and knows how many steps an epoch has. Without Loader, a run that resumes
	// reads the batches that were trained on before, and drops them: the source must give the same
	// batches again.
	Loader *imageloader.Loader
	// Eval feeds the held-back samples, on which Run evaluates the model after every epoch, as
	// Evaluate does; nil for none. Its epoch 0 is read each time.
	Eval *prefetcher.Prefetcher
	// Loss computes the mean loss of a batch, a scalar; nil stands for the cross-entropy of output
	// and batch.Labels.
	Loss func(output *torch.Tensor, batch *prefetcher.Batch) *torch.Tensor
	// Schedule sets the learning rates before each step, counted from 0 over all epochs; nil leaves
	// them alone.
	Schedule optim.Schedule
	// ClipNorm, if over 0, is the maximum norm of all gradients together.
	ClipNorm float64
	// EMA, if not nil, holds averages of nn.State(Model). Run updates them after each step, and
	// evaluates and saves them as the best model.
	EMA *optim.EMA
	// Autocast runs the forward passes, those of the evaluation too, under autocast to BFloat16 or
	// Float16; 0 for none.
	Autocast torch.DType
	// Scaler, if not nil, scales the loss and skips steps whose gradients overflowed, as Float16
	// needs it.
	Scaler *optim.GradScaler
	// Graph replays each step as a CUDA graph: see StepperOptions.Graph.
	Graph bool
	// Log says which steps run without a graph and which last batch is left out, and why, and warns
	// of a folder that cannot be locked and of a dtype that is slow on the CPU; nil for silence.
	Log *slog.Logger
	// Seed, if not 0, seeds LibTorch's generators before each step from Seed and the step's number,
	// so that what Dropout draws depends on nothing else. The generators belong to the process.
	Seed uint64

	// Dir is the folder of the files, made if missing; "" writes none. A new run writes its first
	// last.pt at once, and is refused in a folder that has a last.pt or best.pt of another run. If
	// the run ends with an error before that file was replaced, Run removes it again. One run at a
	// time has the folder: a second one, in any process, is a *BusyError that names the first.
	Dir       string
	Resume    bool // goes on from last.pt in Dir, if there is one
	SaveSteps int  // saves last.pt every so many steps too; 0 for once an epoch
	// Patience, if not 0, ends the training after so many epochs without a better one, in the order
	// of Report.Best.
	Patience int
	// TensorBoard writes the figures of each epoch to an event file in Dir too.
	TensorBoard bool
	// Metadata is saved with the checkpoints under "metadata": for example the classes. torchstream
	// predict and evaluate need three keys: "model", a name of models.Names; "classes", a JSON list
	// of the classes' names, in the order of the outputs; "size", the pixels of an image's side.
	Metadata map[string]string

	// Progress receives a table with a line for each epoch, and a bar if it is a terminal; nil for
	// silence.
	Progress io.Writer
	// OnStep and OnEpoch run after each step and each epoch. An error ends the training; ErrStop
	// ends it without an error.
	OnStep  func(Step) error
	OnEpoch func(Epoch) error
}

// Step is what OnStep gets.
type Step struct {
	Epoch int           // from 1
	Step  int           // over all epochs, from 1
	Loss  *torch.Tensor // scalar on the device, valid during the call; reading it waits for the device
}

// Epoch is the result of one epoch.
type Epoch struct {
	Epoch int      `json:"epoch"` // from 1
	Steps int      `json:"steps"` // since the beginning of the training
	LR    float64  `json:"lr"`    // of the first group, in the last step
	Train *Metrics `json:"train"`
	Eval  *Metrics `json:"eval,omitempty"` // nil without Config.Eval
	Best  bool     `json:"best"`           // better than all epochs before

	// Of an epoch that was interrupted, these are about the part after the last interruption.
	Seconds         float64 `json:"seconds"` // training, without evaluation
	ImagesPerSecond float64 `json:"images_per_second"`
	WaitShare       float64 `json:"wait_share"` // of the seconds in which the device waited for a batch

	AllocatedBytes int64 `json:"device_allocated_bytes"` // 0 on the CPU
	ReservedBytes  int64 `json:"device_reserved_bytes"`  // 0 on the CPU
}

// Report is the result of Run.
type Report struct {
	Epochs  []Epoch      // all complete ones, those before a resume included
	Steps   int          // since the beginning of the training
	Stepper StepperStats // the steps of this process
	Stopped bool         // by a hook, Patience or the context, before the last epoch was complete
}

// Best returns the best epoch: the one with the highest Top1 of the evaluation, and among equals
// with the lowest Loss of the evaluation. If there are no classes or no evaluation, it is the one
// with the lowest loss, without evaluation that of training. Of epochs that are equal in all of
// this the earliest is the best. Best returns nil if no epoch is complete.
func (r *Report) Best() *Epoch {
	for i := len(r.Epochs) - 1; i >= 0; i-- {
		if r.Epochs[i].Best {
			return &r.Epochs[i]
		}
	}
	return nil
}

func (e *Epoch) decisive() *Metrics {
	if e.Eval != nil {
		return e.Eval
	}
	return e.Train
}

func (e *Epoch) betterThan(other *Epoch) bool {
	if other == nil {
		return true
	}
	a, b := e.decisive(), other.decisive()
	if e.Eval != nil && a.Classes > 0 && a.Top1 != b.Top1 {
		return a.Top1 > b.Top1
	}
	return a.Loss < b.Loss
}

// Run trains the model until Config.Epochs epochs are complete, and returns a report, also beside
// an error. It holds its OS thread, because LibTorch plans cuDNN's convolutions for each thread
// anew. It trains on the current stream; within [WithPrecedence] steps go before the preparation of
// later batches on the GPU.
//
// When ctx ends, Run finishes the current step, saves last.pt and returns an *InterruptedError that
// wraps ctx.Err() and says how to go on. Before the first step of a new run there is nothing to
// save. If the evaluation was running, the resumed run repeats it. Another error that comes
// meanwhile is returned instead, and saves nothing. If the loss becomes NaN or infinite, Run
// notices at the end of the epoch or at the next checkpoint, leaves the checkpoints with results as
// they are and returns an error. An error before the first checkpoint with results leaves no folder
// that Run made. With Loader, and without Loss, a model that has fewer outputs than the loader has
// classes is an error before the first step.
//
// BatchNorm in training cannot compute statistics of one value per channel ([nn.ErrOneValue]). Run
// leaves out the last batch of an epoch if it is one sample for which a normalisation returns that
// error, restores the running statistics of the layers before, and logs it. The samples of
// Epoch.Train do not count it. The same error of another batch ends the training.
func Run(ctx context.Context, c Config) (*Report, error) {
	r := &runner{Config: c, report: &Report{}}
	if err := r.check(); err != nil {
		return r.report, err
	}
	r.criterion = criterion{call: "train.Run", own: c.Loss}
	if c.Loader != nil {
		r.criterion.classes = len(c.Loader.Classes())
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var err error
	if r.stepper, err = NewStepper(StepperOptions{
		Model: c.Model, Optimizer: c.Optimizer, Autocast: c.Autocast, Scaler: c.Scaler, ClipNorm: c.ClipNorm,
		Schedule: c.Schedule, EMA: c.EMA, Graph: c.Graph, Log: c.Log,
		Loss: func(output *torch.Tensor, _ []*torch.Tensor) *torch.Tensor { return r.criterion.loss(output, r.batch) },
	}); err != nil {
		return r.report, err
	}
	defer r.stepper.Close()
	defer r.release()
	if err := r.openDir(ctx); err != nil {
		r.removeFirst()
		return r.report, err
	}
	r.progress = newProgress(r)
	defer r.progress.clear()
	err = r.epochs(ctx)
	if r.events != nil {
		err = errors.Join(err, r.events.Close())
	}
	if err != nil {
		r.removeFirst()
	}
	r.report.Steps, r.report.Stepper = r.at.Step, r.stepper.Stats()
	return r.report, err
}

// runner is one run.
type runner struct {
	Config
	stepper   *Stepper
	report    *Report
	at        position
	state     *imageloader.State // after the last step of a running epoch, with a Loader
	progress  *progress
	batch     *prefetcher.Batch // of the running step
	events    *tfevents.Writer  // nil without TensorBoard, and before the first epoch
	criterion criterion
	leftOut   bool            // a last batch was left out, and Log has it
	first     bool            // the folder has no more of this run than the last.pt that it began with
	claim     *safefile.Claim // on Dir
	made      []string        // folders that the run made: Dir, and those above it
}

func (c *Config) check() error {
	switch {
	case c.Model == nil || c.Optimizer == nil || c.Feed == nil:
		return fmt.Errorf("train.Run: Config needs Model, Optimizer and Feed: %w", cuda.ErrInvalidArgument)
	case c.Epochs < 1:
		return fmt.Errorf("train.Run: Epochs is %d, and must be at least 1: %w", c.Epochs, cuda.ErrInvalidArgument)
	case c.SaveSteps < 0 || c.Patience < 0:
		return fmt.Errorf("train.Run: SaveSteps is %d and Patience %d: neither may be negative: %w", c.SaveSteps, c.Patience, cuda.ErrInvalidArgument)
	case c.Dir == "" && (c.Resume || c.SaveSteps > 0 || c.TensorBoard):
		return fmt.Errorf("train.Run: Resume, SaveSteps and TensorBoard need Dir: %w", cuda.ErrInvalidArgument)
	}
	return nn.Err(c.Model)
}

// epochs runs the epochs that are left.
func (r *runner) epochs(ctx context.Context) error {
	for r.at.Epoch < r.Epochs {
		if r.impatient() {
			r.report.Stopped = true
			return nil
		}
		e, err := r.epoch(ctx)
		if err != nil {
			return r.ended(ctx, err)
		}
		if e.Best = e.betterThan(r.report.Best()); e.Best {
			if err := r.saveBest(e); err != nil {
				return r.failed(err)
			}
		}
		r.report.Epochs = append(r.report.Epochs, e)
		r.at = position{Epoch: r.at.Epoch + 1, Step: r.at.Step}
		r.state = nil
		if err := errors.Join(r.saveLast("training"), r.saveLog()); err != nil {
			return r.failed(err)
		}
		if err := r.event(e); err != nil {
			return r.failed(err)
		}
		r.progress.epoch(e)
		if r.OnEpoch != nil {
			if err := r.OnEpoch(e); err != nil {
				return r.ended(ctx, hookError{err})
			}
		}
	}
	return nil
}

// impatient reports whether Patience has run out.
func (r *runner) impatient() bool {
	best := r.report.Best()
	return r.Patience > 0 && best != nil && r.at.Epoch-best.Epoch >= r.Patience
}

// InterruptedError is the error of a Run that its context ended in good order.
type InterruptedError struct {
	Epoch      int    // the running one, from 1
	Step       int    // the last complete one, over all epochs, from 1; 0 before the first
	Checkpoint string // path of the last.pt from which Config.Resume goes on; "" if nothing is saved
	Err        error  // of the context
}

func (e *InterruptedError) Error() string {
	goOn := "Resume goes on from " + e.Checkpoint
	switch {
	case e.Checkpoint == "" && e.Step == 0:
		goOn = "nothing is saved: run again"
	case e.Checkpoint == "":
		goOn = "no checkpoint, because Config.Dir is empty"
	}
	return fmt.Sprintf("train: interrupted in epoch %d after step %d: %s: %v", e.Epoch, e.Step, goOn, e.Err)
}

func (e *InterruptedError) Unwrap() error { return e.Err }

// hookError is an error of the program's own hook.
type hookError struct{ error }

func (e hookError) Unwrap() error { return e.error }

// failed gives an error its place.
func (r *runner) failed(err error) error {
	return fmt.Errorf("train: epoch %d, after step %d: %w", r.at.Epoch+1, r.at.Step, err)
}

// ended handles the end of a run before its last epoch: it saves where the run is if the context or
// a hook ended it.
func (r *runner) ended(ctx context.Context, err error) error {
	stop := errors.Is(err, ErrStop)
	// An error of a step may have left a half of it, also where the context has ended meanwhile.
	if !stop && (ctx.Err() == nil || !errors.Is(err, ctx.Err()) && !errors.Is(err, context.Cause(ctx))) {
		return r.failed(err)
	}
	r.report.Stopped = r.at.Epoch < r.Epochs
	if r.at.Step == 0 && r.first {
		return &InterruptedError{Epoch: r.at.Epoch + 1, Err: ctx.Err()}
	}
	if saved := r.saveLast("training"); saved != nil {
		return r.failed(errors.Join(err, saved))
	}
	if stop {
		return nil
	}
	interrupted := &InterruptedError{Epoch: r.at.Epoch + 1, Step: r.at.Step, Err: ctx.Err()}
	if r.Dir != "" {
		interrupted.Checkpoint = r.path(lastFile)
	}
	return interrupted
}

// epoch trains on the batches of the epoch that are left, and evaluates.
func (r *runner) epoch(ctx context.Context) (e Epoch, err error) {
	if r.at.meter, err = newMeter(r.Feed.Device(), r.at.Sums); err != nil {
		return e, err
	}
	defer func() {
		// The totals go into the checkpoint of a run that ended here.
		if r.at.Batches > 0 && err != nil {
			sums, failed := r.at.meter.read("training")
			r.at.Sums = sums
			if failed != nil {
				err = failed
			}
		}
		r.at.meter.close()
		r.at.meter = nil
	}()
	r.trainMode()
	begin, before, first := time.Now(), r.Feed.Stats(), r.at.meter.samples
	r.progress.start(begin, before)
	if err := r.train(ctx); err != nil {
		return e, err
	}
	e = Epoch{Epoch: r.at.Epoch + 1, Steps: r.at.Step, LR: r.at.LR}
	if e.Train, err = r.at.meter.metrics("training"); err != nil {
		return e, err
	}
	e.Seconds = time.Since(begin).Seconds()
	e.ImagesPerSecond = float64(r.at.meter.samples-first) / e.Seconds
	e.WaitShare = waitShare(before, r.Feed.Stats(), e.Seconds)
	if r.Eval != nil {
		if e.Eval, err = r.evaluate(ctx); err != nil {
			return e, err
		}
	}
	if device := r.Feed.Device(); device != cuda.CPU {
		memory, err := device.Memory()
		if err != nil {
			return e, err
		}
		e.AllocatedBytes, e.ReservedBytes = memory.Allocated, memory.Reserved
	}
	return e, nil
}

// waitShare is the share of the seconds in which the consumer waited between two statistics.
func waitShare(before, after prefetcher.Stats, seconds float64) float64 {
	if seconds <= 0 {
		return 0
	}
	return min(1, (after.ConsumerWait-before.ConsumerWait).Seconds()/seconds)
}

// train is the loop over the batches.
func (r *runner) train(ctx context.Context) error {
	skip := 0
	if r.state == nil {
		skip = r.at.Batches
	}
	var refused error // of a batch of one sample that the model cannot train on
	for batch, err := range r.Feed.Epoch(ctx, r.at.Epoch) {
		if err != nil {
			return err
		}
		if refused != nil {
			return refused // it was not the last
		}
		if skip > 0 {
			skip--
			continue
		}
		if refused, err = r.stepOrRefuse(batch); err != nil {
			return err
		}
		if refused != nil {
			continue
		}
		if r.SaveSteps > 0 && r.at.Step%r.SaveSteps == 0 {
			if err := r.saveLast("training"); err != nil {
				return err
			}
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	r.sayLeftOut(refused)
	if skip > 0 {
		return fmt.Errorf("the feed ended %d batches before the place to resume at: it must give the batches of the interrupted run", skip)
	}
	return nil
}

// step trains on a batch. It queues work for the device and does not wait for it.
func (r *runner) step(batch *prefetcher.Batch) error {
	if r.Seed != 0 {
		if err := torch.ManualSeed(mix(r.Seed, uint64(r.at.Step))); err != nil {
			return err
		}
	}
	r.at.LR = r.Optimizer.LRs()[0]
	r.batch = batch
	output, loss, err := r.stepper.Step(input(batch), batch.Tensors()...)
	if err != nil {
		return err
	}
	if err := r.at.meter.add(output, loss, batch.Labels, batch.N, false); err != nil {
		return err
	}
	r.at.Step++
	r.at.Batches++
	if info, ok := batch.Info.(imageloader.Info); ok && r.Loader != nil {
		r.state = &info.State
	}
	r.progress.step(batch.N)
	if r.OnStep != nil {
		if err := r.OnStep(Step{Epoch: r.at.Epoch + 1, Step: r.at.Step, Loss: loss}); err != nil {
			return hookError{err}
		}
	}
	return nil
}

// mix makes a seed of two numbers (the finaliser of SplitMix64).
func mix(seed, step uint64) uint64 {
	x := seed + (step+1)*0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// evaluate measures the model, or its averages, on the held-back samples.
func (r *runner) evaluate(ctx context.Context) (result *Metrics, err error) {
	err = r.averaged(func() (failed error) {
		result, failed = evaluate(ctx, r.Model, r.Eval, r.Autocast, r.criterion)
		return failed
	})
	return result, err
}

// averaged calls f while the model has its averages, if there are any.
func (r *runner) averaged(f func() error) error {
	if r.EMA == nil {
		return f()
	}
	if err := r.EMA.Swap(); err != nil {
		return err
	}
	err := f()
	if back := r.EMA.Swap(); back != nil {
		// No error of a context that has ended meanwhile: no checkpoint may be made of this model.
		back = fmt.Errorf("the model may be left with its averages: %w", back)
		if err != nil {
			back = fmt.Errorf("%w (after: %v)", back, err)
		}
		return back
	}
	return err
}

// trainMode sets the training mode, except in modules whose parameters are all frozen: the running
// statistics of a frozen BatchNorm stay as they are.
func (r *runner) trainMode() {
	nn.Train(r.Model, true)
	freeze(r.Model)
}

func freeze(m nn.Module) {
	params := nn.Parameters(m)
	trained := 0
	for _, p := range params {
		if p.RequiresGrad() {
			trained++
		}
	}
	switch {
	case len(params) > 0 && trained == 0:
		nn.Train(m, false)
	case trained < len(params):
		for _, child := range m.Parts().Modules {
			freeze(child.Module)
		}
	}
}
