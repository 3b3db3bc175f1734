package checkpoint

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/torchstream/torchstream/checkpoint/internal/ptfile"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/safefile"
	"github.com/torchstream/torchstream/torch"
)

// RankWriter writes a checkpoint together with the writers of the other ranks of a job, to a folder
// that all ranks see:
//
//	rank 0: NewRankWriter, and sends ID to the others    the others: JoinRankWriter
//	all ranks: Write
//	rank 0, when all have returned: Commit
//
// Commit replaces the old checkpoint by a rename, and then removes the old checkpoint's files. If a
// process dies at any moment, either the old or the new checkpoint is whole. Leftover files belong
// to no checkpoint; the next NewRankWriter or SavePyTorch of the path removes them.
// train.Checkpoint performs all of these steps.
//
// All files have the mode of rank 0's file: the mode of the existing file at the path or, for the
// first checkpoint, the mode that rank 0's umask gives.
//
// Only the files of the checkpoint at the path are replaced and removed. When you move or copy a
// checkpoint, include all of its files.
type RankWriter struct {
	path, id string
	ranks    int
	file     *unfinished // on rank 0, until Commit or Abandon
}

// NewRankWriter starts the checkpoint at the path on rank 0. Call Commit or Abandon afterwards.
// There are 1 to 65,536 ranks.
func NewRankWriter(path string, ranks int) (*RankWriter, error) {
	if err := checkRanks(path, ranks); err != nil {
		return nil, err
	}
	f, err := newMain(path, safefile.PyTorch, true)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: save %s: %w", path, err)
	}
	return &RankWriter{path: path, id: f.id(), ranks: ranks, file: f}, nil
}

// JoinRankWriter joins the checkpoint that rank 0 started with this id. It returns an error if this
// rank does not see rank 0's file: the path is then on a local disk of each host.
func JoinRankWriter(path, id string, ranks int) (*RankWriter, error) {
	if err := checkRanks(path, ranks); err != nil {
		return nil, err
	}
	if !unfinishedNumber.MatchString(id) {
		return nil, fmt.Errorf("checkpoint: save %s: rank 0 names the checkpoint %q: %w", path, id,
			cuda.ErrInvalidArgument)
	}
	w := &RankWriter{path: path, id: id, ranks: ranks}
	if _, err := os.Lstat(w.unfinished()); err != nil {
		host, _ := os.Hostname()
		return nil, fmt.Errorf("checkpoint: save %s: the host %s does not see the file that rank 0 has "+
			"made there: give a path in a folder that all hosts share: %v", path, host, err)
	}
	return w, nil
}

// checkRanks returns an error for a number of ranks that no reader accepts.
func checkRanks(path string, ranks int) error {
	if ranks < 1 || ranks > maxRanks {
		return fmt.Errorf("checkpoint: save %s: %d ranks, want 1 to %d: %w", path, ranks, maxRanks,
			cuda.ErrInvalidArgument)
	}
	return nil
}

// ID returns the checkpoint's id.
func (w *RankWriter) ID() string { return w.id }

// Write writes a rank's parts, as [Divided.Parts] returns them, to the rank's file. It blocks until
// the file is on the disk. If rank 0 has abandoned the checkpoint in the meantime, Write returns an
// error and removes the file.
func (w *RankWriter) Write(rank int, parts []torch.Named) error {
	if err := w.checkMain(rank); err != nil {
		return err
	}
	own := slices.DeleteFunc(slices.Clone(parts),
		func(n torch.Named) bool { return n.Tensor.Err() == nil && n.Tensor.Elements() == 0 })
	metadata := map[string]string{checkpointKey: w.id, rankKey: strconv.Itoa(rank)}
	err := writeAtomically(w.fileOf(rank), w.unfinished(), safefile.Safetensors, func(out io.Writer) error {
		_, _, err := encode(out, own, metadata, true)
		return err
	})
	if late := w.checkMain(rank); late != nil {
		// Nobody else would remove a file that stays, or that a loss of power brings back.
		os.Remove(w.fileOf(rank))
		safefile.SyncFolder(w.path)
		return late
	}
	if err != nil {
		os.Remove(w.fileOf(rank)) // Commit must not find a file that a loss of power may take
		return fmt.Errorf("checkpoint: save %s: %w", w.fileOf(rank), ofPart(err))
	}
	return nil
}

// checkMain returns an error if rank 0 has called Abandon, since it does not wait forever, or may
// have called it.
func (w *RankWriter) checkMain(rank int) error {
	err := lookUp(w.unfinished())
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("checkpoint: save %s: rank 0 has given the checkpoint up before rank %d had "+
			"written its file", w.path, rank)
	}
	if err != nil {
		return fmt.Errorf("checkpoint: save %s: rank %d cannot see whether rank 0 has given the checkpoint up: %w",
			w.path, rank, err)
	}
	return nil
}

// Commit writes the value to the path, on rank 0. The files of all ranks must exist and contain the
// parts of the value's divided tensors. After an error the old checkpoint stays in place, unless
// the error wraps [ErrNotDurable]. value must be one that SavePyTorch accepts, without the key
// "shards".
func (w *RankWriter) Commit(value map[string]any, d Divided) error {
	if w.file == nil {
		return fmt.Errorf("checkpoint: save %s: only the RankWriter of NewRankWriter commits, once and "+
			"not after Abandon: %w", w.path, cuda.ErrInvalidArgument)
	}
	err := w.commit(value, d)
	if err != nil && !errors.Is(err, ErrNotDurable) {
		w.Abandon()
	}
	w.file = nil
	if err != nil {
		return fmt.Errorf("checkpoint: save %s: %w", w.path, err)
	}
	return nil
}

// Abandon gives up the checkpoint on rank 0, and removes its files. After Commit it does nothing,
// so it may be deferred. On other ranks it does nothing either.
func (w *RankWriter) Abandon() {
	if w.file == nil {
		return
	}
	w.file.abandonMain()
	w.file = nil
}

func (w *RankWriter) commit(value map[string]any, d Divided) error {
	if value[shardsKey] != nil {
		return fmt.Errorf("the value has the key %q, which is that of the ranks' files: %w", shardsKey,
			cuda.ErrInvalidArgument)
	}
	parts := d.Parts(value)
	set := &rankFiles{dir: filepath.Dir(w.path), base: filepath.Base(w.path), id: w.id,
		files: make([]rankFile, w.ranks)}
	defer set.close()
	sizes, seals := make([]any, w.ranks), make([]any, w.ranks)
	for rank := range w.ranks {
		info, err := os.Stat(w.fileOf(rank))
		if err != nil {
			return fmt.Errorf("rank %d has not written its file: %v", rank, err)
		}
		set.files[rank].bytes = info.Size()
		sizes[rank] = info.Size()
		f, err := set.open(rank)
		if err != nil {
			return err
		}
		sums, err := f.readChecksums()
		if err != nil {
			return fmt.Errorf("%s, the file of rank %d: %w", set.name(rank), rank, err)
		}
		seals[rank] = int64(sums.seal)
	}
	converter := pytorchConverter{seen: map[*torch.Tensor]any{}}
	for _, n := range parts {
		record, err := set.describe(n, d[n.Tensor])
		if err != nil {
			return fmt.Errorf("tensor %s: %w", n.Name, err)
		}
		converter.seen[n.Tensor] = record
	}
	root := maps.Clone(value)
	root[shardsKey] = map[string]any{idKey: w.id, baseKey: set.base, bytesKey: sizes, sealsKey: seals}
	converted, err := converter.value(root, 0)
	if err != nil {
		return err
	}
	return w.file.finishPyTorch(converted)
}

// describe returns the dict that replaces a divided tensor. The tensor's parts must be in the
// files.
func (s *rankFiles) describe(part torch.Named, d Division) (*ptfile.Dict, error) {
	dtype := part.Tensor.DType()
	// A checkpoint that no reader accepts must not replace a good one.
	view, err := ptfile.NewView(dtype, d.Shape, d.Strides, nil)
	if err != nil || len(d.First) != len(s.files)+1 || !slices.IsSorted(d.First) || d.First[0] != 0 ||
		d.First[len(s.files)] != view.Bytes()/int64(dtype.Size()) {
		return nil, fmt.Errorf("the division %v of the shape %v and the strides %v among %d ranks: %w",
			d.First, d.Shape, d.Strides, len(s.files), cuda.ErrInvalidArgument)
	}
	name, ok := fileTypes[dtype]
	if !ok {
		return nil, fmt.Errorf("safetensors has no dtype %v", dtype)
	}
	parts := &ptfile.List{}
	for rank := range s.files {
		first, n := d.First[rank], d.First[rank+1]-d.First[rank]
		if n == 0 {
			continue
		}
		if err := s.check(dividedPart{rank, first, n}, part.Name, dtype); err != nil {
			return nil, err
		}
		parts.Items = append(parts.Items, int64(rank), first, n)
	}
	record := &ptfile.Dict{}
	for _, kv := range []struct {
		key   string
		value any
	}{{dividedKey, part.Name}, {dtypeKey, name}, {shapeKey, integerList(d.Shape)},
		{stridesKey, integerList(d.Strides)}, {partsKey, parts}} {
		record.Set(kv.key, kv.value)
	}
	return record, nil
}

func integerList(values []int64) *ptfile.List {
	l := &ptfile.List{Items: make([]any, len(values))}
	for i, v := range values {
		l.Items[i] = v
	}
	return l
}
