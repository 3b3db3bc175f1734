package checkpoint

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"

	"github.com/torchstream/torchstream/checkpoint/internal/ptfile"
	"github.com/torchstream/torchstream/torch"
)

// rankFiles holds the files of all ranks of a checkpoint.
type rankFiles struct {
	dir, base, id string
	files         []rankFile
	seals         []int64 // CRC-32s of the files' headers and checksums; nil: the checksums are not read
}

// rankFile is one rank's file. It is opened on first use.
type rankFile struct {
	bytes  int64
	mu     sync.Mutex
	opened *openRankFile // guarded by mu
}

// openRankFile is the open file of a rank.
type openRankFile struct {
	*File
	sums *checksums // nil in files of an earlier version
}

// maxRanks bounds the number of ranks that a file may claim.
const maxRanks = 1 << 16

// parseRankFiles returns the rank files that a checkpoint's dict names, or nil if it names none.
func parseRankFiles(root *ptfile.Dict, dir string) (*rankFiles, error) {
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
	s := &rankFiles{dir: dir, base: text(baseKey), id: text(idKey)}
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
	s.files = make([]rankFile, len(sizes))
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

func (s *rankFiles) close() error {
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

func (s *rankFiles) name(rank int) string { return rankFileName(s.base, s.id, rank, len(s.files)) }

// total returns the size of all files.
func (s *rankFiles) total() (n int64) {
	for rank := range s.files {
		n += s.files[rank].bytes
	}
	return n
}

// present checks that the files exist and have the recorded sizes. Its error is never
// fs.ErrNotExist, which tells a program that there is no checkpoint.
func (s *rankFiles) present() error {
	for rank := range s.files {
		info, err := os.Stat(filepath.Join(s.dir, s.name(rank)))
		switch {
		case err != nil:
			return fmt.Errorf("the file of rank %d is missing: a checkpoint has files beside it, which "+
				"move with it: %v", rank, err)
		case info.Size() != s.files[rank].bytes:
			return fmt.Errorf("%s, the file of rank %d, has %d bytes, and had %d when the checkpoint was "+
				"written: copy it again", s.name(rank), rank, info.Size(), s.files[rank].bytes)
		}
	}
	return nil
}

// open returns a rank's open file.
func (s *rankFiles) open(rank int) (*openRankFile, error) {
	f := &s.files[rank]
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.opened != nil {
		return f.opened, nil
	}
	c, err := Open(filepath.Join(s.dir, s.name(rank)))
	if err != nil {
		return nil, fmt.Errorf("the file of rank %d: %v", rank, err)
	}
	if m := c.metadata; c.IsPyTorch() || m[checkpointKey] != s.id || m[rankKey] != strconv.Itoa(rank) {
		c.Close()
		return nil, fmt.Errorf("%s is not the file of rank %d of this checkpoint: it says checkpoint %q "+
			"and rank %q", s.name(rank), rank, m[checkpointKey], m[rankKey])
	}
	opened := &openRankFile{File: c}
	if s.seals != nil {
		opened.sums, err = c.readChecksums()
		if err == nil && int64(opened.sums.seal) != s.seals[rank] {
			err = errors.New("its names, shapes or checksums are not those that were written: copy the " +
				"file again, or go on from an older checkpoint")
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
func (s *rankFiles) check(p dividedPart, name string, dtype torch.DType) error {
	_, _, err := s.find(p, name, dtype)
	return err
}

func (s *rankFiles) find(p dividedPart, name string, dtype torch.DType) (*openRankFile, entry, error) {
	c, err := s.open(p.rank)
	if err != nil {
		return nil, entry{}, err
	}
	e, ok := c.tensors.entries[name]
	switch {
	case !ok:
		return nil, e, fmt.Errorf("%s, the file of rank %d, does not have it", s.name(p.rank), p.rank)
	case e.dtype != dtype || !slices.Equal(e.shape, []int64{p.n}):
		return nil, e, fmt.Errorf("%s, the file of rank %d, has %v%v of it, and should have %v[%d]",
			s.name(p.rank), p.rank, e.dtype, e.shape, dtype, p.n)
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
func (f *File) readDivided(root *ptfile.Dict) error {
	path := f.path
	if target, err := filepath.EvalSymlinks(path); err == nil { // the folder of a link's target
		path = target
	}
	s, err := parseRankFiles(root, filepath.Dir(path))
	if err != nil || s == nil {
		return err
	}
	if err := s.present(); err != nil {
		return err
	}
	root.Set(shardsKey, nil) // a copy written by SavePyTorch is whole
	f.pytorch.ranks = s
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
func (s *rankFiles) tensor(d *ptfile.Dict) (*ptfile.Tensor, error) {
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
			return nil, fmt.Errorf("%s, the file of rank %d, has %d bytes, and cannot have %d elements of it", s.name(p.rank), p.rank,
				bytes, p.n)
		}
		at += p.n
		parts = append(parts, p)
	}
	t, err := ptfile.NewView(dtype, shape, strides,
		func(b []byte, offset int64) error { return s.read(b, offset, name, dtype, parts) })
	if err != nil {
		return nil, err
	}
	if t.Bytes()/size != at {
		return nil, fmt.Errorf("its shape is %v, and the ranks have %d elements of it", shape, at)
	}
	return t, nil
}

// read reads bytes at an offset of a tensor from the rank files.
func (s *rankFiles) read(b []byte, offset int64, name string, dtype torch.DType, parts []dividedPart) error {
	size := int64(dtype.Size())
	i, found := slices.BinarySearchFunc(parts, offset,
		func(p dividedPart, at int64) int { return cmp.Compare(p.first*size, at) })
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
func (f *openRankFile) readPart(b []byte, name string, e entry, offset int64) error {
	if f.sums == nil {
		return f.readFull(b, f.data+e.begin+offset)
	}
	return f.sums.read(f.File, b, name, e, offset)
}
