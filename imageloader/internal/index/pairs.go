package index

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// Pairs tells images and their partners, such as masks, from other members by their names. An image
// and a partner are a pair if the "*" of their patterns stands for the same text. They may be in
// different shards if neither has a partner in its own shard. A name that matches both patterns is
// a partner.
type Pairs struct {
	Image, Partner Pattern
	// Boxes means that partners are files with bounding boxes, not masks. The index file then has
	// all members, as for a list. A member that looks like an image is not a partner.
	Boxes bool
}

// role returns the text that a member shares with the other member of its pair. ok is false if the
// member is neither an image nor a partner.
func (p *Pairs) role(m *record, name string) (key string, partner, ok bool) {
	if key, ok = p.Partner.key(name); ok && !(p.Boxes && m.flags&recordImage != 0) {
		return key, true, true
	}
	key, ok = p.Image.key(name)
	return key, false, ok && !(p.Boxes && m.flags&recordImage == 0)
}

// nouns returns words for messages: for a partner (such as "mask"), for the option that sets the
// patterns, and for a partner's file (such as "image file").
func (p *Pairs) nouns() (partner, option, file string) {
	if p.Boxes {
		return "file of boxes", "Options.Boxes", "file"
	}
	return "mask", "Options.Masks", "image file"
}

// pairsDirectory is the only directory in the index file for pairs. Pairs do not use directories.
const pairsDirectory = "*"

// PairError reports an image with two partners, or a partner with two images.
type PairError struct {
	File        string
	Name, Other string // the two members
	Pattern     string // the pattern that both match
}

func (e *PairError) Error() string {
	return fmt.Sprintf("imageloader: %s: %q and %q match the pattern %q with the same text for its \"*\": "+
		"remove one of them, or narrow the pattern", e.File, e.Name, e.Other, e.Pattern)
}

// addPair implements add for images and masks. It records every member that looks like an image, in
// any directory, so that one index file serves all patterns.
func (b *Builder) addPair(m *archive.Member, magic []byte) (number int, err error) {
	if !claims(m, magic) {
		b.ignored++
		return -1, nil
	}
	dir, err := b.dirs.number(pairsDirectory)
	if err != nil {
		return -1, err
	}
	b.dirs.claimed[dir] = true
	return b.record(m, dir, recordImage)
}

// loadPairs reads the members. The records of x become the images that have a partner, and their
// partners.
func (b *Builder) loadPairs(x *Index, sections map[uint32]section) error {
	members, err := newMemberReader(x.shards, len(b.dirs.names), sections)
	if err != nil {
		return err
	}
	p := pairing{x: x, pairs: *b.config.Pairs}
	first := "" // the first member that looks like an image
	var kept strings.Builder
	for i := 0; ; i++ {
		m, name, err := members.next()
		if err != nil {
			return err
		}
		if m == nil {
			break
		}
		if b.dirs.names[m.label] != pairsDirectory {
			return errIndexDamaged
		}
		if first == "" && m.flags&recordImage != 0 {
			first = string(name)
		}
		if _, _, ok := p.pairs.role(m, string(name)); !ok {
			x.ignored++
			continue
		}
		m.label, m.name = 0, uint32(kept.Len())
		kept.Write(name)
		x.samples = append(x.samples, *m)
		x.numbers = append(x.numbers, int32(i))
	}
	x.names = kept.String()
	if err := p.pair(b.file); err != nil {
		return err
	}
	unpaired := p.unpaired(b, first)
	p.keepPaired()
	x.readCost = x.costOfAll()
	if len(x.places) == 0 {
		x.unpaired = unpaired
	}
	return nil
}

// pairing finds the pairs among the records of an Index.
type pairing struct {
	x      *Index
	pairs  Pairs
	images []int32 // number of the record of each pair's image
	others []int32 // number of the record of each pair's partner
	single []int32 // numbers of the records that have no pair
}

// group has the records whose "*" stands for the same text: the first image and partner, and the
// second image and partner, if any. -1 stands for none.
type group struct{ image, partner, image2, partner2 int32 }

// pair finds the pairs. It first looks within each shard, because several shards may use the same
// names, and then among the remaining records.
func (p *pairing) pair(file string) error {
	x := p.x
	list := make([]int32, 0, len(x.samples))
	for k := range x.samples {
		if k > 0 && x.samples[k].shard != x.samples[k-1].shard {
			if err := p.match(file, list); err != nil {
				return err
			}
			list = list[:0]
		}
		list = append(list, int32(k))
	}
	if err := p.match(file, list); err != nil {
		return err
	}
	left := p.single
	p.single = nil
	if err := p.match(file, left); err != nil {
		return err
	}
	order := make([]int, len(p.images)) // to sort the pairs by the images' order in the archive
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(p.images[a], p.images[b]) })
	x.places = make([]int32, 2*len(order))
	for i, pair := range order {
		x.places[i], x.places[len(order)+i] = p.images[pair], p.others[pair]
	}
	return nil
}

// match finds the pairs among the records of a list.
func (p *pairing) match(file string, list []int32) error {
	numbers := make(map[string]int32, len(list)/2)
	var groups []group
	for _, k := range list {
		key, partner, _ := p.pairs.role(&p.x.samples[k], p.x.recordName(int(k)))
		n, found := numbers[key]
		if !found {
			n = int32(len(groups))
			numbers[key] = n
			groups = append(groups, group{-1, -1, -1, -1})
		}
		g := &groups[n]
		switch {
		case partner && g.partner < 0:
			g.partner = k
		case partner:
			g.partner2 = k
		case g.image < 0:
			g.image = k
		default:
			g.image2 = k
		}
	}
	for _, g := range groups {
		switch {
		case g.image < 0 || g.partner < 0:
			for _, k := range []int32{g.image, g.partner, g.image2, g.partner2} {
				if k >= 0 {
					p.single = append(p.single, k)
				}
			}
		case g.image2 >= 0:
			return &PairError{file, p.x.recordName(int(g.image)), p.x.recordName(int(g.image2)), p.pairs.Image.text}
		case g.partner2 >= 0:
			return &PairError{file, p.x.recordName(int(g.partner)), p.x.recordName(int(g.partner2)),
				p.pairs.Partner.text}
		default:
			p.images, p.others = append(p.images, g.image), append(p.others, g.partner)
		}
	}
	return nil
}

// unpaired logs the records without a partner. It returns the reason that an error gives if the
// archive has no pairs at all.
func (p *pairing) unpaired(b *Builder, first string) string {
	var images, partners []string
	for _, k := range p.single {
		name := p.x.recordName(int(k))
		if _, partner, _ := p.pairs.role(&p.x.samples[k], name); partner {
			partners = append(partners, name)
		} else {
			images = append(images, name)
		}
	}
	log := func(message, what string, list []string) {
		if len(list) > 0 && len(p.images) > 0 {
			b.config.Logger.Warn(message, "archive", b.file, what, len(list), "first", list[0])
		}
	}
	partner, option, file := p.pairs.nouns()
	log("images without a "+partner+" are ignored", "images", images)
	if p.pairs.Boxes {
		log("files of boxes without an image are ignored", "files", partners)
	} else {
		log("masks without an image are ignored", "masks", partners)
	}
	describe := func(pattern Pattern, list []string, file string) string {
		if len(list) == 0 {
			return fmt.Sprintf("no %s matches %q", file, pattern.text)
		}
		return fmt.Sprintf("%d match %q, the first is %q", len(list), pattern.text, list[0])
	}
	if first == "" {
		return "it has no image files"
	}
	return fmt.Sprintf("no image has a %s by %s: %s; %s; the archive's first image file is %q", partner, option,
		describe(p.pairs.Image, images, "image file"), describe(p.pairs.Partner, partners, file), first)
}

// keepPaired removes the records without a partner.
func (p *pairing) keepPaired() {
	x := p.x
	x.ignored += len(p.single)
	if len(p.single) == 0 {
		return
	}
	keep := make([]bool, len(x.samples))
	for _, k := range x.places {
		keep[k] = true
	}
	x.keepRecords(keep)
}
