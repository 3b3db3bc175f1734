package index

import (
	"fmt"
	"hash/maphash"
	"strings"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// webGroup collects the members of one WebDataset sample: see [Groups].
type webGroup struct {
	groups  Groups
	keys    digests // keys of the shard's groups that have an image or a label
	members digests // the group's members: keys with extensions

	label   webLabel
	noField bool // the group has a .json that contains no label
	image   int  // number of the image's member; -1: none yet
	rank    int  // rank of the image: see webRank
	keyed   bool // the group's key is in keys
}

// webLacks counts the members of WebDataset groups that do not become part of a sample.
type webLacks struct {
	seconds   int    // ignored images that share a group with a sample
	second    string // member name of the first such image
	lone      int    // labels without an image
	firstLone string // member name of the first such label
}

// noteSecond counts an image that shares a group with a sample.
func (l *webLacks) noteSecond(name string) {
	if l.seconds++; l.seconds == 1 {
		l.second = name
	}
}

// noteLone counts a label without an image.
func (l *webLacks) noteLone(name string) {
	if l.lone++; l.lone == 1 {
		l.firstLone = name
	}
}

func newWebGroup() *webGroup {
	seed := maphash.MakeSeed()
	return &webGroup{image: -1, keys: digests{seed: seed}, members: digests{seed: seed}}
}

// next resets g for the group of the next member.
func (g *webGroup) next() {
	*g = webGroup{groups: g.groups, image: -1, keys: g.keys, members: g.members}
	g.members.clear()
}

// Groups numbers the WebDataset groups of an archive. A group is a run of consecutive members of
// one shard whose paths are equal up to the first dot in the file name. The members must be passed
// in order.
type Groups struct {
	shard int
	key   string
	n     int
}

// Next returns the ordinal, from 1, of the group of the next member m. It returns 0 if m belongs to
// no group: a hidden file, or a name without an extension. Such a member does not end a group.
func (g *Groups) Next(m *archive.Member) int {
	key, _, grouped := webName(m.Name)
	if !grouped {
		return 0
	}
	if g.n == 0 || key != g.key || m.Shard != g.shard {
		g.shard, g.key = m.Shard, key
		g.n++
	}
	return g.n
}

// Key returns the key of the current group.
func (g *Groups) Key() string { return g.key }

// webName splits a member's path as WebDataset does. grouped is false for hidden files and for
// names without an extension.
func webName(name string) (key, extension string, grouped bool) {
	slash := strings.LastIndexByte(name, '/') + 1
	dot := strings.IndexByte(name[slash:], '.')
	if dot <= 0 {
		return "", "", false
	}
	return name[:slash+dot], strings.ToLower(name[slash+dot+1:]), true
}

// webRank ranks an image within its group. The image with the highest rank is the sample. "0.jpg"
// ranks above "0.depth", and "0.depth" ranks above "0.depth.png".
func webRank(m *archive.Member, extension string) int {
	switch {
	case strings.Contains(extension, "."):
		return 0
	case !claims(m, nil): // an image only by its first bytes
		return 1
	}
	return 2
}

// digests is a set of strings. It keeps only 64 bits of each string. The probability that two of 10
// million strings have the same bits is 1 in 400,000.
type digests struct {
	seed maphash.Seed
	seen map[uint64]struct{}
}

// again adds a string. It reports whether the string was already in the set.
func (d *digests) again(s string) bool {
	digest := maphash.String(d.seed, s)
	if _, found := d.seen[digest]; found {
		return true
	}
	if d.seen == nil {
		d.seen = map[uint64]struct{}{}
	}
	d.seen[digest] = struct{}{}
	return false
}

// clear empties the set. It keeps the memory of a small set for reuse.
func (d *digests) clear() {
	const small = 16
	if len(d.seen) > small {
		d.seen = nil
	}
	clear(d.seen)
}

// addWeb implements add for WebDataset. It sets w.found if the member is the best image of its
// group so far.
func (w *walk) addWeb(m *archive.Member, magic []byte) (number int, err error) {
	b, g := w.b, w.b.web
	shard, groups := g.groups.shard, g.groups.n
	g.groups.Next(m)
	if g.groups.n != groups {
		if err := b.closeGroup(); err != nil { // its error names the member
			return -1, err
		}
		if g.next(); g.groups.shard != shard && !b.config.OneShard {
			g.keys.clear()
		}
	}
	if number, err = w.addToGroup(m, magic); err != nil {
		return -1, w.a.Fail(err)
	}
	return number, nil
}

// addToGroup adds a member to the current group.
func (w *walk) addToGroup(m *archive.Member, magic []byte) (number int, err error) {
	b, g := w.b, w.b.web
	key, extension, grouped := webName(m.Name)
	hidden := strings.HasPrefix(m.Name[strings.LastIndexByte(m.Name, '/')+1:], ".")
	image := !hidden && claims(m, magic)
	label := isWebLabel(extension)
	if !grouped {
		if image {
			b.addOrphan(m.Name, orphanNoExtension)
		}
		b.ignored++
		return -1, nil
	}
	if g.members.again(key + "." + extension) {
		return -1, fmt.Errorf("%q: duplicate file name: the shard has a member with the key %q and the "+
			"extension %q already: "+
			"rename or remove one of them", m.Name, key, extension)
	}
	if (image || label) && !g.keyed {
		if g.keyed = true; g.keys.again(key) {
			return -1, b.keyAgain(m.Name, key)
		}
	}
	switch {
	case label:
		return -1, w.addLabel(m, extension)
	case image:
		return w.addImage(m, extension)
	}
	b.ignored++
	return -1, nil
}

// keyAgain returns the error for a member that has the same key as an earlier group.
func (b *Builder) keyAgain(name, key string) error {
	if b.config.OneShard {
		return fmt.Errorf("%q: the key %q has come before, in this shard or another: in one shard the "+
			"samples would not be told apart: "+
			"fix each shard alone, or rename a sample", name, key)
	}
	return fmt.Errorf("%q: the shard has members with the key %q already, and others between: the "+
		"members of a sample have to "+
		"follow each other, and each sample needs its own key: sort the members by name, or rename a sample", name, key)
}

// addImage makes an image the group's sample, unless the group has a better one.
func (w *walk) addImage(m *archive.Member, extension string) (number int, err error) {
	b, g := w.b, w.b.web
	rank := webRank(m, extension)
	if g.image >= 0 {
		other := m.Name
		if rank > g.rank {
			other = string(b.records.newest.path)
		}
		b.lacking.noteSecond(other)
		b.ignored++
		if rank <= g.rank {
			return -1, nil
		}
		b.drop() // the previous image is still the newest member
		if b.onGroup != nil {
			if err := b.onGroup(-1); err != nil {
				return -1, err
			}
		}
	}
	if number, err = b.record(m, 0, recordImage); err != nil {
		return -1, err
	}
	g.image, g.rank = number, rank
	w.found.Index, w.found.Group = number, g.groups.n
	return number, nil
}

// addLabel reads the group's label from a member.
func (w *walk) addLabel(m *archive.Member, extension string) error {
	b, g := w.b, w.b.web
	if err := checkWebLabel(m, extension); err != nil {
		return fmt.Errorf("%q: %w", m.Name, err)
	}
	content := make([]byte, m.Size)
	if err := w.a.Content(content); err != nil {
		return err
	}
	text, err := readWebLabel(extension, content, b.dirs.lists)
	if err != nil {
		return fmt.Errorf("%q: %w", m.Name, err)
	}
	if len(text) > archive.MaxNameBytes {
		return labelTooLong{fmt.Errorf("%q: a label of %d bytes, over the limit of %d", m.Name, len(text),
			archive.MaxNameBytes)}
	}
	if text == "" {
		g.noField = true
		return nil
	}
	read := webLabel{text: text, member: m.Name, cls: extension == "cls"}
	if g.label.text == "" {
		g.label = read
		return nil
	}
	if !g.label.agrees(&read, b.dirs.lists) {
		return fmt.Errorf("%q has the label %q, and %q of the same sample has %q: correct or remove one of them",
			m.Name, shownLabel(text), g.label.member, shownLabel(g.label.text))
	}
	if read.cls {
		g.label = read
	}
	return nil
}

// whyNoLabel returns the reason why the group's image has no label.
func (b *Builder) whyNoLabel() (reason int) {
	switch g := b.web; {
	case g.noField && b.dirs.lists:
		return orphanNoFieldOfList
	case g.noField:
		return orphanNoField
	case g.rank == 0: // the user may have meant a dot in the name as part of the key
		return orphanDotted
	}
	return orphanNoLabel
}

// closeGroup sets the label of the group's image. An image without a label is not a sample.
func (b *Builder) closeGroup() error {
	g := b.web
	if g.image < 0 {
		if g.label.text != "" {
			b.lacking.noteLone(g.label.member)
		}
		return nil
	}
	if g.label.text == "" {
		b.addOrphan(string(b.records.newest.path), b.whyNoLabel())
		b.ignored++
		b.drop() // the image is still the newest member
		if b.onGroup != nil {
			return b.onGroup(-1)
		}
		return nil
	}
	if label, unknown := b.dirs.unknownIn(g.label.text); unknown {
		return b.dirs.unknown(string(b.records.newest.path), label)
	}
	if _, known := b.dirs.given[g.label.text]; b.dirs.given != nil && !known && !b.dirs.lists {
		return b.dirs.unknown(string(b.records.newest.path), g.label.text)
	}
	dir, err := b.dirs.number(g.label.text)
	if err != nil {
		return err
	}
	b.records.newest.label, b.dirs.claimed[dir] = dir, true
	if b.onGroup != nil {
		return b.onGroup(dir)
	}
	return nil
}
