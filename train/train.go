package train

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/safefile"
	"github.com/torchstream/torchstream/internal/tfevents"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
)

// ErrStop, returned by a hook, stops the training normally: Run saves last.pt and returns its
// report without an error.
var ErrStop = errors.New("train: stop")

// Config configures Run. Model, Optimizer, Feed and Epochs are required.
type Config struct {
	// Model must be on Feed's device. Its input is Batch.Images or, if the batches have none, their
	// first tensor. Modules whose parameters are all frozen stay in evaluation mode.
	Model     nn.Module
	Optimizer optim.Optimizer // of Model's parameters; SGD, Adam, ...
	Feed      *prefetcher.Prefetcher
	Epochs    int // total number of epochs, including those before a resume

	// Loader is the image loader that Feed's source reads from. nil means the source itself, if it
	// is an *imageloader.Loader. With an image loader Run resumes immediately with Loader.Restore,
	// refuses other archives and options, and gets the number of steps per epoch from the loader.
	// Without one, a resumed run reads the batches that were already trained on and drops them, so
	// the source must give the same batches again. If a prefetcher.SampleSource was made with other
	// options, Run returns an error that names the first.
	Loader *imageloader.Loader
	// Eval feeds the held-out samples. Run evaluates the model on them after every epoch, as
	// Evaluate does, and reads epoch 0 each time. nil means no evaluation.
	Eval *prefetcher.Prefetcher
	// Loss computes the mean loss of a batch, a scalar. nil means the cross-entropy of output and
	// batch.Labels.
	Loss func(output *torch.Tensor, batch *prefetcher.Batch) *torch.Tensor
	// MultiLabel is for samples with any number of labels: batch.Labels has a 0 or 1 for each class
	// ([N classes], as imageloader.Options.MultiLabel gives them). The loss is then the binary
	// cross-entropy of the outputs as logits, unless Loss is set. Evaluations measure the mean
	// average precision (Metrics.MAP), which decides which epoch is best. Until its end, an
	// evaluation keeps 5 bytes for each sample and class on the device. In a job, each rank also
	// holds about 15 bytes for each sample of all ranks and class on the host, while it combines
	// them.
	MultiLabel bool
	// Schedule sets the learning rates before each step, counted from 0 over all epochs. nil leaves
	// them unchanged.
	Schedule optim.Schedule
	// MicroBatch, if over 0, divides each step into parts of about that many samples, so a step
	// needs only the memory of one part: see StepperOptions.MicroBatch. Loss then gets a batch of
	// the part's samples. A job of several ranks does not support it.
	MicroBatch int
	// ClipNorm, if over 0, is the maximum norm of all gradients together.
	ClipNorm float64
	// EMA, if not nil, holds averages of nn.State(Model). Run updates them after each step,
	// evaluates them, and saves them as the best model.
	EMA *optim.EMA
	// Autocast runs the forward passes, including evaluation, under autocast to BFloat16 or
	// Float16. 0 means none.
	Autocast torch.DType
	// Scaler, if not nil, scales the loss and skips steps whose gradients overflowed. Float16 needs
	// it.
	Scaler *optim.GradScaler
	// Graph replays each step as a CUDA graph: see StepperOptions.Graph.
	Graph bool
	// Log reports, with the reasons, which steps run without a graph and that the last batch of an
	// epoch is left out. It also warns of a folder that cannot be locked or synced and of a dtype
	// that is slow on the CPU. nil means silence.
	Log *slog.Logger
	// Seed, if not 0, seeds LibTorch's generators before each step from Seed and the step's number,
	// so that Dropout depends on nothing else. The generators are global to the process.
	Seed uint64
	// World, if not nil, is a job of several processes that train one model together. Each rank has
	// a copy of the model. Every rank calls Run with the same options and its own share of the
	// samples: open the loaders of Feed and Eval with the Rank and World of the group. Feed must be
	// on World.Device(). Run averages the gradients over the ranks. All ranks return the same
	// report, whose metrics cover all ranks. Rank 0 writes the files and the progress. A job can
	// resume with the same number of ranks or, if it has a Loader, with another one. When the
	// context of one rank ends, all ranks stop after the same step. Hooks must return the same
	// error on all ranks. The caller closes the group, even after an error, so that the other ranks
	// end.
	//
	// The evaluation does not count the samples that a loader repeats to give all ranks equal
	// numbers of samples. Eval must not be shuffled.
	World *distributed.Group

	// Dir is the folder for the files, made if missing. "" writes none. A new run is refused if the
	// folder has a last.pt or best.pt of another run. Otherwise it writes its first last.pt at
	// once, before any step. If the run fails before it replaces this first last.pt, Run removes
	// the file. Only one run at a time may use the folder. A second run, in any process, gets a
	// *BusyError that names the first run.
	Dir       string
	Resume    bool // continues from last.pt in Dir, if it exists
	SaveSteps int  // also saves last.pt every SaveSteps steps; 0 saves once per epoch
	// LogEvery, if not 0, writes a line to Progress after every LogEvery steps, for logs. The line
	// shows the step's loss. To read the loss, Run waits for the device. A terminal also has the
	// progress bar.
	LogEvery int
	// Patience, if not 0, ends the training once that many epochs in a row were not better than the
	// best one before them. Report.Best defines which epoch is better.
	Patience int
	// TensorBoard also writes the metrics of each epoch to an event file in Dir.
	TensorBoard bool
	// Metadata is saved with the checkpoints under "metadata": for example the classes. torchstream
	// predict and evaluate need three keys: "model", a name of models.Names; "classes", a JSON list
	// of the classes' names, in the order of the outputs; "size", an image's side in pixels.
	Metadata map[string]string

	// Progress receives a table with a line for each epoch, and a progress bar if it is a terminal.
	// nil means silence.
	Progress io.Writer
	// OnStep and OnEpoch run after each step and each epoch. An error ends the training; ErrStop
	// ends it without an error.
	OnStep  func(Step) error
	OnEpoch func(Epoch) error
}

// Step is the argument of OnStep.
type Step struct {
	Epoch int           // from 1
	Step  int           // over all epochs, from 1
	Loss  *torch.Tensor // scalar on the device, valid during the call; reading it waits for the device
}

// Epoch is the result of one epoch.
type Epoch struct {
	Epoch int      `json:"epoch"` // from 1
	Steps int      `json:"steps"` // since the start of the training
	LR    float64  `json:"lr"`    // of the first group, in the last step
	Train *Metrics `json:"train"`
	Eval  *Metrics `json:"eval,omitempty"` // nil without Config.Eval
	Best  bool     `json:"best"`           // better than all earlier epochs

	// For an interrupted epoch, these fields cover only the part after the last interruption.
	Seconds          float64 `json:"seconds"` // training, without evaluation
	SamplesPerSecond float64 `json:"samples_per_second"`
	WaitShare        float64 `json:"wait_share"` // of Seconds, while the device waited for a batch

	AllocatedBytes int64 `json:"device_allocated_bytes"` // 0 on the CPU
	ReservedBytes  int64 `json:"device_reserved_bytes"`  // 0 on the CPU
}

// UnmarshalJSON reads an epoch of a checkpoint, also of one in which the rate has its former name.
func (e *Epoch) UnmarshalJSON(data []byte) error {
	type fields Epoch // without this method
	former := struct {
		*fields
		Rate *float64 `json:"images_per_second"`
	}{fields: (*fields)(e)}
	if err := json.Unmarshal(data, &former); err != nil {
		return err
	}
	if former.Rate != nil {
		e.SamplesPerSecond = *former.Rate
	}
	return nil
}

// Report is the result of Run.
type Report struct {
	Epochs  []Epoch      // all complete epochs, including those before a resume
	Steps   int          // since the start of the training
	Stepper StepperStats // the steps of this process
	Stopped bool         // by a hook, Patience or the context, before the last epoch was complete
}

// Best returns the best epoch, or nil if no epoch is complete. The best epoch has the highest Top1,
// or with MultiLabel the highest MAP, in the evaluation. Among epochs with equal values, the lowest
// Loss in the evaluation is best. Without classes, the lowest Loss in the evaluation decides alone.
// Without an evaluation, the lowest Loss in the training decides. If epochs are still equal, the
// earliest is best.
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
	if e.Eval != nil && a.MAP != b.MAP { // both are 0 without MultiLabel
		return a.MAP > b.MAP
	}
	if e.Eval != nil && a.Classes > 0 && a.Top1 != b.Top1 {
		return a.Top1 > b.Top1
	}
	return a.Loss < b.Loss
}

// Run trains the model until Config.Epochs epochs are complete. It returns a report, even with an
// error. It locks its OS thread, because LibTorch plans cuDNN's convolutions once per thread. It
// trains on the current stream. Call Run within [WithPrecedence] to make the GPU prefer steps to
// the preparation of later batches.
//
// When ctx ends, Run finishes the current step, saves last.pt and returns an *InterruptedError. The
// error wraps ctx.Err() and says how to resume. Before the first step of a new run there is nothing
// to save. If ctx ends during an evaluation, the resumed run repeats the evaluation. If another
// error occurs when ctx ends, Run returns that error instead and saves nothing.
//
// A checkpoint that is in place, but may not survive a loss of power ([checkpoint.ErrNotDurable]),
// does not end the run: Log gets a warning. After an interruption, Run joins that error to the
// *InterruptedError.
//
// Run notices a NaN or infinite loss at the end of the epoch or at the next checkpoint. It then
// returns an error and leaves existing checkpoints with results unchanged. If an error occurs
// before the first checkpoint with results, Run removes the folders that it made. With Loader, and
// without Loss, a model that has fewer outputs than the loader has classes is an error before the
// first step.
//
// In training, BatchNorm cannot compute statistics of a single value per channel
// ([nn.ErrOneValue]). If the last batch of an epoch is a single sample and a normalisation returns
// that error, Run leaves the batch out, restores the running statistics of earlier layers, and logs
// it. Epoch.Train does not count the sample. The same error for another batch ends the training.
func Run(ctx context.Context, c Config) (report *Report, err error) {
	r := &runner{Config: c, report: &Report{}}
	if err := r.check(); err != nil {
		return r.report, err
	}
	r.criterion = criterion{call: "train.Run", own: c.Loss, multi: c.MultiLabel}
	if r.Loader == nil {
		r.Loader = sourceLoader(c.Feed)
	}
	if r.Loader != nil {
		r.criterion.classes = len(r.Loader.Classes())
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer func() {
		if failed := r.job.close(); err == nil { // a job that has failed cannot close without an error
			err = failed
		}
	}()
	if err := r.join(ctx); err != nil {
		return r.report, err
	}
	if r.stepper, err = NewStepper(StepperOptions{
		Model: c.Model, Optimizer: c.Optimizer, Autocast: c.Autocast, Scaler: c.Scaler, ClipNorm: c.ClipNorm,
		Schedule: c.Schedule, EMA: c.EMA, Graph: c.Graph, Log: c.Log, Backward: r.job.backward(),
		MicroBatch: c.MicroBatch, Loss: r.loss,
	}); err != nil {
		return r.report, err
	}
	defer r.stepper.Close()
	defer r.folder.release()
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

// runner is the state of one Run.
type runner struct {
	Config
	job       job
	stepper   *Stepper
	report    *Report
	at        position
	state     *imageloader.State // after the last step of an unfinished epoch, with a Loader
	progress  *progress
	batch     *prefetcher.Batch // of the current step
	events    *tfevents.Writer  // nil without TensorBoard, and before the first epoch
	criterion criterion
	leftOut   bool // a last batch was left out, and that has been logged
	folder    runFolder
}

// runFolder holds Config.Dir for a run, and records the folders and files that the run has made.
type runFolder struct {
	first bool            // the folder has only this run's initial last.pt
	claim *safefile.Claim // on the folder
	made  []string        // folders that the run made: Dir and its parents
}

// release makes the folder available to other runs.
func (f *runFolder) release() {
	if f.claim != nil {
		f.claim.Release() // if a lock file remains, the next run replaces it
		f.claim = nil
	}
}

func (c *Config) check() error {
	switch {
	case c.Model == nil || c.Optimizer == nil || c.Feed == nil:
		return fmt.Errorf("train.Run: Config needs Model, Optimizer and Feed: %w", cuda.ErrInvalidArgument)
	case c.Epochs < 1:
		return fmt.Errorf("train.Run: Epochs is %d, and must be at least 1: %w", c.Epochs, cuda.ErrInvalidArgument)
	case c.SaveSteps < 0 || c.Patience < 0 || c.LogEvery < 0:
		return fmt.Errorf("train.Run: SaveSteps is %d, Patience %d and LogEvery %d: none may be negative: %w",
			c.SaveSteps, c.Patience, c.LogEvery, cuda.ErrInvalidArgument)
	case c.Dir == "" && (c.Resume || c.SaveSteps > 0 || c.TensorBoard):
		return fmt.Errorf("train.Run: Resume, SaveSteps and TensorBoard need Dir: %w", cuda.ErrInvalidArgument)
	case c.Loader != nil && sourceLoader(c.Feed) != nil && sourceLoader(c.Feed) != c.Loader:
		return fmt.Errorf("train.Run: Feed reads from another loader than Loader: leave Loader nil: %w",
			cuda.ErrInvalidArgument)
	}
	return nn.Err(c.Model)
}

// sourceLoader returns the feed's source if it is an image loader, or else nil.
func sourceLoader(feed *prefetcher.Prefetcher) *imageloader.Loader {
	loader, _ := feed.Source().(*imageloader.Loader)
	return loader
}

// epochs runs the remaining epochs.
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
			if err := r.job.lead(func() error { return r.saveBest(e) }); err != nil {
				return r.failed(err)
			}
		}
		r.report.Epochs = append(r.report.Epochs, e)
		r.at = position{Epoch: r.at.Epoch + 1, Step: r.at.Step}
		r.state = nil
		err = r.warnNotDurable(r.saveLast("training"))
		if err := errors.Join(err, r.job.lead(func() error { return errors.Join(r.saveLog(), r.event(e)) })); err != nil {
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

// InterruptedError is returned by a Run that stopped normally because its context ended.
type InterruptedError struct {
	Epoch      int    // the current epoch, from 1
	Step       int    // the last complete step, over all epochs, from 1; 0 before the first
	Checkpoint string // path of the last.pt for Config.Resume; "" if none was saved
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

// hookError is an error that the program's hook returned.
type hookError struct{ error }

func (e hookError) Unwrap() error { return e.error }

// failed adds the position to an error.
func (r *runner) failed(err error) error {
	return fmt.Errorf("train: epoch %d, after step %d: %w", r.at.Epoch+1, r.at.Step, err)
}

// ended handles a run that ends before its last epoch is complete. If the context or a hook ended
// the run, it saves the position.
func (r *runner) ended(ctx context.Context, err error) error {
	stop := errors.Is(err, ErrStop)
	// Save nothing after any other error, even if the context has ended too: a failed step may have
	// changed only a part of the state.
	if !stop && !errors.Is(err, errJobStops) && (ctx.Err() == nil || !errors.Is(err, ctx.Err()) && !errors.Is(err, context.Cause(ctx))) {
		return r.failed(err)
	}
	r.report.Stopped = r.at.Epoch < r.Epochs
	if r.at.Step == 0 && r.folder.first {
		return &InterruptedError{Epoch: r.at.Epoch + 1, Err: cmp.Or(ctx.Err(), context.Canceled)}
	}
	loose := r.saveLast("training")
	if saved := r.warnNotDurable(loose); saved != nil {
		return r.failed(errors.Join(err, saved))
	}
	if stop {
		return nil
	}
	interrupted := &InterruptedError{Epoch: r.at.Epoch + 1, Step: r.at.Step,
		Err: cmp.Or(ctx.Err(), context.Canceled)} // another rank's context may have ended
	if r.Dir != "" {
		interrupted.Checkpoint = r.path(lastFile)
	}
	if loose != nil {
		return errors.Join(interrupted, loose)
	}
	return interrupted
}

// epoch trains on the remaining batches of the epoch, and evaluates.
func (r *runner) epoch(ctx context.Context) (e Epoch, err error) {
	if r.at.meter, err = newMeter(r.Feed.Device(), r.at.Sums, r.MultiLabel); err != nil {
		return e, err
	}
	defer func() {
		// If the run stops here, its checkpoint needs the totals.
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
	own, err := r.at.meter.tally("training")
	sum, err := r.job.add(own, err)
	if err != nil {
		return e, err
	}
	if e.Train, err = sum.metrics("training"); err != nil {
		return e, err
	}
	e.Seconds = time.Since(begin).Seconds()
	e.SamplesPerSecond = float64((r.at.meter.samples-first)*int64(r.job.size())) / e.Seconds
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

// waitShare returns the share of the seconds in which the consumer waited. before and after are the
// feed's statistics at the start and the end of that time.
func waitShare(before, after prefetcher.Stats, seconds float64) float64 {
	if seconds <= 0 {
		return 0
	}
	return min(1, (after.ConsumerWait-before.ConsumerWait).Seconds()/seconds)
}

// train loops over the batches.
func (r *runner) train(ctx context.Context) error {
	skip, before := r.at.Batches, 0 // without a loader, the feed gives the batches from the first on
	if r.state != nil {
		skip, before = 0, r.state.Batches()
	}
	var refused error // set if the model cannot train on a batch of one sample
	for batch, err := range r.Feed.Epoch(r.job.feedContext(ctx), r.at.Epoch) {
		if err != nil {
			return err
		}
		if refused != nil {
			return refused // it was not the last batch
		}
		if after, known := batchesAfter(batch.Info); known {
			if after == before { // an error cut the batch short: a resumed run gets the whole batch
				continue
			}
			before = after
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
			if err := r.warnNotDurable(r.saveLast("training")); err != nil {
				return err
			}
		}
		if err := r.job.stopped(ctx); err != nil {
			return err
		}
	}
	r.sayLeftOut(refused)
	if skip > 0 {
		return fmt.Errorf("the feed ended %d batches before the place to resume at: it must give the "+
			"batches of the interrupted run", skip)
	}
	return nil
}

// batchesAfter returns the number of batches of the epoch up to and with a batch. A batch that an
// error cuts short does not count. known is false if the source of the batch does not say.
func batchesAfter(info any) (n int, known bool) {
	switch info := info.(type) {
	case imageloader.Info:
		return info.State.Batches(), true
	case prefetcher.SampleInfo:
		return info.State.Batches(), true
	}
	return 0, false
}

// step trains on a batch. It queues work for the device and does not wait for it.
func (r *runner) step(batch *prefetcher.Batch) error {
	if r.Seed != 0 {
		if err := torch.ManualSeed(mix(r.job.seed(r.Seed), uint64(r.at.Step))); err != nil {
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
	switch info := batch.Info.(type) {
	case imageloader.Info:
		if r.Loader != nil {
			r.state = &info.State
		}
	case prefetcher.SampleInfo:
		r.at.Samples = &info.State
	}
	if err := r.progress.step(batch.N, loss); err != nil {
		return err
	}
	if r.OnStep != nil {
		if err := r.OnStep(Step{Epoch: r.at.Epoch + 1, Step: r.at.Step, Loss: loss}); err != nil {
			return hookError{err}
		}
	}
	return nil
}

// loss computes the loss of the current batch or, with MicroBatch, of the part with these tensors.
func (r *runner) loss(output *torch.Tensor, tensors []*torch.Tensor) *torch.Tensor {
	if r.MicroBatch > 0 {
		return r.criterion.loss(output, r.batch.With(tensors))
	}
	return r.criterion.loss(output, r.batch)
}

// mix combines two numbers into a seed (the finaliser of SplitMix64).
func mix(seed, step uint64) uint64 {
	x := seed + (step+1)*0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// evaluate measures the model, or its averages, on the held-out samples.
func (r *runner) evaluate(ctx context.Context) (result *Metrics, err error) {
	err = r.averaged(func() (failed error) {
		if failed = r.job.shareBuffers(r.Model); failed == nil {
			result, failed = evaluate(ctx, r.Model, r.Eval, r.Autocast, r.criterion, &r.job)
		}
		return failed
	})
	return result, err
}

// averaged calls f. If there are averages, the model has them instead of its parameters during the
// call.
func (r *runner) averaged(f func() error) error {
	if r.EMA == nil {
		return f()
	}
	if err := r.EMA.Swap(); err != nil {
		return err
	}
	err := f()
	if back := r.EMA.Swap(); back != nil {
		// Do not wrap the context's error here: Run would take it for an interruption, and save a
		// checkpoint of this model.
		back = fmt.Errorf("the model may be left with its averages: %w", back)
		if err != nil {
			back = fmt.Errorf("%w (after: %v)", back, err)
		}
		return back
	}
	return err
}

// trainMode sets the training mode, except in modules whose parameters are all frozen. Therefore
// the running statistics of a frozen BatchNorm do not change.
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
