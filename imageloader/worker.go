package imageloader

import (
	"math/rand/v2"
	"slices"

	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/imageloader/internal/order"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// worker decodes samples in one goroutine.
type worker struct {
	p        *pass
	d        decoder
	source   rand.PCG
	rng      *rand.Rand
	geometry imagecapi.Geometry

	augmenter *transform.Augmenter // nil without Transform.Ops
	points    *workerEntryPoints   // nil: entry points are not used
	mask      maskDecoder
	target    []float32       // of Options.Target, for one sample
	counted   imagecapi.Stats // of the decoder, at the last count
	plans     []byte          // for a plan of a whole scan that is not written in its place, aligned; reused
	// pixelsOnly leaves out what Options.Target writes.
	pixelsOnly bool
}

func (w *worker) reset() { w.rng = rand.New(&w.source) }

// decode decodes a job's content into its row, or returns the reason why its sample is bad. The
// error of a good sample is a *SampleError with the damage that was tolerated.
func (w *worker) decode(j *job) (flightState, error) {
	if j.bad != nil {
		return bad, j.bad
	}
	judge := &w.p.l.judge
	if codec.Sniff(j.data) == "" {
		return bad, judge.notImage(&j.sample, j.data)
	}
	damage := ""
	info, err := w.d.Header(j.data)
	if err == nil {
		if e := judge.header(&j.sample, &info); e != nil {
			return bad, e
		}
		stride := 3 * w.p.l.o.Transform.Size
		if err := w.draw(j, &info); err != nil {
			return bad, judge.bad(&j.sample, Unsupported, err)
		}
		planned := w.plan(j, &info)
		switch {
		case planned:
			w.countCrop(&info)
			w.p.l.counters.planned(1)
		case w.points != nil && info.Format == imagecapi.JPEG && !info.Progressive:
			err = w.decodeByPoints(j, &info, stride)
			w.count(&info)
			damage = tolerated(w.d)
		default:
			err = w.d.Decode(j.data, &w.geometry, j.dst, stride)
			w.count(&info)
			damage = tolerated(w.d)
		}
		if err == nil && !planned {
			err = w.augmenter.Run(w.rng, j.dst)
		}
	}
	if err == nil && j.mask.size > 0 {
		if state, err := w.decodeMask(j, &info); state != good {
			return state, err
		}
	}
	if err == nil && !w.pixelsOnly && (w.p.l.o.Target != nil || w.p.l.o.MultiLabel) {
		if err := w.writeTarget(j); err != nil {
			return bad, judge.bad(&j.sample, Rejected, err)
		}
	}
	switch {
	case err == nil && damage != "":
		return good, judge.tolerated(&j.sample, damage)
	case err == nil:
		return good, nil
	}
	e, err := judge.decoding(&j.sample, err)
	if err != nil {
		return fatal, err
	}
	return bad, e
}

// decodeByPoints decodes a JPEG by its entry points, or makes them.
func (w *worker) decodeByPoints(j *job, info *imagecapi.Info, stride int) error {
	err := w.points.decode(j.sample.Index, j.data, &w.geometry, j.dst, stride)
	if err == nil && tolerated(w.d) == "" {
		w.keepHead(j, info)
	}
	return err
}

// decodeMask decodes the mask of a job whose image was decoded, or returns the reason why it makes
// the sample bad.
func (w *worker) decodeMask(j *job, info *imagecapi.Info) (flightState, error) {
	judge, s := &w.p.l.judge, Sample{Name: j.mask.name, Index: j.sample.Index}
	if codec.Sniff(j.mask.data) == "" {
		return bad, judge.notImage(&s, j.mask.data)
	}
	width, height := int(info.Width), int(info.Height)
	if w.geometry.Orientation >= 5 { // the image was turned upright
		width, height = height, width
	}
	err := w.mask.decode(j.mask.data, width, height, &w.geometry, w.augmenter, j.dstTarget)
	if err == nil {
		return good, nil
	}
	e, err := judge.decoding(&s, err)
	if err != nil {
		return fatal, err
	}
	return bad, e
}

// draw draws the geometry of a job's image, and the parameters of Transform.Ops.
func (w *worker) draw(j *job, info *imagecapi.Info) error {
	order.SeedRepeat(&w.source, w.p.l.o.Seed, order.OfSample, j.epoch, j.sample.Index, j.again)
	err := w.p.l.plan.Geometry(w.rng, info, &w.geometry)
	if err == nil {
		w.augmenter.Draw(w.rng)
	}
	return err
}

// crops reports whether only a crop of the image is wanted.
func (w *worker) crops(info *imagecapi.Info) bool {
	g := &w.geometry
	return int64(g.CropWidth)*int64(g.CropHeight) < int64(info.Width)*int64(info.Height)
}

// countCrop counts an image of which a crop is wanted.
func (w *worker) countCrop(info *imagecapi.Info) {
	if w.crops(info) {
		w.p.l.counters.cropped.Add(1)
	}
}

// count counts the image that the worker has decoded last.
func (w *worker) count(info *imagecapi.Info) {
	c := &w.p.l.counters
	w.countCrop(info)
	add := func(p DecodePath, n int64) {
		if n > 0 {
			c.decoded[slices.Index(paths[:], p)].Add(n)
		}
	}
	switch info.Format {
	case imagecapi.PNG:
		add(ByPNG, 1)
	case imagecapi.WebP:
		add(ByWebP, 1)
	case imagecapi.AVIF, imagecapi.HEIC:
		add(ByLibHEIF, 1)
	case codec.GIF, codec.BMP, codec.TIFF:
		add(ByGo, 1)
	case imagecapi.JPEG:
		d, ok := w.d.(statsDecoder)
		if !ok {
			return
		}
		now, err := d.Stats()
		if err != nil {
			return // an open decoder always has them
		}
		before := w.counted
		w.counted = now
		used := now.EntriesUsed - before.EntriesUsed
		add(ByEntryPoints, used)
		add(ByHuffman, now.JPEGOwn-before.JPEGOwn-used)
		add(ByLibJPEG, now.JPEGLibjpeg-before.JPEGLibjpeg)
		c.gaveUp.Add(now.JPEGGaveUp - before.JPEGGaveUp)
		c.entriesMade.Add(now.EntriesMade - before.EntriesMade)
		c.entriesRefused.Add(now.EntriesRefused - before.EntriesRefused)
	}
}
