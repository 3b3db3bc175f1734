package index

import (
	"cmp"
	"math"
	"slices"
)

// fromList holds the data that an index takes from a list.
type fromList struct {
	report     *ListReport // nil: there is no list
	groups     []int32     // group of each record; nil: there are no groups, or no part needs them
	groupNames []string
	numbered   bool // the labels are numbers of images in a file of boxes
}

// groupSplit decides which groups of samples are held out. It keeps the held-out share of each
// class near share.
type groupSplit struct {
	share  float64
	groups map[int32]*heldGroup
	counts []classCount // by class; the last counts all samples
}

// heldGroup is a group that a groupSplit may hold out.
type heldGroup struct {
	hash    float64
	name    int32
	held    bool
	samples map[int]int // by class
}

// classCount counts a class's samples and groups. It also counts those that are held out.
type classCount struct{ samples, groups, heldSamples, heldGroups int }

// cost returns the distance of the held-out share from the wanted share. It is higher if all groups
// of the class are on one side.
func (c *classCount) cost(share float64) float64 {
	cost := math.Abs(float64(c.heldSamples)/float64(c.samples) - share)
	if c.groups > 1 && (c.heldGroups == 0 || c.heldGroups == c.groups) {
		cost++
	}
	return cost
}

// heldOutGroups reports for each sample whether its group is held out. In the order of their
// hashes, groups are held out if this brings the shares of their classes nearer to the wanted
// share. After that, single groups change sides as long as a change brings the shares still nearer.
func (x *Index) heldOutGroups(p Part) []bool {
	s := groupSplit{share: p.HeldOut, groups: map[int32]*heldGroup{}, counts: make([]classCount, len(x.classes)+1)}
	for k := range x.samples {
		if !p.in(x.recordName(k)) {
			continue
		}
		name := x.listed.groups[k]
		g := s.groups[name]
		if g == nil {
			g = &heldGroup{hash: p.hash(x.listed.groupNames[name]), name: name, samples: map[int]int{}}
			s.groups[name] = g
		}
		s.add(g, len(x.classes))
		if x.lists == nil {
			s.add(g, int(x.samples[k].label))
			continue
		}
		for _, class := range x.lists[x.samples[k].label] {
			s.add(g, int(class))
		}
	}
	s.divide()
	held := make([]bool, len(x.samples))
	for k := range held {
		g := s.groups[x.listed.groups[k]]
		held[k] = g != nil && g.held
	}
	return held
}

// add counts a sample of a class in a group.
func (s *groupSplit) add(g *heldGroup, class int) {
	if g.samples[class]++; g.samples[class] == 1 {
		s.counts[class].groups++
	}
	s.counts[class].samples++
}

// divide decides which groups are held out.
func (s *groupSplit) divide() {
	var order []*heldGroup
	for _, g := range s.groups {
		order = append(order, g)
	}
	slices.SortFunc(order, func(a, b *heldGroup) int {
		return cmp.Or(cmp.Compare(a.hash, b.hash), cmp.Compare(a.name, b.name))
	})
	const most = 20 // rounds over all groups
	for range most {
		changed := false
		for _, g := range order {
			before := s.cost(g)
			if s.move(g); s.cost(g) < before-1e-9 {
				changed = true
				continue
			}
			s.move(g) // back
		}
		if !changed {
			return
		}
	}
}

// cost returns the sum of the costs of a group's classes.
func (s *groupSplit) cost(g *heldGroup) (cost float64) {
	for _, class := range s.classes(g) {
		cost += s.counts[class].cost(s.share)
	}
	return cost
}

// classes returns a group's classes in order, so that sums are the same in every run.
func (s *groupSplit) classes(g *heldGroup) []int {
	list := make([]int, 0, len(g.samples))
	for class := range g.samples {
		list = append(list, class)
	}
	slices.Sort(list)
	return list
}

// move moves a group to the other side.
func (s *groupSplit) move(g *heldGroup) {
	sign := 1
	if g.held = !g.held; !g.held {
		sign = -1
	}
	for class, n := range g.samples {
		s.counts[class].heldSamples += sign * n
		s.counts[class].heldGroups += sign
	}
}
