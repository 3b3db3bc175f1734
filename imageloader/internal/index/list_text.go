package index

import (
	"bufio"
	"bytes"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/text/encoding/unicode"
)

// sampleBytes is the size of the sample that decides a list's line ends and separator.
const sampleBytes = 1 << 16

// listText reads the records of a CSV or TSV file.
type listText struct {
	file    string
	csv     *csv.Reader
	skipped int // number of lines before the first that csv has read
}

// newListText detects a list's encoding, line ends and separator. The encoding is UTF-8, or UTF-16
// if there is a byte order mark. Other kinds of files are errors.
func newListText(file string, in io.Reader) (*listText, error) {
	b, err := decoded(file, bufio.NewReaderSize(in, sampleBytes))
	if err != nil {
		return nil, fmt.Errorf("imageloader: %s: %w", file, err)
	}
	head, err := b.Peek(sampleBytes)
	if err != nil && err != io.EOF {
		return nil, fmt.Errorf("imageloader: %s: %w", file, err)
	}
	if bytes.IndexByte(head, 0) >= 0 {
		return nil, fmt.Errorf("imageloader: %s: the list has a byte 0, so it is no text, or UTF-16 without a "+
			"byte order mark: write it as UTF-8", file)
	}
	t := &listText{file: file}
	text := string(head)
	if strings.Contains(text, "\r") && !strings.Contains(text, "\n") { // line ends of old Macs
		b = bufio.NewReaderSize(lineFeeds{b}, sampleBytes)
		text = strings.ReplaceAll(text, "\r", "\n")
	}
	comma, directive := ',', false
	if first, _, _ := strings.Cut(text, "\n"); strings.HasPrefix(strings.ToLower(first), "sep=") { // Excel writes such a line
		rest := strings.TrimRight(first[len("sep="):], "\r")
		if comma, directive = ';', utf8.RuneCountInString(rest) == 1; directive {
			comma, _ = utf8.DecodeRuneInString(rest)
		}
		_, _ = b.Discard(min(len(first)+1, len(text))) // Peek has buffered it
		t.skipped = 1
	} else {
		comma = separator(file, text, err == io.EOF)
	}
	t.csv = csv.NewReader(b)
	t.csv.Comma, t.csv.FieldsPerRecord, t.csv.ReuseRecord = comma, -1, true
	t.csv.LazyQuotes = comma == '\t'
	return t, nil
}

// decoded returns a reader of a list's text as UTF-8 without a byte order mark. The reader's buffer
// has sampleBytes. decoded returns an error if the file's first bytes or name show that it is not a
// text table.
func decoded(file string, b *bufio.Reader) (*bufio.Reader, error) {
	head, err := b.Peek(4)
	if err != nil && err != io.EOF {
		return nil, err
	}
	ext, start := strings.ToLower(path.Ext(file)), string(head)
	switch {
	case ext == ".json" || ext == ".jsonl":
		return nil, errors.New("a list is a CSV or TSV file, not JSON: write its paths " +
			"and labels to a .csv with the columns path and label")
	case ext == ".parquet" || start == "PAR1":
		return nil, errors.New("a list is a CSV or TSV file, not Parquet: write its paths and labels to a .csv " +
			"with the columns path and label")
	case strings.HasPrefix(start, "PK\x03\x04"):
		return nil, errors.New("a list is a CSV or TSV file, not a workbook or a zip: save the sheet as " +
			"\"CSV UTF-8\", or unpack the zip")
	case strings.HasPrefix(start, "\x1f\x8b"), start == "\x28\xb5\x2f\xfd", strings.HasPrefix(start, "BZh"):
		return nil, errors.New("the list is compressed: unpack it first")
	case strings.HasPrefix(start, "\xff\xfe"), strings.HasPrefix(start, "\xfe\xff"):
		decoder := unicode.UTF16(unicode.LittleEndian, unicode.UseBOM).NewDecoder()
		return bufio.NewReaderSize(decoder.Reader(b), sampleBytes), nil
	case strings.HasPrefix(start, "\xef\xbb\xbf"):
		_, _ = b.Discard(3) // Peek has buffered them
	}
	return b, nil
}

// lineFeeds replaces carriage returns by line feeds.
type lineFeeds struct{ in io.Reader }

func (l lineFeeds) Read(p []byte) (n int, err error) {
	n, err = l.in.Read(p)
	for i := range p[:n] {
		if p[i] == '\r' {
			p[i] = '\n'
		}
	}
	return n, err
}

// separator returns the separator of a list's fields. text is the beginning of the list, or the
// whole list if all is set. A separator must divide each record into at least two fields. separator
// prefers one that gives all records the same number of fields, and among these one whose fields
// include the file name of an image. If no separator fits, the file's name decides.
func separator(file, text string, all bool) rune {
	ext := strings.ToLower(path.Ext(file))
	if ext == ".tsv" || ext == ".tab" {
		return '\t'
	}
	best, most := ',', 0
	for _, comma := range []rune{',', ';', '\t'} {
		if s := separates(text, comma, all); s > most {
			best, most = comma, s
		}
	}
	return best
}

// separates returns how well a separator fits the first records of a text. 0 means that it does not
// fit.
func separates(text string, comma rune, all bool) (fit int) {
	const records = 20
	r := csv.NewReader(strings.NewReader(text))
	r.Comma, r.FieldsPerRecord, r.LazyQuotes = comma, -1, true
	var sample [][]string
	for len(sample) <= records {
		record, err := r.Read()
		if err != nil {
			break
		}
		sample = append(sample, record)
	}
	if len(sample) > 1 && (!all || len(sample) > records) {
		sample = sample[:len(sample)-1] // the last record may be incomplete
	}
	if len(sample) == 0 || slices.ContainsFunc(sample, func(r []string) bool { return len(r) < 2 }) {
		return 0
	}
	fit = 1
	if !slices.ContainsFunc(sample, func(r []string) bool { return len(r) != len(sample[0]) }) {
		fit += 2
	}
	if slices.ContainsFunc(sample[len(sample)-1], claimsByName) {
		fit++
	}
	return fit
}

// read returns the next record and the number of its line. It returns io.EOF at the end. The record
// is valid until the next call.
func (t *listText) read() (record []string, line int, err error) {
	record, err = t.csv.Read()
	if err == nil {
		line, _ = t.csv.FieldPos(0)
		return record, line + t.skipped, nil
	}
	var parse *csv.ParseError
	if errors.As(err, &parse) {
		err = fmt.Errorf("column %d: %w: a field with a quote is written in quotes, and the quote twice: "+
			`"5"" x 7"""`, parse.Column, parse.Err)
		return nil, 0, &ListError{t.file, parse.Line + t.skipped, err}
	}
	if err != io.EOF {
		err = fmt.Errorf("imageloader: %s: %w", t.file, err)
	}
	return nil, 0, err
}

// separatorName returns the separator's name for messages.
func (t *listText) separatorName() string {
	switch t.csv.Comma {
	case ',':
		return "commas"
	case ';':
		return "semicolons"
	case '\t':
		return "tabs"
	}
	return fmt.Sprintf("%q", t.csv.Comma)
}
