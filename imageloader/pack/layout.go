package pack

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/torchstream/torchstream/imageloader/internal/index"
)

// layout decides the names of members in the shards, and where the class of a sample is stored.
type layout struct {
	web     bool // the class is in a .cls member; otherwise it is the directory
	fromWeb bool // the input has WebDataset groups, which already have labels
	listed  bool // the input's labels come from a list or a Parquet file, not from directories
	// numbered means that .cls members have the number of the class, and .json members its name,
	// because a loader would sort the names into another order.
	numbered bool
	stems    bool // the extension may change, so the names must differ without it
}

// number decides whether .cls members need numbers instead of the names of classes.
func (l *layout) number(classes []string) {
	if !l.web || l.fromWeb {
		return
	}
	names := index.NamesClasses(classes)
	l.numbered = names && !slices.IsSorted(classes)
	for i, class := range classes {
		if !names && class != strconv.Itoa(i) || strings.TrimSpace(class) != class || class == "" ||
			!utf8.ValidString(class) || strings.ContainsFunc(class, unicode.IsControl) {
			l.numbered = true
		}
	}
}

// classesOf returns the classes that a loader reads from the shards.
func (l layout) classesOf(classes []string) []string {
	if !l.numbered {
		return classes
	}
	numbers := make([]string, len(classes))
	for i := range numbers {
		numbers[i] = strconv.Itoa(i)
	}
	return numbers
}

// checkClasses returns an error if a loader would not read the same labels from the shards. samples
// has the number of samples of each class in the first part.
func (l layout) checkClasses(classes []string, samples []int) error {
	numbers := l.web && (l.numbered || !index.NamesClasses(classes))
	for i, class := range classes {
		if !l.web && (class == "" || strings.HasPrefix(class, ".") || strings.ContainsAny(class, "/\x00")) {
			return fmt.Errorf("the class %q cannot be the name of a directory: use -format webdataset", class)
		}
		if samples[i] == 0 && (!numbers || i == len(classes)-1) {
			return fmt.Errorf("the class %q has no sample to train on, and without it the labels of "+
				"later classes change: add some, or leave the class out", class)
		}
	}
	if !l.web && !slices.IsSorted(classes) {
		return fmt.Errorf("a loader sorts directories as text, and the classes have another order (%q is before "+
			"%q): use -format webdataset", classes[unsorted(classes)], classes[unsorted(classes)+1])
	}
	return nil
}

// unsorted returns the position of the first class whose name sorts after the name of the next
// class.
func unsorted(classes []string) int {
	i := 0
	for classes[i] <= classes[i+1] {
		i++
	}
	return i
}

// rename returns the name of a sample of the given class: its path without the extension, and the
// extension with the dot, or "".
func (l layout) rename(name, class string) (stem, extension string) {
	dir, base := split(relative(name))
	switch {
	case l.fromWeb:
		stem, extension = cut(base, strings.IndexByte(base, '.'))
	default:
		stem, extension = cut(base, strings.LastIndexByte(base, '.'))
		if !imageExtension(extension) {
			stem, extension = base, ""
		}
	}
	if l.web && !l.fromWeb {
		stem = cmp.Or(strings.ReplaceAll(stem, ".", "_"), "_") // the key ends at the first dot
	}
	if !l.web && (l.fromWeb || l.listed) {
		if dir = shown(dir); !strings.HasSuffix("/"+dir, "/"+class+"/") {
			dir += class + "/"
		}
	}
	return dir + stem, extension
}

// split splits a name into its directory, with the slash, and its base name.
func split(name string) (dir, base string) {
	slash := strings.LastIndexByte(name, '/') + 1
	return name[:slash], name[slash:]
}

func cut(s string, at int) (before, after string) {
	if at < 0 {
		return s, ""
	}
	return s[:at], s[at:]
}

// relative removes leading slashes and leading ".." elements from a clean path. tar does the same
// when it unpacks.
func relative(name string) string {
	name = strings.TrimLeft(name, "/")
	for strings.HasPrefix(name, "../") {
		name = name[len("../"):]
	}
	return name
}

// shown prefixes the names of hidden directories with an underscore. dir ends in a slash. Below a
// hidden directory, a loader would take the hidden directory as the class of an image, not the
// directory that directly holds the image.
func shown(dir string) string {
	parts := strings.Split(dir, "/")
	for i, part := range parts {
		if strings.HasPrefix(part, ".") {
			parts[i] = "_" + part
		}
	}
	return strings.Join(parts, "/")
}

// imageExtension reports whether a file with this extension is an image.
func imageExtension(extension string) bool {
	return slices.Contains([]string{".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif",
		".tiff", ".heic", ".heif", ".hif", ".avif", ".ppm", ".pgm", ".pbm", ".pnm"}, strings.ToLower(extension))
}

// isJPEG reports whether a file with this extension is a JPEG.
func isJPEG(extension string) bool {
	return slices.Contains([]string{".jpg", ".jpeg", ".jpe", ".jfif"}, strings.ToLower(extension))
}

// extensionOf returns the extension of an image format (codec.Sniff).
func extensionOf(format string) string {
	if format == "JPEG" {
		return ".jpg"
	}
	return "." + strings.ToLower(format)
}

// namer gives each sample a unique name. It stores a hash of 64 bits for each name.
type namer struct {
	layout
	seen map[uint64]struct{} // nil after the last sample
	// renamed has the stems of the samples whose first name was already taken.
	renamed map[int]string
}

// newNamer names all samples, in order.
func newNamer(l layout, x *index.Index, classes []string) *namer {
	n := &namer{layout: l, seen: make(map[uint64]struct{}, x.Len()), renamed: map[int]string{}}
	for i := range x.Len() {
		stem, extension := l.rename(x.Name(i), classes[x.Label(i)])
		if n.take(stem, extension) {
			continue
		}
		for again := 2; ; again++ {
			if other := fmt.Sprintf("%s~%d", stem, again); n.take(other, extension) {
				n.renamed[i] = other
				break
			}
		}
	}
	n.seen = nil
	return n
}

// take reports whether a name is new, and marks it as taken.
func (n *namer) take(stem, extension string) bool {
	name := stem
	if !n.web && !n.stems {
		name += extension
	}
	sum := sha256.Sum256([]byte(name))
	digest := binary.LittleEndian.Uint64(sum[:])
	if _, taken := n.seen[digest]; taken {
		return false
	}
	n.seen[digest] = struct{}{}
	return true
}

// name returns the stem and the extension of sample i.
func (n *namer) name(i int, name, class string) (stem, extension string) {
	stem, extension = n.rename(name, class)
	if other, found := n.renamed[i]; found {
		stem = other
	}
	return stem, extension
}
