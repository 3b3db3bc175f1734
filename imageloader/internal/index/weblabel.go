package index

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// Maximum sizes of members with labels.
const (
	maxClsBytes  = 1 << 20
	maxJSONBytes = 16 << 20
)

// webLabel is the label of a WebDataset sample.
type webLabel struct {
	text   string // with Config.MultiLabel the text of a list: see listOf; "" means no label
	member string
	cls    bool // the member is a .cls file; otherwise a .json file
}

// isWebLabel reports whether a member with this extension has the label of its group.
func isWebLabel(extension string) bool { return extension == "cls" || extension == "json" }

// IsWebLabel reports whether a member of this name has the label of its WebDataset group.
func IsWebLabel(name string) bool {
	_, extension, grouped := webName(name)
	return grouped && isWebLabel(extension)
}

// checkWebLabel returns an error if a label can't be read from the member.
func checkWebLabel(m *archive.Member, extension string) error {
	limit := int64(maxClsBytes)
	if extension == "json" {
		limit = maxJSONBytes
	}
	switch {
	case m.Kind == archive.HardLink:
		return errors.New("a label has to be a file, and this is a hard link: pack the archive with tar " +
			"--hard-dereference")
	case m.Kind != archive.Regular:
		return errors.New("a label has to be a file, and this is a link, a device, or stored as a sparse file: " +
			"pack the archive with tar --dereference, without --sparse")
	case m.Size > limit:
		return fmt.Errorf("a label file of %d bytes, over the limit of %d", m.Size, limit)
	}
	return nil
}

// agrees reports whether two labels of one sample are consistent. A number and a name are always
// consistent: a .cls may contain the number of a class, and a .json its name.
func (l *webLabel) agrees(other *webLabel, lists bool) bool {
	var labels [2][]string
	var names [2]int
	for i, text := range []string{l.text, other.text} {
		labels[i] = []string{text}
		if lists {
			labels[i] = labelsIn(text)
		}
		for j, label := range labels[i] {
			if n, err := strconv.ParseUint(label, 10, 64); err == nil {
				labels[i][j] = strconv.FormatUint(n, 10) // "007" is 7
			} else if isName(label) {
				names[i]++
			}
		}
		labels[i] = slices.Compact(slices.Sorted(slices.Values(labels[i])))
	}
	if slices.Equal(labels[0], labels[1]) {
		return true
	}
	numbersAndNames := func(i, j int) bool {
		return len(labels[i]) > 0 && names[i] == 0 && names[j] > 0 && names[j] >= len(labels[j])
	}
	return numbersAndNames(0, 1) || numbersAndNames(1, 0)
}

// shownLabel returns a label, or a list of labels, as messages show it.
func shownLabel(text string) string {
	return strings.ReplaceAll(strings.TrimPrefix(text, "\n"), "\n", " ")
}

// readWebLabel reads a label, or the text of a list of labels (see listOf). It returns "" for a
// .json without a label. In a .cls, the list is the words of the file, separated by white space or
// commas. In a .json, it is a string, a whole number, or an array of strings and whole numbers.
func readWebLabel(extension string, content []byte, lists bool) (string, error) {
	if extension == "json" {
		return readJSONLabel(content, lists)
	}
	text, err := clsText(content)
	if err != nil {
		return "", err
	}
	if lists {
		return listOf(strings.FieldsFunc(text, func(r rune) bool { return r == ',' || unicode.IsSpace(r) }))
	}
	if text = strings.TrimSpace(text); text == "" {
		return "", errors.New("the label is empty: write a number or a name, or remove the member")
	}
	return text, nil
}

// byteOrderMark is the byte order mark in UTF-8, which some editors write at the start of a file.
const byteOrderMark = "\xef\xbb\xbf"

// clsText returns the text of a .cls file, without the byte order mark.
func clsText(content []byte) (string, error) {
	text := bytes.TrimPrefix(content, []byte(byteOrderMark))
	lead := len(content) - len(text)
	for i := 0; i < len(text); {
		r, size := utf8.DecodeRune(text[i:])
		if r == utf8.RuneError && size == 1 || unicode.IsControl(r) && !unicode.IsSpace(r) {
			return "", fmt.Errorf("the label is no text: byte %d is 0x%02x: write a number or a name in UTF-8", lead+i, text[i])
		}
		i += size
	}
	return string(text), nil
}

// readJSONLabel implements readWebLabel for a .json.
func readJSONLabel(content []byte, lists bool) (string, error) {
	text := bytes.TrimPrefix(content, []byte(byteOrderMark))
	lead := len(content) - len(text)
	if !utf8.Valid(text) {
		at := 0
		for r, size := utf8.DecodeRune(text); r != utf8.RuneError || size > 1; r, size = utf8.DecodeRune(text[at:]) {
			at += size
		}
		return "", fmt.Errorf("byte %d is 0x%02x, which is not UTF-8: write the file in UTF-8", lead+at, text[at])
	}
	plain := withoutNaN(text)
	var syntax *json.SyntaxError
	if err := json.Unmarshal(plain, new(json.RawMessage)); errors.As(err, &syntax) {
		return "", fmt.Errorf("byte %d: %w: correct the file", int64(lead)+max(0, syntax.Offset-1), syntax)
	} else if err != nil {
		return "", err
	}
	field, at, end, err := findLabel(plain, lists)
	if err != nil || field == "" {
		return "", err
	}
	return jsonLabel(field, plain[at:end], text[at:end], lead+at, lists)
}

// withoutNaN replaces the numbers NaN, Infinity and -Infinity, which Python's json module writes,
// with objects of the same length. They are not valid JSON, and an object is never a label.
func withoutNaN(text []byte) []byte {
	if !bytes.Contains(text, []byte("NaN")) && !bytes.Contains(text, []byte("Infinity")) {
		return text
	}
	text = bytes.Clone(text)
	inString := false
	for i := 0; i < len(text); i++ {
		switch {
		case text[i] == '"':
			inString = !inString
		case inString && text[i] == '\\':
			i++
		case !inString:
			for _, number := range []string{"NaN", "Infinity", "-Infinity"} {
				if bytes.HasPrefix(text[i:], []byte(number)) {
					copy(text[i:], "{"+strings.Repeat(" ", len(number)-2)+"}")
					i += len(number) - 1
					break
				}
			}
		}
	}
	return text
}

// findLabel finds the best field for a label in a valid JSON text. It returns the name of the field
// and the offsets of its value. field is "" if there is none.
func findLabel(text []byte, lists bool) (field string, at, end int, err error) {
	fields := []string{"label", "cls", "class"}
	if lists {
		fields = []string{"labels", "label", "cls", "class"}
	}
	d := json.NewDecoder(bytes.NewReader(text))
	if first, err := d.Token(); err != nil || first != json.Delim('{') {
		return "", 0, 0, err
	}
	best, twice := len(fields), ""
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return "", 0, 0, err
		}
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return "", 0, 0, err
		}
		name, _ := key.(string)
		switch rank := slices.Index(fields, name); {
		case rank < 0 || rank > best:
		case rank == best:
			twice = name
		default:
			best, end = rank, int(d.InputOffset())
			field, at, twice = name, end-len(value), ""
		}
	}
	if twice != "" {
		return "", 0, 0, fmt.Errorf("the field %q is there twice: remove one of them", twice)
	}
	return field, at, end, nil
}

// jsonLabel reads the value of a field. shown is the value's text in the file, and at its offset,
// for errors.
func jsonLabel(field string, value, shown []byte, at int, lists bool) (string, error) {
	odd := func(what string) error {
		return fmt.Errorf("%q %s: %q (byte %d)", field, what, shown[:min(len(shown), 40)], at)
	}
	if !lists {
		label, ok := jsonText(value)
		switch {
		case !ok:
			return "", odd("is neither a string nor a whole number")
		case label == "" || strings.ContainsRune(label, utf8.RuneError):
			return "", odd("is empty, or is no text")
		}
		return label, nil
	}
	var items []json.RawMessage
	if err := json.Unmarshal(value, &items); err != nil || items == nil {
		items = []json.RawMessage{value}
	}
	labels := make([]string, 0, len(items))
	for _, item := range items {
		label, ok := jsonText(item)
		switch {
		case !ok:
			return "", odd("has something else than strings and whole numbers")
		case strings.ContainsRune(label, utf8.RuneError):
			return "", odd("has a string that is no text")
		}
		labels = append(labels, label)
	}
	return listOf(labels)
}

// jsonText returns a JSON string or whole number as text.
func jsonText(value []byte) (text string, ok bool) {
	var n int64
	switch {
	case string(value) == "null":
		return "", false
	case json.Unmarshal(value, &n) == nil:
		return strconv.FormatInt(n, 10), true
	}
	return text, json.Unmarshal(value, &text) == nil
}

// logMixedLabels logs the first WebDataset label that is a name, if other labels are numbers. In
// this case the numbers also count as names.
func (x *Index) logMixedLabels(archive string, c *Config) {
	if !c.WebDataset || len(c.Classes) > 0 {
		return
	}
	names := make([]bool, len(x.classes))
	for i, class := range x.classes {
		names[i] = isName(class)
	}
	if !slices.Contains(names, true) || !slices.Contains(names, false) {
		return
	}
	for i := range x.Len() {
		labels := []int32{int32(x.Label(i))}
		if x.lists != nil {
			labels = x.Labels(i)
		}
		for _, label := range labels {
			if names[label] {
				c.Logger.Warn("labels are names of classes, since not all of them are numbers",
					"archive", archive, "name", x.Name(i), "label", x.classes[label], "classes", len(x.classes))
				return
			}
		}
	}
}
