package archive_test

import (
	"archive/tar"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// walked lists the members of an archive with their kinds, and its empty folders.
func walked(t *testing.T, path string) (members, empty []string) {
	t.Helper()
	a, err := archive.Open(t.Context(), path, archive.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	for m, err := range a.Members() {
		if err != nil {
			t.Fatal(err)
		}
		members = append(members, fmt.Sprintf("%s %d", m.Name, m.Kind))
	}
	return members, a.EmptyFolders()
}

// TestLinksAreFollowed: a walk over a directory reads the targets of symbolic links, in the order
// of the links' names, once for each link. Broken links and loops are members.
func TestLinksAreFollowed(t *testing.T) {
	elsewhere := archivetest.Extract(t,
		[]archivetest.Member{{Name: "cat/1.jpg", Data: "one"}, {Name: "store/ab", Data: "x"}})
	link := func(name, to string) archivetest.Member {
		return archivetest.Member{Name: name, Kind: tar.TypeSymlink, Link: to}
	}
	root := archivetest.Extract(t, []archivetest.Member{
		{Name: "bird/2.jpg", Data: "two"},
		link("bird/link.jpg", filepath.Join(elsewhere, "store/ab")),
		link("cat", filepath.Join(elsewhere, "cat")),
		link("dog", filepath.Join(elsewhere, "cat")),
		link("again", "bird"),
		link("bird/up", ".."),
		link("itself", "itself"),
		link("lost", "nowhere"),
		{Name: "none/", Kind: tar.TypeDir},
	})
	want := []string{
		"again/2.jpg 0", "again/link.jpg 0", fmt.Sprintf("again/up %d", archive.LinkLoop),
		"bird/2.jpg 0", "bird/link.jpg 0", fmt.Sprintf("bird/up %d", archive.LinkLoop), "cat/1.jpg 0", "dog/1.jpg 0",
		fmt.Sprintf("itself %d", archive.BrokenLink), fmt.Sprintf("lost %d", archive.BrokenLink),
	}
	got, empty := walked(t, root)
	if !slices.Equal(got, want) || !slices.Equal(empty, []string{"none"}) {
		t.Errorf("members\n%q, empty %q, want\n%q, empty none", got, empty, want)
	}
	alias := filepath.Join(t.TempDir(), "alias")
	if err := os.Symlink(root, alias); err != nil {
		t.Fatal(err)
	}
	if got, _ := walked(t, alias); !slices.Equal(got, want) {
		t.Errorf("through a link to the root: members\n%q, want\n%q", got, want)
	}
}

// TestEmptyFoldersAreKnown: a walk knows at its end which directories of a tar are empty, in any
// order of the headers and even if some headers are missing.
func TestEmptyFoldersAreKnown(t *testing.T) {
	dir := func(name string) archivetest.Member { return archivetest.Member{Name: name, Kind: tar.TypeDir} }
	file := func(name string) archivetest.Member { return archivetest.Member{Name: name, Data: "x"} }
	data := archivetest.Tar(t, dir("./"), dir("./a/"), dir("./a/none/"), dir("./a/b/"), file("./a/b/1"),
		dir("c/"), file("c/d/e/1"), dir("f"),
		dir("c/d/e/"), file("c/d/e/2"), file("top"))
	want := []string{"a/none", "f"}
	if _, got := walked(t, archivetest.WriteFile(t, "a.tar", data)); !slices.Equal(got, want) {
		t.Errorf("empty folders %q, want %q", got, want)
	}
}
