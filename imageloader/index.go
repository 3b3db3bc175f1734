package imageloader

import (
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"unsafe"
)

// index says where the samples of an archive are. Names share one string: an archive of a million images costs 60 MB, not 200.
type index struct {
	info    fs.FileInfo // of the file when it was scanned
	classes []string    // sorted
	entries []entry
	names   string
	ignored int // members that are no samples
	// held has the samples' contents by offset, if they are kept in memory: then the archive is not read again.
	held     map[int64][]byte
	seekable bool // a member's content lies in the file as it is, at its offset
}

type entry struct {
	offset int64 // of the content in the tar stream
	size   int64
	name   uint32 // where it begins in names; ends where the next one begins
	label  int32
	kind   memberKind
}

func (x *index) name(i int) string {
	end := uint32(len(x.names))
	if i+1 < len(x.entries) {
		end = x.entries[i+1].name
	}
	return x.names[x.entries[i].name:end]
}

// random says whether the content of any sample can be read in any order, by several goroutines at once, each with a sampleReader. It never changes in
// the life of an index.
func (x *index) random() bool { return x.seekable || x.held != nil }

// sampleReader reads the contents of an index's samples in any order. It is used by one goroutine at a time; several of them read one open archive at once.
type sampleReader struct {
	a *archive
	x *index
}

// newSampleReader is for an index whose random is true, and an open archive that has not changed since. The archive stays the caller's.
func newSampleReader(a *archive, x *index) *sampleReader { return &sampleReader{a, x} }

// read fills dst, which has the length of sample i's content, with it. The sample must be a regular file. Errors are *ArchiveError, or the marker errStopped.
func (r *sampleReader) read(i int, dst []byte) error {
	e := &r.x.entries[i]
	if r.x.held != nil {
		copy(dst, r.x.held[e.offset])
		return nil
	}
	if n, err := r.a.file.ReadAt(dst, e.offset); n < len(dst) {
		return &ArchiveError{File: r.a.path, Member: r.x.name(i), Position: i + 1, Offset: e.offset, Err: truncated(err)}
	}
	return nil
}

// close gives back what the reader holds outside of Go's memory.
func (r *sampleReader) close() {}

// indexer collects an index member by member. With classes given, the members of these directories are the samples; without, those of every directory that
// has a member that claims to be an image (by its first bytes or its extension), which is known at the end only.
type indexer struct {
	file    string
	given   bool
	classes map[string]int32 // provisional numbers if !given
	claimed []bool           // by class number
	entries []entry
	names   []byte
	ignored int
	orphans int // images outside of any directory

	seekable  bool             // as index.seekable
	held      map[int64][]byte // as index.held; nil: nothing is kept
	heldBytes int64
	heldLimit int64
}

func newIndexer(file string, classes []string) (*indexer, error) {
	x := &indexer{file: file, given: len(classes) > 0, classes: map[string]int32{}}
	for i, c := range classes {
		if _, twice := x.classes[c]; twice {
			return nil, fmt.Errorf("imageloader: class %q is twice in Options.Classes", c)
		}
		x.classes[c] = int32(i)
	}
	return x, nil
}

// hold makes the indexer keep contents, up to limit bytes in all: one more, and none is kept.
func (x *indexer) hold(limit int64) { x.held, x.heldLimit = map[int64][]byte{}, limit }

// wants says whether the content of a member of this size would still be kept.
func (x *indexer) wants(size int64) bool { return x.held != nil && x.heldBytes+size <= x.heldLimit }

// keep takes a sample's content. data is nil if it is too large to be kept.
func (x *indexer) keep(offset int64, data []byte, size int64) {
	if !x.wants(size) {
		x.held = nil
	}
	if x.held != nil {
		x.held[offset] = data
		x.heldBytes += size
	}
}

// classOf is the name of the directory that a member lies in; "" if there is none. name is clean.
func classOf(name string) string {
	slash := strings.LastIndexByte(name, '/')
	if slash <= 0 {
		return ""
	}
	class := name[:slash]
	class = class[strings.LastIndexByte(class, '/')+1:]
	if class == ".." || class == "." {
		return ""
	}
	return class
}

// claims says whether a member wants to be an image. magic holds its first bytes.
func claims(m *member, magic []byte) bool {
	if sniff(magic) != "" {
		return true
	}
	base := m.name[strings.LastIndexByte(m.name, '/')+1:]
	if strings.HasPrefix(base, ".") { // .DS_Store, and the ._x.jpg of macOS
		return false
	}
	switch dot := strings.LastIndexByte(base, '.'); strings.ToLower(base[dot+1:]) {
	case "jpg", "jpeg", "png", "ppm", "pgm", "bmp", "tif", "tiff", "webp": // torchvision's list
		return dot >= 0
	}
	return false
}

// sniff names the format of an image by its first bytes; "" if it is none that is handled.
func sniff(b []byte) string {
	switch {
	case len(b) >= 3 && b[0] == 0xff && b[1] == 0xd8 && b[2] == 0xff:
		return "JPEG"
	case len(b) >= 8 && string(b[:8]) == "\x89PNG\r\n\x1a\n":
		return "PNG"
	}
	return ""
}

// add takes a member. It returns the sample's index, or -1 if the member is none; an error is an *UnknownClassError.
func (x *indexer) add(m *member, magic []byte) (int, error) {
	class := classOf(m.name)
	image := claims(m, magic)
	if class == "" {
		if image {
			x.orphans++
		}
		x.ignored++
		return -1, nil
	}
	label, known := x.classes[class]
	if !known {
		if x.given {
			if !image {
				x.ignored++
				return -1, nil
			}
			return -1, &UnknownClassError{File: x.file, Name: m.name, Class: class, Known: x.list()}
		}
		label = int32(len(x.classes))
		x.classes[class] = label
		x.claimed = append(x.claimed, false)
	}
	if !x.given && image {
		x.claimed[label] = true
	}
	if len(x.names)+len(m.name) > 1<<32-1 {
		return -1, fmt.Errorf("imageloader: %s: more than 4 GB of member names", x.file)
	}
	x.entries = append(x.entries, entry{m.offset, m.size, uint32(len(x.names)), label, m.kind})
	x.names = append(x.names, m.name...)
	return len(x.entries) - 1, nil
}

// list returns the given classes in their order.
func (x *indexer) list() []string {
	list := make([]string, len(x.classes))
	for c, i := range x.classes {
		list[i] = c
	}
	return list
}

// finish sorts the classes and drops the members of directories that turned out to be none.
func (x *indexer) finish(info fs.FileInfo) *index {
	out := &index{info: info, entries: x.entries, ignored: x.ignored, classes: x.list(), held: x.held, seekable: x.seekable}
	if !x.given {
		out.classes = slices.DeleteFunc(out.classes, func(c string) bool { return !x.claimed[x.classes[c]] })
		slices.Sort(out.classes)
		number := make([]int32, len(x.classes))
		for c, i := range x.classes {
			number[i] = -1
			if n, found := slices.BinarySearch(out.classes, c); found {
				number[i] = int32(n)
			}
		}
		names := x.names[:0]
		kept := out.entries[:0]
		for i, e := range x.entries {
			end := len(x.names)
			if i+1 < len(x.entries) {
				end = int(x.entries[i+1].name)
			}
			if number[e.label] < 0 {
				out.ignored++
				delete(out.held, e.offset)
				continue
			}
			name := x.names[e.name:end]
			e.label = number[e.label]
			e.name = uint32(len(names))
			names = append(names, name...)
			kept = append(kept, e)
		}
		out.entries, x.names = kept, names
	}
	out.entries = slices.Clip(out.entries)
	out.names = unsafe.String(unsafe.SliceData(x.names), len(x.names)) // x is not used any more
	return out
}
