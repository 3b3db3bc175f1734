package prefetcher

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/torchstream/torchstream/internal/order"
)

// SampleState is a position in an epoch of a [SampleSource], right after a batch. Each batch has
// its SampleState (SampleInfo.State), because a prefetcher is several batches ahead of the
// consumer. Save the state of the last batch that the program has used. SampleSource.Restore
// continues after it.
//
// A SampleState is saved as JSON (json.Marshal and json.Unmarshal). It is a value that may be
// copied and kept without limit.
type SampleState struct {
	run     *sampleRun
	batches int // batches that were delivered since the epoch started or was dealt again
	turns   int // turns that the rank has taken since then (see order.Deal)
}

// sampleRun has what all states of one pass have in common. A pass is an epoch, or the rest of an
// epoch after a Restore. A sampleRun is immutable.
type sampleRun struct {
	mark    order.Mark // at the start of the pass
	options map[string]string
}

// Epoch returns the epoch of the state. After Restore, continue with this epoch.
func (s SampleState) Epoch() int {
	if s.run == nil {
		return 0
	}
	return s.run.mark.Epoch
}

// Share returns the rank of the state's source, and the number of ranks that share the epoch:
// SamplesOptions.Rank and World.
func (s SampleState) Share() (rank, world int) {
	if s.run == nil {
		return 0, 1
	}
	return s.run.mark.Share.Rank, s.run.mark.Share.World
}

// Share returns SamplesOptions.Rank and World. World is at least 1.
func (s *SampleSource) Share() (rank, world int) { return s.options.Rank, s.options.World }

// Batches returns the number of batches of the epoch before the state.
func (s SampleState) Batches() int {
	if s.run == nil {
		return 0
	}
	return s.run.mark.Before + s.batches
}

const (
	sampleStateVersion  = 1
	maxSampleStateBytes = 64 << 20
)

// wireSampleState is a SampleState as JSON.
type wireSampleState struct {
	Version int               `json:"version"`
	Place   wirePlace         `json:"place"`
	Options map[string]string `json:"options"`
}

// wirePlace is an order.Mark as JSON.
type wirePlace struct {
	Epoch   int        `json:"epoch"`
	Order   order.Kind `json:"order"`
	Rank    int        `json:"rank"`
	World   int        `json:"world"`
	Next    int        `json:"next"`
	Ahead   []int      `json:"ahead,omitempty"`
	Before  int        `json:"before"`
	Batches int        `json:"batches"`
	Turns   int        `json:"turns"`
}

// mark converts the position to an order.Mark.
func (w *wirePlace) mark() order.Mark {
	return order.Mark{Epoch: w.Epoch, Kind: w.Order, Share: order.Share{Rank: w.Rank, World: w.World},
		Done: order.Positions{Next: w.Next, Ahead: w.Ahead}, Before: w.Before, Batches: w.Batches, Turns: w.Turns}
}

// mark returns the position of the state.
func (s SampleState) mark() order.Mark {
	m := s.run.mark
	m.Batches, m.Turns = s.batches, s.turns
	return m
}

// MarshalJSON writes the state. It fails for the zero SampleState.
func (s SampleState) MarshalJSON() ([]byte, error) {
	if s.run == nil {
		return nil, errors.New("prefetcher: the zero SampleState is no place in an epoch")
	}
	m := s.mark()
	return json.Marshal(wireSampleState{sampleStateVersion, wirePlace{m.Epoch, m.Kind, m.Share.Rank, m.Share.World,
		m.Done.Next, m.Done.Ahead, m.Before, m.Batches, m.Turns}, s.run.options})
}

// UnmarshalJSON reads the output of MarshalJSON, and returns an error for anything else. Restore
// checks whether the state fits a source.
func (s *SampleState) UnmarshalJSON(data []byte) error {
	if len(data) > maxSampleStateBytes {
		return fmt.Errorf("prefetcher: a state of %d bytes: more than %d", len(data), maxSampleStateBytes)
	}
	var w wireSampleState
	if err := json.Unmarshal(data, &w); err != nil {
		return fmt.Errorf("prefetcher: damaged state: %w", err)
	}
	if w.Version != sampleStateVersion {
		return fmt.Errorf("prefetcher: the state is of version %d, this program reads %d", w.Version, sampleStateVersion)
	}
	mark := w.Place.mark()
	if err := mark.Check(); err != nil {
		return fmt.Errorf("prefetcher: damaged state: %w", err)
	}
	*s = SampleState{run: &sampleRun{mark: mark, options: w.Options}, batches: mark.Batches, turns: mark.Turns}
	return nil
}

// Restore continues an interrupted epoch. From now on, that epoch starts right after the state's
// batch. Other epochs are complete. The rest of the epoch is the same as without the interruption:
// the same samples in the same batches, with any number of workers. Restore() without a state
// undoes this. Running epochs are not affected.
//
// If Rank and World are the same as in the state, this rank's state is enough. With another World,
// the rest of the epoch is dealt to the new ranks. Every sample that was in no batch is then
// delivered once. A sample that was in a batch is delivered again only as padding. Dealing again
// needs the states of all former ranks after the same number of batches. One state is enough if
// there was one rank, or if SamplesOptions.BadSamples is not Skip. When the rest is dealt again,
// BatchSize may differ too.
//
// Restore returns an error that names the difference if the state is from a source with another
// number of samples, other fields, another SamplesOptions.Data or other options.
func (s *SampleSource) Restore(states ...SampleState) error {
	if len(states) == 0 {
		s.setResume(nil)
		return nil
	}
	start, err := s.restored(states)
	if err != nil {
		return fmt.Errorf("prefetcher: the samples can't go on from this state: %w", err)
	}
	s.setResume(&start)
	return nil
}

// CheckState returns the error of Restore if the state is from a source with another number of
// samples, other fields, another SamplesOptions.Data or other options. Like Restore, it accepts
// another Rank or World, and with another World also another BatchSize: Share returns both. It does
// not check whether Restore needs the states of other ranks, and changes nothing.
func (s *SampleSource) CheckState(state SampleState) error {
	if state.run == nil {
		return errors.New("prefetcher: the zero SampleState is no place in an epoch")
	}
	if err := s.accepts(state.run); err != nil {
		return fmt.Errorf("prefetcher: the samples can't go on from this state: %w", err)
	}
	return nil
}

func (s *SampleSource) setResume(start *order.Start) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.resume = start
}

// startOf returns the start position of an epoch.
func (s *SampleSource) startOf(epoch int) order.Start {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.resume != nil && s.resume.Epoch == epoch {
		return *s.resume
	}
	return order.Start{Epoch: epoch}
}

// restored returns the start position of a restored epoch.
func (s *SampleSource) restored(states []SampleState) (order.Start, error) {
	marks := make([]order.Mark, len(states))
	for i, state := range states {
		if state.run == nil {
			return order.Start{}, errors.New("it is the zero SampleState")
		}
		if err := s.accepts(state.run); err != nil {
			return order.Start{}, err
		}
		size, err := strconv.Atoi(state.run.options[batchSizeName])
		if err != nil || size < 1 || size > maxSampleBatch {
			return order.Start{}, fmt.Errorf("it is damaged: its %s is %q", batchSizeName, state.run.options[batchSizeName])
		}
		marks[i] = state.mark()
		share := &marks[i].Share
		share.Batch, share.DropLast, share.PadLast = size, s.options.DropLast, s.options.PadLast
		if marks[i].Kind != s.kind {
			return order.Start{}, fmt.Errorf("it is damaged: its order is %q, and these options have %q", marks[i].Kind, s.kind)
		}
	}
	return order.Resume(marks, s.options.share(), s.n, s.options.BadSamples == Skip)
}

// batchSizeName is the name of the only option that may differ between a state and the source that
// restores it. It may differ only if World differs too.
const batchSizeName = "SamplesOptions.BatchSize"

// fingerprint returns the options that determine the batches, by name.
func (s *SampleSource) fingerprint() map[string]string {
	o := &s.options
	fields := ""
	for _, f := range s.fields {
		fields += fmt.Sprintf("%q %v %v %v; ", f.Name, f.DType, f.Shape, f.MemoryFormat)
	}
	print := map[string]string{
		"n": strconv.Itoa(s.n), "fields": fields, batchSizeName: strconv.Itoa(o.BatchSize),
		"SamplesOptions.Shuffle": strconv.FormatBool(o.Shuffle), "SamplesOptions.Seed": strconv.FormatUint(o.Seed, 10),
		"SamplesOptions.DropLast":   strconv.FormatBool(o.DropLast),
		"SamplesOptions.PadLast":    strconv.FormatBool(o.PadLast),
		"SamplesOptions.BadSamples": o.BadSamples.String(), "SamplesOptions.Data": strconv.Quote(o.Data),
	}
	if s.weights != nil {
		print["SamplesOptions.Weights"] = s.weights.Digest()
	}
	return print
}

// accepts returns an error that names the difference between a state and this source. It returns
// nil if there is none.
func (s *SampleSource) accepts(r *sampleRun) error {
	mine := s.fingerprint()
	names := slices.AppendSeq(slices.Collect(maps.Keys(mine)), maps.Keys(r.options))
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		if name == batchSizeName && r.mark.Share.World != s.options.World {
			continue // the rest is dealt again
		}
		if a, b := mine[name], r.options[name]; a != b {
			return fmt.Errorf("%s is %s here, and was %s", name, cmp.Or(a, "none"), cmp.Or(b, "none"))
		}
	}
	return nil
}

// runOf returns what all states of a pass have in common.
func (s *SampleSource) runOf(at *order.Start, epoch int) *sampleRun {
	return &sampleRun{options: s.fingerprint(), mark: order.Mark{Epoch: epoch, Kind: s.kind,
		Share: order.Share{Rank: s.options.Rank, World: s.options.World}, Done: at.Done, Before: at.Before}}
}
