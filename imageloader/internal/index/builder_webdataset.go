package index

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"unicode"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// maxLabelBytes is the maximum size of a member that is read as a label.
const maxLabelBytes = 1 << 20

// webGroup collects the members of one WebDataset sample: consecutive members with the same path up
// to the first dot of its last part.
type webGroup struct {
	groups Groups
	label  string
	image  int // number of its member; -1: none yet
}

// Groups numbers the WebDataset groups of an archive's members, which come in order.
type Groups struct {
	key string
	n   int
}

// Next takes the next member's name and returns the ordinal of the member's group, from 1.
func (g *Groups) Next(name string) int {
	if key, _ := webName(name); g.n == 0 || key != g.key {
		g.key = key
		g.n++
	}
	return g.n
}

// webName splits a member's path like WebDataset.
func webName(name string) (key, extension string) {
	slash := strings.LastIndexByte(name, '/') + 1
	dot := strings.IndexByte(name[slash:], '.')
	if dot <= 0 { // a hidden file belongs to no sample
		return name, ""
	}
	return name[:slash+dot], strings.ToLower(name[slash+dot+1:])
}

// isWebLabel reports whether a member has the label of its group.
func isWebLabel(m *archive.Member) bool {
	_, extension := webName(m.Name)
	return (extension == "cls" || extension == "json") && m.Kind == archive.Regular && m.Size <= maxLabelBytes
}

// addWeb is add by the conventions of WebDataset: the first image of a group is a sample. content
// is the content of a label.
func (b *Builder) addWeb(m *archive.Member, magic, content []byte) (number int, err error) {
	_, extension := webName(m.Name)
	if before := b.web.groups.n; b.web.groups.Next(m.Name) != before {
		if err := b.closeGroup(); err != nil {
			return -1, err
		}
	}
	if isWebLabel(m) {
		read := webLabel
		if b.dirs.lists {
			read = webLabels
		}
		label, err := read(extension, content)
		if err != nil {
			return -1, fmt.Errorf("%q: %w", m.Name, err)
		}
		if len(label) > archive.MaxNameBytes {
			return -1, fmt.Errorf("%q: a label of %d bytes, over the limit of %d", m.Name, len(label), archive.MaxNameBytes)
		}
		if label != "" {
			b.web.label = label
		}
		return -1, nil
	}
	image := claims(m, magic)
	if image && b.web.image >= 0 {
		if b.seconds++; b.seconds == 1 {
			b.second = m.Name
		}
	}
	if !image || b.web.image >= 0 {
		b.ignored++
		return -1, nil
	}
	number, err = b.record(m, 0, recordImage)
	if err != nil {
		return -1, err
	}
	b.web.image = number
	return number, nil
}

// webLabel reads a label. It returns "" for a .json without a label.
func webLabel(extension string, content []byte) (string, error) {
	if extension == "cls" {
		return strings.TrimSpace(string(content)), nil
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(content, &fields); err != nil {
		return "", nil // not a JSON object
	}
	for _, name := range []string{"label", "cls", "class"} {
		raw, ok := fields[name]
		if !ok {
			continue
		}
		var text string
		if err := json.Unmarshal(raw, &text); err == nil {
			return text, nil
		}
		var n int64
		if err := json.Unmarshal(raw, &n); err != nil {
			return "", fmt.Errorf("%q is neither a string nor a whole number: %q", name, raw[:min(len(raw), 40)])
		}
		return strconv.FormatInt(n, 10), nil
	}
	return "", nil
}

// webLabels reads a list of labels, as the text of listOf: the words of a .cls, between white space
// or commas, or a string, a whole number, or an array of these in a .json. It returns "" for a
// .json without labels.
func webLabels(extension string, content []byte) (string, error) {
	if extension == "cls" {
		return listOf(strings.FieldsFunc(string(content), func(r rune) bool { return r == ',' || unicode.IsSpace(r) }))
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(content, &fields); err != nil {
		return "", nil // not a JSON object
	}
	for _, name := range []string{"labels", "label", "cls", "class"} {
		raw, ok := fields[name]
		if !ok {
			continue
		}
		var items []json.RawMessage
		if err := json.Unmarshal(raw, &items); err != nil || items == nil {
			items = []json.RawMessage{raw}
		}
		var labels []string
		for _, item := range items {
			var text string
			var n int64
			if json.Unmarshal(item, &n) == nil && string(item) != "null" {
				text = strconv.FormatInt(n, 10)
			} else if err := json.Unmarshal(item, &text); err != nil || string(item) == "null" {
				return "", fmt.Errorf("%q has something else than strings and whole numbers: %q", name, item[:min(len(item), 40)])
			}
			labels = append(labels, text)
		}
		return listOf(labels)
	}
	return "", nil
}

// closeGroup gives the image of a group its label. An image without a label is not a sample.
func (b *Builder) closeGroup() error {
	g := *b.web
	*b.web = webGroup{groups: g.groups, image: -1}
	if g.image < 0 {
		return nil
	}
	if g.label == "" {
		b.orphans++
		b.ignored++
		b.drop() // it is still the newest member
		if b.onGroup != nil {
			return b.onGroup(-1)
		}
		return nil
	}
	if label, unknown := b.dirs.unknownIn(g.label); unknown {
		return b.dirs.unknown(string(b.lastName), label)
	}
	if _, known := b.dirs.given[g.label]; b.dirs.given != nil && !known && !b.dirs.lists {
		return b.dirs.unknown(string(b.lastName), g.label)
	}
	dir, err := b.dirs.number(g.label)
	if err != nil {
		return err
	}
	b.last.label, b.dirs.claimed[dir] = dir, true
	if b.onGroup != nil {
		return b.onGroup(dir)
	}
	return nil
}
