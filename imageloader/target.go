package imageloader

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// maxTargetWidth bounds Options.TargetWidth.
const maxTargetWidth = 1 << 20

// checkTarget refuses a target without a width, and options that mean nothing beside a target.
func (o *Options) checkTarget() error {
	switch {
	case o.MultiLabel && !o.WebDataset:
		return errors.New("imageloader: Options.MultiLabel is for the labels of Options.WebDataset; Options.Target makes targets of other labels")
	case o.MultiLabel && (o.Target != nil || o.Balanced):
		return errors.New("imageloader: Options.MultiLabel excludes Options.Target and Options.Balanced")
	case o.Target == nil && o.TargetWidth != 0:
		return fmt.Errorf("imageloader: Options.TargetWidth is %d, and Options.Target is nil", o.TargetWidth)
	case o.Target == nil:
		return nil
	case o.TargetWidth < 1 || o.TargetWidth > maxTargetWidth:
		return fmt.Errorf("imageloader: Options.TargetWidth is %d, not in 1 to %d", o.TargetWidth, maxTargetWidth)
	case o.Masks.masked():
		return errors.New("imageloader: Options.Target and Options.Masks exclude each other: a sample has one target")
	}
	return nil
}

// targetWidth returns how many numbers a worker writes for a sample in place of a label; 0: none.
func (l *Loader) targetWidth() int {
	if l.o.MultiLabel {
		return len(l.Classes())
	}
	return l.o.TargetWidth
}

// targetBytes returns the size of what a worker writes for a sample in place of a label; 0:
// nothing.
func (l *Loader) targetBytes() int {
	if o := &l.o; o.Masks.masked() {
		return o.Transform.Size * o.Transform.Size * o.Masks.DType.Size()
	}
	return 4 * l.targetWidth()
}

// writeTarget writes the numbers of Options.Target or MultiLabel, or returns the error that makes
// the sample bad.
func (w *worker) writeTarget(j *job) error {
	o := &w.p.l.o
	if w.target == nil {
		w.target = make([]float32, len(j.dstTarget)/4)
	}
	clear(w.target)
	if o.MultiLabel {
		for _, class := range w.p.known.Labels(j.sample.Index) {
			w.target[class] = 1
		}
	} else if err := o.target(j.sample, w.target); err != nil {
		return err
	}
	for i, v := range w.target {
		binary.LittleEndian.PutUint32(j.dstTarget[4*i:], math.Float32bits(v))
	}
	return nil
}

// target calls Target. A panic is its error, since the caller of an epoch could not recover it.
func (o *Options) target(s Sample, numbers []float32) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("Options.Target panicked: %v", v)
		}
	}()
	return o.Target(s, numbers)
}

// mixTargets makes each row of n targets share times itself, and 1-share times the row before it;
// the first row is mixed with the last.
func (m *mixer) mixTargets(rows []byte, n int, share float64) {
	width := 4 * m.width
	row := func(i int) []byte { return rows[i*width : (i+1)*width] }
	number := func(b []byte) float32 { return math.Float32frombits(binary.LittleEndian.Uint32(b)) }
	own, other := float32(share), float32(1-share)
	m.last = append(m.last[:0], row(n-1)...)
	for i := n - 1; i >= 0; i-- {
		before := m.last
		if i > 0 {
			before = row(i - 1)
		}
		for to := row(i); len(to) > 0; to, before = to[4:], before[4:] {
			// Without conversions the compiler may fuse a product with the sum.
			binary.LittleEndian.PutUint32(to, math.Float32bits(float32(own*number(to))+float32(other*number(before))))
		}
	}
}
