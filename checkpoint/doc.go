// Package checkpoint reads and writes files of tensors: safetensors files, files of torch.save, and
// checkpoints in several files.
//
// [Save] writes named tensors, and [Open] opens any of the files:
//
//	if err := checkpoint.Save("weights.safetensors", nn.State(net), nil); err != nil {
//		return err
//	}
//	file, err := checkpoint.Open("weights.safetensors")
//	if err != nil {
//		return err
//	}
//	defer file.Close()
//	weight, err := file.Read("conv1.weight")
//
// nn.Load reads a file into a module's parameters: it matches names and shapes, and converts
// dtypes. train.Checkpoint saves and loads the full state of a training run.
//
// # Formats
//
//   - A safetensors file has tensors and texts: [File.Tensors], [File.Metadata].
//   - A PyTorch file (.pt, .pth) also has values, and dicts of tensors: [SavePyTorch],
//     [File.Value], [File.Dict]. Reading executes no code from the file.
//   - A sharded checkpoint is an index (.safetensors.index.json) and data files: [SaveSharded].
//   - A checkpoint of ranks is a PyTorch file and one safetensors file per rank. A rank's file has
//     the rank's parts of divided tensors: [RankWriter]. rankfiles.go defines the names of the
//     files.
//
// # Guarantees
//
// Files are untrusted: no content makes a reader crash, or allocate more than a multiple of the
// file's size.
//
// A file appears under its name only when it is complete and on the disk. It replaces only a file
// of the same kind, and none that it cannot read. If a process is killed while it saves, the old
// file remains. Unfinished files may remain too; the next save to the path removes them. Their
// names are the file's name with ".tmp-" and 12 hexadecimal digits, and with "-abandoned" after it
// if their save has ended.
//
// If two programs save to one path at the same time, the save that ends last replaces the other
// one's checkpoint, which was whole too. If that was in several files, some of them may stay, and
// no later save removes them: a lock on the folder could prevent this, but network disks have none,
// and a program that flock(1) starts with a lock on the folder would wait for flock.
//
// Files that this package writes have checksums. Reading verifies them, and other programs ignore
// them.
package checkpoint
