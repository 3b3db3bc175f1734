package train

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

// Checkpoint is the state of a training, in one file, or, of ranks that divide a model or its
// optimizer, in one beside which each rank has another: with it a program that was killed goes on
// to the bits that it would have computed. Its fields name what to save, or where to load; nil
// fields are left out. A loop calls Load once before it begins, and then, if Loader is not nil, the
// Restore of its loader; Load's error is fs.ErrNotExist in the first run. After a step it sets
// Loader and calls Save, or SaveAsync, which writes beside the training. The example is such a
// loop. With World a checkpoint is that of a job of several processes.
//
// The file is PyTorch's: torch.load(path, weights_only=True) has the model's "state_dict", the
// state_dicts "optimizer", "lr_scheduler" and "scaler", "ema" as tensors by name, "generators" as
// torch.set_rng_state and torch.cuda.set_rng_state take them, and "metadata". That of a job also
// has "ranks", a list with the "generators" and the "loader" of each rank.
type Checkpoint struct {
	// Model may be a distributed.FullyShardedDataParallel, whose checkpoint is that of the whole
	// model. EMA is then of nn.State(Model), and its averages are whole in the file too.
	Model     nn.Module
	Optimizer optim.Optimizer
	Scheduler *optim.Scheduler
	EMA       *optim.EMA
	Scaler    *optim.GradScaler
	// Loader is the place of the loader, as the Info of a batch has it. Load sets it to the file's,
	// or to nil if the file has none.
	Loader *imageloader.State
	// Device is the device of the training. The states of its random generator and of the CPU's,
	// which Dropout draws from, are saved and loaded. A GPU takes the state of another one if the
	// file has none of its own.
	Device cuda.Device
	// Metadata are texts of the program, such as the classes. Load replaces it.
	Metadata map[string]string
	// World, if not nil, is the job whose ranks train together. Save, SaveAsync, Saving.Wait and
	// Load are then collectives: every rank calls them after the same step, with a file that all
	// hosts see. Rank 0 writes its model, optimizer and averages, which all ranks share, and the
	// generators and loaders of all ranks. Of what a distributed.FullyShardedDataParallel or an
	// optimizer of package distributed divides, each rank writes its part, to a file of its own
	// beside rank 0's, and reads its part, of which its host holds no more: see nn.Shards. What the
	// ranks of another group divide they gather, and rank 0 writes what its group has. A job of any
	// number of ranks, or a process alone, reads the file: see RestoreLoader. A rank that the file
	// does not have draws from generators that are seeded by rank 0's and its rank. An error of one
	// rank is one of all, which names it.
	World *distributed.Group

	position *saved // of a Run
	loaders  []imageloader.State
}

// Keys of the file's dict.
const (
	stateKey      = "state_dict"
	optimizerKey  = "optimizer"
	schedulerKey  = "lr_scheduler"
	countKey      = "last_epoch" // PyTorch's name of a scheduler's count
	emaKey        = "ema"
	scalerKey     = "scaler"
	generatorsKey = "generators"
	loaderKey     = "loader"
	metadataKey   = "metadata"
	positionKey   = "train" // the JSON text of a saved
)

// Save writes the file. A new file takes the old one's place as a whole, and only when it is on the
// disk: a program or a machine that dies meanwhile leaves the old one. It may also leave the
// unfinished file, whose name is the path with ".tmp-" and a number, and files of ranks with this
// number, which the next Save to the path removes. Save waits for the device.
func (c *Checkpoint) Save(path string) error {
	w, err := c.collect(path)
	if err != nil {
		return err
	}
	defer w.free()
	w.named = w.parts()
	return agree(c.World, w.write())
}

// writing is a file that this process, or all ranks of a job, are about to write.
type writing struct {
	path    string
	world   *distributed.Group
	file    map[string]any // the value of the file
	divided nn.Divided     // tensors of file of which this rank has parts
	shards  *nn.Shards     // of the ranks that write parts; or nil
	named   []nn.Named     // the parts that this rank writes
	made    []nn.Named     // tensors that free closes
	barrier func() error   // waits until all ranks have written their parts
	failed  error          // of this rank, which writes nothing
}

func (w *writing) free() { closeAll(w.made) }

// parts returns this rank's parts of tensors.
func (w *writing) parts() []nn.Named { return nn.DividedParts(w.file, w.divided) }

// leads reports whether this process writes the file itself.
func (w *writing) leads() bool { return w.world == nil || w.world.Rank() == 0 }

// collect finds what to write. In a job an error is one of all ranks.
func (c *Checkpoint) collect(path string) (*writing, error) {
	w := &writing{path: path, world: c.World, divided: nn.Divided{}, file: map[string]any{metadataKey: metadata(c.Metadata)}}
	states, err := generators(c.Device)
	w.made = states
	named := map[string]any{}
	for _, n := range states {
		named[n.Name] = n.Tensor
	}
	w.file[generatorsKey] = named
	// Whatever failed, all ranks ask the optimizer, whose state may be a collective.
	err = errors.Join(err, c.fill(w))
	if c.World != nil {
		err = c.gather(w, states, err)
	}
	if err != nil {
		w.free()
		return nil, err
	}
	return w, nil
}

// fill adds what the fields name to the value of the file.
func (c *Checkpoint) fill(w *writing) error {
	file := w.file
	// Whatever failed, all ranks ask for the rest too, which may be collectives.
	if err := errors.Join(c.fillOptimizer(w), c.fillModel(w), c.fillAverages(w)); err != nil {
		return err
	}
	if c.Scheduler != nil {
		file[schedulerKey] = map[string]any{countKey: c.Scheduler.Count()}
	}
	if c.Scaler != nil {
		state, err := c.Scaler.State()
		if err != nil {
			return err
		}
		file[scalerKey] = map[string]any{"scale": state.Scale, "_growth_tracker": state.GrowthTracker}
	}
	for key, value := range map[string]any{loaderKey: c.Loader, positionKey: c.position} {
		text, err := json.Marshal(value)
		if err != nil {
			return err
		}
		if string(text) != "null" {
			file[key] = string(text)
		}
	}
	return nil
}

func (c *Checkpoint) fillOptimizer(w *writing) error {
	if c.Optimizer == nil {
		return nil
	}
	state, err := c.optimizerState(w)
	if err == nil {
		w.file[optimizerKey], err = state.PyTorch()
	}
	return err
}

func (c *Checkpoint) fillModel(w *writing) (err error) {
	sharded, ok := c.Model.(*distributed.FullyShardedDataParallel)
	switch {
	case c.Model == nil:
	case ok && c.World == nil:
		err = fmt.Errorf("train: a checkpoint of a FullyShardedDataParallel needs World: %w", cuda.ErrInvalidArgument)
	case ok && !c.dividedBy(sharded.Group()):
		w.file[stateKey], err = sharded.State()
	case ok:
		maps.Copy(w.divided, sharded.Divided())
		fallthrough
	default:
		w.file[stateKey] = nn.State(c.Model)
	}
	return err
}

func (c *Checkpoint) fillAverages(w *writing) (err error) {
	sharded, ok := c.Model.(*distributed.FullyShardedDataParallel)
	switch {
	case c.EMA == nil || ok && c.World == nil:
	case ok && !c.dividedBy(sharded.Group()):
		w.file[emaKey], err = sharded.EMAState(c.EMA)
	case ok:
		var averages nn.Divided
		averages, err = sharded.DividedAverages(c.EMA)
		maps.Copy(w.divided, averages)
		fallthrough
	default:
		w.file[emaKey] = c.EMA.State()
	}
	return err
}

// dividedBy reports whether the ranks of a group are those of the job, in its order: the parts of
// each are then those of a rank of the job.
func (c *Checkpoint) dividedBy(g *distributed.Group) bool {
	return c.World != nil && slices.Equal(g.Ranks(), c.World.Ranks())
}

// optimizerState returns the state of the optimizer, in a job the parts of this rank.
func (c *Checkpoint) optimizerState(w *writing) (optim.State, error) {
	o, ok := c.Optimizer.(dividedOptimizer)
	if !ok || !c.dividedBy(o.Group()) {
		return c.Optimizer.State()
	}
	state, divided, err := o.DividedState()
	maps.Copy(w.divided, divided)
	return state, err
}

// divides reports whether the ranks of the job write parts.
func (c *Checkpoint) divides() bool {
	sharded, model := c.Model.(*distributed.FullyShardedDataParallel)
	o, optimizer := c.Optimizer.(dividedOptimizer)
	return model && c.dividedBy(sharded.Group()) || optimizer && c.dividedBy(o.Group())
}

// dividedOptimizer is an optimizer of package distributed.
type dividedOptimizer interface {
	DividedState() (optim.State, nn.Divided, error)
	Group() *distributed.Group
}

// write writes what this rank writes. The ranks that write parts wait for each other then, and rank
// 0 writes the file that makes them a checkpoint.
func (w *writing) write() error {
	err := w.failed
	if w.shards == nil {
		if err == nil && w.leads() {
			err = nn.SavePyTorch(w.path, w.file)
		}
		return err
	}
	if err == nil {
		err = w.shards.Write(w.world.Rank(), w.named)
	}
	err = errors.Join(err, w.barrier())
	switch {
	case !w.leads():
		return err
	case err != nil:
		w.shards.Abandon()
		return err
	}
	return w.shards.Commit(w.file, w.divided)
}

// generators returns the states of the random generators that a training on the device draws from,
// by the devices' names.
func generators(device cuda.Device) (states []nn.Named, err error) {
	devices := []cuda.Device{cuda.CPU}
	if device != cuda.CPU {
		devices = append(devices, device)
	}
	for _, d := range devices {
		state, err := torch.GeneratorState(d)
		if err != nil {
			return states, err
		}
		states = append(states, nn.Named{Name: d.String(), Tensor: state})
	}
	return states, nil
}

func closeAll(tensors []nn.Named) {
	for _, n := range tensors {
		n.Tensor.Close()
	}
}

// Load reads a file that Save wrote, and replaces the state of everything that the fields name. A
// field whose state the file lacks is an error. Load compares names and shapes before it changes
// the model or the optimizer; after an error, some fields may be loaded and others not.
//
// Ranks that write parts also find out, before the training begins, whether all of them see the
// folder, as Save needs: if rank 0 can write there, a rank that does not see its file is an error
// of Load.
func (c *Checkpoint) Load(path string) error {
	id, err := c.loadFile(path)
	if c.World == nil {
		return err
	}
	err = c.agreeLoaded(path, id, err)
	if c.divides() && (err == nil || errors.Is(err, fs.ErrNotExist)) {
		err = cmp.Or(c.checkFolder(path), err)
	}
	return err
}

// loadFile reads a file on this rank. It returns the file's "id".
func (c *Checkpoint) loadFile(path string) (id string, err error) {
	file, err := nn.OpenCheckpoint(path)
	if err != nil {
		return "", err
	}
	defer file.Close()
	id, _ = value[string](file, idKey)
	if err := c.load(file); err != nil {
		return id, fmt.Errorf("train: %s: %w", path, err)
	}
	return id, nil
}

func (c *Checkpoint) load(file *nn.Checkpoint) error {
	if err := c.texts(file); err != nil {
		return err
	}
	own, err := c.ranks(file)
	if err != nil {
		return err
	}
	if sharded, ok := c.Model.(*distributed.FullyShardedDataParallel); ok {
		if err := sharded.LoadCheckpoint(file); err != nil {
			return err
		}
	} else if c.Model != nil {
		if _, err := file.LoadInto(c.Model, nn.LoadOptions{}); err != nil {
			return err
		}
	}
	if c.Optimizer != nil {
		if err := optim.LoadFrom(file, c.Optimizer); err != nil {
			return err
		}
	}
	if c.EMA != nil {
		if err := c.loadEMA(file); err != nil {
			return err
		}
	}
	if c.Scheduler != nil {
		count, ok := value[int64](file, schedulerKey, countKey)
		if !ok {
			return errors.New("it has no state of a scheduler")
		}
		if err := c.Scheduler.SetCount(int(count)); err != nil {
			return err
		}
	}
	if c.Scaler != nil {
		scale, ok1 := value[float64](file, scalerKey, "scale")
		good, ok2 := value[int64](file, scalerKey, "_growth_tracker")
		if !ok1 || !ok2 {
			return errors.New("it has no state of a GradScaler")
		}
		if err := c.Scaler.LoadState(optim.GradScalerState{Scale: scale, GrowthTracker: good}); err != nil {
			return err
		}
	}
	return c.loadGenerators(file, own)
}

// texts reads what is not a tensor.
func (c *Checkpoint) texts(file *nn.Checkpoint) error {
	c.Loader, c.loaders, c.Metadata = nil, nil, file.Metadata()
	if text, ok := value[string](file, loaderKey); ok {
		if err := json.Unmarshal([]byte(text), &c.Loader); err != nil {
			return fmt.Errorf("%q: %w", loaderKey, err)
		}
	}
	if c.position == nil {
		return nil
	}
	text, ok := value[string](file, positionKey)
	if !ok {
		return fmt.Errorf("it is no checkpoint of a training: it has no text %q", positionKey)
	}
	if err := json.Unmarshal([]byte(text), c.position); err != nil {
		return fmt.Errorf("%q: %w", positionKey, err)
	}
	return c.position.check()
}

// loadGenerators sets the generators last, after everything that may draw. own is the state of this
// rank in a file of several ranks, or nil.
func (c *Checkpoint) loadGenerators(file *nn.Checkpoint, own map[any]any) error {
	states, _ := value[map[any]any](file, generatorsKey)
	if own != nil {
		states = own
	}
	cpu, ok := states[cuda.CPU.String()].(*nn.StoredTensor)
	if !ok {
		return errors.New("it has no state of the random generators")
	}
	if own == nil && c.World != nil && c.World.Rank() > 0 {
		return seedNewRank(cpu, c.World.Rank())
	}
	if err := loadGenerator(cuda.CPU, cpu); err != nil || c.Device == cuda.CPU {
		return err
	}
	gpu, ok := states[c.Device.String()].(*nn.StoredTensor)
	for n := 0; !ok && n < maxGPUs; n++ {
		gpu, ok = states[cuda.Device(n).String()].(*nn.StoredTensor)
	}
	if !ok {
		return nil // of a training on the CPU
	}
	return loadGenerator(c.Device, gpu)
}

const maxGPUs = 64

func loadGenerator(device cuda.Device, stored *nn.StoredTensor) error {
	state, err := stored.Read()
	if err != nil {
		return err
	}
	defer state.Close()
	return torch.SetGeneratorState(device, state)
}

// value returns the value at a path of keys, if there is one of the type.
func value[T any](file *nn.Checkpoint, path ...any) (T, bool) {
	v, err := file.Value(path...)
	t, ok := v.(T)
	return t, ok && err == nil
}

func (c *Checkpoint) loadEMA(file *nn.Checkpoint) error {
	dict, ok := value[map[any]any](file, emaKey)
	if !ok {
		return errors.New("it has no averages: the interrupted run had no EMA")
	}
	stored := map[string]*nn.StoredTensor{}
	for name, value := range dict {
		key, isName := name.(string)
		t, isTensor := value.(*nn.StoredTensor)
		if !isName || !isTensor {
			return fmt.Errorf("%q: %v is no tensor", emaKey, name)
		}
		stored[key] = t
	}
	if sharded, ok := c.Model.(*distributed.FullyShardedDataParallel); ok {
		return sharded.LoadEMAFrom(c.EMA, stored)
	}
	var state []nn.Named
	defer func() { closeAll(state) }()
	for name, s := range stored {
		t, err := s.Read()
		if err != nil {
			return err
		}
		state = append(state, nn.Named{Name: name, Tensor: t})
	}
	return c.EMA.LoadState(state)
}
