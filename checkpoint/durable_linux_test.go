package checkpoint_test

import (
	"errors"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/internal/foldersync"
	"github.com/torchstream/torchstream/torch"
)

// A save whose folder cannot be synced returns ErrNotDurable with the reason. The new checkpoint
// has replaced the old one, and no unfinished file stays.
func TestSaveWithoutFolderSyncIsNotDurable(t *testing.T) {
	tensor := func(values ...float32) []torch.Named {
		x, err := torch.FromSlice(values, int64(len(values)))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { x.Close() })
		return []torch.Named{{Name: "x", Tensor: x}}
	}
	before, after := tensor(1, 2), tensor(3, 4)
	for _, name := range []string{"m.safetensors", "m.pt"} {
		path := filepath.Join(t.TempDir(), name)
		if err := checkpoint.Save(path, before, nil); err != nil {
			t.Fatal(err)
		}
		saved := make(chan error)
		go func() { // its thread ends with it
			if err := foldersync.Break(); err != nil {
				saved <- err
				return
			}
			saved <- checkpoint.Save(path, after, nil)
		}()
		if err := <-saved; !errors.Is(err, checkpoint.ErrNotDurable) || !errors.Is(err, syscall.EIO) ||
			!strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "save again") {
			t.Errorf("%s: got error %v, want ErrNotDurable and EIO with the path and the next step", name, err)
		}
		file, err := checkpoint.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		x, err := file.Read("x")
		if err != nil {
			t.Fatal(err)
		}
		if got, err := x.Float32s(); err != nil || len(got) != 2 || got[0] != 3 || got[1] != 4 {
			t.Errorf("%s: the file has %v, %v, want the new values [3 4]", name, got, err)
		}
		x.Close()
		file.Close()
		if files, err := filepath.Glob(filepath.Join(filepath.Dir(path), "*")); err != nil || len(files) != 1 {
			t.Errorf("the folder has %v, %v, want only %s", files, err, path)
		}
	}
}
