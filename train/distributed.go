package train

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/torch"
)

// CheckRanks requires that the loaders of all ranks divide the same epochs between them. Every rank
// calls it after opening its loader. All loaders must have the same archive, options and number of
// batches, and each must be opened for its own rank. Archives are the same if a digest of the
// names, sizes and labels of their samples is the same. A difference is an error on all ranks. The
// error names the rank, its archive and the difference, and wraps distributed.ErrMismatch.
func CheckRanks(world *distributed.Group, loader *imageloader.Loader) error {
	all, err := distributed.AllGatherObject(world, loader.Identity())
	if err != nil {
		return err
	}
	for rank, id := range all {
		if id.World != world.Size() || id.Rank != rank {
			return fmt.Errorf("train: rank %d of %d reads %s as rank %d of %d: open its loader with "+
				"Options.Rank and World from the group: %w",
				rank, world.Size(), id.Path, id.Rank, id.World, distributed.ErrMismatch)
		}
		if d := id.Difference(all[0]); d != "" {
			return fmt.Errorf("train: rank %d reads %s, and rank 0 %s: rank %d has %s: %w", rank, id.Path,
				all[0].Path, rank, d, distributed.ErrMismatch)
		}
	}
	return nil
}

// Keys that only the file of a job has.
const (
	idKey    = "id"    // a random text that tells files apart
	ranksKey = "ranks" // a list by rank: dicts with "generators" and "loader"
)

// rankState is the part of a checkpoint that differs between ranks.
type rankState struct {
	Error      string             `json:"error,omitempty"`
	Generators map[string][]byte  `json:"generators"`
	Loader     *imageloader.State `json:"loader"`
	// Shards is the id of the checkpoint whose shards the ranks write. Only rank 0 sets it.
	Shards string `json:"shards,omitempty"`
}

// gather adds the states of all ranks to rank 0's file. If the ranks write shards, it also opens
// the files of all ranks. own holds this rank's generators. failed is an earlier error of this
// rank, or nil. A failure of one rank is an error of all ranks: of gather, or of agree at the end.
func (c *Checkpoint) gather(w *writing, own []torch.Named, failed error) (err error) {
	mine := rankState{Loader: c.Loader, Generators: map[string][]byte{}}
	for _, n := range own {
		if failed == nil {
			mine.Generators[n.Name], failed = n.Tensor.Bytes()
		}
	}
	if failed == nil && c.divides() && w.leads() {
		if w.shards, failed = checkpoint.NewRankWriter(w.path, c.World.Size()); failed == nil {
			mine.Shards = w.shards.ID()
		}
	}
	defer func() {
		if err != nil && w.leads() && w.shards != nil {
			w.shards.Abandon()
		}
	}()
	if failed != nil {
		mine = rankState{Error: failed.Error()}
	}
	all, err := distributed.AllGatherObject(c.World, mine)
	if failed != nil || err != nil {
		return errors.Join(failed, err)
	}
	for rank, state := range all {
		if state.Error != "" {
			return fmt.Errorf("train: rank %d has no checkpoint: %s", rank, state.Error)
		}
	}
	if w.leads() {
		w.failed = w.addRanks(all)
	}
	if !c.divides() {
		return nil
	}
	if !w.leads() {
		w.shards, failed = checkpoint.JoinRankWriter(w.path, all[0].Shards, c.World.Size())
	}
	if err := agree(c.World, failed); err != nil {
		return err
	}
	// Several checkpoints may be written at the same time. All ranks save them in the same order,
	// so reserving the barriers now gives a checkpoint the same barrier on every rank.
	w.barrier = c.World.ReserveBeside("checkpoint")
	return nil
}

// checkFolder requires that all ranks see a file that rank 0 creates next to path. If rank 0 cannot
// write to the folder, Save reports that later.
func (c *Checkpoint) checkFolder(path string) error {
	id := ""
	if c.World.Rank() == 0 {
		if s, err := checkpoint.NewRankWriter(path, c.World.Size()); err == nil {
			defer s.Abandon() // removes the file after all ranks have looked
			id = s.ID()
		}
	}
	id, err := distributed.BroadcastObject(c.World, id, 0)
	if err != nil || id == "" {
		return err
	}
	if c.World.Rank() != 0 {
		_, err = checkpoint.JoinRankWriter(path, id, c.World.Size())
	}
	return agree(c.World, err)
}

// addRanks adds the states of all ranks to the value of the file.
func (w *writing) addRanks(all []rankState) error {
	ranks := make([]any, len(all))
	for rank, state := range all {
		generators := map[string]any{}
		for name, bytes := range state.Generators {
			t, err := torch.FromBytes(bytes, int64(len(bytes)))
			if err != nil {
				return err
			}
			w.made = append(w.made, torch.Named{Name: name, Tensor: t})
			generators[name] = t
		}
		entry := map[string]any{generatorsKey: generators}
		if state.Loader != nil {
			text, err := json.Marshal(state.Loader)
			if err != nil {
				return err
			}
			entry[loaderKey] = string(text)
		}
		ranks[rank] = entry
	}
	w.file[ranksKey] = ranks
	w.file[idKey] = rand.Text()
	return nil
}

// rankFailure is the error with which a rank wrote a checkpoint. The zero value is no error.
type rankFailure struct {
	Text       string
	NotDurable bool // the error wraps checkpoint.ErrNotDurable
}

func (f *rankFailure) Error() string { return f.Text }
func (f *rankFailure) Is(target error) bool {
	return f.NotDurable && target == checkpoint.ErrNotDurable
}

// agree joins the errors of all ranks, so that every rank returns the same error. The error wraps
// checkpoint.ErrNotDurable on every rank or on none. A single process returns its own error.
func agree(world *distributed.Group, failed error) error {
	if world == nil {
		return failed
	}
	var own rankFailure
	if failed != nil {
		own = rankFailure{failed.Error(), errors.Is(failed, checkpoint.ErrNotDurable)}
	}
	all, err := distributed.AllGatherObject(world, own)
	errs := []error{err}
	if err != nil {
		errs = append(errs, failed)
	}
	for rank := range all {
		said := error(&all[rank])
		switch {
		case rank == world.Rank() && failed != nil:
			said = failed
		case all[rank].Text == "":
			continue
		}
		errs = append(errs, fmt.Errorf("train: rank %d could not write the checkpoint: %w", rank, said))
	}
	return errors.Join(errs...)
}

// Saving is a checkpoint that SaveAsync is writing.
type Saving struct {
	world *distributed.Group
	done  chan struct{}
	err   error
}

// Wait waits until the file is on disk, and returns the error of writing it. If the error wraps
// [checkpoint.ErrNotDurable], the new file has replaced the old one. In a job Wait is a collective:
// every rank calls it and gets the errors of all ranks. Call Wait before the next Save or SaveAsync
// to the same path. If several Savings are being written, all ranks must wait for them in the same
// order.
func (s *Saving) Wait() error {
	<-s.done
	return agree(s.world, s.err)
}

// Done returns a channel that is closed when this rank has stopped writing, successfully or not.
// Done is not a collective. A program that ends because of an error waits for Done instead of
// calling Wait, since Wait may block on ranks that never call it.
func (s *Saving) Done() <-chan struct{} { return s.done }

// SaveAsync is like Save, but writes the file in the background. It waits for the device, copies
// the state to host memory, and starts a goroutine that writes the file. Until Wait returns, host
// memory holds a second copy of the tensors that this rank writes: its shards and, on rank 0, all
// tensors that are not sharded. The new file replaces the old one as soon as all ranks have written
// their shards, even before Wait is called. If SaveAsync returns an error, nothing is written. Wait
// returns the errors of writing, such as [checkpoint.ErrNotDurable].
func (c *Checkpoint) SaveAsync(path string) (*Saving, error) {
	w, err := c.collect(path)
	if err != nil {
		return nil, err
	}
	copies := hostCopies{}
	own, err := w.copied(copies)
	w.free()
	s := &Saving{world: c.World, done: make(chan struct{})}
	if err != nil {
		if c.World == nil {
			copies.close()
			return nil, err
		}
		own.failed = errors.Join(own.failed, err) // Wait tells the other ranks
	}
	go func() {
		defer close(s.done)
		defer copies.close()
		s.err = own.write()
	}()
	return s, nil
}

// copied returns a copy of w. The tensors that this rank writes are copied to host memory.
func (w *writing) copied(copies hostCopies) (*writing, error) {
	own := &writing{path: w.path, world: w.world, shards: w.shards, barrier: w.barrier, failed: w.failed,
		divided: checkpoint.Divided{}}
	if w.leads() {
		value, err := copies.of(w.file)
		if err != nil {
			return own, err
		}
		own.file = value.(map[string]any)
	}
	for _, n := range w.parts() {
		t, err := copies.tensor(n.Tensor)
		if err != nil {
			return own, fmt.Errorf("%s: %w", n.Name, err)
		}
		own.divided[t] = w.divided[n.Tensor]
		own.named = append(own.named, torch.Named{Name: n.Name, Tensor: t})
	}
	return own, nil
}

// hostCopies maps tensors to their copies on the host.
type hostCopies map[*torch.Tensor]*torch.Tensor

func (h hostCopies) close() {
	for _, t := range h {
		t.Close()
	}
}

// of returns a value for checkpoint.SavePyTorch. The result holds host copies instead of the
// tensors.
func (h hostCopies) of(value any) (any, error) {
	switch v := value.(type) {
	case *torch.Tensor:
		return h.tensor(v)
	case []torch.Named:
		named := slices.Clone(v)
		for i := range named {
			var err error
			if named[i].Tensor, err = h.tensor(v[i].Tensor); err != nil {
				return nil, fmt.Errorf("%s: %w", v[i].Name, err)
			}
		}
		return named, nil
	case []any:
		return copied(h, slices.All(v), make([]any, len(v)), func(to []any, i int, x any) { to[i] = x })
	case map[string]any:
		return copied(h, pairs(v), map[string]any{}, func(to map[string]any, k string, x any) { to[k] = x })
	case map[any]any:
		return copied(h, pairs(v), map[any]any{}, func(to map[any]any, k, x any) { to[k] = x })
	}
	return value, nil
}

func (h hostCopies) tensor(t *torch.Tensor) (*torch.Tensor, error) {
	if h[t] == nil {
		detached := t.Detach()
		defer detached.Close()
		made := detached.Clone
		if t.Device() != cuda.CPU {
			made = func() *torch.Tensor { return detached.To(cuda.CPU) }
		}
		host := made()
		if err := host.Err(); err != nil {
			return nil, err
		}
		h[t] = host
	}
	return h[t], nil
}

func pairs[K comparable](m map[K]any) func(yield func(K, any) bool) {
	return func(yield func(K, any) bool) {
		for k, v := range m {
			if !yield(k, v) {
				return
			}
		}
	}
}

// copied copies the entries of one container into another, which is its parameter to, with host
// copies instead of tensors. set stores one entry.
func copied[K, C any](h hostCopies, from func(yield func(K, any) bool), to C, set func(to C, k K, x any)) (C, error) {
	for k, v := range from {
		x, err := h.of(v)
		if err != nil {
			return to, err
		}
		set(to, k, x)
	}
	return to, nil
}

// RestoreLoader moves the loader to the position in the file that Load read. The number of ranks
// may differ from the file's: see imageloader's Loader.Restore. RestoreLoader does nothing if the
// file has no position, or if no file was read.
func (c *Checkpoint) RestoreLoader(ctx context.Context, loader *imageloader.Loader) error {
	states := c.loaders
	if states == nil && c.Loader != nil {
		states = []imageloader.State{*c.Loader}
	}
	if len(states) == 0 {
		return nil
	}
	return loader.Restore(ctx, states...)
}

// ranks reads the states of all ranks. It returns this rank's generators, or nil if the file has
// none for this rank.
func (c *Checkpoint) ranks(file *checkpoint.File) (generators map[any]any, err error) {
	entries, _ := value[[]any](file, ranksKey)
	rank, world := 0, 1
	if c.World != nil {
		rank, world = c.World.Rank(), c.World.Size()
	}
	for r, e := range entries {
		entry, ok := e.(map[any]any)
		if !ok {
			return nil, fmt.Errorf("%q: entry %d is no dict", ranksKey, r)
		}
		if text, ok := entry[loaderKey].(string); ok {
			var s imageloader.State
			if err := json.Unmarshal([]byte(text), &s); err != nil {
				return nil, fmt.Errorf("%q of rank %d: %w", loaderKey, r, err)
			}
			c.loaders = append(c.loaders, s)
			if r == rank && len(entries) == world {
				c.Loader = &s
			}
		}
		if r == rank {
			generators, _ = entry[generatorsKey].(map[any]any)
		}
	}
	return generators, nil
}

// seedNewRank seeds the generators of a rank without an entry in the file. The seed depends on rank
// 0's state and on the rank number, so the ranks of a job draw different numbers.
func seedNewRank(cpu *checkpoint.StoredTensor, rank int) error {
	state, err := cpu.Read()
	if err != nil {
		return err
	}
	defer state.Close()
	bytes, err := state.Bytes()
	if err != nil {
		return err
	}
	sum := sha256.Sum256(binary.LittleEndian.AppendUint64(bytes, uint64(rank)))
	return torch.ManualSeed(binary.LittleEndian.Uint64(sum[:]))
}

// loaded describes the file that a rank has read, for the other ranks.
type loaded struct {
	Error   string `json:"error,omitempty"`
	Missing bool   `json:"missing,omitempty"` // there is no file
	ID      string `json:"id"`
}

// agreeLoaded requires that all ranks have read the same file. If one rank fails, all ranks return
// an error.
func (c *Checkpoint) agreeLoaded(path, id string, failed error) error {
	mine := loaded{ID: id, Missing: errors.Is(failed, fs.ErrNotExist)}
	if failed != nil {
		mine.Error = failed.Error()
	}
	all, err := distributed.AllGatherObject(c.World, mine)
	if err != nil {
		return errors.Join(failed, err)
	}
	var missing, has []string
	for rank, l := range all {
		if l.Missing {
			missing = append(missing, fmt.Sprint(rank))
		} else {
			has = append(has, fmt.Sprint(rank))
		}
	}
	switch {
	case len(has) == 0:
		return failed
	case len(missing) > 0:
		return fmt.Errorf("train: there is no %s on the ranks %s, and there is one on the ranks %s: all "+
			"hosts need the same file: %w",
			path, strings.Join(missing, ", "), strings.Join(has, ", "), distributed.ErrMismatch)
	case failed != nil:
		return failed
	}
	for rank, l := range all {
		if l.Error != "" {
			return fmt.Errorf("train: rank %d: %s", rank, l.Error)
		}
		if l.ID != all[0].ID {
			return fmt.Errorf("train: %s is another checkpoint on rank %d than on rank 0: all hosts need "+
				"the same file: %w", path, rank, distributed.ErrMismatch)
		}
	}
	return nil
}
