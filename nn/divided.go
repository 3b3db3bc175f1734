package nn

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/ptfile"
	"github.com/torchstream/torchstream/internal/safefile"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
)

// A checkpoint that the ranks of a job write together consists of a PyTorch file and one
// safetensors file per rank in the same directory. The PyTorch file holds everything that is not
// divided. Its key "shards" describes the rank files. Each divided tensor is replaced by a dict
// that says which rank has which elements. The rank files hold these elements as rows, under the
// names in the dicts.

// Division says how the ranks of a job divide a tensor.
type Division struct {
	// Shape and Strides describe the whole tensor. Its elements fill one contiguous range of
	// memory.
	Shape, Strides []int64
	// First has the index of each rank's first element, in memory order, followed by the number of
	// elements: rank r has the elements First[r] to First[r+1]-1.
	First []int64
}

// Divided maps each part that this rank has to its Division. A part is a row with the rank's
// elements in memory order, and may be empty.
type Divided map[*torch.Tensor]Division

// DividedParts returns the divided tensors of a value for [SavePyTorch], each once. The names say
// where the tensors are in the value. Ranks whose values have the same keys get the same names.
func DividedParts(value any, d Divided) []torch.Named {
	var parts []torch.Named
	seen := map[*torch.Tensor]bool{}
	var visit func(path string, value any, depth int)
	below := func(path string, key any) string {
		if path == "" {
			return fmt.Sprint(key)
		}
		return fmt.Sprint(path, ".", key)
	}
	visit = func(path string, value any, depth int) {
		if depth > maxDepth {
			return // SavePyTorch refuses the value
		}
		switch v := value.(type) {
		case *torch.Tensor:
			if _, ok := d[v]; ok && !seen[v] {
				seen[v] = true
				parts = append(parts, torch.Named{Name: path, Tensor: v})
			}
		case []torch.Named:
			for _, n := range v {
				visit(below(path, n.Name), n.Tensor, depth+1)
			}
		case []any:
			for i, x := range v {
				visit(below(path, i), x, depth+1)
			}
		case map[string]any:
			for _, key := range slices.Sorted(maps.Keys(v)) {
				visit(below(path, key), v[key], depth+1)
			}
		case map[any]any:
			byText := func(a, b any) int { return cmp.Compare(fmt.Sprint(a), fmt.Sprint(b)) }
			for _, key := range slices.SortedFunc(maps.Keys(v), byText) {
				visit(below(path, key), v[key], depth+1)
			}
		}
	}
	visit("", value, 0)
	return parts
}

// Shards is a checkpoint that the ranks of a job write together, on a disk that all of them see:
//
//	rank 0: BeginShards, and sends ID to the others    the others: JoinShards
//	all ranks: Write
//	rank 0, when all have returned: Commit
//
// Commit replaces the old checkpoint by a rename, and then removes the old checkpoint's files. If a
// process dies at any moment, either the old or the new checkpoint is whole. Leftover files belong
// to no checkpoint; the next BeginShards or SavePyTorch of the path removes them. train.Checkpoint
// performs all of these steps.
//
// All files have the mode of rank 0's file: the mode of the existing file at the path or, for the
// first checkpoint, the mode that rank 0's umask gives.
//
// Only the files of the checkpoint at the path are replaced and removed. A move or copy must
// include all files of a checkpoint.
type Shards struct {
	path, id string
	ranks    int
	file     *unfinished // on rank 0
}

// Keys of a joint checkpoint: in its dict, in the dicts that replace tensors, and in the metadata
// of a rank's file.
const (
	shardsKey = "shards"
	idKey     = "id"    // a number in the files' names
	baseKey   = "base"  // the common prefix of the files' names
	bytesKey  = "bytes" // the files' sizes, by rank
	sealsKey  = "crc32" // CRC-32s of headers and checksums, by rank; absent in older files

	dividedKey = "divided" // the tensor's name in the files
	dtypeKey   = "dtype"   // safetensors' name
	shapeKey   = "shape"
	stridesKey = "strides"
	partsKey   = "parts" // for each part the rank, its first element and the number of elements

	checkpointKey = "checkpoint" // the id
	rankKey       = "rank"
)

// BeginShards starts the checkpoint at the path on rank 0. Call Commit or Abandon afterwards.
func BeginShards(path string, ranks int) (*Shards, error) {
	f, err := newPyTorch(path)
	if err != nil {
		return nil, fmt.Errorf("nn: save %s: %w", path, err)
	}
	return &Shards{path: path, id: strings.TrimPrefix(f.file.Name(), path+unfinishedInfix), ranks: ranks, file: f}, nil
}

// JoinShards joins the checkpoint that rank 0 started with this id. It returns an error if this
// rank does not see rank 0's file: the path is then on a local disk of each host.
func JoinShards(path, id string, ranks int) (*Shards, error) {
	if !unfinishedNumber.MatchString(id) {
		return nil, fmt.Errorf("nn: save %s: rank 0 names the checkpoint %q: %w", path, id, cuda.ErrInvalidArgument)
	}
	s := &Shards{path: path, id: id, ranks: ranks}
	if _, err := os.Lstat(s.unfinished()); err != nil {
		host, _ := os.Hostname()
		return nil, fmt.Errorf("nn: save %s: the host %s does not see the file that rank 0 has made there: give a path in a folder that all hosts share: %v", path, host, err)
	}
	return s, nil
}

// ID returns the checkpoint's id.
func (s *Shards) ID() string { return s.id }

// shardName returns the name of a rank's file.
func shardName(base, id string, rank, ranks int) string {
	return fmt.Sprintf("%s-%s-rank%05d-of-%05d%s", base, id, rank, ranks, shardSuffix)
}

// unfinished returns the name of rank 0's file before Commit.
func (s *Shards) unfinished() string { return s.path + unfinishedInfix + s.id }

func (s *Shards) shard(rank int) string {
	return filepath.Join(filepath.Dir(s.path), shardName(filepath.Base(s.path), s.id, rank, s.ranks))
}

// Write writes a rank's parts, as DividedParts returns them, to the rank's file. It blocks until
// the file is on the disk. If rank 0 has abandoned the checkpoint in the meantime, Write returns an
// error and removes the file.
func (s *Shards) Write(rank int, parts []torch.Named) error {
	own := slices.DeleteFunc(slices.Clone(parts), func(n torch.Named) bool { return n.Tensor.Err() == nil && n.Tensor.Elements() == 0 })
	metadata := map[string]string{checkpointKey: s.id, rankKey: strconv.Itoa(rank)}
	err := writeAtomically(s.shard(rank), s.unfinished(), safefile.Safetensors, func(w io.Writer) error {
		_, _, err := encode(w, own, metadata, true)
		return err
	})
	if err != nil {
		return fmt.Errorf("nn: save %s: %w", s.shard(rank), err)
	}
	// Rank 0 does not wait forever. Nobody would remove a file written after Abandon.
	if _, err := os.Lstat(s.unfinished()); errors.Is(err, fs.ErrNotExist) {
		os.Remove(s.shard(rank))
		return fmt.Errorf("nn: save %s: rank 0 has given the checkpoint up before rank %d had written its file", s.path, rank)
	}
	return nil
}

// Commit writes the value to the path, on rank 0. The files of all ranks must exist and contain the
// parts of the value's divided tensors. An error leaves the old checkpoint in place. SavePyTorch
// must accept the value, and it must not have the key "shards".
func (s *Shards) Commit(value map[string]any, d Divided) error {
	err := s.commit(value, d)
	if err != nil {
		s.Abandon()
		return fmt.Errorf("nn: save %s: %w", s.path, err)
	}
	return nil
}

// Abandon gives up the checkpoint on rank 0, and removes its files.
func (s *Shards) Abandon() {
	removeID(s.path, s.id) // first: if a process dies here, the name of the leftovers remains
	s.file.abandon()
	removeID(s.path, s.id) // files of a rank that checked for rank 0's file earlier
}

func (s *Shards) commit(value map[string]any, d Divided) error {
	if value[shardsKey] != nil {
		return fmt.Errorf("the value has the key %q, which is that of the ranks' files: %w", shardsKey, cuda.ErrInvalidArgument)
	}
	parts := DividedParts(value, d)
	set := &shardSet{dir: filepath.Dir(s.path), base: filepath.Base(s.path), id: s.id, files: make([]shardFile, s.ranks)}
	defer set.close()
	sizes, seals := make([]any, s.ranks), make([]any, s.ranks)
	for rank := range s.ranks {
		info, err := os.Stat(s.shard(rank))
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
	root[shardsKey] = map[string]any{idKey: s.id, baseKey: set.base, bytesKey: sizes, sealsKey: seals}
	converted, err := converter.value(root, 0)
	if err != nil {
		return err
	}
	return s.file.finishPyTorch(converted)
}

// describe returns the dict that replaces a divided tensor. The tensor's parts must be in the
// files.
func (s *shardSet) describe(part torch.Named, d Division) (*ptfile.Dict, error) {
	dtype := part.Tensor.DType()
	// A checkpoint that no reader accepts must not replace a good one.
	view, err := ptfile.NewView(dtype, d.Shape, d.Strides, nil)
	if err != nil || len(d.First) != len(s.files)+1 || !slices.IsSorted(d.First) || d.First[0] != 0 || d.First[len(s.files)] != view.Bytes()/int64(dtype.Size()) {
		return nil, fmt.Errorf("the division %v of the shape %v and the strides %v among %d ranks: %w", d.First, d.Shape, d.Strides, len(s.files), cuda.ErrInvalidArgument)
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
	}{{dividedKey, part.Name}, {dtypeKey, name}, {shapeKey, integerList(d.Shape)}, {stridesKey, integerList(d.Strides)}, {partsKey, parts}} {
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

// removeID removes the files of the checkpoint with this id at the path, both finished and
// unfinished. A file that it cannot remove belongs to no checkpoint.
func removeID(path, id string) {
	if !unfinishedNumber.MatchString(id) {
		return
	}
	dir, prefix := filepath.Dir(path), filepath.Base(path)+"-"+id+"-rank"
	files, _ := os.ReadDir(dir)
	for _, f := range files {
		if strings.HasPrefix(f.Name(), prefix) && f.Type().IsRegular() {
			os.Remove(filepath.Join(dir, f.Name()))
		}
	}
}

// replacesComment starts the zip comment of a PyTorch file that replaced a joint checkpoint. The id
// of that checkpoint follows.
const replacesComment = "replaces "

// newPyTorch starts a PyTorch file that will replace the file at the path. It also removes rank
// files that the existing file replaced: they remain if a process died after the rename.
func newPyTorch(path string) (*unfinished, error) {
	f, err := newUnfinished(path, path, safefile.PyTorch)
	if err == nil {
		_, replaced := idsAt(path)
		removeID(path, replaced)
	}
	return f, err
}

// finishPyTorch writes the value, renames the file, and removes the rank files of the checkpoint
// that it replaces. The file records the id of those rank files, so a later save can remove any
// that remain.
func (f *unfinished) finishPyTorch(root any) error {
	old, _ := idsAt(f.path)
	comment := ""
	if old != "" {
		comment = replacesComment + old
	}
	if err := f.write(func(w io.Writer) error { return ptfile.Write(w, root, comment) }); err != nil {
		return err
	}
	if err := f.finish(); err != nil {
		return err
	}
	removeID(f.path, old)
	return nil
}

// idsAt returns the id of the checkpoint at a path, and the id of the checkpoint that it replaced.
// An id is empty if there are no rank files, or if the file cannot be read.
func idsAt(path string) (id, replaced string) {
	f, err := safefile.Open(path)
	if err != nil {
		return "", ""
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", ""
	}
	file, err := ptfile.Open(f, info.Size())
	if err != nil {
		return "", ""
	}
	if root, ok := file.Root.(*ptfile.Dict); ok {
		if s, err := parseShards(root, filepath.Dir(path)); err == nil && s != nil && s.base == filepath.Base(path) {
			id = s.id
		}
	}
	if other, ok := strings.CutPrefix(file.Comment, replacesComment); ok && other != id {
		replaced = other
	}
	return id, replaced
}

// shardSet is the rank files of a checkpoint.
type shardSet struct {
	dir, base, id string
	files         []shardFile
	seals         []int64 // CRC-32s of the files' checksums, which are not read if it is nil
}

// shardFile is one rank's file. It is opened on first use.
type shardFile struct {
	bytes  int64
	mu     sync.Mutex
	opened *rankFile // guarded by mu
}

// rankFile is the open file of a rank.
type rankFile struct {
	*Checkpoint
	sums *checksums // nil in files of an earlier version
}

// maxRanks bounds the number of ranks that a file may claim.
const maxRanks = 1 << 16

// parseShards returns the rank files that a checkpoint's dict names, or nil if it names none.
func parseShards(root *ptfile.Dict, dir string) (*shardSet, error) {
	v, _ := root.Get(shardsKey)
	d, ok := v.(*ptfile.Dict)
	if !ok {
		return nil, nil
	}
	text := func(key string) string {
		v, _ := d.Get(key)
		s, _ := v.(string)
		return s
	}
	s := &shardSet{dir: dir, base: text(baseKey), id: text(idKey)}
	v, _ = d.Get(bytesKey)
	sizes, err := integersOf(v)
	if err != nil || !unfinishedNumber.MatchString(s.id) {
		return nil, nil // another program's key
	}
	if s.base == "" || s.base != filepath.Base(s.base) || len(sizes) == 0 || len(sizes) > maxRanks {
		return nil, fmt.Errorf("%q: files of %d ranks whose names begin with %q", shardsKey, len(sizes), s.base)
	}
	if v, ok := d.Get(sealsKey); ok {
		if s.seals, err = integersOf(v); err != nil || len(s.seals) != len(sizes) {
			return nil, fmt.Errorf("%q: the checksums %v of %d files: %v", shardsKey, s.seals, len(sizes), err)
		}
	}
	s.files = make([]shardFile, len(sizes))
	for rank, n := range sizes {
		s.files[rank].bytes = n
	}
	return s, nil
}

func integersOf(v any) ([]int64, error) {
	l, ok := v.(*ptfile.List)
	if !ok {
		return nil, errors.New("no list")
	}
	values := make([]int64, len(l.Items))
	for i, item := range l.Items {
		n, ok := item.(int64)
		if !ok || n < 0 {
			return nil, fmt.Errorf("%v where a non-negative integer should be", item)
		}
		values[i] = n
	}
	return values, nil
}

func (s *shardSet) close() error {
	var errs []error
	for rank := range s.files {
		f := &s.files[rank]
		f.mu.Lock()
		if f.opened != nil {
			errs = append(errs, f.opened.Close())
		}
		f.opened = nil
		f.mu.Unlock()
	}
	return errors.Join(errs...)
}

func (s *shardSet) name(rank int) string { return shardName(s.base, s.id, rank, len(s.files)) }

// total returns the size of all files.
func (s *shardSet) total() (n int64) {
	for rank := range s.files {
		n += s.files[rank].bytes
	}
	return n
}

// present checks that the files exist and have the recorded sizes. Its error is never
// fs.ErrNotExist, which tells a program that there is no checkpoint.
func (s *shardSet) present() error {
	for rank := range s.files {
		info, err := os.Stat(filepath.Join(s.dir, s.name(rank)))
		switch {
		case err != nil:
			return fmt.Errorf("the file of rank %d is missing: a checkpoint has files beside it, which move with it: %v", rank, err)
		case info.Size() != s.files[rank].bytes:
			return fmt.Errorf("%s, the file of rank %d, has %d bytes, and had %d when the checkpoint was written: copy it again", s.name(rank), rank, info.Size(), s.files[rank].bytes)
		}
	}
	return nil
}

// open returns a rank's open file.
func (s *shardSet) open(rank int) (*rankFile, error) {
	f := &s.files[rank]
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.opened != nil {
		return f.opened, nil
	}
	c, err := OpenCheckpoint(filepath.Join(s.dir, s.name(rank)))
	if err != nil {
		return nil, fmt.Errorf("the file of rank %d: %v", rank, err)
	}
	if m := c.metadata; c.pytorch || m[checkpointKey] != s.id || m[rankKey] != strconv.Itoa(rank) {
		c.Close()
		return nil, fmt.Errorf("%s is not the file of rank %d of this checkpoint: it says checkpoint %q and rank %q", s.name(rank), rank, m[checkpointKey], m[rankKey])
	}
	opened := &rankFile{Checkpoint: c}
	if s.seals != nil {
		opened.sums, err = c.readChecksums()
		if err == nil && int64(opened.sums.seal) != s.seals[rank] {
			err = errors.New("its names, shapes or checksums are not those that were written: copy the file again, or go on from an older checkpoint")
		}
		if err != nil {
			c.Close()
			return nil, fmt.Errorf("%s, the file of rank %d: %w", s.name(rank), rank, err)
		}
	}
	f.opened = opened
	return opened, nil
}

// dividedPart is the elements first to first+n-1 of a tensor, held by one rank.
type dividedPart struct {
	rank     int
	first, n int64
}

// check verifies that the rank's file has the part.
func (s *shardSet) check(p dividedPart, name string, dtype torch.DType) error {
	_, _, err := s.find(p, name, dtype)
	return err
}

func (s *shardSet) find(p dividedPart, name string, dtype torch.DType) (*rankFile, entry, error) {
	c, err := s.open(p.rank)
	if err != nil {
		return nil, entry{}, err
	}
	e, ok := c.entries[name]
	switch {
	case !ok:
		return nil, e, fmt.Errorf("%s, the file of rank %d, does not have it", s.name(p.rank), p.rank)
	case e.dtype != dtype || !slices.Equal(e.shape, []int64{p.n}):
		return nil, e, fmt.Errorf("%s, the file of rank %d, has %v%v of it, and should have %v[%d]", s.name(p.rank), p.rank, e.dtype, e.shape, dtype, p.n)
	}
	return c, e, nil
}

// standsForTensor reports whether a dict has exactly the keys of a dict that replaces a tensor. A
// program's own dict may have some of them.
func standsForTensor(d *ptfile.Dict) bool {
	keys := []string{dividedKey, dtypeKey, shapeKey, stridesKey, partsKey}
	return d.Len() == len(keys) && !slices.ContainsFunc(keys, func(key string) bool {
		_, has := d.Get(key)
		return !has
	})
}

// readDivided replaces the dicts of divided tensors with tensors.
func (c *Checkpoint) readDivided(root *ptfile.Dict) error {
	path := c.path
	if target, err := filepath.EvalSymlinks(path); err == nil { // the folder of a link's target
		path = target
	}
	s, err := parseShards(root, filepath.Dir(path))
	if err != nil || s == nil {
		return err
	}
	if err := s.present(); err != nil {
		return err
	}
	root.Set(shardsKey, nil) // a copy written by SavePyTorch is whole
	c.divided = s
	seen := map[any]bool{}
	var visit func(v any) (any, error)
	visit = func(v any) (any, error) {
		switch container := v.(type) {
		case *ptfile.Dict:
			if standsForTensor(container) {
				t, err := s.tensor(container)
				if err != nil {
					name, _ := container.Get(dividedKey)
					return nil, fmt.Errorf("tensor %v: %w", name, err)
				}
				return t, nil
			}
			if seen[v] {
				return v, nil
			}
			seen[v] = true
			for key, x := range container.All() {
				x, err := visit(x)
				if err != nil {
					return nil, err
				}
				container.Set(key, x)
			}
		case *ptfile.List:
			if seen[v] {
				return v, nil
			}
			seen[v] = true
			for i, x := range container.Items {
				var err error
				if container.Items[i], err = visit(x); err != nil {
					return nil, err
				}
			}
		}
		return v, nil
	}
	_, err = visit(root)
	return err
}

// tensor returns the tensor that a dict describes. The parts must cover all elements exactly once.
func (s *shardSet) tensor(d *ptfile.Dict) (*ptfile.Tensor, error) {
	get := func(key string) any {
		v, _ := d.Get(key)
		return v
	}
	name, ok1 := get(dividedKey).(string)
	typeName, ok2 := get(dtypeKey).(string)
	dtype, ok3 := dtypeOf(typeName)
	shape, err1 := integersOf(get(shapeKey))
	strides, err2 := integersOf(get(stridesKey))
	numbers, err3 := integersOf(get(partsKey))
	if err := errors.Join(err1, err2, err3); err != nil || !ok1 || !ok2 || !ok3 || len(numbers)%3 != 0 {
		return nil, fmt.Errorf("the dict that stands for it is damaged: dtype %v: %v", get(dtypeKey), err)
	}
	size := int64(dtype.Size())
	var parts []dividedPart
	at := int64(0)
	for i := 0; i < len(numbers); i += 3 {
		p := dividedPart{int(numbers[i]), numbers[i+1], numbers[i+2]}
		if numbers[i] >= int64(len(s.files)) || p.first != at || p.n == 0 || at+p.n < at {
			return nil, fmt.Errorf("%d elements from %d of rank %d follow %d elements", p.n, p.first, numbers[i], at)
		}
		if bytes := s.files[p.rank].bytes; p.n > bytes/size { // before any allocation
			return nil, fmt.Errorf("%s, the file of rank %d, has %d bytes, and cannot have %d elements of it", s.name(p.rank), p.rank, bytes, p.n)
		}
		at += p.n
		parts = append(parts, p)
	}
	t, err := ptfile.NewView(dtype, shape, strides, func(b []byte, offset int64) error { return s.read(b, offset, name, dtype, parts) })
	if err != nil {
		return nil, err
	}
	if t.Bytes()/size != at {
		return nil, fmt.Errorf("its shape is %v, and the ranks have %d elements of it", shape, at)
	}
	return t, nil
}

// read reads bytes at an offset of a tensor from the rank files.
func (s *shardSet) read(b []byte, offset int64, name string, dtype torch.DType, parts []dividedPart) error {
	size := int64(dtype.Size())
	i, found := slices.BinarySearchFunc(parts, offset, func(p dividedPart, at int64) int { return cmp.Compare(p.first*size, at) })
	if !found {
		i-- // the last part that starts at or before the offset
	}
	for ; len(b) > 0 && i < len(parts); i++ {
		p := parts[i]
		from := offset - p.first*size
		n := min(p.n*size-from, int64(len(b)))
		f, e, err := s.find(p, name, dtype)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := f.readPart(b[:n], name, e, from); err != nil {
			return fmt.Errorf("%s in %s, the file of rank %d: %w", name, s.name(p.rank), p.rank, err)
		}
		b, offset = b[n:], offset+n
	}
	return nil
}

// readPart reads bytes of a tensor from an offset.
func (f *rankFile) readPart(b []byte, name string, e entry, offset int64) error {
	if f.sums == nil {
		return f.readFull(b, f.data+e.begin+offset)
	}
	return f.sums.read(f.Checkpoint, b, name, e, offset)
}

// Size returns the checkpoint's total size in bytes, including shard files.
func (c *Checkpoint) Size() (int64, error) {
	info, err := c.file.Stat()
	if err != nil {
		return 0, fmt.Errorf("nn: %s: %w", c.path, err)
	}
	n := info.Size()
	for _, s := range c.shards {
		own, err := s.Size()
		if err != nil {
			return 0, err
		}
		n += own
	}
	if c.divided != nil {
		n += c.divided.total()
	}
	return n, nil
}

// ReadPart returns n elements of the tensor, on the CPU, as a row. The elements are numbered in the
// memory order of a dense tensor with these strides; first is the number of the row's first
// element. If the file has this order, ReadPart reads and allocates only these elements. Otherwise
// it reads the whole tensor. A file has the order of Contiguous strides, except for tensors that
// ranks have written. The row belongs to the caller.
func (s *StoredTensor) ReadPart(strides []int64, first, n int64) (*torch.Tensor, error) {
	t, err := s.from.readPart(s.entry, strides, first, n)
	if err != nil {
		return nil, s.failed(err)
	}
	return t, nil
}

func (c *Checkpoint) readPart(e entry, strides []int64, first, n int64) (*torch.Tensor, error) {
	if e.shard != nil {
		c = e.shard
	}
	if err := e.check(); err != nil { // before it allocates
		return nil, err
	}
	total := torch.Spec{DType: e.dtype, Shape: e.shape}.Elements()
	if len(strides) != len(e.shape) || !tensor.Dense(e.shape, strides) || first < 0 || n < 0 || first > total-n {
		return nil, fmt.Errorf("%d elements from %d of the shape %v in the order of the strides %v: %w", n, first, e.shape, strides, cuda.ErrInvalidArgument)
	}
	t, err := torch.Empty(cuda.CPU, e.dtype, n)
	if err != nil || n == 0 {
		return t, err
	}
	if e.ordered(strides) {
		err = c.fillPart(t, e, first)
	} else {
		err = c.cut(t, e, strides, first)
	}
	if err != nil {
		t.Close()
		return nil, err
	}
	return t, nil
}

// ordered reports whether the order of the elements in the file matches the strides, which are
// dense.
func (e *entry) ordered(strides []int64) bool {
	own := ptfile.Contiguous(e.shape)
	if e.stored != nil {
		own = e.stored.Strides
	}
	for d, n := range e.shape {
		if n > 1 && own[d] != strides[d] {
			return false
		}
	}
	return true
}

// fillPart reads elements that are contiguous in the file.
func (c *Checkpoint) fillPart(t *torch.Tensor, e entry, first int64) error {
	b, err := t.Bytes()
	if err != nil {
		return err
	}
	return c.readBytes(b, e, first)
}

// cut reads the whole tensor, and copies the elements for t.
func (c *Checkpoint) cut(t *torch.Tensor, e entry, strides []int64, first int64) error {
	read, err := c.read(e)
	if err != nil {
		return err
	}
	scope := torch.NewScope("nn.ReadPart")
	defer scope.Close()
	whole := scope.Own(read)
	row, err := torch.Empty(cuda.CPU, e.dtype, whole.Elements())
	if err != nil {
		return err
	}
	row = scope.Own(row)
	if err := row.AsStrided(e.shape, strides, torch.AsStridedOptions{}).CopyFrom(whole, torch.CopyOptions{}); err != nil {
		return err
	}
	return t.CopyFrom(row.Narrow(0, first, t.Elements()), torch.CopyOptions{})
}
