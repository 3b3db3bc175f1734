package index

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// LeftOut is a kind of folder or link that may have been meant as a class, and is none.
type LeftOut struct {
	What  string
	Count int
	First []string // the first names, at most 10
}

// What is left out where directories are the classes.
const (
	noImages   = "folders without an image (no file has the name or the first bytes of one)"
	hiddenOnes = "hidden folders"
)

// linkKinds says what links are left out: those that do not have the name of an image.
var linkKinds = map[archive.Kind]string{
	archive.Symlink:    "symbolic links in a tar (tar --dereference packs what they lead to)",
	archive.HardLink:   "hard links in a tar (tar --hard-dereference packs what they lead to)",
	archive.BrokenLink: "symbolic links that lead nowhere",
	archive.LinkLoop:   "symbolic links to a folder that they are in",
}

const (
	maxLeftOut = 10      // names of each kind
	maxAbove   = 1 << 16 // names of directories that hold directories
)

// add counts a name.
func (l *LeftOut) add(name string) {
	if l.Count++; l.Count <= maxLeftOut {
		l.First = append(l.First, strings.Clone(name))
	}
}

// linkPrefix begins the names under which directories keep links, each with its kind in between. No
// directory has such a name.
const linkPrefix = "/"

// link keeps a member if it is a link.
func (d *directories) link(m *archive.Member) error {
	if _, ok := linkKinds[m.Kind]; !ok {
		return nil
	}
	_, err := d.number(linkPrefix + string('0'+rune(m.Kind)) + m.Name)
	return err
}

// leftOut returns what is left out. A directory that only holds directories of images is not.
func (d *directories) leftOut() (list []LeftOut) {
	byWhat := map[string]*LeftOut{}
	for i, name := range d.names {
		what := ""
		link, isLink := strings.CutPrefix(name, linkPrefix)
		switch {
		case isLink && len(link) > 1:
			what, name = linkKinds[archive.Kind(link[0]-'0')], link[1:]
		case isHidden(name) && d.claimed[i]:
			what = hiddenOnes
		case !isHidden(name) && !d.claimed[i] && !d.above[name]:
			what = noImages
		}
		if byWhat[what] == nil {
			byWhat[what] = &LeftOut{What: what}
		}
		byWhat[what].add(name)
	}
	delete(byWhat, "")
	for _, what := range slices.Sorted(maps.Keys(byWhat)) {
		list = append(list, *byWhat[what])
	}
	return list
}

// enter notes the directories above a sample's directory. name is the sample's.
func (d *directories) enter(name string) {
	path := name[:max(0, strings.LastIndexByte(name, '/'))]
	if path == d.entered || len(d.above) >= maxAbove {
		return
	}
	d.entered = strings.Clone(path)
	if d.above == nil {
		d.above = map[string]bool{}
	}
	parts := strings.Split(d.entered, "/")
	for _, part := range parts[:len(parts)-1] {
		d.above[part] = true
	}
}

// byDirectory reports whether the directories are the classes.
func (b *Builder) byDirectory() bool {
	return b.web == nil && b.config.Pairs == nil && b.config.List == nil
}

// endDirectories adds the directories without an entry after a walk.
func (b *Builder) endDirectories(a *archive.Archive) error {
	if !b.byDirectory() {
		return nil
	}
	for _, path := range a.EmptyFolders() {
		name := classOf(path + "/")
		if name == "" {
			continue
		}
		if _, err := b.dirs.number(name); err != nil {
			return err
		}
	}
	return nil
}

// leftOut returns what is left out of an archive that was walked to its end.
func (b *Builder) leftOut() []LeftOut {
	if !b.byDirectory() {
		return nil
	}
	return b.dirs.leftOut()
}

// warn logs what is left out.
func (c *Config) warn(path string, list []LeftOut) {
	for _, l := range list {
		c.Logger.Warn("left out, so not a class", "archive", path, "what", l.What, "count", l.Count, "first", l.First)
	}
}

// leftOutError adds what is left out to an error about the samples.
func leftOutError(err error, list []LeftOut) error {
	for _, l := range list {
		err = fmt.Errorf("%w; left out: %d %s, the first is %q", err, l.Count, l.What, l.First[0])
	}
	return err
}
