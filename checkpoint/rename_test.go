//go:build linux

package checkpoint_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// A server has renamed the main file, and answers with an error: the checkpoint is in place.
func TestCommitAfterARenameThatReportsAnError(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "last.pt")
	s, err := checkpoint.NewRankWriter(path, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Abandon()
	v, d := dividedValue(t, 0, 1, 5)
	if err := s.Write(0, d.Parts(v)); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".tmp-"+s.ID(), path); err != nil { // Commit's rename then returns ENOENT
		t.Fatal(err)
	}
	if err := s.Commit(v, d); err != nil {
		t.Errorf("Commit: got %v, want no error: the file is in place", err)
	}
	requireDivided(t, path, 5)
}

// Abandon keeps the ranks' files if the main file has got its final name, although rank 0 does not
// know that.
func TestAbandonKeepsFilesOfACheckpointInPlace(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "last.pt")
	s, err := checkpoint.NewRankWriter(path, 1)
	if err != nil {
		t.Fatal(err)
	}
	v, d := dividedValue(t, 0, 1, 5)
	if err := s.Write(0, d.Parts(v)); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".tmp-"+s.ID(), path); err != nil {
		t.Fatal(err)
	}
	s.Abandon()
	want := []string{"last.pt", "last.pt-" + s.ID() + "-rank00000-of-00001.safetensors"}
	if names := files(t, dir); !slices.Equal(names, want) {
		t.Errorf("the folder has %v, want %v", names, want)
	}
}

// The name of an abandoned file is too long for the file system. The failed save leaves no file.
func TestFailedSaveWithALongNameLeavesNoFile(t *testing.T) {
	dir := t.TempDir()
	const suffix = ".safetensors.index.json"
	path := filepath.Join(dir, strings.Repeat("m", 230-len(suffix))+suffix)
	one := []torch.Named{{Name: "w", Tensor: nn.NewParameter(nn.Constant(1), 2)}}
	if err := checkpoint.SaveSharded(path, one, nil, 8); err == nil {
		t.Error("saving files with names of over 255 bytes: got no error, want one")
	}
	if names := files(t, dir); len(names) != 0 {
		t.Errorf("the folder has %v, want no file", names)
	}
}

// The old index cannot be read, so a new one could not record the ids of its files, and nobody
// would remove them. The save fails, and leaves the old index.
func TestSaveOverAnUnreadableIndexIsAnError(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "m.safetensors.index.json")
	if err := os.Symlink("/proc/self/mem", path); err != nil { // reading its first byte returns EIO
		t.Fatal(err)
	}
	one := []torch.Named{{Name: "w", Tensor: nn.NewParameter(nn.Constant(1), 2)}}
	err := checkpoint.SaveSharded(path, one, nil, 8)
	if !errors.Is(err, syscall.EIO) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "remove it") {
		t.Errorf("saving over an index that cannot be read: got error %v, want EIO with the path and what to do", err)
	}
	if names := files(t, dir); !slices.Equal(names, []string{filepath.Base(path)}) {
		t.Errorf("the folder has %v, want the old index alone", names)
	}
}

// Older versions gave the files of an index an id of 8 digits. A part's temporary file can be left
// under its abandoned name.
func TestSaveShardedRemovesOlderNames(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "m.safetensors.index.json")
	one := []torch.Named{{Name: "w", Tensor: nn.NewParameter(nn.Constant(1), 2)}}
	save := func() {
		t.Helper()
		if err := checkpoint.SaveSharded(path, one, nil, 8); err != nil {
			t.Fatal(err)
		}
	}
	old := filepath.Join(dir, "m-0123abcd-00001-of-00001.safetensors")
	index := `{"metadata": {}, "weight_map": {"w": "m-0123abcd-00001-of-00001.safetensors"}}`
	for name, text := range map[string]string{path: index, old: "x", old + ".tmp-0123456789ab-abandoned": "x"} {
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	save()
	if names := files(t, dir); len(names) != 2 {
		t.Errorf("the folder has %v, want an index and its file", names)
	}
}
