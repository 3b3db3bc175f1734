package imageloader

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/torchstream/torchstream/internal/order"
)

// State is a position in an epoch, right after a batch. Each batch has its State (Info.State,
// Batch.State), because a prefetcher and the loader itself are batches ahead of the consumer. Save
// the state of the last batch that the program has used. Restore continues after it.
//
// If an error ends an epoch within a batch, the loader first delivers the samples before it as a
// short batch, with the state of the batch before: Batches is not larger. A program that resumes
// should not train on a short batch of this kind, since it gets the samples again.
//
// A State is saved as JSON (json.Marshal and json.Unmarshal), about 1,000 bytes. It is a value that
// may be copied and kept without limit.
type State struct {
	run     *run
	batches int // batches that were delivered since the epoch started or was dealt again
	turns   int // turns that the rank has taken since then (see order.Deal)
}

// run is the data that the states of one epoch share. It is immutable.
type run struct {
	epoch  int
	order  order.Kind
	rank   int
	world  int
	done   order.Positions // positions taken before the epoch was dealt again
	before int             // batches of the epoch that were delivered before it was dealt again

	archive archiveIdentity
	classes string
	options map[string]string
	// identify, if not nil, computes archive. This takes a while for a large archive, and only
	// saved states need it.
	identify func() archiveIdentity
}

// archiveIdentity identifies an archive.
type archiveIdentity struct {
	Bytes   int64  `json:"bytes"`
	Samples int    `json:"samples"` // 0 if unknown when the state was made
	Digest  string `json:"digest"`  // digest of the samples' names, sizes and labels; "" if unknown
}

// Epoch returns the epoch of the state. After Restore, continue with this epoch.
func (s State) Epoch() int {
	if s.run == nil {
		return 0
	}
	return s.run.epoch
}

// Batches returns the number of batches of the epoch before the state.
func (s State) Batches() int {
	if s.run == nil {
		return 0
	}
	return s.run.before + s.batches
}

const (
	stateVersion  = 1
	maxStateBytes = 64 << 20
)

// wireState is a State as JSON.
type wireState struct {
	Version int               `json:"version"`
	Epoch   int               `json:"epoch"`
	Order   order.Kind        `json:"order"`
	Rank    int               `json:"rank"`
	World   int               `json:"world"`
	Next    int               `json:"next"`  // all positions below Next were taken before the epoch was dealt again
	Ahead   []int             `json:"ahead"` // further positions taken before the epoch was dealt again
	Before  int               `json:"before"`
	Batches int               `json:"batches"`
	Turns   int               `json:"turns"`
	Archive archiveIdentity   `json:"archive"`
	Classes string            `json:"classes"`
	Options map[string]string `json:"options"`
}

// MarshalJSON writes the state. It fails for the zero State.
func (s State) MarshalJSON() ([]byte, error) {
	if s.run == nil {
		return nil, errors.New("imageloader: the zero State is no place in an epoch")
	}
	r := s.run
	id := r.archive
	if r.identify != nil {
		id = r.identify()
	}
	return json.Marshal(wireState{stateVersion, r.epoch, r.order, r.rank, r.world, r.done.Next,
		append([]int{}, r.done.Ahead...), r.before, s.batches, s.turns,
		id, r.classes, r.options})
}

// UnmarshalJSON reads the output of MarshalJSON, and returns an error for anything else. Restore
// checks whether the state fits a loader.
func (s *State) UnmarshalJSON(data []byte) error {
	if len(data) > maxStateBytes {
		return fmt.Errorf("imageloader: a state of %d bytes: more than %d", len(data), maxStateBytes)
	}
	var version struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(data, &version); err != nil {
		return fmt.Errorf("imageloader: damaged state: %w", err)
	}
	if version.Version != stateVersion {
		return fmt.Errorf("imageloader: the state is of version %d, this program reads %d", version.Version,
			stateVersion)
	}
	var w wireState
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&w); err != nil {
		return fmt.Errorf("imageloader: damaged state: %w", err)
	}
	if _, err := d.Token(); err != io.EOF {
		return errors.New("imageloader: damaged state: something follows it")
	}
	if err := w.check(); err != nil {
		return fmt.Errorf("imageloader: damaged state: %w", err)
	}
	s.run = &run{epoch: w.Epoch, order: w.Order, rank: w.Rank, world: w.World,
		done: order.Positions{Next: w.Next, Ahead: w.Ahead}, before: w.Before,
		archive: w.Archive, classes: w.Classes, options: w.Options}
	s.batches, s.turns = w.Batches, w.Turns
	return nil
}

// check returns an error for values that no state has.
func (w *wireState) check() error {
	mark := w.mark()
	return cmp.Or(mark.Check(), order.CheckCount("samples", w.Archive.Samples),
		order.CheckCount("bytes", int(w.Archive.Bytes)))
}

// mark returns the position of the state.
func (w *wireState) mark() order.Mark {
	return order.Mark{Epoch: w.Epoch, Kind: w.Order, Share: order.Share{Rank: w.Rank, World: w.World},
		Done: order.Positions{Next: w.Next, Ahead: w.Ahead}, Before: w.Before, Batches: w.Batches, Turns: w.Turns}
}

// mark returns the position of the state. Its Share has only the rank and the number of ranks.
func (s State) mark() order.Mark {
	r := s.run
	return order.Mark{Epoch: r.epoch, Kind: r.order, Share: order.Share{Rank: r.rank, World: r.world},
		Done: r.done, Before: r.before, Batches: s.batches, Turns: s.turns}
}
