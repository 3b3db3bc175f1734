package train

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

// Checkpoint saves the full state of a run in one file. When ranks shard the model or the
// optimizer, each rank adds a file. A restarted program that loads the checkpoint computes the
// results of an uninterrupted run. On the CPU, with the same number of threads, the results are
// bit-identical.
//
// The fields are the objects to save, or the objects to load into. Nil fields are left out. A
// program first calls Load once and then, if Loader is not nil, RestoreLoader. On the first run
// there is no file, and Load returns fs.ErrNotExist. After a step, the program sets Loader and
// calls Save, or SaveAsync, which writes while training continues. The example shows such a
// program. With World, the checkpoint belongs to a job of several processes.
//
// PyTorch can read the file. torch.load(path, weights_only=True) returns a dict with these keys,
// among others:
//   - "state_dict": the model's state_dict
//   - "optimizer", "lr_scheduler" and "scaler": the state_dicts of these objects
//   - "ema": the averages, tensors by name
//   - "generators": the states that torch.set_rng_state and torch.cuda.set_rng_state expect
//   - "metadata": texts by name
//   - "ranks", only in the file of a job: a list with the "generators" and the "loader" of each
//     rank
type Checkpoint struct {
	// Model may be a distributed.FullyShardedDataParallel. The checkpoint then holds the full,
	// unsharded model. EMA must then average nn.State(Model), and the checkpoint holds the full
	// averages.
	Model     nn.Module
	Optimizer optim.Optimizer
	Scheduler *optim.Scheduler
	EMA       *optim.EMA
	Scaler    *optim.GradScaler
	// Loader is the loader's position, as found in the Info of a batch. Load sets it from the file,
	// or to nil if the file has none.
	Loader *imageloader.State
	// Device is the device on which the program trains. Save and Load include the states of the
	// CPU's and the device's random generators, from which Dropout draws. If the file has no state
	// for this GPU, Load uses the state of another one. 0 stands for cuda.Default().
	Device cuda.Device
	// Metadata holds texts of the program, such as the classes. Load replaces it.
	Metadata map[string]string
	// World, if not nil, is the job whose ranks train together. Save, SaveAsync, Saving.Wait and
	// Load are then collectives: every rank calls them after the same step, with a path that all
	// hosts see.
	//
	// Rank 0 writes its model, optimizer and averages, since these are equal on all ranks. It also
	// writes the generator states and loader positions of all ranks. If a
	// distributed.FullyShardedDataParallel or an optimizer of package distributed shards its state
	// over World, each rank writes its shard to a separate file next to rank 0's. On each rank,
	// Load reads only the rank's own shards. No host holds whole tensors of sharded state: see
	// checkpoint.RankWriter. If the state is sharded over a group other than World, Save first
	// gathers it within that group. Such groups are replicas: World's rank 0 writes the state of
	// its own group.
	//
	// A job of any number of ranks, or a single process, can read the file: see RestoreLoader. A
	// rank without an entry in the file seeds its generators from rank 0's state and its own rank
	// number. If one rank fails, all ranks return an error that names the rank.
	World *distributed.Group

	position *saved // set by Run
	loaders  []imageloader.State
}

// Keys of the file's dict.
const (
	stateKey      = "state_dict"
	optimizerKey  = "optimizer"
	schedulerKey  = "lr_scheduler"
	countKey      = "last_epoch" // PyTorch's name for a scheduler's count
	emaKey        = "ema"
	scalerKey     = "scaler"
	generatorsKey = "generators"
	loaderKey     = "loader"
	metadataKey   = "metadata"
	positionKey   = "train" // JSON of type saved
)

// Save writes the file. Once the new file is on disk, it atomically replaces the old one. If the
// program or the machine dies during Save, the old file remains. Unfinished files may remain too:
// one named like the path plus ".tmp-" and a number, and rank files with the same number. The next
// Save to the path removes unfinished files. Save waits for the device.
//
// If the error wraps [checkpoint.ErrNotDurable], the new file has replaced the old one, but a loss
// of power may undo that. A program may warn and continue. In a job, all ranks get such an error.
func (c *Checkpoint) Save(path string) error {
	w, err := c.collect(path)
	if err != nil {
		return err
	}
	defer w.free()
	w.named = w.parts()
	return agree(c.World, w.write())
}

// writing is a file that this process, or all ranks of a job, will write.
type writing struct {
	path    string
	world   *distributed.Group
	file    map[string]any         // the value of the file
	divided checkpoint.Divided     // the sharded tensors of file
	shards  *checkpoint.RankWriter // set if ranks write shards, otherwise nil
	named   []torch.Named          // the shards that this rank writes
	made    []torch.Named          // tensors that free closes
	barrier func() error           // waits until all ranks have written their shards
	failed  error                  // the error that keeps this rank from writing, or nil
}

func (w *writing) free() { closeAll(w.made) }

// parts returns this rank's shards of tensors.
func (w *writing) parts() []torch.Named { return w.divided.Parts(w.file) }

// leads reports whether this process writes the main file, and not only a file of shards.
func (w *writing) leads() bool { return w.world == nil || w.world.Rank() == 0 }

// collect gathers everything to write. In a job, all ranks learn of a failure of one rank: collect
// returns an error on each, or agree does at the end of Save.
func (c *Checkpoint) collect(path string) (*writing, error) {
	w := &writing{path: path, world: c.World, divided: checkpoint.Divided{},
		file: map[string]any{metadataKey: metadata(c.Metadata)}}
	states, err := generators(c.device())
	w.made = states
	named := map[string]any{}
	for _, n := range states {
		named[n.Name] = n.Tensor
	}
	w.file[generatorsKey] = named
	// All ranks call fill even after an error: reading the optimizer's state may be a collective.
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

// fill adds the state of the objects in c's fields, such as Model and Optimizer, to w.file.
func (c *Checkpoint) fill(w *writing) error {
	file := w.file
	// All ranks continue even after an error: the calls below may be collectives.
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
		var averages checkpoint.Divided
		averages, err = sharded.DividedAverages(c.EMA)
		maps.Copy(w.divided, averages)
		fallthrough
	default:
		w.file[emaKey] = c.EMA.State()
	}
	return err
}

// dividedBy reports whether g has the ranks of the job in the same order. If so, a shard over g is
// also a shard over the job.
func (c *Checkpoint) dividedBy(g *distributed.Group) bool {
	return c.World != nil && slices.Equal(g.Ranks(), c.World.Ranks())
}

// optimizerState returns the optimizer's state. If the optimizer is sharded over World, it returns
// only this rank's shards.
func (c *Checkpoint) optimizerState(w *writing) (optim.State, error) {
	o, ok := c.Optimizer.(dividedOptimizer)
	if !ok || !c.dividedBy(o.Group()) {
		return c.Optimizer.State()
	}
	state, divided, err := o.DividedState()
	maps.Copy(w.divided, divided)
	return state, err
}

// divides reports whether the ranks of the job write shards.
func (c *Checkpoint) divides() bool {
	sharded, model := c.Model.(*distributed.FullyShardedDataParallel)
	o, optimizer := c.Optimizer.(dividedOptimizer)
	return model && c.dividedBy(sharded.Group()) || optimizer && c.dividedBy(o.Group())
}

// dividedOptimizer is an optimizer of package distributed.
type dividedOptimizer interface {
	DividedState() (optim.State, checkpoint.Divided, error)
	Group() *distributed.Group
}

// write writes this rank's files. Ranks that write shards then wait for each other, and rank 0
// writes the main file. The shards become part of a checkpoint only with the main file.
func (w *writing) write() error {
	err := w.failed
	if w.shards == nil {
		if err == nil && w.leads() {
			err = checkpoint.SavePyTorch(w.path, w.file)
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

// device returns the device on which the program trains.
func (c *Checkpoint) device() cuda.Device {
	if c.Device == 0 {
		return cuda.Default()
	}
	return c.Device
}

// generators returns the states of the random generators that training on the device uses, by
// device name.
func generators(device cuda.Device) (states []torch.Named, err error) {
	devices := []cuda.Device{cuda.CPU}
	if device != cuda.CPU {
		devices = append(devices, device)
	}
	for _, d := range devices {
		state, err := torch.GeneratorState(d)
		if err != nil {
			return states, err
		}
		states = append(states, torch.Named{Name: d.String(), Tensor: state})
	}
	return states, nil
}

func closeAll(tensors []torch.Named) {
	for _, n := range tensors {
		n.Tensor.Close()
	}
}

// Load reads a file that Save wrote, and replaces the state of every object that the fields name.
// It is an error if the file lacks the state for a field. Exceptions are Loader, Metadata, and the
// generator of a GPU if the file was saved on the CPU. Load compares names and shapes before it
// changes the model or the optimizer. After an error, some fields may be loaded and others not.
//
// If ranks write shards, Load also checks that every rank sees the folder, because Save will need
// that. Rank 0 creates a temporary file there, and Load fails if another rank does not see it.
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
	file, err := checkpoint.Open(path)
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

func (c *Checkpoint) load(file *checkpoint.File) error {
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
		if _, err := nn.LoadFrom(file, c.Model, nn.LoadOptions{}); err != nil {
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

// texts reads everything except tensors.
func (c *Checkpoint) texts(file *checkpoint.File) error {
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

// loadGenerators sets the generators. It runs last, because loading other state may draw random
// numbers. own holds this rank's generator states from the file of a job, or is nil.
func (c *Checkpoint) loadGenerators(file *checkpoint.File, own map[any]any) error {
	states, _ := value[map[any]any](file, generatorsKey)
	if own != nil {
		states = own
	}
	cpu, ok := states[cuda.CPU.String()].(*checkpoint.StoredTensor)
	if !ok {
		return errors.New("it has no state of the random generators")
	}
	if own == nil && c.World != nil && c.World.Rank() > 0 {
		return seedNewRank(cpu, c.World.Rank())
	}
	if err := loadGenerator(cuda.CPU, cpu); err != nil || c.device() == cuda.CPU {
		return err
	}
	gpu, ok := states[c.device().String()].(*checkpoint.StoredTensor)
	for n := 0; !ok && n < maxGPUs; n++ {
		gpu, ok = states[cuda.Device(n).String()].(*checkpoint.StoredTensor)
	}
	if !ok {
		return nil // saved on the CPU
	}
	return loadGenerator(c.device(), gpu)
}

const maxGPUs = 64

func loadGenerator(device cuda.Device, stored *checkpoint.StoredTensor) error {
	state, err := stored.Read()
	if err != nil {
		return err
	}
	defer state.Close()
	return torch.SetGeneratorState(device, state)
}

// value returns the value at a path of keys, if it exists and has type T.
func value[T any](file *checkpoint.File, path ...any) (T, bool) {
	v, err := file.Value(path...)
	t, ok := v.(T)
	return t, ok && err == nil
}

func (c *Checkpoint) loadEMA(file *checkpoint.File) error {
	dict, ok := value[map[any]any](file, emaKey)
	if !ok {
		return errors.New("it has no averages: the interrupted run had no EMA")
	}
	stored := map[string]*checkpoint.StoredTensor{}
	for name, value := range dict {
		key, isName := name.(string)
		t, isTensor := value.(*checkpoint.StoredTensor)
		if !isName || !isTensor {
			return fmt.Errorf("%q: %v is no tensor", emaKey, name)
		}
		stored[key] = t
	}
	if sharded, ok := c.Model.(*distributed.FullyShardedDataParallel); ok {
		return sharded.LoadEMAFrom(c.EMA, stored)
	}
	var state []torch.Named
	defer func() { closeAll(state) }()
	for name, s := range stored {
		t, err := s.Read()
		if err != nil {
			return err
		}
		state = append(state, torch.Named{Name: name, Tensor: t})
	}
	return c.EMA.LoadState(state)
}
