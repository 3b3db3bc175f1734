package index

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// LeftOut counts one kind of folder or link that is not a class, although the user may have meant
// it as one.
type LeftOut struct {
	What  string
	Count int
	First []string // the first names, at most 10
}

// The kinds of directories that are left out if directories are the classes.
const (
	noImages   = "folders without an image (no file has the name or the first bytes of one)"
	hiddenOnes = "hidden folders"
)

// memberKinds describes the members that are left out: archives, and links whose names are not
// image names.
var memberKinds = map[archive.Kind]string{
	archive.Symlink:    "symbolic links in a tar (tar --dereference packs what they lead to)",
	archive.HardLink:   "hard links in a tar (tar --hard-dereference packs what they lead to)",
	archive.BrokenLink: "symbolic links that lead nowhere",
	archive.LinkLoop:   "symbolic links to a folder that they are in",
	nested:             "archives in the archive (unpack each into a folder with its name)",
}

const (
	maxLeftOut = 10      // names kept of each kind
	maxAbove   = 1 << 16 // maximum number of recorded directories that contain directories
)

// add counts a name.
func (l *LeftOut) add(name string) {
	if l.Count++; l.Count <= maxLeftOut {
		l.First = append(l.First, strings.Clone(name))
	}
}

// notePrefix starts the names under which directories stores links and archives. After the prefix
// come the kind and the member's name. No directory has such a name.
const notePrefix = "/"

// nested is the kind of an archive in an archive. It is not one of archive.Kind's values.
const nested archive.Kind = 9

// noteLeftOut records a member if it is a link or an archive.
func (d *directories) noteLeftOut(m *archive.Member) error {
	kind := m.Kind
	if kind == archive.Regular && isArchive(m.Name) {
		kind = nested
	}
	if _, ok := memberKinds[kind]; !ok {
		return nil
	}
	_, err := d.number(notePrefix + string('0'+rune(kind)) + m.Name)
	return err
}

// isArchive reports whether a member has the name of an archive, like the classes in ImageNet's
// archives.
func isArchive(name string) bool {
	return slices.ContainsFunc([]string{".tar", ".tar.gz", ".tgz", ".tar.zst", ".zip"},
		func(suffix string) bool { return strings.HasSuffix(name, suffix) })
}

// leftOut returns the directories that are left out. It does not count a directory that contains
// only directories of images.
func (d *directories) leftOut() (list []LeftOut) {
	byWhat := map[string]*LeftOut{}
	for i, name := range d.names {
		what := ""
		note, noted := strings.CutPrefix(name, notePrefix)
		switch {
		case noted && len(note) > 1:
			what, name = memberKinds[archive.Kind(note[0]-'0')], note[1:]
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

// enter records the directories above a sample's directory. name is the name of the sample.
func (d *directories) enter(name string) {
	path := name[:max(0, strings.LastIndexByte(name, '/'))]
	path = path[:max(0, strings.LastIndexByte(path, '/'))]
	if path == d.entered || len(d.above) >= maxAbove {
		return
	}
	d.entered = strings.Clone(path)
	if d.above == nil {
		d.above = map[string]bool{}
	}
	for _, part := range strings.Split(d.entered, "/") {
		d.above[part] = true
	}
}

// byDirectory reports whether the directories are the classes.
func (b *Builder) byDirectory() bool {
	return b.web == nil && b.config.Pairs == nil && b.config.List == nil && !b.config.Parquet
}

// endDirectories adds the directories without an entry, after a walk.
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

// leftOut returns the kinds that were left out, after a walk to the end of the archive.
func (b *Builder) leftOut() []LeftOut {
	if !b.byDirectory() {
		return nil
	}
	return b.dirs.leftOut()
}

// warn logs the kinds that were left out.
func (c *Config) warn(path string, list []LeftOut) {
	for _, l := range list {
		c.Logger.Warn("left out, so not a class", "archive", path, "what", l.What, "count", l.Count, "first", l.First)
	}
}

// leftOutError adds the kinds that were left out to an error about samples.
func leftOutError(err error, list []LeftOut) error {
	for _, l := range list {
		err = fmt.Errorf("%w; left out: %d %s, the first is %q", err, l.Count, l.What, l.First[0])
	}
	return err
}
