package loadersim

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/simworld/world"
)

// This file checks how epochs end whose archive cannot be read.

// damaged damages the archive after a loader has opened it, or removes or replaces it after the
// first batch of an epoch, and reads the epoch from its start.
func (j *job) damaged() error {
	w := j.w
	if !j.files.format.gzipped() || j.files.remote || j.model.Order == Drawn {
		return nil
	}
	j.streamOptions()
	r := &rank{job: j, number: w.Choose("damaged rank", j.model.World)}
	r.start()
	p := w.Start(0, false, nil)
	path, own := j.place(p)
	own.Rank, own.Workers = r.number, 1+w.Choose("damaged workers", 3)
	l, err := imageloader.Open(path, own)
	if err != nil {
		return errors.Join(err, p.End())
	}
	random, err := r.inAnyOrder(p)
	if err != nil {
		return errors.Join(err, l.Close(), p.End())
	}
	known := l.Len() >= 0
	random = random && known
	within := r.spoil(random, known)
	r.session = session{began: j.faults(), fills: w.Choose("fill", 3) == 2}
	r.takeBatches(context.Background(), p, l)
	if err = r.err; err == nil {
		err = r.endedDamaged(random, within)
	}
	return errors.Join(err, l.Close(), p.End())
}

// spoil damages the archive, or lets the rank remove or replace it. within is false if the damage
// is the checksum at the archive's end.
func (r *rank) spoil(random, known bool) (within bool) {
	switch r.w.Choose("removed", 5) {
	case 3:
		r.next = map[string][]byte{}
	case 4:
		r.next = r.longer()
	default:
		within = random || known && r.w.Choose("damage within", 3) == 2
		r.damage(within)
	}
	return within
}

// endedDamaged returns an error if an epoch of a damaged archive has not ended as it should.
func (r *rank) endedDamaged(random, within bool) error {
	switch {
	case r.failure == nil && !random && r.next == nil && r.ending == (Ending{Bad: -1}) && !r.enough():
		return fmt.Errorf("epoch %d ends without an error, and the archive is damaged", r.epoch)
	case r.failure != nil && !strings.Contains(r.failure.Error(), "train"):
		return fmt.Errorf("the error does not name the archive: %w", r.failure)
	case r.failure != nil && r.next == nil && !within:
		return r.lostBeforeEnd()
	}
	return nil
}

// longer returns longer files of the archive, because its size changes the order of an epoch.
func (j *job) longer() map[string][]byte {
	files := map[string][]byte{}
	for name, data := range j.files.was {
		files[name] = append(bytes.Clone(data), make([]byte, 2048)...)
	}
	return files
}

// writeNext replaces or removes the archive, if the rank should do so after each batch.
func (r *rank) writeNext() {
	if r.next == nil {
		return
	}
	for name := range r.files.was {
		r.w.Disk.Delete(name)
	}
	for name, data := range r.next {
		r.w.Disk.Write(name, data)
	}
}

// streamOptions draws options with which an archive does not stay in memory.
func (j *job) streamOptions() {
	j.deal = deal{}
	w, m, o := j.w, &j.model, &j.options
	if w.Choose("damaged under Skip", 2) == 1 { // an epoch may end before the damage
		m.Policy, o.BadSamples = Skip, imageloader.Skip
		if w.Choose("damaged under DropLast", 2) == 1 {
			m.World, m.DropLast, m.PadLast = 2, true, false
			o.World, o.DropLast, o.PadLast = 2, true, false
			m.Order, o.Shuffle = Permuted, true
		}
	}
	o.NoIndex, o.ShuffleBytes = w.Choose("damaged with an index", 3) != 2, 1
	if m.Order == Permuted {
		bytes := 0
		for _, n := range m.Sizes {
			bytes += n
		}
		m.BufferBytes = max(1, bytes/(2+w.Choose("part in memory", 3)))
		o.ShuffleBytes = int64(m.BufferBytes)
	}
}

// inAnyOrder reports whether a loader reads the archive by random access: it then permutes samples.
func (r *rank) inAnyOrder(p *world.Process) (random bool, err error) {
	path, o := r.place(p)
	o.Rank, o.Shuffle, o.BadSamples = r.number, true, imageloader.Substitute
	l, err := imageloader.Open(path, o)
	if err != nil {
		return false, err
	}
	random = true // if there is no batch
	for b, e := range l.Epoch(context.Background(), 0) {
		if e == nil {
			state, e := json.Marshal(b.State)
			name, e2 := orderName(state)
			random, err = name != "buffer", errors.Join(e, e2)
		}
		break
	}
	return random, errors.Join(err, l.Close())
}

// damage changes a byte of the archive's last file, and keeps the file's time. Only checksums show
// the change: the samples' checksums if within is set, and otherwise the last gzip member's.
func (j *job) damage(within bool) {
	files := j.files.format.files()
	last := len(files) - 1
	was, name := j.files.was[files[last]], files[last]
	at := len(was) - 8 // the checksum of the last gzip member
	if within {
		at = 10 + j.w.Choose("damaged byte of the archive", len(was)-18)
	}
	data := bytes.Clone(was)
	data[at] ^= 0xff // also changes bits that mean something: padding is shorter than a byte
	g, err := gzip.NewReader(bytes.NewReader(data))
	if err == nil {
		_, err = io.Copy(io.Discard, g)
	}
	if err == nil { // other bytes of the same meaning
		at, data = len(was)-8, bytes.Clone(was)
		data[at] ^= 0xff
	}
	changed := j.w.Disk.Changed(name)
	j.w.Disk.Overwrite(name, data)
	j.w.Disk.Age(name, j.w.Disk.Changed(name).Sub(changed))
	j.w.Say("byte %d of %s is damaged", at, name)
}

// enough reports whether the first round of an epoch has a sample for the rank after all that it
// needs under Skip: the epoch may then end before the archive does.
func (r *rank) enough() bool {
	m := r.model
	if r.inBuffer {
		m.Order = Buffered
	}
	left, fixed := m.turns(m.perRound() * m.Repeat)
	if !fixed || m.Policy != Skip {
		return false
	}
	for i := r.number; i < m.perRound(); i += m.World {
		if left == 0 {
			return true
		}
		if !m.Bad[m.row(r.epoch, i, 0).Index] {
			left--
		}
	}
	return false
}

// needless returns an error if an epoch has ended with one although the rank has all batches, and
// nothing has happened except that another file has replaced the archive, or that it could not be
// opened again. from is the number of batches before the epoch was read.
func (r *rank) needless(p *world.Process, from int) error {
	whole := r.ending == (Ending{Bad: -1}) && r.short == 0 && r.taken == len(r.want)
	if !whole || p.Killed() {
		return nil
	}
	replaced := r.replaced && r.altered.epoch == r.epoch && r.w.Faults() <= r.began.all+1
	var failed *fs.PathError
	one := r.files.format == TarGzip || r.files.format == Parquet // file, which is opened once for each round
	unopened := one && r.taken > from && errors.As(r.failure, &failed) && (failed.Op == "open" || failed.Op == "stat")
	if !replaced && !unopened {
		return nil
	}
	return fmt.Errorf("epoch %d ends with an error after its last batch: %w", r.epoch, r.failure)
}

// lost returns an error if reading has failed during an epoch that is shuffled through a buffer,
// and not all samples before the damage were delivered. from is the number of batches before the
// epoch was read: the check is of epochs that were read from the start. known says that the loader
// had an index: it may then read the samples one by one in the order of the epoch, so that the
// first one that it cannot read ends the epoch, and the buffer leaves nothing.
func (r *rank) lost(p *world.Process, from int, known bool) error {
	m := &r.model
	if known && len(r.strays) == 0 {
		return nil
	}
	if !r.inBuffer || from > 0 || r.rest != nil || m.World > 1 || m.Repeat > 1 || m.DropLast || m.Policy == Substitute ||
		p.Killed() || errors.Is(r.failure, imageloader.ErrClosed) || errors.As(r.failure, new(*imageloader.SampleError)) {
		return nil
	}
	delivered := r.delivered()
	for i, last := 0, slices.Max(append(slices.Collect(maps.Keys(delivered)), -1)); i < last; i++ {
		if !delivered[i] && !m.Bad[i] {
			return fmt.Errorf("epoch %d has the sample %d, and lacks %d, which is before: %w", r.epoch, last, i, r.failure)
		}
	}
	return nil
}

// lostBeforeEnd returns an error if the first round of an epoch, which fails at the archive's last
// checksum, has not delivered all good samples of the rank.
func (r *rank) lostBeforeEnd() error {
	m := r.model
	if m.DropLast || errors.As(r.failure, new(*imageloader.SampleError)) {
		return nil
	}
	if r.inBuffer {
		m.Order = Buffered
	}
	delivered := r.delivered()
	for i := r.number; i < m.perRound(); i += m.World {
		if row := m.row(r.epoch, i, 0); !m.Bad[row.Index] && !delivered[row.Index] {
			return fmt.Errorf("epoch %d lacks the sample %d, which is before the damage: %w", r.epoch, row.Index, r.failure)
		}
	}
	return nil
}

// delivered returns the samples of the batches that the rank has got of an epoch.
func (r *rank) delivered() map[int]bool {
	samples := map[int]bool{}
	for _, row := range slices.Concat(slices.Concat(r.want[:r.taken]...), r.cutShort()) {
		samples[row.Index] = true
	}
	for _, i := range r.strays {
		samples[i] = true
	}
	return samples
}

// cutShort returns the rows of the last batch, if an error has cut it short.
func (r *rank) cutShort() []Row {
	if r.short == 0 {
		return nil
	}
	return r.want[r.taken][:r.short]
}
