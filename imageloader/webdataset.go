package imageloader

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
)

// mostLabelBytes is how large a member may be that is read as a label.
const mostLabelBytes = 1 << 20

// mostNumberedClasses bounds labels that are numbers.
const mostNumberedClasses = 1 << 20

// webGroup collects the members of one WebDataset sample: those that follow each other and have the same path up to the first dot of its last part.
type webGroup struct {
	key   string
	label string
	image int // its number among the entries; -1: none yet
}

// webName splits a member's path as WebDataset does.
func webName(name string) (key, extension string) {
	slash := strings.LastIndexByte(name, '/') + 1
	dot := strings.IndexByte(name[slash:], '.')
	if dot <= 0 { // a hidden file is part of no sample
		return name, ""
	}
	return name[:slash+dot], strings.ToLower(name[slash+dot+1:])
}

// isWebLabel says whether a member holds the label of its group.
func isWebLabel(m *member) bool {
	_, extension := webName(m.name)
	return (extension == "cls" || extension == "json") && m.kind == kindFile && m.size <= mostLabelBytes
}

// addWeb is add for the conventions of WebDataset: the first image of a group is a sample. content is that of a label.
func (x *indexer) addWeb(m *member, magic, content []byte) (s Sample, number int, err error) {
	s = Sample{Name: m.name, Index: -1}
	key, extension := webName(m.name)
	if key != x.web.key {
		if err := x.closeWeb(); err != nil {
			return s, -1, err
		}
		x.web.key = key
	}
	if isWebLabel(m) {
		label, err := webLabel(extension, content)
		if err != nil {
			return s, -1, fmt.Errorf("%s: %w", m.name, err)
		}
		if len(label) > maxNameBytes {
			return s, -1, fmt.Errorf("%s: a label of %d bytes, over the limit of %d", m.name, len(label), maxNameBytes)
		}
		if label != "" {
			x.web.label = label
		}
		return s, -1, nil
	}
	if !claims(m, magic) || x.web.image >= 0 {
		x.ignored++
		return s, -1, nil
	}
	if number, err = x.record(m, 0, entryImage); err != nil {
		return s, -1, err
	}
	x.web.image, s.Index = number, number
	return s, number, nil
}

// webLabel reads a label; "" if a .json has none.
func webLabel(extension string, content []byte) (string, error) {
	if extension == "cls" {
		return strings.TrimSpace(string(content)), nil
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(content, &fields); err != nil {
		return "", nil // a .json of another kind
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
			return "", fmt.Errorf("%q is neither a string nor a whole number: %s", name, raw[:min(len(raw), 40)])
		}
		return strconv.FormatInt(n, 10), nil
	}
	return "", nil
}

// closeWeb gives the image of a group its label. One without a label is no sample.
func (x *indexer) closeWeb() error {
	g := *x.web
	*x.web = webGroup{image: -1}
	if g.image < 0 {
		return nil
	}
	if g.label == "" {
		x.orphans++
		x.ignored++
		x.drop() // nothing came after it
		return nil
	}
	if _, known := x.given[g.label]; x.given != nil && !known {
		return &UnknownClassError{File: x.file, Name: string(x.lastName), Class: g.label, Known: x.list}
	}
	dir, err := x.dir(g.label)
	if err != nil {
		return err
	}
	x.last.label, x.claimed[dir] = dir, true
	return nil
}

// numbered is the classes "0" to the highest number if all of the directories that x has are numbers: the labels are these numbers then.
func (x *indexer) numbered() []string {
	highest := -1
	for _, d := range x.dirList {
		n, err := strconv.Atoi(d)
		if err != nil || n < 0 || n >= mostNumberedClasses || strconv.Itoa(n) != d {
			return nil
		}
		highest = max(highest, n)
	}
	classes := make([]string, highest+1)
	for i := range classes {
		classes[i] = strconv.Itoa(i)
	}
	return classes
}
