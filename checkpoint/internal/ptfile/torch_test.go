package ptfile_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint/internal/ptfile"
)

// python returns a Python interpreter with PyTorch: TORCHSTREAM_PYTHON, or python3.
func python(t *testing.T) string {
	t.Helper()
	program := os.Getenv("TORCHSTREAM_PYTHON")
	if program == "" {
		program = "python3"
	}
	if out, err := exec.Command(program, "-c", "import torch").CombinedOutput(); err != nil {
		t.Skipf("%s cannot import torch: set TORCHSTREAM_PYTHON to a Python that can: %v %.200s", program, err, out)
	}
	return program
}

// TestPyTorchReadsWhatIsWritten copies each of PyTorch's files with Write, and compares them in
// Python with torch.load(weights_only=True).
func TestPyTorchReadsWhatIsWritten(t *testing.T) {
	program := python(t)
	dir := t.TempDir()
	args := []string{filepath.Join("testdata", "check_written.py")}
	var names []string
	files := expected(t)
	files["other_dtypes.pt"] = nil // float8, uint16, complex64
	for name, want := range files {
		if name == "big_endian.pt" { // Write refuses it
			continue
		}
		f, err := open(fixture(t, name))
		if err != nil {
			t.Fatal(err)
		}
		dropNames(f.Root, want)
		written := filepath.Join(dir, name)
		file, err := os.Create(written)
		if err != nil {
			t.Fatal(err)
		}
		if err := ptfile.Write(file, f.Root, "PyTorch does not read this"); err != nil {
			t.Fatal(err)
		}
		if err := file.Close(); err != nil {
			t.Fatal(err)
		}
		names = append(names, name)
		args = append(args, filepath.Join("testdata", name), written)
	}
	out, err := exec.Command(program, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v, want no error\n%s", err, out)
	}
	for _, name := range names {
		if !slices.Contains(strings.Split(string(out), "\n"), "equal "+filepath.Join("testdata", name)) {
			t.Errorf("%s was not compared:\n%s", name, out)
		}
	}
}
