package checkpoint_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
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
