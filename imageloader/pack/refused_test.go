package pack_test

import (
	"archive/zip"
	"bytes"
	"errors"
	"image"
	"image/png"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/pack"
	"github.com/torchstream/torchstream/internal/parquettest"
	"github.com/torchstream/torchstream/internal/safefile"
)

// TestWrongOptionsAreNamed: the error says which option is wrong, before a file is made.
func TestWrongOptionsAreNamed(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, photos(t, 4)...))
	train := pack.Part{Name: "train"}
	for says, c := range map[string]struct {
		in imageloader.Options
		o  pack.Options
	}{
		"Options.Shards and Options.ShardBytes exclude": {o: pack.Options{Shards: 2, ShardBytes: 1 << 20}},
		`no format "zip": want tar, tgz or webdataset`:  {o: pack.Options{Format: "zip"}},
		"Options.Side is -1":                            {o: pack.Options{Side: -1}},
		"Options.Side is 65536, not in 0 to 32768":      {o: pack.Options{Side: 1 << 16}},
		"Options.Quality is 101, not in 1 to 100":       {o: pack.Options{Quality: 101}},
		"Options.Quality is -1":                         {o: pack.Options{Quality: -1}},
		"Options.Shards is -1":                          {o: pack.Options{Shards: -1}},
		"Options.Shards is 2147483647":                  {o: pack.Options{Shards: math.MaxInt32}},
		"Options.ShardBytes is -1":                      {o: pack.Options{ShardBytes: -1}},
		"Options.Upright needs Options.Side":            {o: pack.Options{Upright: true}},
		`part "../x": a name has letters`:               {o: pack.Options{Parts: []pack.Part{{Name: "../x"}}}},
		`part "train": a name has letters, digits, - and _, and each part has another`: {
			o: pack.Options{Parts: []pack.Part{train, train}}},
		`part "train": field HeldOut is 2`: {
			o: pack.Options{Parts: []pack.Part{{Name: "train", Part: imageloader.Part{HeldOut: 2}}}}},
		"List and WebDataset exclude each other": {in: imageloader.Options{List: "a.csv", WebDataset: true}},
		"MultiLabel, Classes and Masks are not":  {in: imageloader.Options{Classes: []string{"bee"}}},
		"the option Workers is -1":               {in: imageloader.Options{Workers: -1}},
		"the option BadSamples is substitute, not Fail or Skip": {
			in: imageloader.Options{BadSamples: imageloader.Substitute}},
	} {
		dir := filepath.Join(t.TempDir(), "out")
		_, err := pack.Write(t.Context(), path, dir, c.in, c.o)
		if err == nil || !strings.Contains(err.Error(), says) || !strings.HasPrefix(err.Error(), "pack: ") {
			t.Errorf("got error %v, want one with %q", err, says)
		}
		if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: the output folder has been made: %v", says, err)
		}
	}
}

// TestDivideDecidesTheParts: the result of Divide is checked like Options.Parts. If it is nil,
// Options.Parts applies.
func TestDivideDecidesTheParts(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, photos(t, 12)...))
	failed := errors.New("which folder is for testing?")
	for says, divide := range map[string]func([]string) ([]pack.Part, error){
		failed.Error():                    func([]string) ([]pack.Part, error) { return nil, failed },
		`part "a/b": a name has`:          func([]string) ([]pack.Part, error) { return []pack.Part{{Name: "a/b"}}, nil },
		`is in the parts "one" and "two"`: func([]string) ([]pack.Part, error) { return []pack.Part{{Name: "one"}, {Name: "two"}}, nil },
	} {
		if _, err := pack.Write(t.Context(), path, t.TempDir(), imageloader.Options{},
			pack.Options{Divide: divide}); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("got error %v, want one with %q", err, says)
		}
	}
	var folders []string
	r := write(t, path, t.TempDir(), imageloader.Options{}, pack.Options{Divide: func(list []string) ([]pack.Part, error) {
		folders = list
		return nil, nil
	}})
	if len(folders) != len(r.Classes) || len(r.Parts) != 1 || r.Parts[0].Name != "train" {
		t.Errorf("got the folders %q and the parts %+v, want %d folders and the part train", folders, r.Parts,
			len(r.Classes))
	}
}

// TestInputsThatCannotBePackedAreRefused: the error says what is wrong with the input.
func TestInputsThatCannotBePackedAreRefused(t *testing.T) {
	rows := []parquettest.Row{{Path: "a.png", Image: archivetest.PNG(t, photo(t, 1, 8, 8)), Label: 0}}
	parquet := archivetest.WriteFile(t, "a.parquet", parquettest.File(t, rows, parquettest.Layout{Classes: []string{"a"}}))
	plain := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, photos(t, 4)...))
	for _, c := range []struct {
		path, says string
		in         imageloader.Options
		o          pack.Options
	}{
		{parquet, "is a Parquet file, whose labels are in a column", imageloader.Options{WebDataset: true}, pack.Options{}},
		{plain, `for the part "test"`, imageloader.Options{},
			pack.Options{Parts: []pack.Part{{Name: "test", Part: imageloader.Part{Folder: "test"}}}}},
		{plain + ".gone", "no such file", imageloader.Options{}, pack.Options{}},
		{plain, "list: ", imageloader.Options{List: plain + ".gone.csv"}, pack.Options{}},
	} {
		if _, err := pack.Write(t.Context(), c.path, t.TempDir(), c.in, c.o); err == nil ||
			!strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: got error %v, want one with %q", filepath.Base(c.path), err, c.says)
		}
	}
}

// TestJournalOfAnotherKindIsRefused: a folder whose journal cannot be continued stays as it is.
func TestJournalOfAnotherKindIsRefused(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, photos(t, 24)...))
	o := pack.Options{ShardBytes: 10 << 10}
	whole := t.TempDir()
	write(t, path, whole, imageloader.Options{}, o)
	journal := files(t, whole)[pack.JournalFile]
	lines := strings.SplitAfter(journal, "\n")
	for says, text := range map[string]string{
		"is not the journal of a pack":         "notes without a line's end",
		":1 is not a line of a pack's journal": "notes\n",
		":2 is not a line of a pack's journal": lines[0] + lines[0],
		":3 is not a line of a pack's journal": lines[0] + lines[1] + "{\"shard\":\n" + lines[2],
		"has a pack of version 99, not ":       strings.Replace(journal, `"version":2`, `"version":99`, 1),
		"of an input with other samples":       strings.Replace(journal, `"samples":"`, `"samples":"x`, 1),
		"with other labels":                    strings.Replace(journal, `"labels":"`, `"labels":"x`, 1),
		"files that have changed":              strings.Replace(journal, `"files":"`, `"files":"x`, 1),
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, pack.JournalFile), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		_, err := pack.Write(t.Context(), path, dir, imageloader.Options{}, o)
		if err == nil || !strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), dir) {
			t.Errorf("got error %v, want one of %s with %q", err, dir, says)
		}
		if got := files(t, dir); len(got) != 1 || got[pack.JournalFile] != text {
			t.Errorf("%s: the folder has %d files, or another journal, want the journal alone", says, len(got))
		}
	}
}

// TestFolderOfARunningPackIsBusy: a second pack into the folder of a running one is refused, and
// the first one is undisturbed.
func TestFolderOfARunningPackIsBusy(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, photos(t, 12)...))
	dir, calls := t.TempDir(), 0
	o := pack.Options{}
	o.Progress = func(p imageloader.Progress) {
		if p.TotalBytes == 0 || p.Members != 6 {
			return
		}
		calls++
		var busy *safefile.BusyError
		if _, err := pack.Write(t.Context(), path, dir, imageloader.Options{}, pack.Options{}); !errors.As(err, &busy) ||
			!strings.Contains(err.Error(), dir) {
			t.Errorf("a second pack: got error %v, want a *safefile.BusyError of %s", err, dir)
		}
	}
	r := write(t, path, dir, imageloader.Options{}, o)
	if calls == 0 || r.Parts[0].Samples != 12 {
		t.Errorf("got %d second packs and %d samples, want some and 12", calls, r.Parts[0].Samples)
	}
}

// TestOutputThatIsAFileIsRefused: if the output is a file, the error names the file, and the file
// stays.
func TestOutputThatIsAFileIsRefused(t *testing.T) {
	data := archivetest.Tar(t, photos(t, 4)...)
	path := archivetest.WriteFile(t, "a.tar", data)
	file := archivetest.WriteFile(t, "out", []byte("precious"))
	for name, input := range map[string]string{"random access": path,
		"a spool": archivetest.WriteFile(t, "a.zst", archivetest.Zstd(t, data))} {
		for _, dir := range []string{file, filepath.Join(file, "below")} {
			_, err := pack.Write(t.Context(), input, dir, imageloader.Options{}, pack.Options{})
			if err == nil || !strings.Contains(err.Error(), file) {
				t.Errorf("%s into %s: got error %v, want one that names it", name, dir, err)
			}
		}
	}
	if got, err := os.ReadFile(file); err != nil || !bytes.Equal(got, []byte("precious")) {
		t.Errorf("the file has %q, error %v, want it unchanged", got, err)
	}
}

// TestFinishedPackIsDone: a pack of the same input into its finished folder changes nothing, and
// reports what is there.
func TestFinishedPackIsDone(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, photos(t, 24)...))
	dir, o := t.TempDir(), pack.Options{ShardBytes: 10 << 10}
	first := write(t, path, dir, imageloader.Options{}, o)
	want := files(t, dir)
	again := write(t, path, dir, imageloader.Options{}, o)
	if names := differences(files(t, dir), want); len(names) > 0 {
		t.Errorf("the second pack changed %q, want nothing", names)
	}
	if again.Continued != first.Parts[0].Files || again.Parts[0].Samples != 24 {
		t.Errorf("got %d shards continued and %d samples, want %d and 24", again.Continued, again.Parts[0].Samples,
			first.Parts[0].Files)
	}
}

// faultyZip returns a zip of stored members in which the content of each member named in damaged is
// changed.
func faultyZip(t *testing.T, members []archivetest.Member, damaged ...string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := zip.NewWriter(&b)
	for _, m := range members {
		to, err := w.CreateHeader(&zip.FileHeader{Name: m.Name, Method: zip.Store})
		if err == nil {
			_, err = io.WriteString(to, m.Data)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	data := b.Bytes()
	for _, m := range members {
		if at := bytes.Index(data, []byte(m.Data)); at >= 0 && slices.Contains(damaged, m.Name) {
			data[at+len(m.Data)/2] ^= 0xff
		}
	}
	return data
}

// checkLeftOut checks that a pack under Skip leaves out the samples of want. want has words of
// their errors, by name. Under Fail, each of these samples must be the error of a pack that has no
// other bad sample.
func checkLeftOut(t *testing.T, path string, in imageloader.Options, o pack.Options, samples int, want map[string]string) {
	t.Helper()
	in.BadSamples = imageloader.Skip
	r := write(t, path, t.TempDir(), in, o)
	if r.Parts[0].Samples != samples || len(r.LeftOut) != len(want) {
		t.Errorf("got %d samples, and left out %+v, want %d samples and %d left out", r.Parts[0].Samples, r.LeftOut,
			samples, len(want))
	}
	for _, l := range r.LeftOut {
		if says := want[l.Name]; says == "" || !strings.Contains(string(l.Reason)+": "+l.Detail, says) {
			t.Errorf("left out %q as %s: %s, want %q", l.Name, l.Reason, l.Detail, says)
		}
	}
	in.BadSamples = imageloader.Fail
	_, err := pack.Write(t.Context(), path, t.TempDir(), in, o)
	var bad *imageloader.SampleError
	if !errors.As(err, &bad) || want[bad.Name] == "" || !strings.Contains(err.Error(), want[bad.Name]) {
		t.Errorf("under Fail: got error %v, want one of the bad samples", err)
	}
}

// TestEveryKindOfBadSampleIsLeftOut: samples that a loader would refuse are not written.
func TestEveryKindOfBadSampleIsLeftOut(t *testing.T) {
	members := photos(t, 6)
	folder := filepath.Dir(members[0].Name)
	var long bytes.Buffer
	if err := png.Encode(&long, image.NewGray(image.Rect(0, 0, 40_000, 40))); err != nil {
		t.Fatal(err)
	}
	members = append(members,
		archivetest.Member{Name: folder + "/text.jpg", Data: "no image"},
		archivetest.Member{Name: folder + "/large.jpg", Data: members[0].Data + strings.Repeat("\x00", 1<<20)},
		archivetest.Member{Name: folder + "/long.png", Data: long.String()},
		archivetest.Member{Name: folder + "/sum.jpg", Data: archivetest.JPEG(t, photo(t, 99, 30, 20))})
	path := archivetest.WriteFile(t, "a.zip", faultyZip(t, members, folder+"/sum.jpg"))
	checkLeftOut(t, path, imageloader.Options{MaxSampleBytes: 1 << 20, NoIndex: true}, pack.Options{Side: 39}, 6,
		map[string]string{
			folder + "/text.jpg":  "not an image",
			folder + "/large.jpg": "too large",
			folder + "/long.png":  "it would have 39000 x 39 pixels, over 32768 a side",
			folder + "/sum.jpg":   "damaged",
		})
}

// TestBadMembersOfAWebDatasetSampleLeaveItOut: a sample whose caption is damaged or too large is
// left out as a whole.
func TestBadMembersOfAWebDatasetSampleLeaveItOut(t *testing.T) {
	members := webMembers(t, 0, 6)
	for i := range members {
		if members[i].Name == "s/002.txt" {
			members[i].Data = strings.Repeat("long ", 1<<18)
		}
	}
	path := archivetest.WriteFile(t, "a.zip", faultyZip(t, members, "s/004.txt"))
	checkLeftOut(t, path, imageloader.Options{MaxSampleBytes: 1 << 20, WebDataset: true, NoIndex: true},
		pack.Options{DropClasses: true}, 4, map[string]string{"s/002.txt": "too large", "s/004.txt": "damaged"})
}

// TestSecondImagesNeedWebDataset: a sample with a second image is refused in two cases. In a
// directory, the second image would become another sample. With Options.Side, only the first image
// would be resized.
func TestSecondImagesNeedWebDataset(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, webMembers(t, 0, 4)...))
	for says, o := range map[string]pack.Options{
		": use -format webdataset": {Format: pack.Tar},
		": pack without -side":     {Side: 10},
	} {
		_, err := pack.Write(t.Context(), path, t.TempDir(), imageloader.Options{WebDataset: true}, o)
		if err == nil || !strings.HasPrefix(err.Error(), "pack: "+path+": \"s/") || !strings.HasSuffix(err.Error(), says) {
			t.Errorf("got error %v, want one of the input's member with %q", err, says)
		}
	}
}
