package epoch

import (
	"github.com/torchstream/torchstream/imageloader/internal/devplan"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
)

// Item is one occurrence of a sample in an epoch.
type Item struct {
	Sample  sample.Sample
	Size    int64 // size of the file in bytes
	Data    []byte
	Draw    devplan.Draw
	bad     *sample.Error // reason if the sample is bad according to its header in the archive
	partner partnerItem
}

// partnerItem is the mask of an item, or the file with its boxes. It is the zero value for other
// kinds of labels. fetch reads its content.
type partnerItem struct {
	name     string // name of the member
	size     int64
	data     []byte
	borrowed bool // data belongs to the index: it is read-only and must not be recycled
}

// weight returns the number of bytes of the content. The content need not have been read yet.
func (it *Item) weight() int64 {
	if it.Data == nil && it.bad == nil {
		return it.Size
	}
	return int64(len(it.Data))
}

// Row is the place of an item in a batch.
type Row struct {
	Pixels  []byte           // [Side, Side, 3]
	Label   []byte           // written by the decoder unless it is empty
	Staging *devplan.Staging // for the row's plan; nil: the image is decoded on the host
	Number  int              // number of the row in the batch
}

// job is an item that has a row and has not been decoded yet.
type job struct {
	Item
	row      Row
	position int
	borrowed bool           // Data belongs to the index: it is read-only and must not be recycled
	inflated index.Inflated // compressed bytes of Data
}

// item returns an item for sample i of the index.
func (p *pass) item(i int) Item {
	known := p.source.Known
	s := known.Sample(i)
	it := Item{Sample: sample.Sample{Name: s.Name, Index: i, Label: s.Label}, Size: s.Size}
	it.Draw.Epoch = p.start.Epoch * p.config.Order.Repeat
	it.bad = p.env.Rules.Member(&it.Sample, s.Kind, s.Size)
	kind := p.config.Labels.Kind
	if kind == Boxes {
		it.Sample.Label = 0 // with a BoxSet, a label in the index says which image of the set this is
	}
	if p.config.Labels.files() == 2 {
		partner := known.Sample(known.Partner(i))
		it.partner = partnerItem{name: partner.Name, size: partner.Size}
		if it.bad == nil {
			it.bad = p.env.Rules.Member(&sample.Sample{Name: partner.Name, Index: i}, partner.Kind, partner.Size)
		}
		if kind == Boxes && it.bad != nil && it.bad.Reason == sample.Empty && it.bad.Name == partner.Name {
			it.bad = nil // an image without objects
		}
	}
	return it
}

// lend asks the consumer for a slot when place needs one. It runs in a separate goroutine, because
// a row of an earlier slot may become free meanwhile, and place then continues without the new
// slot.
func (p *pass) lend() {
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-p.asm.Asked():
		}
		slot, err := p.to.Lend(p.ctx)
		var memory *rows
		if err == nil {
			memory, err = newRows(p.config, slot)
		}
		if err != nil {
			p.stop(err) // no effect if the pass has ended already
			return
		}
		p.asm.Add(memory)
	}
}

// place assigns a row to every sample of a stream and sends the sample to be decoded.
func (p *pass) place() {
	defer close(p.flow.jobs)
	for {
		var it Item
		var more bool
		select {
		case it, more = <-p.flow.items:
		case <-p.ctx.Done():
			return
		}
		if !more {
			if p.flow.short {
				p.asm.EndShort(p.flow.readErr)
			} else {
				p.asm.End(p.flow.readErr)
			}
			return
		}
		j, ok := p.rowFor(&it, true)
		if !ok {
			return
		}
		select {
		case p.flow.jobs <- j:
		case <-p.ctx.Done():
			return
		}
	}
}

// rowFor assigns a row to an item. ok is the result of assembly.Assembly.Place.
func (p *pass) rowFor(it *Item, wait bool) (j job, ok bool) {
	waited := p.asm.Waited()
	position, slot, number, ok := p.asm.Place(it.Sample, wait)
	p.env.Counters.Times.WaitSlot.Add(int64(p.asm.Waited() - waited)) // only one goroutine places samples
	if !ok {
		return job{}, false
	}
	return job{Item: *it, position: position, row: Row{
		Pixels: slot.Memory.image(number), Label: slot.Memory.label(number),
		Staging: slot.Memory.staging.Of(number), Number: number,
	}}, true
}

// recycle releases the memory of a job's contents.
func (p *pass) recycle(j *job) {
	if j.bad != nil {
		return
	}
	if !j.borrowed {
		p.queue.release(j.Data)
	}
	if j.partner.size > 0 && !j.partner.borrowed {
		p.queue.release(j.partner.data)
	}
}
