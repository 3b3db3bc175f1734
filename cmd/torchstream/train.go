//go:build linux && cgo

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/normalform"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/trace"
	"github.com/torchstream/torchstream/train"
)

// trainOptions is the command line of train.
type trainOptions struct {
	feeding
	job                                                      jobOptions
	archive, test, model, optimizer, device, out, pretrained string
	testList, testFolder, pretrainedDict                     string
	epochs, size, saveSteps, patience, logEvery, accumulate  int
	lr, decay, warmup, clip, ema, smoothing                  float64
	resume, freeze                                           bool
	amp, profile                                             string
	channelsLast, graph, tensorBoard                         bool
}

// feeding configures how images become batches.
type feeding struct {
	batch, workers, decodeSMs int
	workerCPUs                []int
	threads                   *int
	decode                    string
	seed                      uint64
	rank, world               int // of the job; world is 0 for one process
	badSamples                imageloader.BadSamplePolicy
	images                    cli.Images
}

// register adds the options that several commands have.
func (f *feeding) register(set *flag.FlagSet) {
	set.IntVar(&f.workers, "workers", 0, "goroutines that decode (default: the number of CPUs)")
	f.threads = cli.ThreadsOption(set)
	set.StringVar(&f.decode, "decode", "host", "where images are decoded: host, device (a GPU), or auto, "+
		"which is the device if it can; the images are the same")
	set.IntVar(&f.decodeSMs, "decode-sms", 0, cli.DecodeSMsHelp)
}

// registerFailOrSkip adds -bad-samples for a command that cannot use an image twice. In its text a
// bad sample ends the thing named ends.
func (f *feeding) registerFailOrSkip(set *flag.FlagSet, ends string) {
	set.Func("bad-samples", "`POLICY` for images that cannot be decoded: fail ends the "+ends+", skip leaves them "+
		"out (default fail)", func(name string) error {
		policy, err := parseBadSamples(name)
		if err != nil || policy == imageloader.Substitute {
			return errors.New("want fail or skip")
		}
		f.badSamples = policy
		return nil
	})
}

// trainCommand trains a classifier.
func trainCommand(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var o trainOptions
	set := cli.Flags("torchstream train -archive FILE", "Trains a classifier on an archive of images "+
		"(directory = class). The folder of -o gets last.pt, from which -resume continues,\n"+
		"best.pt, log.csv, curves.png, and with -test confusion.csv and confusion.png. Go (nn.Load) and "+
		"PyTorch (torch.load) read both checkpoints. Ctrl-C ends it after the step, with a new last.pt.", stderr)
	set.StringVar(&o.archive, "archive", "", cli.ArchiveHelp)
	set.StringVar(&o.test, "test", "", "`FILE` of held-back images of the same classes, evaluated after every epoch (default: none)")
	set.StringVar(&o.testList, "test-list", "", "CSV or TSV `FILE` with the labels of -test, as -list "+
		"has those of -archive. Without -test, it names held-back images of -archive")
	o.images.Register(set, cli.LabelOptions|cli.MultiLabelOptions|cli.UprightOption|cli.AugmentOptions|cli.SplitOptions)
	set.Float64Var(&o.smoothing, "label-smoothing", 0,
		"share of each label that is spread over all classes, from 0 to below 1; the evaluation's loss has none")
	set.StringVar(&o.model, "model", "resnet18", strings.Join(models.Classifiers(), ", "))
	set.IntVar(&o.epochs, "epochs", 10, "passes over the archive")
	set.IntVar(&o.batch, "batch", 64, "images per step")
	set.IntVar(&o.accumulate, "accumulate", 1, "compute each step in `N` parts of -batch, one after another (gradient "+
		"accumulation), in about 1/N of the memory: the result is the same, except that BatchNorm sees a part")
	set.IntVar(&o.size, "size", 224, "pixels of an image's side in the network")
	set.StringVar(&o.optimizer, "optimizer", "adamw", "adamw or sgd (with momentum 0.9)")
	set.Float64Var(&o.lr, "lr", 0,
		"highest learning rate; it falls to 0 along a cosine (default 0.001 for adamw, 0.05 for sgd)")
	set.Float64Var(&o.decay, "weight-decay", 0, "weight decay (default 0.01 for adamw, 0.0001 for sgd)")
	set.Float64Var(&o.warmup, "warmup", 1, "epochs in which the learning rate rises; at most a tenth of all")
	set.Float64Var(&o.clip, "clip", 0, "maximum norm of the gradients (default: no limit)")
	set.Float64Var(&o.ema, "ema", 0,
		"decay of a moving average of the parameters, such as 0.999; the average is evaluated and saved as best.pt "+
			"(default: none)")
	set.StringVar(&o.device, "device", "", "cpu, cuda or cuda:N (default: a GPU if there is one)")
	set.IntVar(&o.job.gpus, "gpus", 0, "number of GPUs of this host to train on, with a process for each, which "+
		"share each -batch (default: one). Do not give it under torchrun or srun, which start the processes themselves")
	set.IntVar(&o.job.ranks, "ranks", 0, "with -device cpu: number of processes, which share each -batch (default: one)")
	o.feeding.register(set)
	set.Func("bad-samples", "`POLICY` for images that cannot be decoded: fail ends the training, skip "+
		"leaves them out, substitute puts another image of the batch in their place; those of -test are "+
		"then left out (default fail)",
		func(name string) (err error) { o.badSamples, err = parseBadSamples(name); return err })
	set.Uint64Var(&o.seed, "seed", 1, "of the parameters, the order, the crops and Dropout; at least 1")
	set.StringVar(&o.out, "o", "trained", "`DIR` of the results")
	cli.Alias(set, "out", "o")
	set.BoolVar(&o.resume, "resume", false,
		"continue from last.pt in the folder, if there is one; the other options must be those of the interrupted run")
	set.IntVar(&o.saveSteps, "save-steps", 0, "also write last.pt after every so many steps (default: only after each epoch)")
	set.StringVar(&o.pretrained, "pretrained", "", "checkpoint `FILE` (.pt, .pth, .safetensors) to start "+
		"from; tensors of another shape, such as the head, get new values (default: all do)")
	set.StringVar(&o.pretrainedDict, "pretrained-dict", "", "`KEY` of the dict in the -pretrained file "+
		"that has the tensors, such as state_dict_ema; keys of nested dicts are joined by dots")
	set.BoolVar(&o.freeze, "freeze", false, "with -pretrained of the same network: train only the head, "+
		"its last layer. It starts with the checkpoint's head if the classes are the same")
	set.StringVar(&o.amp, "amp", "", "bf16 or fp16: mixed precision, the network in 16 bits with "+
		"parameters in float32; fp16 on a GPU only (default: all in float32)")
	set.BoolVar(&o.channelsLast, "channels-last", false,
		"keep images and kernels in the memory order N H W C, in which a GPU's convolutions are faster")
	set.BoolVar(&o.graph, "graph", false, "on a GPU: replay each step as a CUDA graph, with less work for the host")
	set.IntVar(&o.patience, "patience", 0, "end after so many epochs without a better one (default: never)")
	set.IntVar(&o.logEvery, "log-every", 0, "print a line with the loss every so many steps, for logs (default: none)")
	set.BoolVar(&o.tensorBoard, "tensorboard", false, "also write event files for TensorBoard into the folder of -o")
	set.StringVar(&o.profile, "profile", "",
		"record four steps of the first epoch to this `FILE`: a timeline (.svg, .png) or a trace for Perfetto (.json)")
	if err := cli.Parse(set, args, 0); err != nil {
		return err
	}
	o.setDefaults(set)
	if err := o.check(); err != nil {
		return err
	}
	err := o.start(ctx, stdout, stderr)
	if errors.Is(err, cuda.ErrOutOfMemory) {
		err = fmt.Errorf("%w (-batch %d: a smaller one needs less memory)", err, o.batch)
	}
	if err != nil && o.badSamples == imageloader.Fail {
		err = cli.SkippableError{Err: err}
	}
	return err
}

// parseBadSamples parses -bad-samples.
func parseBadSamples(name string) (imageloader.BadSamplePolicy, error) {
	for _, p := range []imageloader.BadSamplePolicy{imageloader.Fail, imageloader.Skip, imageloader.Substitute} {
		if p.String() == name {
			return p, nil
		}
	}
	return 0, errors.New("want fail, skip or substitute")
}

// vitPatch is the patch size of a ViT, in pixels. It must divide the size of the images.
const vitPatch = 16

// isViT reports whether a network accepts only one image size.
func isViT(model string) bool { return strings.HasPrefix(model, "vit") }

// setDefaults sets options whose defaults depend on other options, unless the command line sets
// them.
func (o *trainOptions) setDefaults(set *flag.FlagSet) {
	lr, decay := 0.001, 0.01
	if o.optimizer == "sgd" {
		lr, decay = 0.05, 0.0001
	}
	given := map[string]bool{}
	set.Visit(func(f *flag.Flag) { given[f.Name] = true })
	if !given["lr"] {
		o.lr = lr
	}
	if !given["weight-decay"] {
		o.decay = decay
	}
}

// check refuses impossible options.
func (o *trainOptions) check() error {
	switch {
	case o.archive == "":
		return cli.UsageError{Message: "train needs -archive FILE"}
	case !slices.Contains(models.Classifiers(), o.model):
		guess := ""
		if near := cli.Nearest(models.Classifiers(), o.model); near != "" {
			guess = "did you mean " + near + "? "
		}
		return cli.Usagef("-model %q: %swant one of %s", o.model, guess, strings.Join(models.Classifiers(), ", "))
	case o.optimizer != "adamw" && o.optimizer != "sgd":
		return cli.Usagef("-optimizer %q: want adamw or sgd", o.optimizer)
	case o.seed < 1:
		return cli.UsageError{Message: "-seed 0: must be at least 1"}
	case o.out == "":
		return cli.UsageError{Message: "-o is empty: name a folder"}
	case o.lr <= 0:
		return cli.Usagef("-lr %v: must be more than 0", o.lr)
	case o.ema < 0 || o.ema >= 1:
		return cli.Usagef("-ema %v: must be from 0 to below 1", o.ema)
	case o.pretrainedDict != "" && o.pretrained == "":
		return cli.UsageError{Message: "-pretrained-dict needs -pretrained FILE: it chooses a dict of " +
			"tensors of that file"}
	case o.freeze && o.pretrained == "":
		return cli.UsageError{Message: "-freeze needs -pretrained FILE: without it the frozen tensors " +
			"would be random numbers"}
	}
	if err := cmp.Or(o.checkNumbers(), o.checkImages()); err != nil {
		return err
	}
	if err := o.checkBatch(); err != nil {
		return err
	}
	if err := o.feeding.check(); err != nil {
		return err
	}
	if _, err := parseAMP(o.amp); err != nil {
		return err
	}
	if err := o.window().Check(); err != nil {
		return cli.UsageError{Message: "-profile: " + err.Error()}
	}
	return nil
}

// checkNumbers checks the options whose values are numbers with a minimum, and -size.
func (o *trainOptions) checkNumbers() error {
	for _, option := range []struct {
		name       string
		value, min float64
	}{
		{"epochs", float64(o.epochs), 1}, {"batch", float64(o.batch), 1},
		{"accumulate", float64(o.accumulate), 1}, {"weight-decay", o.decay, 0},
		{"clip", o.clip, 0},
		{"warmup", o.warmup, 0}, {"save-steps", float64(o.saveSteps), 0},
		{"patience", float64(o.patience), 0}, {"workers", float64(o.workers), 0},
	} {
		if option.value < option.min {
			return cli.Usagef("-%s %v: must be at least %v", option.name, option.value, option.min)
		}
	}
	if err := cli.CheckSize(o.size, cli.MinSize); err != nil {
		return err
	}
	if isViT(o.model) && o.size%vitPatch != 0 {
		return cli.Usagef("-size %d: %s divides images into squares of %d pixels: want a multiple of %[3]d",
			o.size, o.model, vitPatch)
	}
	return nil
}

// check refuses impossible decoding options.
func (o feeding) check() error {
	where, err := cli.ParseDecode(o.decode)
	if err != nil {
		return err
	}
	return cli.CheckSMs(o.decodeSMs, where)
}

// checkDevice refuses options that the CPU does not support or that are too slow there.
func (o feeding) checkDevice(device cuda.Device, amp string) error {
	if device == cuda.CPU && amp == "fp16" {
		return cli.UsageError{Message: "-amp fp16 is for GPUs, and many times slower than float32 on the " +
			"CPU: use -amp bf16"}
	}
	if device == cuda.CPU && o.decode == "device" {
		return cli.UsageError{Message: "-decode device needs a GPU, and the device is the CPU: use " +
			"-decode auto or host"}
	}
	return nil
}

// microBatch returns the number of images in a part of a batch, or 0 if a batch has one part.
func (o *trainOptions) microBatch(batch int) int {
	if o.accumulate <= 1 {
		return 0
	}
	return (batch + o.accumulate - 1) / o.accumulate
}

// parseAMP parses -amp.
func parseAMP(name string) (torch.DType, error) {
	dtype, known := map[string]torch.DType{"": 0, "bf16": torch.BFloat16, "fp16": torch.Float16}[name]
	if !known {
		return 0, cli.Usagef("-amp %q: want bf16 or fp16", name)
	}
	return dtype, nil
}

// window returns the part of the run that -profile records.
func (o *trainOptions) window() trace.Window { return trace.Window{File: o.profile} }

// settings returns the options that must not change when a run resumes.
func (o *trainOptions) settings() map[string]string {
	settings := o.images.Settings()
	if o.accumulate > 1 {
		settings["accumulate"] = strconv.Itoa(o.accumulate)
	}
	if o.smoothing > 0 {
		settings["label-smoothing"] = fmt.Sprint(o.smoothing)
	}
	maps.Copy(settings, map[string]string{
		"batch":  strconv.Itoa(o.batch),
		"epochs": strconv.Itoa(o.epochs), "optimizer": o.optimizer,
		"lr": fmt.Sprint(o.lr), "weight-decay": fmt.Sprint(o.decay), "warmup": fmt.Sprint(o.warmup),
		"clip": fmt.Sprint(o.clip),
		"ema":  fmt.Sprint(o.ema), "seed": fmt.Sprint(o.seed), "freeze": strconv.FormatBool(o.freeze),
		"amp": o.amp, "channels-last": strconv.FormatBool(o.channelsLast),
	})
	return settings
}

// oneClass is the error for an archive with a single class.
const oneClass = "one class: nothing to tell apart; the directory of a file is its class, so move the " +
	"images of each class to a folder"

// noClass is the error for an archive without samples.
const noClass = "no samples: a sample's class is the name of the directory that it is in"

// printUnused names the options that have no effect, or only a partial one.
func (o *trainOptions) printUnused(device cuda.Device, images int, stdout io.Writer) {
	if o.batch > images {
		fmt.Fprintf(stdout, "-batch %d is more than the archive has: a step has all of the %s\n", o.batch,
			printable.Counted(images, "image", "images"))
	}
	if o.graph && device == cuda.CPU {
		fmt.Fprintln(stdout, "-graph has no effect on the CPU: CUDA graphs are for GPUs")
	}
}

// checkBatch refuses batches of one image of the smallest size. The last convolutions reduce such
// an image to one value per channel, for which BatchNorm cannot compute a variance.
func (o *trainOptions) checkBatch() error {
	normalises := !strings.HasPrefix(o.model, "vit") && !strings.HasPrefix(o.model, "convnext")
	if o.accumulate > o.batch {
		return cli.Usagef("-accumulate %d: must be at most -batch (%d), the images that it divides", o.accumulate, o.batch)
	}
	if o.batch > o.accumulate || !normalises || o.size > cli.MinSize {
		return nil
	}
	if o.accumulate > 1 {
		return cli.Usagef("-accumulate %d: BatchNorm can compute no statistics of one image at -size %d: choose a "+
			"larger -batch or -size", o.accumulate, o.size)
	}
	return cli.Usagef("-batch 1: BatchNorm can compute no statistics of one image at -size %d: choose a "+
		"larger -batch or -size", o.size)
}

// checkWritable refuses a folder that cannot be made or written to. It creates nothing.
func checkWritable(folder string) error {
	folder, err := existing(folder)
	if err != nil {
		return err
	}
	if err := unix.Access(folder, unix.W_OK|unix.X_OK); err != nil {
		return fmt.Errorf("cannot write to the directory %s: %w", printable.Name(folder), err)
	}
	return nil
}

// checkRoom refuses a folder with less free space than the run needs at its peak.
func (o *trainOptions) checkRoom(c *train.Config) error {
	if done, epochs, ok := o.earlier(); ok && done >= epochs {
		return nil // a finished run writes nothing
	}
	last, best := checkpointBytes(c, o.optimizer)
	if err := checkSpace(o.out, peakBytes(o.out, last, best)); err != nil {
		return fmt.Errorf("-o %s: %w", printable.Name(o.out), err)
	}
	return nil
}

// peakBytes returns the maximum number of bytes by which the checkpoints in a folder grow. A new
// checkpoint replaces the old one only when it is complete, so at the peak there are two copies of
// last.pt besides best.pt. The files of a resumed run already exist.
func peakBytes(folder string, last, best int64) int64 {
	need := 2*last + best
	for _, name := range []string{"last.pt", "best.pt"} {
		if info, err := os.Stat(filepath.Join(folder, name)); err == nil {
			need -= info.Size()
		}
	}
	return need
}

// checkpointBytes returns the sizes of last.pt, after the first step, and of best.pt.
func checkpointBytes(c *train.Config, optimizer string) (last, best int64) {
	const rest = 64 << 10 // loader, schedule, generators, results, class names
	best = rest + stateBytes(nn.State(c.Model))
	last = best
	moments := map[string]int64{"sgd": 1, "adamw": 2}[optimizer] // tensors of the size of a parameter
	for _, p := range nn.NamedParameters(c.Model) {
		if p.Tensor.RequiresGrad() {
			last += moments * stateBytes([]torch.Named{p})
		}
	}
	if c.EMA != nil {
		last += stateBytes(c.EMA.State())
	}
	return last, best
}

// stateBytes returns the size of the tensors in a PyTorch file.
func stateBytes(tensors []torch.Named) (bytes int64) {
	const record = 512 // per tensor: its entries in the zip archive and the pickle, and the alignment
	for _, n := range tensors {
		bytes += record + n.Tensor.Elements()*int64(n.Tensor.DType().Size())
	}
	return bytes
}

// checkSpace refuses a folder with less free space than the given number of bytes. The folder need
// not exist.
func checkSpace(folder string, bytes int64) error {
	there, err := existing(folder)
	if err != nil {
		return err
	}
	var disk unix.Statfs_t
	if err := unix.Statfs(there, &disk); err != nil || disk.Blocks == 0 {
		return nil // writing reports the error, or the file system does not report its size
	}
	blocks := disk.Bavail
	if os.Geteuid() == 0 {
		blocks = disk.Bfree // root may also use the reserved blocks
	}
	if free := float64(blocks) * float64(disk.Bsize); free < float64(bytes) {
		return fmt.Errorf("%s are free, and the checkpoints of this training take %s at their peak: free "+
			"some space, or name another folder", byteSize(int64(free)), byteSize(bytes))
	}
	return nil
}

// existing returns the folder, or its nearest parent that exists.
func existing(folder string) (string, error) {
	for {
		info, err := os.Stat(folder)
		switch parent := filepath.Dir(folder); {
		case errors.Is(err, fs.ErrNotExist) && parent != folder:
			folder = parent
		case err != nil:
			return "", err
		case !info.IsDir():
			return "", fmt.Errorf("%s is not a directory", printable.Name(folder))
		default:
			return folder, nil
		}
	}
}

// checkArchives refuses an -archive or -test that does not exist, and a -test equal to -archive.
func (o *trainOptions) checkArchives() error {
	archive, err := statArchive(o.archive)
	if err != nil {
		return fmt.Errorf("-archive: %w", err)
	}
	if o.test == "" {
		return nil
	}
	test, err := statArchive(o.test)
	if err != nil {
		return fmt.Errorf("-test: %w", err)
	}
	if o.testList == "" && o.images.Part.HeldOut == 0 &&
		(o.test == o.archive || test != nil && archive != nil && os.SameFile(test, archive)) {
		return cli.Usagef("-test %s is -archive, so the accuracy would be that on images of the "+
			"training: name an archive of held-back images, or leave -test out",
			printable.ArchiveName(o.test))
	}
	return nil
}

// statArchive describes an archive's file. It returns nil for shards or a URL.
func statArchive(path string) (fs.FileInfo, error) {
	if strings.ContainsAny(path, "{*?[") || strings.Contains(path, "://") {
		return nil, nil
	}
	return os.Stat(path)
}

// checkPretrained refuses a -pretrained that is not a checkpoint, or that names another model.
func (o *trainOptions) checkPretrained() error {
	if o.pretrained == "" {
		return nil
	}
	if _, err := os.Stat(o.pretrained); err != nil {
		return fmt.Errorf("-pretrained: %w", err)
	}
	if err := checkpointFolder("-pretrained", o.pretrained); err != nil {
		return err
	}
	file, err := checkpoint.Open(o.pretrained)
	if err != nil {
		return fmt.Errorf("-pretrained: %w", err)
	}
	model := file.Metadata()["model"]
	if err := file.Close(); err != nil {
		return err
	}
	// In a checkpoint of another program, the key "model" may have a different meaning.
	if model == o.model || !slices.Contains(models.Classifiers(), model) {
		return nil
	}
	return fmt.Errorf("-pretrained %s is a checkpoint of a %s, and -model is %s: train it further with "+
		"-model %[2]s, or name a checkpoint of a %[3]s",
		printable.Name(o.pretrained), model, o.model)
}

// busyFolder rewrites a train.BusyError for the command line. It returns other errors unchanged.
func busyFolder(err error) error {
	var busy *train.BusyError
	if !errors.As(err, &busy) {
		return err
	}
	return fmt.Errorf("-o %s: another run writes to it: %s: wait until it ends, or name another folder",
		printable.Name(busy.Dir), printable.Text(busy.Holder))
}

// checkFolder refuses a new run in the folder of an earlier one before any work, and says how to
// continue.
func (o *trainOptions) checkFolder() error {
	if err := o.checkOutside(); err != nil {
		return err
	}
	done, epochs, ok := o.earlier()
	if o.resume || !ok {
		return nil
	}
	next := "-resume to go on with the same options, -o DIR for a new one"
	if done >= epochs {
		next = "-o DIR for a new one, with -pretrained " + filepath.Join(o.out, "best.pt") +
			" to start from its result"
	}
	return fmt.Errorf("%s has an earlier run (%d of %d epochs): %s, or delete %s", printable.Name(o.out),
		done, epochs, next, printable.Name(o.out))
}

// checkOutside refuses an -o folder inside a directory of images. The pictures that train writes
// would become images of that directory.
func (o *trainOptions) checkOutside() error {
	out, err := realPath(o.out)
	if err != nil {
		return err
	}
	for _, images := range []struct{ option, path string }{{"-archive", o.archive}, {"-test", o.test}} {
		if info, err := os.Stat(images.path); err != nil || !info.IsDir() {
			continue // opening the archive reports a wrong path
		}
		path, err := realPath(images.path)
		if err != nil {
			return err
		}
		inside, err := filepath.Rel(path, out)
		if err == nil && inside != ".." && !strings.HasPrefix(inside, ".."+string(filepath.Separator)) {
			return cli.Usagef("-o %s is inside %s %s: its pictures would become images of the archive: "+
				"name a folder outside", printable.Name(o.out), images.option, printable.Name(images.path))
		}
	}
	return nil
}

// realPath returns the absolute path without symbolic links. The last elements need not exist.
func realPath(path string) (string, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	real, err := filepath.EvalSymlinks(path)
	if parent := filepath.Dir(path); errors.Is(err, fs.ErrNotExist) && parent != path {
		real, err = realPath(parent)
		return filepath.Join(real, filepath.Base(path)), err
	}
	return real, err
}

// earlier returns the completed and the total number of epochs of the run in the folder. ok is
// false if the folder has no checkpoint of a run. If the checkpoint's name belongs to a file of
// another kind, ok is also false, and train.Run refuses the file.
func (o *trainOptions) earlier() (done, epochs int, ok bool) {
	file, err := checkpoint.Open(filepath.Join(o.out, "last.pt"))
	if err != nil {
		return 0, 0, false
	}
	defer file.Close()
	var place struct {
		At struct {
			Epoch int `json:"epoch"`
		} `json:"at"`
	}
	value, err := file.Value("train")
	text, isText := value.(string)
	if err != nil || !isText || json.Unmarshal([]byte(text), &place) != nil {
		return 0, 0, false
	}
	epochs, err = strconv.Atoi(file.Metadata()["epochs"])
	return place.At.Epoch, epochs, err == nil
}

// compare refuses to resume with other images, settings or classes, and names all differences.
func (o *trainOptions) compare(now map[string]string) error {
	path := filepath.Join(o.out, "last.pt")
	file, err := checkpoint.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	before := file.Metadata()
	if err := file.Close(); err != nil {
		return err
	}
	_, had := before["test-samples"]
	_, has := now["test-samples"]
	var differences []string
	both := maps.Clone(before)
	maps.Copy(both, now)
	for _, key := range byName(both) {
		switch {
		case before[key] == now[key]:
		case key == "classes":
			differences = append(differences, otherClasses(before[key], now[key]))
		case key == "test-samples" && had != has:
			// A checkpoint of an earlier version has neither the key "samples" nor "test-samples",
			// so it does not tell whether the run had -test.
			if _, knows := before["samples"]; knows {
				differences = append(differences, map[bool]string{true: "-test", false: "no -test"}[had])
			}
		case key == "samples" || key == "test-samples":
			// The values are digests, or empty if the archive was not read to compute one. Without
			// two digests, changed images go unnoticed here. A changed source of labels is found by
			// the key "labels".
			if before[key] != "" && now[key] != "" {
				option := map[string]string{"samples": "-archive", "test-samples": "-test"}[key]
				differences = append(differences, "other images or labels in "+option)
			}
		default:
			differences = append(differences,
				fmt.Sprintf("%s %s, not %s", key, settingText(before[key]), settingText(now[key])))
		}
	}
	if len(differences) == 0 {
		return nil
	}
	start := ""
	if best := filepath.Join(o.out, "best.pt"); fileExists(best) {
		start = fmt.Sprintf("; -pretrained %s -o DIR starts from its result with other options", best)
	}
	return fmt.Errorf("%s is of a run with %s: resume with the same options, or name another folder with -o%s", path,
		strings.Join(differences, "; "), start)
}

// settingText returns the value of a setting. Default values of some options are not stored.
func settingText(value string) string {
	if value == "" {
		return "unset"
	}
	return printable.Name(value)
}

func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// otherClasses describes how two lists of classes, as JSON, differ.
func otherClasses(before, now string) string {
	var old, current []string
	if json.Unmarshal([]byte(before), &old) != nil || json.Unmarshal([]byte(now), &current) != nil {
		return "other classes"
	}
	without := func(list, other []string) (names []string) {
		for _, name := range list {
			if !slices.Contains(other, name) {
				names = append(names, name)
			}
		}
		return names
	}
	text := fmt.Sprintf("%d classes, and this archive has %d", len(old), len(current))
	lacks, added := without(old, current), without(current, old)
	if len(lacks) > 0 {
		text += ", lacks " + strings.Join(printable.Names(lacks), ", ")
	}
	if len(added) > 0 {
		text += ", has the new " + strings.Join(printable.Names(added), ", ")
	}
	if len(lacks)+len(added) == 0 {
		text += ", in another order"
	}
	return text + normalform.Hint(added, lacks)
}

func byName(of map[string]string) []string {
	names := make([]string, 0, len(of))
	for name := range of {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// start trains in this process, or starts the ranks of a job that train.
func (o *trainOptions) start(ctx context.Context, stdout, stderr io.Writer) error {
	device, err := cli.PickDevice(o.device)
	if err != nil {
		return err
	}
	env, err := distributed.ReadEnvironment(os.Getenv)
	if err != nil {
		return err
	}
	if env.Warning != "" {
		fmt.Fprintln(stderr, "torchstream: warning:", env.Warning)
	}
	ranks, err := o.processes(env)
	if err != nil {
		return err
	}
	if ranks > 0 {
		return startRanks(ctx, ranks, stdout, stderr)
	}
	if err := o.join(ctx, env); err != nil {
		return err
	}
	if w := o.job.world; w != nil {
		device, o.rank, o.world = w.Device(), w.Rank(), w.Size()
		if o.rank > 0 {
			stdout, stderr = io.Discard, io.Discard
		}
		o.shareCores()
		o.workerCPUs = nearWorkers(nearCPUs(), device, o.job.onHost(), o.workers)
	}
	return o.job.close(o.run(ctx, device, stdout, stderr))
}

// shareCores divides the host's cores among its ranks. It leaves -workers and -threads unchanged if
// the command line sets them.
func (o *trainOptions) shareCores() {
	share := max(1, runtime.GOMAXPROCS(0)/o.job.onHost())
	if o.workers == 0 {
		o.workers = share
	}
	if *o.threads == 0 && o.job.onHost() > 1 {
		*o.threads = share
	}
}

// nearCPUs returns for each GPU the CPUs of its NUMA node, or nil if all are equally near.
func nearCPUs() (near [][]int) {
	for d := range cuda.DeviceCount() {
		near = append(near, cuda.Device(d).NearCPUs())
	}
	return near
}

// nearWorkers returns the CPUs for the workers of a rank: those near its GPU, if they suffice for
// the workers of all ranks with GPUs of the same NUMA node. Otherwise it returns nil, for any CPU.
// near has the CPUs near each GPU. The host's ranks have the first GPUs.
func nearWorkers(near [][]int, device cuda.Device, ranks, workers int) []int {
	if device < 0 || ranks < 2 || len(near) < ranks {
		return nil
	}
	own := near[device]
	same := 0
	for _, other := range near[:ranks] {
		if slices.Equal(other, own) {
			same++
		}
	}
	if len(own) < same*workers {
		return nil
	}
	return own
}

// checkFiles refuses unusable files and folders before any work.
func (o *trainOptions) checkFiles() error {
	if err := checkWritable(o.out); err != nil {
		return fmt.Errorf("-o %s: %w", printable.Name(o.out), err)
	}
	if err := o.checkArchives(); err != nil {
		return err
	}
	if err := train.Busy(o.out); err != nil {
		return busyFolder(err)
	}
	return cmp.Or(o.checkFolder(), o.checkPretrained())
}

// run opens the images, builds the model and trains it.
func (o *trainOptions) run(ctx context.Context, device cuda.Device, stdout, stderr io.Writer) error {
	if err := cli.SetThreads(*o.threads); err != nil {
		return err
	}
	if err := o.checkDevice(device, o.amp); err != nil {
		return err
	}
	if o.rank == 0 { // only rank 0 writes files
		if err := o.checkFiles(); err != nil {
			return err
		}
	}
	images := 0
	if err := o.job.inTurn(func() (err error) { images, err = o.countImages(ctx, stdout, stderr); return err }); err != nil {
		return err
	}
	options := imageloader.Options{Transform: imageloader.Train(o.size), Shuffle: true, BadSamples: o.badSamples}
	if err := o.images.Set(&options); err != nil {
		return err
	}
	window := o.window()
	if o.rank > 0 {
		window = trace.Window{}
	}
	loader, feed, err := o.open(ctx, device, o.archive, images, options, window)
	if err != nil {
		return err
	}
	defer loader.Close()
	defer feed.Close()
	if classes := loader.Classes(); len(classes) == 1 && !o.images.MultiLabel {
		return o.oneClass(classes[0])
	}
	o.printUnused(device, images, stdout)
	c := train.Config{Feed: feed, Loader: loader, Epochs: o.epochs, ClipNorm: o.clip, Seed: o.seed,
		World: o.job.world, MicroBatch: o.microBatch(loader.BatchSize()), Dir: o.out, Resume: o.resume, SaveSteps: o.saveSteps,
		Metadata: o.settings(), Progress: stdout, Graph: o.graph, Patience: o.patience, LogEvery: o.logEvery,
		TensorBoard: o.tensorBoard, MultiLabel: o.images.MultiLabel,
		Log: slog.New(slog.NewTextHandler(stderr, nil))}
	maps.Copy(c.Metadata, models.Metadata{Model: o.model, Classes: loader.Classes(), Size: o.size,
		Upright: o.images.Upright, MultiLabel: o.images.MultiLabel}.Strings())
	c.Metadata["samples"] = loader.Identity().Digest
	if o.smoothing > 0 {
		c.Loss = o.smoothedLoss
	}
	if o.test != "" {
		var held *imageloader.Loader
		var testFeed *prefetcher.Prefetcher
		if err := o.job.inTurn(func() (err error) {
			held, testFeed, err = o.openTest(ctx, device, loader.Classes(), stdout, stderr)
			return err
		}); err != nil {
			return fmt.Errorf("-test: %w", err)
		}
		defer held.Close()
		defer testFeed.Close()
		c.Eval = testFeed
		c.Metadata["test-samples"] = held.Identity().Digest
		defer func() { printBad(stdout, o.test, held.Stats(), imageloader.Skip, inEpochs) }()
	}
	if o.resume && o.rank == 0 {
		if err := o.compare(c.Metadata); err != nil {
			return err
		}
	}
	defer func() { printBad(stdout, o.archive, loader.Stats(), o.badSamples, inEpochs) }()
	return train.WithPrecedence(device, func() error { return o.fit(ctx, &c, device, stdout, stderr) })
}

// inEpochs is printBad's note in training, where every epoch counts the same bad samples again.
const inEpochs = ", each counted in every epoch"

// printBad prints how many bad samples of an archive the policy left out or replaced, then the note
// and the names of the first bad samples.
func printBad(w io.Writer, path string, s imageloader.Stats, p imageloader.BadSamplePolicy, note string) {
	if s.Bad == 0 || p == imageloader.Fail {
		return // with Fail, an error has already named the sample
	}
	names := make([]string, len(s.BadNamed))
	for i, bad := range s.BadNamed {
		names[i] = bad.Name
	}
	done := map[imageloader.BadSamplePolicy]string{imageloader.Skip: "left out",
		imageloader.Substitute: "replaced by others"}[p]
	fmt.Fprintf(w, "%s: %s %s%s: %s: `torchstream inspect -fix OUT.tgz %[1]s` writes an archive without\n",
		printable.ArchiveName(path), printable.Counted(s.Bad, "bad image", "bad images"), done, note, listed(names))
}

// fit builds the model and trains it.
func (o *trainOptions) fit(ctx context.Context, c *train.Config, device cuda.Device, stdout, stderr io.Writer) error {
	if err := o.build(c, device, stdout); err != nil {
		return err
	}
	defer c.Optimizer.Close()
	if c.Scaler != nil {
		defer c.Scaler.Close()
	}
	if c.EMA != nil {
		defer c.EMA.Close()
	}
	if o.rank == 0 {
		if err := o.checkRoom(c); err != nil {
			return err
		}
	}
	if o.job.world != nil {
		o.job.release() // from here on, train.Run stops all ranks after the same step if ctx ends
	}
	begin := time.Now()
	report, err := train.Run(ctx, *c)
	if err != nil {
		return interruption(ctx, busyFolder(err), stderr)
	}
	return o.finish(report, time.Since(begin), c.Loader.Classes(), stdout)
}

// interruption tells the user how to resume with the command line. If another error follows the
// interruption, such as a failed last checkpoint, it prints that error, because the exit status
// only shows the interruption.
func interruption(ctx context.Context, err error, stderr io.Writer) error {
	var interrupted *train.InterruptedError
	switch {
	case !errors.As(err, &interrupted):
		if ctx.Err() != nil {
			fmt.Fprintf(stderr, "torchstream: %s\n", printable.Text(cli.Advised(err, "train")))
		}
		return err
	case interrupted.Checkpoint == "":
		return cli.InterruptedError{Message: "interrupted before the first step: nothing is saved, run " +
			"the same command again"}
	}
	return cli.InterruptedError{Message: fmt.Sprintf(
		"interrupted in epoch %d after step %d: the same command with -resume goes on from %s",
		interrupted.Epoch, interrupted.Step, interrupted.Checkpoint)}
}

// open opens an archive and a prefetcher for it. It limits a batch to the number of images in the
// archive, because a batch's memory is allocated in full.
func (o feeding) open(ctx context.Context, device cuda.Device, path string, images int, options imageloader.Options,
	window trace.Window) (*imageloader.Loader, *prefetcher.Prefetcher, error) {
	ranks := max(1, o.world)
	options.BatchSize, options.Workers, options.Seed = (min(o.batch, images)+ranks-1)/ranks, o.workers, o.seed
	options.WorkerCPUs, options.Rank, options.World = o.workerCPUs, o.rank, ranks
	options.ShareOnHost = ranks > 1
	loader, err := imageloader.OpenContext(ctx, path, options)
	if err != nil {
		return nil, nil, err
	}
	decode, _ := cli.ParseDecode(o.decode) // check has already validated it
	feed, err := prefetcher.New(loader,
		prefetcher.Options{Device: device, Decode: decode, DecodeMultiprocessors: o.decodeSMs, Trace: window})
	if err != nil {
		loader.Close()
		return nil, nil, err
	}
	return loader, feed, nil
}

// build makes the model, the optimizer, the schedule and the averages.
func (o *trainOptions) build(c *train.Config, device cuda.Device, stdout io.Writer) (err error) {
	if err := torch.ManualSeed(o.seed); err != nil {
		return err
	}
	if c.Model, err = newModel(o.model, len(c.Loader.Classes()), o.size); err != nil {
		return err
	}
	if err := o.loadPretrained(c.Model, stdout); err != nil {
		return err
	}
	if err := nn.To(c.Model, device); err != nil {
		return err
	}
	if o.channelsLast {
		if err := nn.ToMemoryFormat(c.Model, torch.ChannelsLast); err != nil {
			return err
		}
	}
	if c.Autocast, err = parseAMP(o.amp); err != nil {
		return err
	}
	var params []*torch.Tensor
	elements := int64(0)
	for _, p := range nn.Parameters(c.Model) {
		if p.RequiresGrad() {
			params = append(params, p)
			elements += p.Elements()
		}
	}
	where := device.String()
	if n := o.job.size(); n > 1 {
		where += fmt.Sprintf(" by %d processes", n)
	}
	fmt.Fprintf(stdout, "%s: %d parameters to train, images of %d x %d, batches of %d, on %s\n\n", o.model,
		elements, o.size, o.size, c.Loader.BatchSize()*o.job.size(), where)
	if o.optimizer == "sgd" {
		c.Optimizer, err = optim.NewSGD(params,
			optim.SGDOptions{LR: o.lr, Momentum: 0.9, WeightDecay: o.decay, Capturable: o.graph})
	} else {
		c.Optimizer, err = optim.NewAdamW(params,
			optim.AdamWOptions{LR: o.lr, WeightDecay: o.decay, NoWeightDecay: o.decay == 0, Capturable: o.graph})
	}
	if err != nil {
		return err
	}
	if o.amp == "fp16" {
		if c.Scaler, err = optim.NewGradScaler(device, optim.GradScalerOptions{}); err != nil {
			return errors.Join(err, c.Optimizer.Close())
		}
	}
	if o.ema > 0 {
		if c.EMA, err = optim.NewEMA(nn.State(c.Model), optim.EMAOptions{Decay: o.ema}); err != nil {
			return errors.Join(err, c.Optimizer.Close())
		}
	}
	c.Schedule = o.schedule(c.Loader.Batches())
	return nil
}

// newModel makes a classifier for images of the given size.
func newModel(name string, classes, size int) (nn.Module, error) {
	return models.Metadata{Model: name, Classes: make([]string, classes), Size: size}.NewModel()
}

// schedule raises the learning rate in the first epochs and then lowers it to 0 along a cosine.
func (o *trainOptions) schedule(batches int) optim.Schedule {
	steps := o.epochs * batches
	warmup := int(min(o.warmup*float64(batches), float64(steps)/10))
	if warmup < 1 {
		return optim.CosineLR{Steps: steps}
	}
	return optim.Sequential{
		{Steps: warmup, Schedule: optim.LinearWarmup{Steps: warmup, Start: 0.1}},
		{Schedule: optim.CosineLR{Steps: steps - warmup}},
	}
}

// loadPretrained loads the matching tensors of -pretrained and reports the others. With -freeze it
// freezes all layers except the head.
func (o *trainOptions) loadPretrained(model nn.Module, stdout io.Writer) error {
	if o.pretrained == "" {
		return nil
	}
	report, err := nn.LoadWith(o.pretrained, model, nn.LoadOptions{Partial: true, Dict: o.pretrainedDict})
	if err != nil {
		return err
	}
	fmt.Fprintf(stdout, "%s: %s\n\n", printable.Name(o.pretrained),
		printable.Text(cli.InFlags(report.Describe(article(o.model), 10))))
	if !o.freeze {
		return nil
	}
	if unfit := belowHead(model, report); len(unfit) > 0 {
		return fmt.Errorf("-freeze trains the head alone, and %s of %s and this %s differ below it: %s: "+
			"name a checkpoint of the same network, or leave -freeze out",
			printable.Counted(len(unfit), "tensor", "tensors"), printable.Name(o.pretrained), o.model, listed(unfit))
	}
	if err := nn.Freeze(model); err != nil {
		return err
	}
	for _, n := range nn.NamedParameters(model) {
		if !strings.HasPrefix(n.Name, headOf(model)) {
			continue
		}
		if err := n.Tensor.SetRequiresGrad(true); err != nil {
			return err
		}
	}
	return nil
}

// headOf returns the name prefix of a classifier's head tensors. The head is the last layer.
func headOf(model nn.Module) string {
	parameters := nn.NamedParameters(model)
	last := parameters[len(parameters)-1].Name
	return last[:strings.LastIndex(last, ".")+1]
}

// article returns a network's name with its indefinite article.
func article(model string) string {
	if strings.ContainsRune("aeiou", rune(model[0])) {
		return "an " + model
	}
	return "a " + model
}

// belowHead lists mismatched tensors outside the head. num_batches_tracked may be missing, because
// old PyTorch files lack it.
func belowHead(model nn.Module, report *nn.LoadReport) []string {
	head := headOf(model)
	names := slices.Clone(report.Missing)
	for _, m := range report.Mismatched {
		names = append(names, m.Name)
	}
	return slices.DeleteFunc(append(names, report.Unexpected...), func(name string) bool {
		return strings.HasPrefix(name, head) || strings.HasSuffix(name, ".num_batches_tracked")
	})
}

// finish prints the result and explains how to use it.
func (o *trainOptions) finish(report *train.Report, took time.Duration, classes []string, stdout io.Writer) error {
	best, path := report.Best(), filepath.Join(o.out, "best.pt")
	if n := report.Stepper.Replays; n > 0 {
		fmt.Fprintf(stdout, "\n%d of the %s of this run replayed a CUDA graph", n,
			printable.Counted(report.Stepper.Steps, "step", "steps"))
	}
	result := fmt.Sprintf("the best epoch is %d", best.Epoch)
	switch {
	case best.Eval != nil && o.images.MultiLabel:
		result += fmt.Sprintf(", mean average precision %.4f on %s", best.Eval.MAP,
			printable.Counted(best.Eval.Samples, "held-back image", "held-back images"))
	case best.Eval != nil:
		result += fmt.Sprintf(", right on %.1f %% of %s", 100*best.Eval.Top1,
			printable.Counted(best.Eval.Samples, "held-back image", "held-back images"))
	default:
		result += ", by its loss in training: name held-back images with -test FILE"
	}
	if report.Stepper.Steps > 0 {
		fmt.Fprintf(stdout, "\n%s, %s in this run; %s\n", printable.Counted(report.Steps, "step", "steps"),
			took.Round(100*time.Millisecond), result)
	} else {
		fmt.Fprintf(stdout, "%s is of a run that is finished (%d of %s, %s), so there was nothing to "+
			"train; %s\n", printable.Name(filepath.Join(o.out, "last.pt")),
			len(report.Epochs), printable.Counted(o.epochs, "epoch", "epochs"),
			printable.Counted(report.Steps, "step", "steps"), result)
		if report.Stopped {
			fmt.Fprintln(stdout, "-patience ended it: -resume with a larger one goes on")
		}
		fmt.Fprintf(stdout, "-o DIR -pretrained %s trains its result further\n", path)
	}
	if best.Eval != nil && best.Eval.Confusion != nil {
		const most = 5
		if err := printConfusions(stdout, best.Eval, classes, most,
			filepath.Join(o.out, "confusion.csv")+" has all"); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(stdout, "checkpoint %s: torchstream predict -checkpoint %[1]s classifies "+
		"images; in Python: torch.load(%q, weights_only=True)[\"state_dict\"]\n", path, path)
	return err
}

// census holds the classes of an archive or directory, and the numbers of images.
type census struct {
	classes []imageloader.ClassReport // names and counts, by label
	headers bool                      // turned is known, from an index
	turned  int                       // images whose orientation is not upright
	samples int
	list    *imageloader.ListReport // nil: there is no list
}

// countClasses counts the images of an archive or directory.
func countClasses(ctx context.Context, path string, labels *cli.Images, stderr io.Writer) (census, error) {
	var options imageloader.Options
	labels.SetLabels(&options)
	info, err := os.Stat(path)
	if err == nil && info.IsDir() || options.MultiLabel && options.List == "" { // a report has one label an image then
		return countSamples(ctx, path, options)
	}
	progress, done := cli.ReadingProgress(stderr)
	report, err := imageloader.InspectIndex(ctx, path, options, progress)
	if errors.Is(err, imageloader.ErrOtherLabels) { // the command's loaders would replace the index
		if _, err = imageloader.MakeIndex(ctx, path, options, progress); err == nil {
			report, err = imageloader.InspectIndex(ctx, path, options, progress)
		}
	}
	done()
	if errors.Is(err, imageloader.ErrNeedsNoIndex) { // a zip
		return countSamples(ctx, path, options)
	}
	if err != nil {
		return census{}, err
	}
	return census{report.Classes, true, report.Turned, report.Samples, report.List}, nil
}

// countSamples counts the images of a directory or a zip. These have no index, so countSamples
// counts the samples that a loader finds.
func countSamples(ctx context.Context, path string, options imageloader.Options) (census, error) {
	directories := map[int][]string{}
	if options.List == "" && !options.WebDataset && !options.MultiLabel {
		options.Weights = func(s imageloader.Sample) float64 {
			label := int(s.Label)
			if dir := filepath.ToSlash(filepath.Dir(s.Name)); !slices.Contains(directories[label], dir) &&
				len(directories[label]) < 5 {
				directories[label] = append(directories[label], dir)
			}
			return 1
		}
	}
	loader, err := imageloader.OpenContext(ctx, path, options)
	if err != nil {
		return census{}, err
	}
	found := census{samples: loader.Len(), list: loader.ListReport()}
	counts := loader.ClassCounts()
	for label, name := range loader.Classes() {
		found.classes = append(found.classes,
			imageloader.ClassReport{Name: name, Samples: counts[label], Directories: directories[label]})
	}
	return found, loader.Close()
}

// printClasses prints an archive's classes with their counts, and flags those with suspiciously few
// images. It returns the number of images.
func printClasses(ctx context.Context, path string, labels *cli.Images, stdout,
	stderr io.Writer) (int, error) {
	found, err := countClasses(ctx, path, labels, stderr)
	if err != nil {
		return 0, err
	}
	classes, samples := found.classes, found.samples
	fmt.Fprintf(stdout, "%s: %s in %s\n", printable.ArchiveName(path),
		printable.Counted(samples, "image", "images"), printable.Counted(len(classes), "class", "classes"))
	printList(stdout, path, found.list)
	var few suspicion // finds likely typos in directory names
	if labels.ByDirectory() {
		few = fewImages(classes, func(c imageloader.ClassReport) int { return c.Samples })
	}
	table := printable.NewTable(stdout, 0)
	fmt.Fprintln(table, "label\timages\tclass\t")
	merged := 0
	for label, c := range classes {
		note := few.note(c.Samples)
		if len(c.Directories) > 1 {
			note = "from " + fromDirectories(c.Directories)
			merged++
		}
		fmt.Fprintf(table, "%5d\t%6d\t%s\t%s\n", label, c.Samples, printable.Name(c.Name), note)
	}
	if err := table.Flush(); err != nil {
		return 0, err
	}
	fmt.Fprint(stdout, few.summary())
	if labels.ByDirectory() && partsOfASet(classes, func(c imageloader.ClassReport) string { return c.Name }) {
		return 0, fmt.Errorf("%s: %s", printable.ArchiveName(path), onlyParts)
	}
	if merged > 0 {
		fmt.Fprintf(stdout, "%s from several directories: if these are parts of a set, such as train and "+
			"test, stop here and make an archive of each\n",
			printable.Counted(merged, "class comes", "classes come"))
	}
	found.printTurned(path, samples, labels.Upright, stdout)
	_, err = fmt.Fprintln(stdout)
	return samples, err
}

// openTest opens -test. It refuses classes that -archive lacks, and prints the classes without an
// image in -test.
func (o *trainOptions) openTest(ctx context.Context, device cuda.Device, classes []string, stdout,
	stderr io.Writer) (*imageloader.Loader, *prefetcher.Prefetcher, error) {
	labels := o.testLabels()
	images, unknown, untested, err := compareClasses(ctx, o.test, &labels, classes, stderr)
	if err != nil {
		return nil, nil, err
	}
	if len(unknown) > 0 {
		return nil, nil, fmt.Errorf("%s has %s that %s has not: %s: rename the folders, or leave them out%s",
			printable.ArchiveName(o.test), printable.Counted(len(unknown), "class", "classes"),
			printable.ArchiveName(o.archive), listed(unknown),
			normalform.Hint(unknown, classes))
	}
	if images > 0 && len(untested) > 0 {
		fmt.Fprintf(stdout, "%s has no image of %d of the %d classes, so its accuracy says nothing about them: %s\n\n",
			printable.ArchiveName(o.test), len(untested), len(classes), strings.Join(printable.Names(untested), ", "))
	}
	held := o.feeding
	held.images = labels
	loader, feed, err := held.openHeldBack(ctx, device, o.test, images, o.size, classes)
	if err == nil && labels.List != o.images.List {
		printList(stdout, o.test, loader.ListReport())
	}
	return loader, feed, err
}

// openHeldBack opens an archive for an evaluation, with labels from the given classes.
func (o feeding) openHeldBack(ctx context.Context, device cuda.Device, path string, images, size int,
	classes []string) (*imageloader.Loader, *prefetcher.Prefetcher, error) {
	// The shorter side is resized to 8/7 of the crop: 256 pixels for a crop of 224.
	options := imageloader.Options{Transform: imageloader.Eval(size*8/7, size), Classes: classes,
		BadSamples: o.badSamples}
	o.images.SetLabels(&options)
	options.Transform.ApplyEXIFOrientation = o.images.Upright
	if o.badSamples == imageloader.Substitute {
		options.BadSamples = imageloader.Skip // counting an image twice would falsify the result
	}
	return o.open(ctx, device, path, images, options, trace.Window{})
}

// compareClasses counts an archive's images. It returns the archive's classes that are not known,
// and the known classes without an image in the archive.
func compareClasses(ctx context.Context, path string, labels *cli.Images, known []string,
	stderr io.Writer) (images int, unknown, without []string, err error) {
	found, err := countClasses(ctx, path, labels, stderr)
	if err != nil {
		return 0, nil, nil, err
	}
	has := map[string]bool{}
	images = found.samples
	for _, c := range found.classes {
		has[c.Name] = c.Samples > 0
		if !slices.Contains(known, c.Name) {
			unknown = append(unknown, c.Name)
		}
	}
	for _, class := range known {
		if !has[class] {
			without = append(without, class)
		}
	}
	return images, unknown, without, nil
}

// listed returns the first names of a list for an error. Dots replace the others.
func listed(names []string) string {
	const most = 10
	if len(names) > most {
		return strings.Join(printable.Names(names[:most]), ", ") + ", ..."
	}
	return strings.Join(printable.Names(names), ", ")
}

// suspicion finds classes with suspiciously few images.
type suspicion struct {
	below   int // classes with fewer images are suspicious
	classes int // number of suspicious classes
}

// fewImages looks for classes with less than a tenth of the median class's images, or with one
// image if the median class has more.
func fewImages[C any](classes []C, images func(C) int) suspicion {
	counts := make([]int, len(classes))
	for i, c := range classes {
		counts[i] = images(c)
	}
	slices.Sort(counts)
	var s suspicion
	if len(counts) == 0 {
		return s
	}
	if median := counts[len(counts)/2]; median > 1 {
		s.below = max(2, (median+9)/10)
	}
	s.classes, _ = slices.BinarySearch(counts, s.below)
	return s
}

// note returns the remark about a class with the given number of images, or "".
func (s suspicion) note(images int) string {
	if images < s.below {
		return "few images: is the name a typo?"
	}
	return ""
}

// onlyParts is the remark on an archive whose classes are the parts of a set.
const onlyParts = "the classes have the names of parts of a set: give the labels of the images with -list FILE, " +
	"or name the folder of one part, with a folder for each class in it"

// partsOfASet reports whether there are several classes, all named like parts of a set, such as
// train and test.
func partsOfASet[C any](classes []C, name func(C) string) bool {
	parts := append(trainNames(), heldNames()...)
	for _, c := range classes {
		if !slices.Contains(parts, strings.ToLower(name(c))) {
			return false
		}
	}
	return len(classes) > 1
}

// summary returns the line below a table of classes, or "" if no class is suspicious.
func (s suspicion) summary() string {
	if s.classes == 0 {
		return ""
	}
	return fmt.Sprintf("%d of the classes have less than a tenth of the median class's images, or one "+
		"image: every directory with an image is a class\n", s.classes)
}
