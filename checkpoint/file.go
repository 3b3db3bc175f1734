package checkpoint

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/torchstream/torchstream/checkpoint/internal/ptfile"
	"github.com/torchstream/torchstream/internal/safefile"
	"github.com/torchstream/torchstream/torch"
)

// File is an open checkpoint: a safetensors file, a PyTorch file, or an index with its data files.
// Several goroutines may call its methods at once.
type File struct {
	path     string
	file     *os.File
	metadata map[string]string
	tensors  tensorSet    // in a PyTorch file, the tensors of the chosen dict
	data     int64        // offset of the tensors' bytes in a safetensors file
	mapped   mapping      // of a safetensors file
	pytorch  *pytorchFile // the values of a PyTorch file; nil for other files
	shards   []*File      // the data files of an index
}

// tensorSet holds named tensors of a file.
type tensorSet struct {
	names   []string // in the file's order
	entries map[string]entry
	unread  map[string]*ptfile.Opaque // the values that cannot be read, by name
}

// entry is one tensor of a file.
type entry struct {
	dtype      torch.DType
	shape      []int64
	begin, end int64          // bytes, from the start of the data
	unread     error          // why the tensor of a safetensors file cannot be read; or nil
	sums       []byte         // checksums in a safetensors file, or nil
	stored     *ptfile.Tensor // the tensor in a PyTorch file
	shard      *File          // the file of a sharded checkpoint that has the tensor
}

// check returns an error if the tensor cannot be read. Callers check a tensor before they allocate
// memory for it.
func (e *entry) check() error {
	if e.stored != nil {
		return e.stored.Check()
	}
	return e.unread
}

// Open opens a safetensors file and checks its whole header: sizes, names, offsets. The file is
// untrusted: no content makes Open crash, or allocate more than a multiple of the header's size.
// Reading a tensor is an error if package torch does not support its dtype.
//
// Open also opens files written by torch.save, with the same guarantee. It recognizes them by their
// first bytes, not by name. It executes nothing: it reads only tensors and plain values. Requesting
// any other value returns an *[UnreadError]. The File's tensors are the tensors of one dict, the
// state_dict. Open takes the first of these that the file has:
//   - the dict under the key "state_dict", "model_state_dict" or "model"
//   - the file's dict itself
//   - the dict under the key "net", "network", "module", "model_state", "params" or "weights"
//   - the only other dict with tensors, not counting averages of weights such as "state_dict_ema"
//   - a dict of averages
//
// [File.Dict] returns the tensors of another dict, and [File.Value] the rest of the file.
//
// A path that ends in ".safetensors.index.json" or ".bin.index.json" is the index of a sharded
// checkpoint. The index's safetensors or PyTorch files are in the same folder.
//
// A checkpoint that ranks wrote with [RankWriter] is opened by the path of its PyTorch file. The
// ranks' files are in the same folder.
func Open(path string) (*File, error) {
	file, err := safefile.Open(path)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: %w", err)
	}
	f := &File{path: path, file: file}
	if err := f.readHeader(); err != nil {
		f.Close()
		return nil, fmt.Errorf("checkpoint: %s: %w", path, brief(err))
	}
	return f, nil
}

// maxErrorText is the maximum length of an error's text, which may quote an untrusted file.
const maxErrorText = 2048

// brief returns err. If the text is too long, it returns an error with the start and the end of the
// text.
func brief(err error) error {
	text := err.Error()
	if len(text) <= maxErrorText {
		return err
	}
	half := maxErrorText / 2
	return errors.New(strings.ToValidUTF8(text[:half], "") + " ... " + strings.ToValidUTF8(text[len(text)-half:], ""))
}

// readHeader reads everything except the tensors' elements.
func (f *File) readHeader() error {
	info, err := f.file.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return errors.New("not a regular file")
	}
	if shardSuffixOf(f.path) != "" {
		return f.readIndex()
	}
	head := make([]byte, 512)
	n, err := f.file.ReadAt(head, 0)
	if err != nil && err != io.EOF {
		return err
	}
	if ptfile.IsZip(head[:n]) || ptfile.IsLegacy(head[:n]) {
		return f.readPyTorch(info.Size())
	}
	return f.readSafetensors(head[:n], info.Size())
}

// Path returns the path passed to Open.
func (f *File) Path() string { return f.path }

// IsPyTorch reports whether the file is a PyTorch file, which has values, rather than a safetensors
// file or an index.
func (f *File) IsPyTorch() bool { return f.pytorch != nil }

// Metadata returns a copy of the strings in the header of a safetensors file, or under "metadata"
// in a PyTorch file.
func (f *File) Metadata() map[string]string {
	if f.metadata == nil {
		return map[string]string{}
	}
	return maps.Clone(f.metadata)
}

// Tensors describes the tensors: in the order of their bytes in a safetensors file, and in the
// order of the state_dict in a PyTorch file. If package torch does not support a tensor's dtype,
// the tensor cannot be read and its DType is not Known.
func (f *File) Tensors() []torch.Spec {
	specs := make([]torch.Spec, len(f.tensors.names))
	for i, name := range f.tensors.names {
		e := f.tensors.entries[name]
		specs[i] = torch.Spec{Name: name, DType: e.dtype, Shape: slices.Clone(e.shape)}
	}
	return specs
}

// Tensor returns the file's tensor with this name, without reading it.
func (f *File) Tensor(name string) (*StoredTensor, error) {
	e, err := f.find(name)
	if err != nil {
		return nil, err
	}
	return &StoredTensor{f, e, name}, nil
}

// find returns the entry of a tensor.
func (f *File) find(name string) (entry, error) {
	e, ok := f.tensors.entries[name]
	if ok {
		return e, nil
	}
	if o := f.tensors.unread[name]; o != nil {
		return e, fmt.Errorf("checkpoint: %s: %w", f.path, &UnreadError{name, o})
	}
	return e, fmt.Errorf("checkpoint: %s: there is no tensor %q", f.path, name)
}

// Size returns the checkpoint's total size in bytes, including the data files of an index and the
// files of ranks.
func (f *File) Size() (int64, error) {
	info, err := f.file.Stat()
	if err != nil {
		return 0, fmt.Errorf("checkpoint: %s: %w", f.path, err)
	}
	n := info.Size()
	for _, s := range f.shards {
		own, err := s.Size()
		if err != nil {
			return 0, err
		}
		n += own
	}
	if f.pytorch != nil && f.pytorch.ranks != nil {
		n += f.pytorch.ranks.total()
	}
	return n, nil
}

// Close closes the file. Tensors that were read or mapped stay valid.
func (f *File) Close() error {
	err := f.file.Close()
	for _, s := range f.shards {
		err = errors.Join(err, s.Close())
	}
	if f.pytorch != nil && f.pytorch.ranks != nil {
		err = errors.Join(err, f.pytorch.ranks.close())
	}
	f.mapped.close()
	return err
}

// mapping is a file in memory.
type mapping struct {
	mu    sync.Mutex
	bytes *torch.Tensor // uint8; nil before the first use; guarded by mu
}

// of returns all bytes of the file.
func (m *mapping) of(file *os.File) (*torch.Tensor, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.bytes != nil {
		return m.bytes, nil
	}
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	// The descriptor refers to the file that was checked, even if another file is at the path now.
	path := fmt.Sprintf("/proc/self/fd/%d", file.Fd())
	t := torch.Call1("from_file", path, torch.Keywords{"shared": false, "size": info.Size(), "dtype": torch.Uint8})
	if err := t.Err(); err != nil {
		return nil, err
	}
	m.bytes = t
	return t, nil
}

func (m *mapping) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.bytes.Close()
	m.bytes = nil
}
