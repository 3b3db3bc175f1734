package checkpoint

import (
	"errors"
	"path/filepath"
	"strings"

	"github.com/torchstream/torchstream/torch"
)

// Save writes named tensors, such as nn.State of a module, to a safetensors file, which PyTorch
// reads with safetensors.torch.load_file. The metadata (may be nil) goes into the file's header.
// The file appears under its name only when it is complete. It replaces an existing safetensors
// file. On failure the existing file stays unchanged, unless the error wraps [ErrNotDurable]. If
// path names a file of another kind, Save returns an error. Save blocks until the file is on the
// disk.
//
// If path ends in .pt or .pth, Save writes a file of torch.save instead, and replaces only such a
// file. torch.load(path, weights_only=True) returns the state_dict, or, with metadata, a dict of
// "state_dict" and "metadata".
func Save(path string, tensors []torch.Named, metadata map[string]string) error {
	if IsPyTorchPath(path) {
		return SavePyTorch(path, pytorchState(tensors, metadata))
	}
	return saveSafetensors(path, path, tensors, metadata)
}

// IsPyTorchPath reports whether a path ends in .pt or .pth. [Save] then writes a PyTorch file.
func IsPyTorchPath(path string) bool {
	ext := strings.ToLower(filepath.Ext(path))
	return ext == ".pt" || ext == ".pth"
}

// ErrNotDurable is wrapped by the error of a save whose file is in place, but whose folder cannot
// be synced: a loss of power may bring the old file back. The old checkpoint's other files stay.
var ErrNotDurable = errors.New("the file is in place, but its folder cannot be synced, so a loss of power may undo " +
	"the save: save again")

// notDurable is an ErrNotDurable with the reason.
type notDurable struct{ folder error }

func (e *notDurable) Error() string        { return ErrNotDurable.Error() + ": " + e.folder.Error() }
func (e *notDurable) Is(target error) bool { return target == ErrNotDurable }
func (e *notDurable) Unwrap() error        { return e.folder }

// ofPart returns the error of writing one of a checkpoint's files, other than the file that names
// the others: the checkpoint is then not in place.
func ofPart(err error) error {
	var e *notDurable
	if errors.As(err, &e) {
		return e.folder
	}
	return err
}
