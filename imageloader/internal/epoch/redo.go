package epoch

import (
	"runtime"

	"github.com/torchstream/torchstream/imageloader/internal/devplan"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
)

// DecodeAgain decodes a sample's pixels on the host, without entry points. It reads the sample with
// r, unless the redo has its file.
func DecodeAgain(c *Config, e *Env, known *index.Index, r *index.Reader, s sample.Sample, redo devplan.Redo,
	dst []byte) error {
	data := []byte(redo.File)
	if len(data) == 0 {
		data = known.InMemory(s.Index)
	}
	if data == nil {
		data = make([]byte, redo.Size)
		if err := r.Read(s.Index, data); err != nil {
			return err
		}
	}
	defer runtime.KeepAlive(known) // data may belong to the index
	d, err := NewDecoder(c, e, known, Plans{}, false)
	if err != nil {
		return err
	}
	defer d.Close()
	it := Item{Sample: s, Size: redo.Size, Data: data, Draw: redo.Draw}
	state, err := d.Decode(&it, index.Inflated{}, Row{Pixels: dst})
	if state != Good {
		return err
	}
	if damage, ok := err.(*sample.Error); ok && !redo.Substitute {
		e.Counters.Tolerated(damage, c.Policy.Damaged, e.Log)
	}
	return nil
}

// decodeLost decodes those rows of a complete batch whose plans were lost.
func (p *pass) decodeLost(r *ready) error {
	if r.Slot.Memory.staging == nil {
		return nil
	}
	var reader *index.Reader
	for row := range r.Samples {
		placed := &r.Slot.Memory.staging.Rows[row]
		if !placed.Lost {
			continue
		}
		if reader == nil && placed.Redo.File == "" {
			reader = index.NewReader(p.source.Known, p.archive)
			defer reader.Close()
		}
		dst := r.Slot.Memory.image(row)
		if err := DecodeAgain(p.config, p.env, p.source.Known, reader, r.Samples[row], placed.Redo, dst); err != nil {
			return err
		}
	}
	return nil
}
