package index

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Part selects samples of an archive. The zero value selects all.
type Part struct {
	// Folder, if not empty, selects the samples in this directory and below it, such as "train".
	Folder string
	// HeldOut, from 0 to below 1, is the share of each class's samples that is held out. A hash of
	// Seed and the sample's name decides whether a sample is held out, so adding images later does
	// not move other samples. If a class has at least two samples, at least one of them is held out
	// and at least one is not. In a class so small that the hash puts all samples on one side, one
	// sample is moved to the other side.
	//
	// With ListFormat.GroupColumn, no group has samples on both sides. A hash of Seed and the
	// group's name decides the order in which groups are considered. They are chosen so that the
	// held-out share of each class is near HeldOut. Adding groups later may therefore move other
	// groups.
	HeldOut float64
	// Test selects the samples that are held out, instead of the samples that are not.
	Test bool
	Seed uint64
}

// Check returns an error for impossible values.
func (p Part) Check() error {
	switch {
	case !(p.HeldOut >= 0 && p.HeldOut < 1):
		return fmt.Errorf("field HeldOut is %v, not from 0 to below 1", p.HeldOut)
	case p.HeldOut == 0 && (p.Test || p.Seed != 0):
		return errors.New("fields Test and Seed need HeldOut, which is 0")
	}
	return nil
}

// hash maps a name to a number from 0 to below 1.
func (p Part) hash(name string) float64 {
	sum := sha256.Sum256(append(binary.LittleEndian.AppendUint64(nil, p.Seed), name...))
	return float64(binary.LittleEndian.Uint64(sum[:])>>11) / (1 << 53)
}

// in reports whether a name is in the part's folder.
func (p Part) in(name string) bool {
	folder := strings.Trim(p.Folder, "/")
	return folder == "" || strings.HasPrefix(name, folder+"/")
}

// In returns for each sample whether it is in the part.
func (x *Index) In(p Part) []bool {
	held := x.heldOut(p)
	in := make([]bool, x.Len())
	for k := range in {
		in[k] = p.in(x.Name(k)) && (p.HeldOut == 0 || held[k] == p.Test)
	}
	return in
}

// extremes are the samples of a class with the lowest and the highest hash.
type extremes struct {
	samples         int
	lowest, highest int // sample numbers
	low, high       float64
}

// keepPart drops the samples outside of the part.
func (x *Index) keepPart(p Part, archive string) error {
	if p == (Part{}) {
		return nil
	}
	in := x.In(p)
	keep, some := make([]bool, len(x.samples)), false
	places := make([][]int32, 2) // of images, and of their partners
	for i, inside := range in {
		if !inside {
			continue
		}
		some, keep[x.at(i)] = true, true
		if x.Paired() {
			keep[x.at(x.Partner(i))] = true
			places[0], places[1] = append(places[0], x.places[i]), append(places[1], x.places[x.Partner(i)])
		}
	}
	if !some {
		return fmt.Errorf("%w in %s: Options.Part has none of its %s", ErrNoSamples, archive,
			many(len(in), "sample", "samples"))
	}
	if x.Paired() {
		x.places = slices.Concat(places...)
	}
	x.keepRecords(keep)
	x.readCost = x.costOfAll()
	x.listed.groups = nil
	return nil
}

// keepRecords removes the other records. No sample may use them.
func (x *Index) keepRecords(keep []bool) {
	place := make([]int32, len(x.samples)) // the new number of each record
	var kept strings.Builder
	samples, numbers := make([]record, 0, len(x.samples)), make([]int32, 0, len(x.samples))
	for k := range x.samples {
		if !keep[k] {
			continue
		}
		place[k] = int32(len(samples))
		r := x.samples[k]
		r.name = uint32(kept.Len())
		kept.WriteString(x.recordName(k))
		samples, numbers = append(samples, r), append(numbers, x.number(k))
	}
	for i, k := range x.places {
		x.places[i] = place[k]
	}
	x.samples, x.numbers, x.names = samples, numbers, kept.String()
}

// costOfAll returns the cost of reading all records in any order.
func (x *Index) costOfAll() readCost {
	w := workMeter{shards: x.shards, next: x.eachMark()}
	for k := range x.samples {
		w.sample(&x.samples[k])
	}
	return w.cost()
}

// heldOut reports for each sample whether it is held out. Lists of labels, and numbers of images in
// a file of boxes, do not count as classes.
func (x *Index) heldOut(p Part) []bool {
	if p.HeldOut == 0 {
		return nil
	}
	if x.listed.groups != nil {
		return x.heldOutGroups(p)
	}
	held := make([]bool, x.Len())
	classes := map[int]*extremes{}
	for k := range held {
		name := x.Name(k)
		if !p.in(name) {
			continue
		}
		label := 0
		if !x.listed.numbered {
			label = x.Label(k)
		}
		h := p.hash(name)
		held[k] = h < p.HeldOut
		c := classes[label]
		if c == nil {
			c = &extremes{lowest: k, highest: k, low: h, high: h}
			classes[label] = c
		}
		c.samples++
		if h < c.low {
			c.lowest, c.low = k, h
		}
		if h >= c.high {
			c.highest, c.high = k, h
		}
	}
	for _, c := range classes {
		if c.samples > 1 {
			held[c.lowest] = true
		}
		held[c.highest] = false
	}
	return held
}
