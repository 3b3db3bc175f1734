package index

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/internal/normalform"
)

const (
	// maxDirBytes limits the names of all directories, or all labels, because they stay in memory.
	maxDirBytes = 128 << 20
	// maxNumberedClasses is an exclusive upper bound of labels that are numbers.
	maxNumberedClasses = 1 << 20
)

// UnknownClassError is the error for an image in a directory that is not one of the given classes.
type UnknownClassError struct {
	File  string
	Name  string // the member
	Class string // the directory
	Known []string
}

func (e *UnknownClassError) Error() string {
	const show = 10
	known := strings.Join(e.Known[:min(show, len(e.Known))], ", ")
	if len(e.Known) > show {
		known += fmt.Sprintf(", ... (%d in all)", len(e.Known))
	}
	return fmt.Sprintf("imageloader: %s: %q is of class %q, which is not one of the expected classes: %s%s",
		e.File, e.Name, e.Class, known, normalform.Hint([]string{e.Class}, e.Known))
}

// LabelError reports an image whose WebDataset label is a number that no class can have. It occurs
// only if all labels of the archive are numbers.
type LabelError struct {
	File  string
	Name  string // the image's member
	Label string
}

// Is reports whether target is archive.ErrLabels.
func (e *LabelError) Is(target error) bool { return target == archive.ErrLabels }

func (e *LabelError) Error() string {
	return fmt.Sprintf("imageloader: %s: %q has the label %q: all labels are numbers, "+
		"so each has to be a whole number from 0 to %d "+
		"(correct it, or list the labels in Options.Classes, which takes them as names)",
		e.File, e.Name, e.Label, maxNumberedClasses-1)
}

// labelTooLong is an error that is archive.ErrLabels.
type labelTooLong struct{ error }

func (labelTooLong) Is(target error) bool { return target == archive.ErrLabels }

func (e labelTooLong) Unwrap() error { return e.error }

// table describes the columns of Parquet files.
type table struct {
	named   []string // class names by label; nil: the files do not name the classes
	columns []string // names of the columns of images and labels
}

// directories numbers the directories of members or, with WebDataset, the labels of images. It
// decides which directories are classes. With given classes, these are the classes. Otherwise every
// directory with a member that looks like an image is a class, which is known only at the end of
// the archive.
type directories struct {
	file    string           // the archive, for error messages
	given   map[string]int32 // labels by name; nil: no classes are given
	classes []string         // the given classes
	table
	web   bool // the directories stand for labels of WebDataset or of Parquet files
	lists bool // the directories stand for lists of labels: see listOf

	numbers map[string]int32
	names   []string // by number
	last    int32    // the number that the last call of number returned
	claimed []bool   // by number: whether a member looks like an image
	parents
	bytes int // size of the sidecar's section of directories
}

// parents are the directories that contain directories of samples.
type parents struct {
	above   map[string]bool // their names
	entered string          // path of the directory that contains the last sample's directory
}

func newDirectories(file string, c *Config) (*directories, error) {
	d := &directories{file: file, numbers: map[string]int32{}, classes: c.Classes, web: c.WebDataset || c.Parquet,
		lists: c.MultiLabel && c.List == nil}
	if len(c.Classes) > 0 {
		d.given = map[string]int32{}
	}
	for i, class := range c.Classes {
		if _, twice := d.given[class]; twice {
			return nil, fmt.Errorf("imageloader: class %q is twice in Options.Classes", class)
		}
		d.given[class] = int32(i)
	}
	return d, nil
}

// number returns the number of a directory.
func (d *directories) number(name string) (int32, error) {
	if int(d.last) < len(d.names) && d.names[d.last] == name {
		return d.last, nil
	}
	number, seen := d.numbers[name]
	if !seen {
		if d.bytes += 4 + len(name); d.bytes > maxDirBytes {
			return -1, labelTooLong{fmt.Errorf("imageloader: %s: more than %d MB of names of directories, or of labels",
				d.file, maxDirBytes>>20)}
		}
		number = int32(len(d.names))
		name = strings.Clone(name)
		d.numbers[name] = number
		d.names = append(d.names, name)
		d.claimed = append(d.claimed, false)
	}
	d.last = number
	return number, nil
}

// unknown returns the error for an image whose class is not one of the given classes.
func (d *directories) unknown(name, class string) *UnknownClassError {
	return &UnknownClassError{File: d.file, Name: name, Class: class, Known: d.classes}
}

// labels returns the classes, and the label of each directory by number. The label is -1 if the
// directory is not a class. odd is the number of the first WebDataset label that is an error, or
// -1.
func (d *directories) labels() (classes []string, label []int32, odd int) {
	label = make([]int32, len(d.names))
	if d.lists {
		for i := range label {
			label[i] = int32(i) // the number of the list
		}
		classes, _, odd = d.eachList()
		return classes, label, odd
	}
	if d.given != nil {
		for i, name := range d.names {
			label[i] = -1
			if l, ok := d.given[name]; ok {
				label[i] = l
			}
		}
		return d.classes, label, -1
	}
	if d.named != nil {
		for i, name := range d.names {
			label[i] = int32(slices.Index(d.named, name))
		}
		return d.named, label, -1
	}
	if d.web && len(d.names) > 0 && !slices.ContainsFunc(d.names, isName) {
		classes, odd = d.numbered(label)
		return classes, label, odd
	}
	for i, name := range d.names {
		if d.claimed[i] && (d.web || !isHidden(name)) {
			classes = append(classes, name)
		}
	}
	slices.Sort(classes)
	for i, name := range d.names {
		label[i] = -1
		if n, found := slices.BinarySearch(classes, name); found {
			label[i] = int32(n)
		}
	}
	return classes, label, -1
}

// listOf returns the text of a list of labels: a line break before each label. The text of an empty
// list is one line break.
func listOf(labels []string) (string, error) {
	if len(labels) == 0 {
		return "\n", nil
	}
	labels = slices.Compact(slices.Sorted(slices.Values(labels)))
	for _, label := range labels {
		if label == "" || strings.Contains(label, "\n") {
			return "", fmt.Errorf("the label %q is empty or has a line break", label)
		}
	}
	return "\n" + strings.Join(labels, "\n"), nil
}

// labelsIn returns the labels in a list's text.
func labelsIn(text string) []string {
	if len(text) <= 1 {
		return nil
	}
	return strings.Split(text[1:], "\n")
}

// eachList returns the classes that occur in lists of labels, and the labels of each list by its
// number. It skips labels that are not among given classes. odd is the number of the first list
// with a label that is an error, or -1.
func (d *directories) eachList() (classes []string, lists [][]int32, odd int) {
	single := &directories{file: d.file, given: d.given, classes: d.classes, table: d.table, web: true,
		numbers: map[string]int32{}}
	numbers := make([][]int32, len(d.names))
	for i, text := range d.names {
		for _, label := range labelsIn(text) {
			number, err := single.number(label)
			if err != nil {
				return nil, numbers, i // no list is that long
			}
			single.claimed[number] = true
			numbers[i] = append(numbers[i], number)
		}
	}
	classes, label, wrong := single.labels()
	odd = -1
	for i, list := range numbers {
		kept := list[:0]
		for _, number := range list {
			if int(number) == wrong && odd < 0 {
				odd = i
			}
			if wrong < 0 && label[number] >= 0 {
				kept = append(kept, label[number])
			}
		}
		numbers[i] = kept
	}
	return classes, numbers, odd
}

// unknownIn returns the first label of a list that is not among the given classes.
func (d *directories) unknownIn(text string) (label string, found bool) {
	if !d.lists || d.given == nil {
		return "", false
	}
	for _, label := range labelsIn(text) {
		if _, known := d.given[label]; !known {
			return label, true
		}
	}
	return "", false
}

// isName reports whether a WebDataset label is a name. Every label is a name except a decimal
// number. A number is not a name even if no class can have it.
func isName(label string) bool {
	if strings.Trim(label, "0123456789+-.eE") != "" {
		return true
	}
	_, err := strconv.ParseFloat(label, 64)
	return errors.Is(err, strconv.ErrSyntax)
}

// NamesClasses reports whether these WebDataset labels of an archive are names of classes. They are
// if at least one of them is not a decimal number.
func NamesClasses(labels []string) bool { return slices.ContainsFunc(labels, isName) }

// numbered uses the names of directories as labels, if all names are numbers, with or without
// leading zeros. The classes are then "0" to the highest number. odd is the number of the first
// directory whose name is not such a number, or -1.
func (d *directories) numbered(label []int32) (classes []string, odd int) {
	highest := -1
	for i, name := range d.names {
		n, err := strconv.ParseUint(name, 10, 31)
		if err != nil || n >= maxNumberedClasses {
			return nil, i
		}
		label[i] = int32(n)
		highest = max(highest, int(n))
	}
	classes = make([]string, highest+1)
	for i := range classes {
		classes[i] = strconv.Itoa(i)
	}
	return classes, -1
}

// classOf returns the name of a member's directory, or "" if it has none. If the member's path
// contains a hidden directory (see isHidden), classOf returns the name of the hidden directory.
// name must be clean.
func classOf(name string) string {
	slash := strings.LastIndexByte(name, '/')
	if slash <= 0 {
		return ""
	}
	path := name[:slash]
	for strings.HasPrefix(path, "../") {
		path = path[len("../"):]
	}
	if hidden := hiddenIn(path); hidden != "" {
		return hidden
	}
	class := path[strings.LastIndexByte(path, '/')+1:]
	if class == ".." {
		return ""
	}
	return class
}

// hiddenIn returns the first hidden directory in a path, or "".
func hiddenIn(path string) string {
	at := 0
	if !isHidden(path) {
		if at = strings.Index(path, "/.") + 1; at == 0 {
			return ""
		}
	}
	hidden, _, _ := strings.Cut(path[at:], "/")
	if hidden == ".." {
		return ""
	}
	return hidden
}

// isHidden reports whether a directory's name starts with a dot, like .ipynb_checkpoints and
// .Trash-1000. Programs keep their internal files in such directories. A hidden directory is a
// class only if it is one of the given classes.
func isHidden(directory string) bool { return strings.HasPrefix(directory, ".") }

// claims reports whether a member looks like an image, by its first bytes or its name.
func claims(m *archive.Member, magic []byte) bool {
	return claimsByName(m.Name) || codec.Claims(magic)
}

// claimsByName reports whether a member has the name of an image.
func claimsByName(name string) bool {
	base := name[strings.LastIndexByte(name, '/')+1:]
	if strings.HasPrefix(base, ".") { // .DS_Store, and the ._x.jpg files of macOS
		return false
	}
	var room [maxExtension]byte
	switch string(lower(room[:0], base[max(0, strings.LastIndexByte(base, '.')):])) {
	case ".jpg", ".jpeg", ".png", ".ppm", ".pgm", ".bmp", ".tif", ".tiff", ".webp", // torchvision's list
		".gif", ".jfif", ".jpe", ".heic", ".heif", ".heics", ".heifs", ".hif", ".avif", ".avifs", ".jp2", ".jpx", ".j2k",
		".jxl", ".pbm", ".pnm":
		return true
	}
	return false
}

// maxExtension is the length of the longest extension that matters, .parquet.
const maxExtension = 8

// lower appends an extension in lower case, without allocating if room has maxExtension bytes. It
// appends nothing if the extension is longer.
func lower(room []byte, extension string) []byte {
	if len(extension) > maxExtension {
		return room
	}
	for _, c := range []byte(extension) {
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		room = append(room, c)
	}
	return room
}
