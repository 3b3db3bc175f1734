package index

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// describeList prints the rows of a list.
func describeList(l *List) string {
	rows := make([]string, len(l.rows))
	for name, row := range l.byPath {
		rows[row] = fmt.Sprintf("%s=%s@%d", name, l.labels[l.rows[row].label].name, l.rows[row].line)
	}
	return strings.Join(rows, " ")
}

func TestListsAreRead(t *testing.T) {
	for name, c := range map[string]struct{ file, text, want string }{
		"two columns":          {"l.csv", "a/1.jpg,cat\nb.jpg,dog\n", "a/1.jpg=cat@1 b.jpg=dog@2"},
		"no newline at end":    {"l.csv", "a.jpg,cat", "a.jpg=cat@1"},
		"more columns":         {"l.csv", "a.jpg,cat,0.5,x\nb.jpg,dog", "a.jpg=cat@1 b.jpg=dog@2"},
		"a header":             {"l.csv", "Label,Note,PATH\ncat,n,a.jpg\n", "a.jpg=cat@2"},
		"other names":          {"l.csv", "filename,class\na.jpg,cat\n", "a.jpg=cat@2"},
		"path before filename": {"l.csv", "filename,path,class\nx,a.jpg,cat\n", "a.jpg=cat@2"},
		"half a header":        {"l.csv", "path,cat\n", "path=cat@1"},
		"byte order mark":      {"l.csv", "\ufeffpath,label\na.jpg,cat\n", "a.jpg=cat@2"},
		"Windows lines":        {"l.csv", "a.jpg,cat\r\n\r\nb.jpg,dog\r\n", "a.jpg=cat@1 b.jpg=dog@3"},
		"quotes and spaces": {"l.csv", "\"a, \"\"b\"\".jpg\", cat \n c.jpg ,\"black dog\"\n",
			"a, \"b\".jpg=cat@1 c.jpg=black dog@2"},
		"a line of two": {"l.csv", "\"a\nb.jpg\",cat\nc.jpg,dog\n", "a\nb.jpg=cat@1 c.jpg=dog@3"},
		"cleaned":       {"l.csv", "./a//b/../c.jpg,cat\n", "a/c.jpg=cat@1"},
		"tabs":          {"l.TSV", "a,b.jpg\tcat\nc \"d\".jpg\tdog\n", "a,b.jpg=cat@1 c \"d\".jpg=dog@2"},
	} {
		l, err := ReadList(c.file, strings.NewReader(c.text), ListFormat{}, false)
		if err != nil {
			t.Errorf("%s: %v, want no error", name, err)
		} else if got := describeList(l); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

// TestListErrorsNameTheLine covers every error of a list.
func TestListErrorsNameTheLine(t *testing.T) {
	long := strings.Repeat("x", archive.MaxNameBytes+1)
	for text, want := range map[string]string{
		"":                             "the list has no lines",
		"path,label\n":                 "the list has no lines",
		"a.jpg,cat\nb.jpg\n":           "l.csv:2: 1 column, and 2 are needed: names are in column 1",
		"label,x,path\ncat,y\n":        "l.csv:2: 2 columns, and 3 are needed: names are in column 3 (path), labels in",
		"a.jpg,cat\n,dog\n":            "l.csv:2: column 1: the path is empty",
		"a.jpg,cat\nb.jpg,  \n":        `l.csv:2: column 2: "b.jpg" has no label`,
		"a.jpg,cat\nb,c\n./a.jpg,dog":  `l.csv:3: "a.jpg" is in line 1 already, with the label "cat", and here with "dog"`,
		"a.jpg,cat\n" + long + ",dog":  "l.csv:2: column 1: a path has more than",
		"a.jpg," + long:                "l.csv:1: column 2: a label has more than",
		"a.jpg,cat\nb.jpg,\"dog\nx,y":  `l.csv:3: column 4: extraneous or missing " in quoted-field`,
		"a.jpg,cat\nb\"c.jpg,dog\nx,y": `l.csv:2: column 2: bare " in non-quoted-field`,
		"\x1f\x8b\x08\x00\x00\x00\x00": "l.csv: the list is compressed: unpack it",
	} {
		_, err := ReadList("l.csv", strings.NewReader(text), ListFormat{}, false)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.40q: error %v, want %s", text, err, want)
		}
		var line *ListError
		if strings.Contains(want, "l.csv:") && !strings.Contains(want, "l.csv: ") && !errors.As(err, &line) {
			t.Errorf("%.40q: %T", text, err)
		}
	}
}

func TestListLabelsAreNumberedLikeWebDatasets(t *testing.T) {
	for text, c := range map[string]struct {
		given []string
		want  string
	}{
		"a,2\nb,0\nc,02\n":      {nil, "[0 1 2] [2 0 2]"},
		"a,10\nb,9\nc,cat\n":    {nil, "[10 9 cat] [0 1 2]"},
		"a,dog\nb,cat\nc,dog\n": {nil, "[cat dog] [1 0]"},
		"a,1\nb,0\n":            {[]string{"1", "0", "2"}, "[1 0 2] [0 1]"},
		"a,1\nb,-1\n":           {nil, `imageloader: l.csv:2: "b" has the label "-1"`},
		"a,cat\nb,dog\nc,dog":   {[]string{"cat"}, `imageloader: l.csv:2: "b" is of class "dog"`},
		"a,cat\nb,dog":          {[]string{"cat", "cat"}, "twice"},
	} {
		l, err := ReadList("l.csv", strings.NewReader(text), ListFormat{}, false)
		if err != nil {
			t.Fatal(err)
		}
		r, err := l.resolve(&Config{Classes: c.given})
		got := fmt.Sprint(r.classes, " ", r.label)
		if err != nil {
			got = err.Error()
		}
		if got = strings.ReplaceAll(got, "[02 ", "["); !strings.Contains(got, c.want) {
			t.Errorf("%q: %s, want %s", text, got, c.want)
		}
	}
}

// FuzzList: reading any bytes as a list ends, and the result is consistent. Each row has a label
// that resolves, and finds the image of its name.
func FuzzList(f *testing.F) {
	for _, text := range []string{"path,label\na,b\n", "a,\"b\"\"c\"\n", "\ufeffa,b", "a\tb\n\"", "a,b\r\na,b", ",\n",
		"sep=;\nid;x;y\n1;0;1\n2;1;0\n", "image,tags\n/a/b/1.jpg,cat|dog\n/a/c/2,\n", "\xff\xfea\x00,\x00b\x00",
		"id,label,g\n1,x,p\n1.jpg,x,p\n", "a,b\ra,b", "PK\x03\x04", "x\\y.jpg,1\n"} {
		for how := range uint8(8) {
			f.Add(text, how)
		}
	}
	f.Fuzz(func(t *testing.T, text string, how uint8) {
		file, multi, format := "l.csv", how&2 != 0, ListFormat{}
		if how&1 != 0 {
			file = "l.tsv"
		}
		if how&4 != 0 {
			format = ListFormat{LabelColumns: []string{"*"}, GroupColumn: "2"}
		}
		l, err := ReadList(file, strings.NewReader(text), format, multi)
		if err != nil {
			if !strings.HasPrefix(err.Error(), "imageloader: "+file) {
				t.Errorf("%v names no list, want an error beginning with %q", err, "imageloader: "+file)
			}
			return
		}
		if len(l.byPath) != len(l.rows) || len(l.labels) > len(l.rows)+l.duplicates {
			t.Errorf("%d paths, %d rows, %d labels", len(l.byPath), len(l.rows), len(l.labels))
		}
		for name, row := range l.byPath {
			if x := l.rows[row]; name == "" || int(x.label) >= len(l.labels) || x.line < 1 ||
				int(x.line) > 1+strings.Count(text, "\n")+strings.Count(text, "\r") || int(x.group) >= len(l.groups) {
				t.Errorf("%q: %+v", name, x)
			}
		}
		if r, err := l.resolve(&Config{MultiLabel: multi}); err == nil {
			checkResolved(t, l, r, multi)
		}
		m := newListMatcher(l, "a.tar")
		for name, row := range l.byPath {
			if got, err := m.match(name, true); err == nil && got != row {
				t.Errorf("%q: got row %d, want %d", name, got, row)
			}
		}
		if r, err := m.finish(testConfig().Logger); err == nil && (r.WithoutImage > r.Rows || r.Rows > len(l.rows)) {
			t.Errorf("got the report %+v of %d rows", r, len(l.rows))
		}
	})
}

// checkResolved requires that all labels are numbers of classes.
func checkResolved(t *testing.T, l *List, r listLabels, multi bool) {
	t.Helper()
	all := r.lists
	if !multi {
		all = [][]int32{r.label}
	}
	if multi && len(r.lists) != len(l.labels) || !multi && len(r.label) != len(l.labels) {
		t.Errorf("got %d lists and %d labels, want %d", len(r.lists), len(r.label), len(l.labels))
	}
	for _, list := range all {
		for _, label := range list {
			if label < 0 || int(label) >= len(r.classes) {
				t.Errorf("got the label %d of %d classes", label, len(r.classes))
			}
		}
	}
}
