package nn

import "github.com/torchstream/torchstream/checkpoint"

// Save writes the module's parameters and buffers, by their state_dict names, to a safetensors file
// or, if path ends in .pt or .pth, to a PyTorch file. It calls [checkpoint.Save] with the module's
// [State].
func Save(path string, m Module, metadata map[string]string) error {
	return checkpoint.Save(path, State(m), metadata)
}
