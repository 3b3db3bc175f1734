package index

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"
	"unicode/utf16"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// utf16Text returns a text in UTF-16 with a byte order mark.
func utf16Text(text string, order binary.AppendByteOrder) string {
	data := order.AppendUint16(nil, 0xfeff)
	for _, unit := range utf16.Encode([]rune(text)) {
		data = order.AppendUint16(data, unit)
	}
	return string(data)
}

// describeLabels prints the rows of a list with their classes.
func describeLabels(t *testing.T, l *List, multi bool) string {
	t.Helper()
	r, err := l.resolve(&Config{MultiLabel: multi})
	if err != nil {
		return err.Error()
	}
	rows := make([]string, len(l.rows))
	for name, row := range l.byPath {
		x := l.rows[row]
		text := name + "="
		if multi {
			var names []string
			for _, class := range r.lists[x.label] {
				names = append(names, r.classes[class])
			}
			text += strings.Join(names, "+")
		} else {
			text += r.classes[r.label[x.label]]
		}
		if x.group >= 0 {
			text += "/" + l.groups[x.group]
		}
		rows[row] = text
	}
	return strings.Join(rows, " ")
}

func TestEncodingsAndSeparators(t *testing.T) {
	const want = "a.jpg=cat b.jpg=dog"
	for name, c := range map[string]struct{ file, text string }{
		"semicolons":             {"l.csv", "path;label\na.jpg;cat\nb.jpg;dog\n"},
		"semicolons, no header":  {"l.csv", "a.jpg;cat;0,5\nb.jpg;dog;0,7\n"},
		"semicolons and commas":  {"l.csv", "path;label;score\na.jpg;cat;0,5\nb.jpg;dog;1\n"},
		"tabs in a .csv":         {"l.csv", "path\tlabel\na.jpg\tcat\nb.jpg\tdog\n"},
		"tabs in a .txt":         {"l.txt", "a.jpg\tcat\nb.jpg\tdog\n"},
		"Excel's directive":      {"l.csv", "sep=;\r\npath;label\r\na.jpg;cat\r\nb.jpg;dog\r\n"},
		"another separator":      {"l.csv", "sep=|\na.jpg|cat\nb.jpg|dog\n"},
		"Unicode text":           {"l.txt", utf16Text("path\tlabel\r\na.jpg\tcat\r\nb.jpg\tdog\r\n", binary.LittleEndian)},
		"UTF-16, big endian":     {"l.csv", utf16Text("path,label\na.jpg,cat\nb.jpg,dog", binary.BigEndian)},
		"UTF-8 mark, semicolons": {"l.csv", "\ufeffpath;label\r\na.jpg;cat\r\nb.jpg;dog"},
		"lines of an old Mac":    {"l.csv", "path,label\ra.jpg,cat\rb.jpg,dog\r"},
		"blank lines":            {"l.csv", "\n\npath,label\n\na.jpg,cat\n\nb.jpg,dog\n\n"},
	} {
		l, err := ReadList(c.file, strings.NewReader(c.text), ListFormat{}, false)
		if err != nil {
			t.Errorf("%s: %v, want no error", name, err)
		} else if got := describeLabels(t, l, false); got != want {
			t.Errorf("%s: got %s, want %s", name, got, want)
		}
	}
}

func TestFilesThatAreNoTableAreErrors(t *testing.T) {
	for text, want := range map[string]string{
		"PK\x03\x04\x14\x00\x06\x00":     "not a workbook or a zip: save the sheet as \"CSV UTF-8\"",
		"PAR1\x15\x04\x15\x00":           "not Parquet",
		"\x1f\x8b\x08\x00":               "compressed: unpack it",
		"p\x00a\x00t\x00h\x00,\x00":      "UTF-16 without a byte order mark: write it as UTF-8",
		"path,label\na.jpg,B\xe4r\n":     "l.csv:2: column 2 (label): the label \"B\\xe4r\" is not UTF-8",
		"path,label\na.jpg,\"a\x00b\"\n": "has a byte 0",
	} {
		_, err := ReadList("l.csv", strings.NewReader(text), ListFormat{}, false)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got the error %v, want %q", text, err, want)
		}
	}
}

func TestColumnsAreFound(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"usual names":          {"id,breed\nx1,cat\nx2,dog\n", "x1=cat x2=dog"},
		"a name and a space":   {"Image Index,Finding Labels,Age\na.png,No Finding,5\n", "a.png=No Finding"},
		"a data frame's index": {",filename,label\n0,a.jpg,cat\n1,b.jpg,dog\n", "a.jpg=cat b.jpg=dog"},
		"an extension":         {"photo,breed\na.jpg,cat\n", "a.jpg=cat"},
		"an extension later":   {"row,photo,label\n7,a.jpg,cat\n", "a.jpg=cat"},
		"label alone":          {"uid,target\nx1,cat\n", "x1=cat"},
		"a class named image":  {"a.jpg,image\nb.jpg,photo\n", "a.jpg=image b.jpg=photo"},
		"one-hot": {"image,MEL,NV,BCC\na,1.0,0.0,0.0\nb,0.0,0.0,1.0\nc,0.0,1.0,0.0\n",
			"a=MEL b=BCC c=NV"},
		"no header": {"a.jpg,cat,x\nb.jpg,dog,y\n", "a.jpg=cat b.jpg=dog"},
		"Windows":   {"path,label\nimages\\a.jpg,cat\n", "images/a.jpg=cat"},
	} {
		l, err := ReadList("l.csv", strings.NewReader(c.text), ListFormat{}, false)
		if err != nil {
			t.Errorf("%s: %v, want no error", name, err)
		} else if got := describeLabels(t, l, false); got != c.want {
			t.Errorf("%s: got %s, want %s", name, got, c.want)
		}
	}
	_, err := ReadList("l.csv", strings.NewReader("image,age,site\na.jpg,5,x\n"), ListFormat{}, false)
	if want := `l.csv:1: the columns are 1 "image", 2 "age", 3 "site", and which have the labels is unclear`; err == nil ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("got the error %v, want %q", err, want)
	}
}

func TestColumnsAreChosen(t *testing.T) {
	const text = "n,Path,kind,patient,site\n1,a,cat,p1,x\n2,b,dog,p2,y\n"
	labels := func(columns ...string) ListFormat { return ListFormat{LabelColumns: columns} }
	for _, c := range []struct {
		text  string
		f     ListFormat
		multi bool
		want  string
	}{
		{text, ListFormat{NameColumn: "path", LabelColumns: []string{"kind"}}, false, "a=cat b=dog"},
		{text, ListFormat{NameColumn: "2", LabelColumns: []string{"3"}}, false, "a=cat b=dog"},
		{text, ListFormat{LabelColumns: []string{"kind"}, GroupColumn: "patient"}, false, "a=cat/p1 b=dog/p2"},
		{text, ListFormat{LabelColumns: []string{"kind", "site"}}, true, "a=cat+x b=dog+y"},
		{text, ListFormat{LabelColumns: []string{"*"}, GroupColumn: "patient"}, true, "a=1+cat+x/p1 b=2+dog+y/p2"},
		{"a,1,cat\nb,2,dog\n", labels("3"), false, "a=cat b=dog"},
		{"a,1,cat\nb,2,dog\n", ListFormat{NameColumn: "2"}, false, "1=a 2=b"},
		{text, labels("kind", "site"), false, "l.csv:2: several columns of labels give an image several labels"},
		{text, labels("Kind", "species"), false, `l.csv:1: no column "species": the first line has the columns 1 "n", 2 "Path"`},
		{text, ListFormat{NameColumn: "kind", LabelColumns: []string{"kind"}}, false,
			"l.csv:1: column 3 (kind) is chosen for the names and for the labels"},
		{"path,g\na,b\n", ListFormat{LabelColumns: []string{"*"}, GroupColumn: "g"}, false,
			`l.csv:1: no column is left for the labels: the first line has the columns 1 "path", 2 "g"`},
		{text, labels("6"), false, `l.csv:1: no column "6"`},
		{"path,label,label\na,x,y\n", labels("label"), false, `l.csv:1: 2 columns have the name "label": give the position`},
		{"path,label,group\na,x,\n", ListFormat{GroupColumn: "group"}, false, `l.csv:2: column 3 (group): "a" has no group`},
		{"path,label,group\na,x,1\na,x,2\n", ListFormat{GroupColumn: "group"}, false,
			`l.csv:3: "a" is in line 2 already, with the group "1", and here with "2"`},
	} {
		l, err := ReadList("l.csv", strings.NewReader(c.text), c.f, c.multi)
		if err != nil {
			if !strings.Contains(err.Error(), c.want) {
				t.Errorf("%q, %+v: got the error %v, want %s", c.text, c.f, err, c.want)
			}
			continue
		}
		if got := describeLabels(t, l, c.multi); got != c.want {
			t.Errorf("%q, %+v: got %s, want %s", c.text, c.f, got, c.want)
		}
	}
}

func TestSeveralLabels(t *testing.T) {
	for _, c := range []struct{ text, separator, want string }{
		{"image_name,tags\na,haze primary\nb,clear\nc,primary haze\nd,\n", "", "a=haze+primary b=clear c=haze+primary d="},
		{"id,labels\na,No Finding\nb,Cyst|No Finding\n", "", "a=No Finding b=Cyst+No Finding"},
		{"id,labels\na,\"cat, dog\"\nb,dog\n", "", "a=cat+dog b=dog"},
		{"id;labels\na;\"cat;dog\"\nb;dog\n", "", "a=cat+dog b=dog"},
		{"id,labels\na,cat/dog\nb,dog\n", "/", "a=cat+dog b=dog"},
		{"id,labels\na,big cat\nb,dog\n", "|", "a=big cat b=dog"},
		{"id,labels\na,2 10\nb,0\n", "", "a=10+2 b=0"},
		{"id,x,y,z\na,1,0,1\nb,0,0,0\nc,1.0,0.0,1.0\n", "", "a=x+z b= c=x+z"},
		{"id,t1,t2\na,cat,\nb,dog,cat\n", "", `l.csv:1: the columns are 1 "id", 2 "t1", 3 "t2", and which`},
		{"id,x,y\na,1,0\nb,0,2\n", "", `l.csv:3: column 3 (y): "2" is neither 0 nor 1, and the label columns of line 2`},
		{"id,x,y\na,1,0\nb,0,\n", "", `l.csv:3: column 3 (y): "" is neither 0 nor 1`},
	} {
		l, err := ReadList("l.csv", strings.NewReader(c.text), ListFormat{Separator: c.separator}, true)
		if err != nil {
			if !strings.Contains(err.Error(), c.want) {
				t.Errorf("%q: got the error %v, want %s", c.text, err, c.want)
			}
			continue
		}
		if got := describeLabels(t, l, true); got != c.want {
			t.Errorf("%q: got %s, want %s", c.text, got, c.want)
		}
	}
	for text, want := range map[string]string{
		"id,x,y\na,1,0\nb,1,1\n": `l.csv:3: "b" has 2 labels (x, y), and one is needed (several need Options.MultiLabel): correct the line`,
		"id,x,y\na,1,0\nb,0,0\n": `l.csv:3: "b" has 0 labels, and one is needed`,
		"id,x,x\na,1,0\n":        `l.csv:1: two columns of labels have the name "x"`,
	} {
		_, err := ReadList("l.csv", strings.NewReader(text), ListFormat{}, false)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got the error %v, want %s", text, err, want)
		}
	}
}

// All one-hot columns are classes, with or without an image.
func TestOneHotColumnsAreClasses(t *testing.T) {
	for _, multi := range []bool{false, true} {
		l, err := ReadList("l.csv", strings.NewReader("id,dog,cat,hen\na,1,0,0\nb,0,1,0\n"), ListFormat{}, multi)
		if err != nil {
			t.Fatal(err)
		}
		r, err := l.resolve(&Config{MultiLabel: multi})
		if got := fmt.Sprint(r.classes, err); got != "[cat dog hen] <nil>" {
			t.Errorf("multi %v: got %s, want [cat dog hen] <nil>", multi, got)
		}
		if _, err := l.resolve(&Config{MultiLabel: multi, Classes: []string{"cat", "dog"}}); err != nil {
			t.Errorf("multi %v, with the classes that the rows use: got %v, want no error", multi, err)
		}
		want := `l.csv:3: "b" is of class "cat", which is not one of the expected classes: dog`
		if _, err := l.resolve(&Config{MultiLabel: multi, Classes: []string{"dog"}}); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("multi %v: got the error %v, want %s", multi, err, want)
		}
	}
}

// matchAll matches the members of an archive. "=" separates a member from its row's line.
func matchAll(t *testing.T, list string, f ListFormat, members ...string) (got string, report *ListReport, err error) {
	t.Helper()
	l, err := ReadList("l.csv", strings.NewReader(list), f, false)
	if err != nil {
		t.Fatal(err)
	}
	m := newListMatcher(l, "a.zip")
	var found []string
	for _, name := range members {
		row, err := m.match(name, claims(&archive.Member{Name: name}, nil))
		if err != nil {
			return "", nil, err
		}
		if row >= 0 {
			found = append(found, fmt.Sprintf("%s=%d", name, l.rows[row].line))
		}
	}
	report, err = m.finish(testConfig().Logger)
	return strings.Join(found, " "), report, err
}

func TestNamesFitMembers(t *testing.T) {
	for name, c := range map[string]struct {
		list    string
		f       ListFormat
		members string
		want    string
	}{
		"ids":        {"1,x\n2,x", ListFormat{}, "train/1.jpg train/2.png train/2.txt notes.csv", "train/1.jpg=1 train/2.png=2"},
		"file names": {"1.jpg,x\n2.jpg,y", ListFormat{}, "ds/x/1.jpg ds/y/2.jpg", "ds/x/1.jpg=1 ds/y/2.jpg=2"},
		"the zip's folder": {"train/1.jpg,x\ntest/1.jpg,x", ListFormat{}, "ds/test/1.jpg ds/train/1.jpg ds/val/1.jpg",
			"ds/test/1.jpg=2 ds/train/1.jpg=1"},
		"longer paths":  {"/home/me/ds/1.jpg,x\n/home/me/ds/b/2.jpg,x", ListFormat{}, "ds/1.jpg ds/b/2.jpg", "ds/1.jpg=1 ds/b/2.jpg=2"},
		"other folders": {"train/1.jpg,x\ntrain/2.jpg,x", ListFormat{}, "train/1.jpg test/2.jpg", "train/1.jpg=1"},
		"dots in ids":   {"1.2.840,x\n1.2.841,x", ListFormat{}, "1.2.840.png 1.2.841.png 1.2.png", "1.2.840.png=1 1.2.841.png=2"},
		"exact first":   {"1.jpg,x\na/2.jpg,y", ListFormat{}, "1.jpg a/1.jpg a/2.jpg", "1.jpg=1 a/2.jpg=2"},
		"a folder":      {"1,x\n2,y", ListFormat{Folder: "train"}, "test/1.jpg train/1.jpg train/2.jpg", "train/1.jpg=1 train/2.jpg=2"},
		"a folder, twice": {"train/1,x\n2,y", ListFormat{Folder: "./train/"}, "test/2.jpg train/1.jpg train/2.jpg",
			"train/1.jpg=1 train/2.jpg=2"},
		"the root":       {"1,x\na/2,y", ListFormat{Folder: "."}, "b/1.jpg 1.jpg a/2.jpg b/a/2.jpg", "1.jpg=1 a/2.jpg=2"},
		"any member":     {"a/notes.txt,x", ListFormat{}, "a/notes.txt", "a/notes.txt=1"},
		"same row twice": {"1,x\n1.jpg,x", ListFormat{}, "a/1.jpg", "a/1.jpg=2"},
		"member twice":   {"1,x", ListFormat{}, "a/1.jpg a/1.jpg", "a/1.jpg=1 a/1.jpg=1"},
		"hidden":         {"1,x\n.2,y", ListFormat{}, "a/1.jpg .2", "a/1.jpg=1 .2=2"},
	} {
		got, _, err := matchAll(t, c.list, c.f, strings.Fields(c.members)...)
		if err != nil || got != c.want {
			t.Errorf("%s: got %s, error %v, want %s", name, got, err, c.want)
		}
	}
	for name, c := range map[string]struct{ list, members, want string }{
		"two folders": {"1,x\n2,x", "train/2.jpg train/1.jpg test/1.jpg",
			`l.csv:1: "1" may be "train/1.jpg" or "test/1.jpg" in a.zip: choose the folder`},
		"two extensions": {"1,x", "1.jpg 1.png", `"1" may be "1.jpg" or "1.png"`},
		"two rows":       {"1,x\n1.jpg,y", "a/1.jpg", `l.csv:2: "1.jpg" is the image "1" of line 1, with another label`},
		"no image":       {"1,x\n2,y", "3.jpg", `l.csv:1: "1" is no member of a.zip (2 lines in all name none)`},
		"a header":       {"uid,kind\n1,x\n2,x", "1.jpg 2.jpg", `l.csv:1: "uid" is no member of a.zip: names in column 1`},
	} {
		if _, _, err := matchAll(t, c.list, ListFormat{}, strings.Fields(c.members)...); err == nil ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got the error %v, want %s", name, err, c.want)
		}
	}
}

func TestListReportCounts(t *testing.T) {
	_, got, err := matchAll(t, "id,label\n1,x\n7,y\n1,x\n2,y\n9,x\n2.jpg,y\n", ListFormat{},
		"a/1.jpg", "a/2.jpg", "a/3.jpg", "a/4.png", "n.txt")
	want := ListReport{File: "l.csv", Columns: "names in column 1 (id), labels in column 2 (label)", Rows: 4, Duplicates: 2,
		WithoutImage: 2, FirstWithout: "7", FirstWithoutLine: 3, Unlisted: 2, FirstUnlisted: "a/3.jpg"}
	if err != nil || *got != want {
		t.Errorf("got %+v, error %v, want %+v", got, err, want)
	}
}
