package checkpoint

import (
	"path/filepath"
	"strings"

	"github.com/torchstream/torchstream/torch"
)

// Save writes named tensors, such as nn.State of a module, to a safetensors file, which PyTorch
// reads with safetensors.torch.load_file. The metadata (may be nil) goes into the file's header.
// The file appears under its name only when it is complete. It replaces an existing safetensors
// file; on failure the existing file stays unchanged. If path names a file of another kind, Save
// returns an error. Save blocks until the file is on the disk.
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
