package aoti

import (
	"crypto/sha256"
	"debug/elf"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/cpu"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/origin"
)

// Options are the settings of [Load].
type Options struct {
	// Model is the name of the model to load. "" loads the package's only model.
	Model string
	// Device is the GPU of a model that was compiled for a GPU. The zero value is the first GPU. A
	// model that was compiled for a CPU runs on the CPU, whatever Device says.
	Device cuda.Device
	// Instances is how many runs can be enqueued, or computed on a CPU, at the same time. 0 means
	// 1. While Load makes an instance, the device holds the weights twice.
	Instances int
	// SHA256 is the hash of the file in hexadecimal digits. Load refuses a file with another hash
	// before it runs anything. "" allows every file. No other program may write the file during
	// Load.
	SHA256 string
}

// Load loads a model of a package. Load runs the native code in the package (see the comment of
// package aoti). It unpacks the model's files into a folder in os.TempDir, which must not be
// mounted with noexec. Close removes the folder, and Load removes the folders that killed processes
// have left.
//
// If the package is at fault, the error wraps [ErrFormat] or [ErrUnsupported]. The caller closes
// the model.
func Load(path string, o Options) (*Model, error) {
	m, err := load(path, o)
	if err != nil {
		return nil, fmt.Errorf("aoti: %s: %w", path, err)
	}
	return m, nil
}

func load(path string, o Options) (_ *Model, err error) {
	if o.Instances < 0 {
		return nil, fmt.Errorf("Options.Instances is %d: use 0 for one, or the number", o.Instances)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := checkHash(f, o.SHA256); err != nil {
		return nil, err
	}
	all, err := readArchive(f)
	if err != nil {
		return nil, err
	}
	chosen, err := choose(all, o.Model)
	if err != nil {
		return nil, err
	}
	device, err := deviceFor(chosen.Description, o.Device)
	if err != nil {
		return nil, err
	}
	files, err := unpack(chosen)
	if err != nil {
		return nil, err
	}
	library := filepath.Join(files.path, chosen.library)
	if err := checkLibrary(library); err != nil {
		return nil, errors.Join(err, files.remove())
	}
	m := &Model{Description: chosen.Description, made: origin.New("aoti.Model"), device: device, files: files,
		closed: make(chan struct{}), swapping: make(chan struct{}, 1)}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.Close())
		}
	}()
	if err := m.open(library, max(1, o.Instances)); err != nil {
		return nil, err
	}
	return m, m.readWeights(chosen.states)
}

// checkHash compares the file's SHA-256 with want, unless want is "".
func checkHash(f *os.File, want string) error {
	if want == "" {
		return nil
	}
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return err
	}
	if got := hex.EncodeToString(h.Sum(nil)); !strings.EqualFold(got, want) {
		return fmt.Errorf("its SHA-256 is %s, and Options.SHA256 is %s: it is another file", got, want)
	}
	return nil
}

// choose returns the model with the name, or the only one if the name is "".
func choose(all []member, name string) (member, error) {
	var names []string
	for _, m := range all {
		if m.Name == name || name == "" && len(all) == 1 {
			return m, nil
		}
		names = append(names, m.Name)
	}
	if name == "" {
		return member{}, fmt.Errorf("it has %d models, %s: choose one with Options.Model", len(all),
			strings.Join(names, ", "))
	}
	return member{}, fmt.Errorf("it has no model %q; it has %s", name, strings.Join(names, ", "))
}

// deviceFor returns the device on which a model runs. It returns an error if the device lacks the
// instructions for which the model was compiled: on a CPU, an unknown instruction would end the
// process.
func deviceFor(d Description, gpu cuda.Device) (cuda.Device, error) {
	if !d.CUDA {
		if missing := missingInstructions(d.CPU); missing != "" {
			return 0, fmt.Errorf("%w: it was compiled for a CPU with %s, and this one has no %s: export it on a "+
				"machine as this one", ErrUnsupported, d.CPU, missing)
		}
		return cuda.CPU, nil
	}
	if gpu == cuda.CPU {
		return 0, fmt.Errorf("%w: it was compiled for a GPU, and Options.Device is the CPU: export it for the CPU",
			ErrUnsupported)
	}
	p, err := gpu.Properties()
	if err != nil {
		return 0, err
	}
	has := fmt.Sprintf("%d%d", p.Major, p.Minor)
	if d.ComputeCapability != "" && d.ComputeCapability != has {
		return 0, fmt.Errorf("%w: it was compiled for GPUs of compute capability %s, and %v (%s) has %s: export "+
			"it on a machine with such a GPU", ErrUnsupported, d.ComputeCapability, gpu, p.Name, has)
	}
	return gpu, nil
}

// missingInstructions returns the first instruction set in names that this CPU lacks, or "" if it
// lacks none. names is AOTInductor's list. Unknown names are ignored.
func missingInstructions(names string) string {
	x := cpu.X86
	has := map[string]bool{
		"AVX2":        x.HasAVX2 && x.HasFMA,
		"AVX512":      x.HasAVX512F && x.HasAVX512DQ && x.HasAVX512VL && x.HasAVX512BW && x.HasFMA,
		"AVX512_VNNI": x.HasAVX512VNNI,
		"AMX_TILE":    x.HasAMXTile,
		"AMX_BF16":    x.HasAMXBF16,
		"AMX_INT8":    x.HasAMXInt8,
	}
	for _, name := range strings.Fields(names) {
		if known, ok := has[name]; ok && !known {
			return name
		}
	}
	return ""
}

// cxxLibrary is the shared C++ library that LibTorch uses.
const cxxLibrary = "libstdc++.so.6"

// checkLibrary refuses a model's library that is statically linked with the C++ library. Loading
// such a library next to LibTorch would end the process.
func checkLibrary(path string) error {
	f, err := elf.Open(path)
	if err != nil {
		return malformed("its shared library: %v", err)
	}
	defer f.Close()
	needed, err := f.ImportedLibraries()
	if err != nil {
		return malformed("its shared library: %v", err)
	}
	if !slices.Contains(needed, cxxLibrary) {
		return fmt.Errorf("%w: the compiler linked the C++ library into it: export it where the linker finds "+
			"the shared %s", ErrUnsupported, cxxLibrary)
	}
	return nil
}

// open makes the instances.
func (m *Model) open(library string, instances int) error {
	m.idle = make(chan *capi.Model, instances)
	for i := range instances {
		var c *capi.Model
		var err error
		if i == 0 {
			c, err = capi.OpenModel(library, m.files.path, int32(m.device))
		} else {
			c, err = capi.AddModelInstance(m.instances[0])
		}
		if err != nil {
			return openError(err)
		}
		m.instances = append(m.instances, c)
		m.idle <- c
	}
	if m.Inputs == nil {
		return m.readStructure()
	}
	return nil
}

// openError wraps ErrUnsupported if the model's library cannot run in this process.
func openError(err error) error {
	var failure *capi.Error
	if errors.As(err, &failure) && (failure.Code == capi.CodeUnsupported || failure.Code == capi.CodeOperator) {
		return fmt.Errorf("%w: %w", ErrUnsupported, err)
	}
	return err
}
