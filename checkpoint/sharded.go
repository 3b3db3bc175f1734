package checkpoint

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/safefile"
	"github.com/torchstream/torchstream/torch"
)

// A sharded checkpoint consists of an index, which is a JSON object, and data files in the same
// folder: safetensors files or, in older checkpoints, PyTorch files. The index has "metadata" and a
// "weight_map" from a tensor's name to its file.

const (
	indexSuffix   = ".safetensors.index.json"
	shardSuffix   = ".safetensors"
	maxIndexBytes = 100 << 20
	maxShards     = 1024 // open files
)

// Keys of an index's metadata. The index of a SaveSharded records the ids of checkpoints that it
// replaced, with spaces between: other readers ignore such keys.
const (
	totalSizeKey = "total_size"
	replacedKey  = "torchstream.replaced"
)

type shardIndex struct {
	Metadata  map[string]any    `json:"metadata"`
	WeightMap map[string]string `json:"weight_map"`
}

// isIndexPath reports whether a path names an index in the form that SaveSharded writes.
func isIndexPath(path string) bool { return strings.HasSuffix(path, indexSuffix) }

// anyIndex matches the names of indexes that Hugging Face's libraries write, for safetensors or
// PyTorch files. The name may include a variant such as "fp16".
var anyIndex = regexp.MustCompile(`\.(safetensors|bin)\.index(\.[A-Za-z0-9_-]+)?\.json$`)

// shardSuffixOf returns the suffix of the data files' names for an index, or "" if the path is not
// an index.
func shardSuffixOf(index string) string {
	if m := anyIndex.FindStringSubmatch(index); m != nil {
		return "." + m[1]
	}
	return ""
}

// readIndex fills the File from the index of a sharded checkpoint, and opens its files.
func (f *File) readIndex() error {
	index, err := parseIndex(f.file)
	if err != nil {
		return err
	}
	f.tensors.entries, f.metadata = map[string]entry{}, map[string]string{}
	for key, value := range index.Metadata {
		if key != replacedKey {
			f.metadata[key] = fmt.Sprint(value)
		}
	}
	byFile := map[string][]string{}
	for name, file := range index.WeightMap {
		byFile[file] = append(byFile[file], name)
	}
	if len(byFile) > maxShards {
		return fmt.Errorf("the index names %d files, and the maximum is %d", len(byFile), maxShards)
	}
	files := make([]string, 0, len(byFile))
	for file := range byFile {
		files = append(files, file)
	}
	slices.Sort(files)
	for _, file := range files {
		if err := f.openShard(file, byFile[file]); err != nil {
			return err
		}
	}
	return nil
}

func parseIndex(r io.Reader) (shardIndex, error) {
	var index shardIndex
	text, err := io.ReadAll(io.LimitReader(r, maxIndexBytes+1))
	if err != nil {
		return index, err
	}
	if len(text) > maxIndexBytes {
		return index, fmt.Errorf("the index has more than %d bytes", maxIndexBytes)
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber() // sizes keep their text
	if err := decoder.Decode(&index); err != nil {
		return index, fmt.Errorf("the index: %w", err)
	}
	if _, err := decoder.Token(); err != io.EOF {
		return index, errors.New("the index: text after the object")
	}
	if len(index.WeightMap) == 0 {
		return index, errors.New("the index has no \"weight_map\"")
	}
	return index, nil
}

// openShard opens a data file, which must be in the index's folder, and adds the named tensors.
func (f *File) openShard(file string, names []string) error {
	suffix := shardSuffixOf(f.path)
	if file != filepath.Base(file) || !strings.HasSuffix(file, suffix) {
		return fmt.Errorf("the index names the file %q: it must be a %s file in the folder of the index", file, suffix)
	}
	shard, err := Open(filepath.Join(filepath.Dir(f.path), file))
	if err != nil {
		return err
	}
	f.shards = append(f.shards, shard)
	switch {
	case suffix == shardSuffix && shard.IsPyTorch():
		return fmt.Errorf("%s is not a safetensors file", file)
	case suffix != shardSuffix && !shard.IsPyTorch():
		return fmt.Errorf("%s is not a PyTorch file", file)
	}
	for _, name := range names {
		e, ok := shard.tensors.entries[name]
		if !ok {
			return fmt.Errorf("the index has the tensor %q in %s, which does not have it", name, file)
		}
		e.shard = shard
		f.tensors.entries[name] = e
	}
	for _, name := range shard.tensors.names {
		if f.tensors.entries[name].shard == shard {
			f.tensors.names = append(f.tensors.names, name)
		}
	}
	return nil
}

// SaveSharded writes the tensors to at most 1,024 safetensors files and an index, which Hugging
// Face's loaders read. Each file has at most maxBytes of tensors; a larger tensor gets a separate
// file. path names the index and ends in ".safetensors.index.json". The files are in the same
// folder, and their names contain a number unique to this call. [Open] takes the path of
// the index.
//
// The metadata (may be nil) goes into the index. SaveSharded sets two keys of it itself:
// "total_size", the bytes of all tensors, and "torchstream.replaced", the numbers of replaced
// checkpoints whose files it may still have to remove. [File.Metadata] does not return the latter.
//
// SaveSharded replaces the old index when all files are on the disk. Then it removes the files that
// an earlier SaveSharded wrote for the old index. A program that dies before the replacement leaves
// the old checkpoint whole. The next SaveSharded to the path removes what a killed one left, and
// old files that a loss of power brought back. SaveSharded blocks until everything is on the disk.
// If the error wraps [ErrNotDurable], the new index is in place, and the old index's files stay.
func SaveSharded(path string, tensors []torch.Named, metadata map[string]string, maxBytes int64) error {
	if err := saveSharded(path, tensors, metadata, maxBytes); err != nil {
		return fmt.Errorf("checkpoint: save %s: %w", path, err)
	}
	return nil
}

func saveSharded(path string, tensors []torch.Named, metadata map[string]string, maxBytes int64) (err error) {
	if !isIndexPath(path) {
		return fmt.Errorf("the path of an index ends in %s: %w", indexSuffix, cuda.ErrInvalidArgument)
	}
	if maxBytes < 1 {
		return fmt.Errorf("maxBytes is %d: %w", maxBytes, cuda.ErrInvalidArgument)
	}
	shards, total, err := split(tensors, maxBytes)
	if err != nil {
		return err
	}
	if len(shards) > maxShards { // too many for any reader
		return fmt.Errorf("%d files of at most %d bytes, and the maximum is %d files: raise maxBytes: %w",
			len(shards), maxBytes, maxShards, cuda.ErrInvalidArgument)
	}
	// A shard must not survive a loss of power without the index's temporary file, from whose name
	// the next save knows the id.
	f, err := newMain(path, safefile.Prefix("the index of a sharded checkpoint", "{"), true)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil && !errors.Is(err, ErrNotDurable) {
			f.abandonMain()
		}
	}()
	base := strings.TrimSuffix(path, indexSuffix)
	index := shardIndex{Metadata: map[string]any{}, WeightMap: map[string]string{}}
	for i, shard := range shards {
		file := fmt.Sprintf("%s-%s-%05d-of-%05d%s", base, f.id(), i+1, len(shards), shardSuffix)
		for _, n := range shard {
			index.WeightMap[n.Name] = filepath.Base(file)
		}
		if err := saveSafetensors(file, f.file.Name(), shard, nil); err != nil {
			return ofPart(err)
		}
	}
	for key, value := range metadata {
		index.Metadata[key] = value
	}
	index.Metadata[totalSizeKey] = total
	return f.finishIndex(index)
}

// finishIndex writes the index, and finishes the main file.
func (f *unfinished) finishIndex(index shardIndex) error {
	delete(index.Metadata, replacedKey)
	replaced, err := f.replacedIDs()
	if err != nil {
		return err
	}
	if len(replaced) > 0 {
		index.Metadata[replacedKey] = strings.Join(replaced, " ")
	}
	text, err := json.MarshalIndent(index, "", "  ")
	if err != nil {
		return err
	}
	if err := f.write(func(w io.Writer) error { _, err := w.Write(text); return err }); err != nil {
		return err
	}
	return f.finishMain(replaced)
}

// split distributes the tensors over files, in their order. Their names must differ.
func split(tensors []torch.Named, maxBytes int64) (shards [][]torch.Named, total int64, err error) {
	var used int64
	names := map[string]bool{}
	for _, n := range tensors {
		if names[n.Name] {
			return nil, 0, fmt.Errorf("tensor %q: a name that comes twice", n.Name)
		}
		names[n.Name] = true
		shape := n.Tensor.Shape()
		if err := n.Tensor.Err(); err != nil {
			return nil, 0, fmt.Errorf("tensor %s: %w", n.Name, err)
		}
		if shape == nil {
			return nil, 0, fmt.Errorf("tensor %s: %w", n.Name, torch.ErrClosed)
		}
		bytes := torch.Spec{DType: n.Tensor.DType(), Shape: shape}.Bytes()
		if len(shards) == 0 || used+bytes > maxBytes {
			shards, used = append(shards, nil), 0
		}
		last := len(shards) - 1
		shards[last], used, total = append(shards[last], n), used+bytes, total+bytes
	}
	if len(shards) == 0 {
		return nil, 0, fmt.Errorf("no tensors: %w", cuda.ErrInvalidArgument)
	}
	return shards, total, nil
}
