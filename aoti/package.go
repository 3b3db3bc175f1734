package aoti

import (
	"archive/zip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
)

// ErrFormat is wrapped by errors about a file that is not a package or is damaged.
var ErrFormat = errors.New("not a readable AOTInductor package")

// ErrUnsupported is wrapped by errors about an intact package that cannot run here: it is for
// another device, GPU or processor, or has no compiled code.
var ErrUnsupported = errors.New("the package cannot run here")

// Package describes a package file.
type Package struct {
	Path   string
	Models []Description // sorted by name; a package usually has one, "model"
}

// Description describes a model of a package.
type Description struct {
	Name string
	// CUDA says whether the model was compiled for a GPU. ComputeCapability is then that GPU's,
	// such as "90". Otherwise the model was compiled for a CPU, and CPU lists the instruction sets
	// that it needs, such as "AVX512 AVX512_VNNI".
	CUDA              bool
	ComputeCapability string
	CPU               string
	LibTorch          string // the version that compiled the model; "" if the package does not say
	// Inputs and Outputs are the tensors in the order of Run, with lists, dictionaries and keyword
	// arguments flattened. They are nil for a package without a description (see the package's
	// comment).
	Inputs, Outputs []Value
	// Metadata has the entries that the exporting program and PyTorch wrote (AOTI_DEVICE_KEY ...).
	Metadata map[string]string
}

// Value describes an input or an output.
type Value struct {
	Name  string // of an input, the parameter's name; of an output, its path: "logits", "0", "boxes.1"
	DType string // PyTorch's name without "torch.": "float32", "bfloat16"
	Shape []Dim
	// MemoryFormat is "contiguous", "channels_last", or "" for other strides.
	MemoryFormat string
}

// Dim is the range of one size of a shape, inclusive. Min equals Max for a fixed size. Max is 0
// if the size has no upper bound.
type Dim struct{ Min, Max int64 }

// String returns a text such as "float32[1..64 3 224 224]", followed by " channels_last" for that
// memory format.
func (v Value) String() string {
	sizes := make([]string, len(v.Shape))
	for i, d := range v.Shape {
		sizes[i] = d.String()
	}
	text := v.DType + "[" + strings.Join(sizes, " ") + "]"
	if v.MemoryFormat == channelsLast {
		text += " " + channelsLast
	}
	return text
}

// String returns "3", "1..64" or "2..".
func (d Dim) String() string {
	switch {
	case d.Min == d.Max:
		return fmt.Sprint(d.Min)
	case d.Max == 0:
		return fmt.Sprintf("%d..", d.Min)
	}
	return fmt.Sprintf("%d..%d", d.Min, d.Max)
}

func (d Dim) has(n int64) bool { return n >= d.Min && (d.Max == 0 || n <= d.Max) }

// Open reads the description of a package. It runs nothing of the package, and writes nothing.
func Open(path string) (*Package, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("aoti: %w", err)
	}
	defer f.Close()
	archive, err := readArchive(f)
	if err != nil {
		return nil, fmt.Errorf("aoti: %s: %w", path, err)
	}
	p := &Package{Path: path}
	for _, m := range archive {
		p.Models = append(p.Models, m.Description)
	}
	return p, nil
}

// Limits of readArchive. PyTorch stores members without compression, so no member is
// larger than the file.
const (
	maxMembers  = 100_000 // a model has a file for each GPU kernel
	maxMetadata = 16 << 20
)

// member is a model in an open archive, with the model's files.
type member struct {
	Description
	files   []*zip.File
	library string  // the base name of the shared library
	states  []state // nil without a description
}

func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrFormat, fmt.Sprintf(format, args...))
}

// readArchive returns the models of a package, sorted by name.
func readArchive(f *os.File) ([]member, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, malformed("not a regular file")
	}
	archive, err := zip.NewReader(f, info.Size())
	if err != nil {
		return nil, malformed("%v", err)
	}
	if len(archive.File) > maxMembers {
		return nil, malformed("%d members, more than %d", len(archive.File), maxMembers)
	}
	models, err := groupFiles(archive.File, info.Size())
	if err != nil {
		return nil, err
	}
	if len(models) == 0 {
		return nil, malformed("%s", describeOther(archive.File))
	}
	for i := range models {
		if err := models[i].describe(); err != nil {
			return nil, fmt.Errorf("model %s: %w", models[i].Name, err)
		}
	}
	return models, nil
}

// groupFiles finds the files PREFIX/data/aotinductor/MODEL/FILE of each model.
func groupFiles(files []*zip.File, size int64) ([]member, error) {
	var models []member
	total := uint64(0)
	seen := map[string]bool{}
	places := map[string]int{} // index in models, by name
	for _, f := range files {
		parts := strings.Split(f.Name, "/")
		if len(parts) != 5 || parts[1] != "data" || parts[2] != "aotinductor" || parts[4] == "" {
			continue
		}
		name, base := parts[3], parts[4]
		switch {
		case !plain(name) || !plain(base):
			return nil, malformed("member %q has a name that is none of a file", f.Name)
		case seen[name+"/"+base]:
			return nil, malformed("file %s of model %s is there twice", base, name)
		case f.Method != zip.Store:
			return nil, malformed("member %q is compressed, which PyTorch does not write", f.Name)
		}
		seen[name+"/"+base] = true
		if total += f.UncompressedSize64; total > uint64(size) || f.UncompressedSize64 > uint64(size) {
			return nil, malformed("members are larger than the file")
		}
		i, ok := places[name]
		if !ok {
			i = len(models)
			places[name] = i
			models = append(models, member{Description: Description{Name: name}})
		}
		models[i].files = append(models[i].files, f)
	}
	slices.SortFunc(models, func(a, b member) int { return strings.Compare(a.Name, b.Name) })
	return models, nil
}

// plain reports whether a name is a file name without a folder, on every operating system.
func plain(name string) bool {
	return name != "" && name != "." && name != ".." && !strings.ContainsAny(name, "/\\:\x00")
}

// describeOther says what kind of archive has these files, if there is no compiled model among
// them.
func describeOther(files []*zip.File) string {
	for _, f := range files {
		switch {
		case strings.HasSuffix(f.Name, "/models/model.json"):
			return "torch.export.save wrote it, so it has no compiled code: compile it with tools/export.py"
		case strings.HasSuffix(f.Name, "/data.pkl"):
			return "torch.save wrote it: read it with package checkpoint"
		}
	}
	return "a zip archive without the folder data/aotinductor"
}

// describe fills in the description from the members' names and the metadata.
func (m *member) describe() error {
	var metadata *zip.File
	for _, f := range m.files {
		base := path.Base(f.Name)
		switch {
		case strings.HasSuffix(base, ".so"):
			if m.library != "" {
				return malformed("two shared libraries, %s and %s", m.library, base)
			}
			m.library = base
		case strings.HasSuffix(base, ".wrapper_metadata.json"):
			metadata = f
		case strings.HasSuffix(base, "_metadata.json") && metadata == nil:
			metadata = f
		case strings.HasSuffix(base, ".blob"):
			return fmt.Errorf("%w: its weights are in a separate file, %s: export it with "+
				"package_constants_on_disk_format=None", ErrUnsupported, base)
		}
	}
	if m.library == "" {
		return fmt.Errorf("%w: it has sources and no compiled library: export it without "+
			"package_cpp_only", ErrUnsupported)
	}
	if metadata == nil {
		return malformed("no metadata")
	}
	text, err := readMember(metadata, maxMetadata)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, &m.Metadata); err != nil {
		return malformed("member %q: %v", metadata.Name, err)
	}
	return m.fromMetadata()
}

// descriptionKey is the key of the metadata under which tools/export.py describes a model.
const descriptionKey = "torchstream"

// described is the JSON that tools/export.py writes.
type described struct {
	Torch   string           `json:"torch"`
	Inputs  []describedValue `json:"inputs"`
	Outputs []describedValue `json:"outputs"`
	Weights []state          `json:"weights"`
}

// state is an entry of the exported module's state_dict.
type state struct {
	Name string `json:"name"`
	Tied string `json:"tied"` // the first name of the same tensor; "" if this is the only one
	Used bool   `json:"used"` // the exported program uses it
}

// The memory formats of a Value.
const (
	contiguous   = "contiguous"
	channelsLast = "channels_last"
)

// describedValue has the shape as pairs of the smallest and the largest size. The largest is null
// for a size without a bound.
type describedValue struct {
	Name         string      `json:"name"`
	DType        string      `json:"dtype"`
	Shape        [][2]*int64 `json:"shape"`
	MemoryFormat string      `json:"memory_format"`
}

func (m *member) fromMetadata() error {
	switch device := m.Metadata["AOTI_DEVICE_KEY"]; device {
	case "cpu":
	case "cuda":
		m.CUDA = true
	default:
		return fmt.Errorf("%w: it was compiled for the device %q", ErrUnsupported, device)
	}
	m.ComputeCapability, m.CPU = m.Metadata["AOTI_COMPUTE_CAPABILITY"], m.Metadata["AOTI_CPU_ISA"]
	text, ok := m.Metadata[descriptionKey]
	if !ok {
		return nil
	}
	var d described
	if err := json.Unmarshal([]byte(text), &d); err != nil {
		return malformed("metadata %q: %v", descriptionKey, err)
	}
	m.LibTorch, m.states = d.Torch, d.Weights
	var err error
	if m.Inputs, err = values(d.Inputs); err == nil {
		m.Outputs, err = values(d.Outputs)
	}
	return err
}

func values(described []describedValue) ([]Value, error) {
	all := make([]Value, len(described))
	for i, d := range described {
		all[i] = Value{Name: d.Name, DType: d.DType, Shape: make([]Dim, len(d.Shape)), MemoryFormat: d.MemoryFormat}
		for j, size := range d.Shape {
			if size[0] == nil || *size[0] < 0 || size[1] != nil && *size[1] < max(1, *size[0]) && *size[1] != *size[0] {
				return nil, malformed("the description of %q has an impossible size %d", d.Name, j)
			}
			all[i].Shape[j].Min = *size[0]
			if size[1] != nil {
				all[i].Shape[j].Max = *size[1]
			}
		}
	}
	return all, nil
}

// readMember reads a member of at most limit bytes, and checks its CRC-32.
func readMember(f *zip.File, limit uint64) ([]byte, error) {
	if f.UncompressedSize64 > limit {
		return nil, malformed("member %q has %d bytes, more than %d", f.Name, f.UncompressedSize64, limit)
	}
	r, err := f.Open()
	if err != nil {
		return nil, malformed("member %q: %v", f.Name, err)
	}
	defer r.Close()
	text, err := io.ReadAll(r)
	if err != nil {
		return nil, malformed("member %q: %v", f.Name, err)
	}
	return text, nil
}
