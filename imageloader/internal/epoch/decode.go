package epoch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/box"
	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/imageloader/internal/count"
	"github.com/torchstream/torchstream/imageloader/internal/devplan"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/mask"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/imagecapi"
	"github.com/torchstream/torchstream/internal/order"
)

// Decoder decodes items into rows, or plans them for the consumer's device. It is not safe for
// concurrent use.
type Decoder struct {
	config    *Config
	env       *Env
	images    sample.Decoder
	plans     planner
	augmenter *transform.Augmenter // nil if there are no operations on pixels
	source    rand.PCG
	rng       *rand.Rand
	current   current
	mask      mask.Decoder
	boxes     *box.Decoder
	numbers   []float32       // numbers of a target; reused
	counted   imagecapi.Stats // the decoder's statistics at the last count
}

// current describes the image that is being decoded. It is reused, so that decoding an image
// allocates nothing.
type current struct {
	info     imagecapi.Info
	geometry imagecapi.Geometry
	plan     devplan.Image
}

// NewDecoder returns a decoder for the images of an index. The index may be nil. members says that
// the goroutines that read samples also plan them.
func NewDecoder(c *Config, e *Env, known *index.Index, plans Plans, members bool) (*Decoder, error) {
	images, err := sample.NewDecoder(e.Codecs, e.Rules.MaxPixels, c.Policy.Damaged)
	if err != nil {
		return nil, fmt.Errorf("imageloader: no decoder: %w", err)
	}
	d := &Decoder{config: c, env: e, images: images, mask: mask.Decoder{DType: c.Labels.DType, Fill: c.Labels.Fill},
		boxes: box.NewDecoder(c.Labels.Boxes)}
	if d.augmenter, err = c.Batch.Transform.NewAugmenter(); err != nil {
		images.Close()
		return nil, fmt.Errorf("imageloader: no augmenter: %w", err)
	}
	d.plans = planner{newStream(c, known, plans.Searches), devplan.NewPlanner(devplan.Settings{Points: plans.Points,
		Known: known, MaxCopyBytes: plans.MaxCopyBytes, ReadsMembers: members, Augments: d.augmenter != nil}, images)}
	d.rng = rand.New(&d.source)
	return d, nil
}

// Close frees the decoder's C memory.
func (d *Decoder) Close() {
	d.augmenter.Close()
	d.images.Close()
}

// Decode decodes an item into its row. If the sample is bad (Outcome Bad), the error is the reason.
// If the sample is good but has tolerated damage, the error is a *sample.Error that describes the
// damage.
func (d *Decoder) Decode(it *Item, from index.Inflated, to Row) (Outcome, error) {
	if it.bad != nil {
		return Bad, it.bad
	}
	rules := d.env.Rules
	if codec.Sniff(it.Data) == "" {
		return Bad, rules.NotImage(&it.Sample, it.Data)
	}
	damage := ""
	info, err := d.images.Header(it.Data)
	d.current.info = info
	if err == nil {
		if e := rules.Header(&it.Sample, &d.current.info); e != nil {
			return Bad, e
		}
		if err := d.draw(it, &d.current.info); err != nil {
			return Bad, rules.Bad(&it.Sample, sample.Unsupported, err)
		}
		damage, err = d.pixels(it, from, to)
	}
	if err == nil && len(to.Label) > 0 {
		if state, err := d.label(it, to); state != Good {
			return state, err
		}
	}
	switch {
	case err == nil && damage != "":
		return Good, rules.Tolerated(&it.Sample, damage)
	case err == nil:
		return Good, nil
	}
	return d.judge(&it.Sample, err)
}

// judge classifies an error from decoding or transforming an image.
func (d *Decoder) judge(s *sample.Sample, err error) (Outcome, error) {
	rules := d.env.Rules
	var rejected transform.FuncError
	switch {
	case errors.As(err, &rejected):
		return Bad, rules.Bad(s, sample.Rejected, rejected.Err)
	case errors.Is(err, mask.ErrSize):
		return Bad, rules.Bad(s, sample.MaskSize, err)
	}
	e, err := rules.Decoding(s, err)
	if err != nil {
		return Fatal, err
	}
	return Bad, e
}

// draw draws the geometry of an item's image, and the parameters of the operations on its pixels.
func (d *Decoder) draw(it *Item, info *imagecapi.Info) error {
	order.SeedRepeat(&d.source, d.config.Order.Seed, order.OfSample, it.Draw.Epoch, it.Sample.Index, it.Draw.Again)
	err := d.config.Batch.Transform.Geometry(d.rng, info, &d.current.geometry)
	if err == nil {
		d.augmenter.Draw(d.rng)
	}
	return err
}

// image describes an item's image to the planner. The description is valid until the next call. ok
// is false if a drawn operation is a Go function, which only the host can run.
func (d *Decoder) image(it *Item, info *imagecapi.Info, from index.Inflated) (m *devplan.Image, ok bool) {
	m = &d.current.plan
	*m = devplan.Image{Index: it.Sample.Index, Size: it.Size, Draw: it.Draw, Data: it.Data, Inflated: from,
		Info: info, Geometry: &d.current.geometry}
	if d.augmenter == nil {
		return m, true
	}
	m.Ops, ok = d.augmenter.Operations()
	return m, ok
}

// pixels plans an image, or decodes it into its row. damage describes tolerated damage.
func (d *Decoder) pixels(it *Item, from index.Inflated, to Row) (damage string, err error) {
	info := &d.current.info
	image, ok := d.image(it, info, from)
	if to.Staging != nil {
		placed := devplan.Placed{Redo: devplan.Redo{Size: it.Size, Draw: it.Draw}}
		planned := false
		if ok {
			if p, ok := d.plans.plan(image, to.Staging); ok {
				placed, planned = p, true
			}
		}
		to.Staging.Rows[to.Number] = placed
		if planned {
			d.countCrop(info)
			d.env.Counters.Decoded.By(count.ByPlan, 1)
			return "", nil
		}
	}
	stride := 3 * d.config.Batch.Side
	if d.plans.Entries != nil && info.Format == imagecapi.JPEG && !info.Progressive {
		err = d.plans.Entries.Decode(it.Sample.Index, it.Data, &d.current.geometry, to.Pixels, stride)
		if err == nil && sample.Tolerated(d.images) == "" {
			d.plans.KeepMemberHead(image, to.Staging)
		}
	} else {
		err = d.images.Decode(it.Data, &d.current.geometry, to.Pixels, stride)
	}
	d.count(info)
	damage = sample.Tolerated(d.images)
	if err == nil {
		err = d.augmenter.Run(d.rng, to.Pixels)
	}
	return damage, err
}

// label writes the label of an item, after its image was decoded or planned. If the label makes the
// sample bad, it returns the reason.
func (d *Decoder) label(it *Item, to Row) (Outcome, error) {
	switch d.config.Labels.Kind {
	case Mask:
		return d.decodeMask(it, to)
	case Boxes:
		if s, err := d.decodeBoxes(it, to); err != nil {
			return Bad, d.env.Rules.Bad(&s, sample.WrongBoxes, err)
		}
	case Target:
		if err := d.writeTarget(it.Sample, to.Label); err != nil {
			return Bad, d.env.Rules.Bad(&it.Sample, sample.Rejected, err)
		}
	}
	return Good, nil
}

// decodeBoxes decodes the boxes of an item after its image. The sample that it returns is for
// errors: its name is the name of the file of boxes, or of the image if one file has the boxes of
// all images.
func (d *Decoder) decodeBoxes(it *Item, to Row) (sample.Sample, error) {
	info := &d.current.info
	if set := d.config.Labels.BoxSet; set.Set != nil {
		return it.Sample, set.Decode(d.boxes, set.ImageOf(it.Sample.Index), info, &d.current.geometry, d.augmenter, to.Label)
	}
	return sample.Sample{Name: it.partner.name, Index: it.Sample.Index}, d.boxes.Decode(it.partner.name, it.partner.data,
		info, &d.current.geometry, d.augmenter, to.Label)
}

// decodeMask decodes the mask of an item after its image. If the mask makes the sample bad, it
// returns the reason.
func (d *Decoder) decodeMask(it *Item, to Row) (Outcome, error) {
	s := sample.Sample{Name: it.partner.name, Index: it.Sample.Index}
	if codec.Sniff(it.partner.data) == "" {
		return Bad, d.env.Rules.NotImage(&s, it.partner.data)
	}
	width, height := int(d.current.info.Width), int(d.current.info.Height)
	if d.current.geometry.Orientation >= 5 { // the image was turned upright
		width, height = height, width
	}
	if err := d.mask.Decode(it.partner.data, width, height, &d.current.geometry, d.augmenter, to.Label); err != nil {
		return d.judge(&s, err)
	}
	return Good, nil
}

// writeTarget writes the numbers of a sample, or returns the error that makes the sample bad.
func (d *Decoder) writeTarget(s sample.Sample, to []byte) error {
	if d.numbers == nil {
		d.numbers = make([]float32, len(to)/4)
	}
	clear(d.numbers)
	if err := callTarget(d.config.Labels.Target, s, d.numbers); err != nil {
		return err
	}
	for i, v := range d.numbers {
		binary.LittleEndian.PutUint32(to[4*i:], math.Float32bits(v))
	}
	return nil
}

// callTarget calls a target. It converts a panic to an error, because the program that runs the
// epoch could not recover the panic.
func callTarget(target func(sample.Sample, []float32) error, s sample.Sample, numbers []float32) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("Options.Target panicked: %v", v)
		}
	}()
	return target(s, numbers)
}

// crops reports whether only a crop of the image is needed.
func (d *Decoder) crops(info *imagecapi.Info) bool {
	g := &d.current.geometry
	return int64(g.CropWidth)*int64(g.CropHeight) < int64(info.Width)*int64(info.Height)
}

// countCrop counts an image if only a crop is needed.
func (d *Decoder) countCrop(info *imagecapi.Info) {
	if d.crops(info) {
		d.env.Counters.Decoded.Cropped.Add(1)
	}
}

// statsDecoder is a decoder with statistics.
type statsDecoder interface {
	Stats() (imagecapi.Stats, error)
}

// count counts the latest decoded image.
func (d *Decoder) count(info *imagecapi.Info) {
	c := &d.env.Counters.Decoded
	d.countCrop(info)
	switch info.Format {
	case imagecapi.PNG:
		c.By(count.ByPNG, 1)
	case imagecapi.WebP:
		c.By(count.ByWebP, 1)
	case imagecapi.AVIF, imagecapi.HEIC:
		c.By(count.ByLibHEIF, 1)
	case codec.GIF, codec.BMP, codec.TIFF:
		c.By(count.ByGo, 1)
	case imagecapi.JPEG:
		images, ok := d.images.(statsDecoder)
		if !ok {
			return
		}
		now, err := images.Stats()
		if err != nil {
			return // an open decoder always has statistics
		}
		before := d.counted
		before.EntriesMade += d.plans.TakeCopies() // a copy's entry points are not for the index, so they do not count
		d.counted = now
		used := now.EntriesUsed - before.EntriesUsed
		c.By(count.ByEntryPoints, used)
		c.By(count.ByHuffman, now.JPEGOwn-before.JPEGOwn-used)
		c.By(count.ByLibJPEG, now.JPEGLibjpeg-before.JPEGLibjpeg)
		c.GaveUp.Add(now.JPEGGaveUp - before.JPEGGaveUp)
		c.EntriesMade.Add(now.EntriesMade - before.EntriesMade)
		c.EntriesRefused.Add(now.EntriesRefused - before.EntriesRefused)
	}
}

// work decodes the samples of a pass into their rows.
func (p *pass) work() {
	unlock, err := p.config.Threads.lock()
	if err != nil {
		p.stop(err)
		return
	}
	defer unlock()
	d, err := NewDecoder(p.config, p.env, p.source.Known, p.source.Plans, p.fetchPlans())
	if err != nil {
		p.stop(err)
		return
	}
	defer d.Close()
	c, planned, idle := p.env.Counters, p.fetchPlans(), time.Now()
	for {
		var j job
		var more bool
		select {
		case j, more = <-p.flow.jobs:
		case <-p.ctx.Done():
			return
		}
		if !more || p.ctx.Err() != nil {
			return
		}
		p.queue.add(-1)
		began := time.Now()
		state, err := d.Decode(&j.Item, j.inflated, j.row)
		now := time.Now()
		if !planned { // if fetch plans most samples, idle workers do not mean that data is missing
			c.Times.WaitData.Add(int64(began.Sub(idle)))
		}
		c.Times.Decode.Add(int64(now.Sub(began)))
		c.Decoded.Bytes.Add(int64(len(j.Data) + len(j.partner.data)))
		idle = now
		p.asm.Resolve(j.position, state, err)
		p.recycle(&j)
	}
}
