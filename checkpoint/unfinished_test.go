//go:build linux

package checkpoint_test

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/nn"
)

// Saving removes the leftovers of a killed process's save. It keeps files that another process is
// writing, and files with other names.
func TestSaveRemovesUnfinishedFiles(t *testing.T) {
	net := nn.NewLinear(3, 2, nn.LinearOptions{})
	defer nn.Close(net)
	for _, name := range []string{"m.safetensors", "m.pt", "m.safetensors.index.json"} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, name)
			save := func() {
				t.Helper()
				var err error
				if strings.HasSuffix(name, "index.json") {
					err = checkpoint.SaveSharded(path, nn.State(net), nil, 8)
				} else {
					err = nn.Save(path, net, nil)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			save()
			file := func(name, text string) string {
				t.Helper()
				path := filepath.Join(dir, name)
				if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
				return path
			}
			left := file(name+".tmp-0123456789ab", "")
			leftShard := file("m-0123456789ab-00001-of-00002.safetensors", "x")
			abandoned := file(name+".tmp-ba9876543211-abandoned", "")
			others := []string{
				file(name+".tmp-0123456789a", ""), file(name+".tmp-0123456789AB", ""),
				file("n"+name+".tmp-0123456789ab", ""), file("m-0123456789ab.safetensors", "x"),
				file("m-0123456789ac-00001-of-00002.safetensors", "x"),
			}
			written, err := os.Open(file(name+".tmp-ba9876543210", ""))
			if err != nil {
				t.Fatal(err)
			}
			defer written.Close()
			if err := syscall.Flock(int(written.Fd()), syscall.LOCK_EX); err != nil {
				t.Fatal(err)
			}
			save()
			exists := func(path string) bool {
				_, err := os.Lstat(path)
				return err == nil
			}
			if exists(abandoned) || exists(left) || strings.HasSuffix(name, "index.json") == exists(leftShard) {
				t.Errorf("left: %t, its file: %t, abandoned: %t", exists(left), exists(leftShard), exists(abandoned))
			}
			for _, path := range append(others, written.Name()) {
				if !exists(path) {
					t.Errorf("%s is gone", path)
				}
			}
			if _, err := nn.Load(path, net); err != nil {
				t.Error(err)
			}
		})
	}
}
