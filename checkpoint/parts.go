package checkpoint

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/checkpoint/internal/ptfile"
	"github.com/torchstream/torchstream/internal/safefile"
)

// A checkpoint of several files has a main file at its path, and parts in the same folder: the
// ranks' files of a RankWriter, or the data files of an index. The parts' names contain the
// checkpoint's id, which is new in each checkpoint. The main file's temporary name has it too, and
// the main file records the ids of the checkpoints that it replaced. From them a save finds the
// parts that a killed process left, or that a loss of power brought back.

// afterID matches the rest of a part's name after the id and its infix. A part's temporary file is
// a part too.
var afterID = regexp.MustCompile(`^\d{5,}-of-\d{5,}\.safetensors(\.tmp-[0-9a-f]{12}(-abandoned)?)?$`)

// indexID matches the id of an index's parts: older versions gave it 8 digits.
var indexID = regexp.MustCompile(`^[0-9a-f]{8}([0-9a-f]{4})?$`)

// isPartID reports whether parts of a checkpoint at the path can have the id.
func isPartID(path, id string) bool {
	if isIndexPath(path) {
		return indexID.MatchString(id)
	}
	return unfinishedNumber.MatchString(id)
}

// partID returns the id in the name of a part. ok is false if the checkpoint at the path cannot
// have a part of that name.
func partID(path, name string) (id string, ok bool) {
	base, infix := filepath.Base(path), rankInfix
	if index, ok := strings.CutSuffix(base, indexSuffix); ok {
		base, infix = index, "-"
	}
	rest, mine := strings.CutPrefix(name, base+"-")
	id, rest, ok = strings.Cut(rest, infix)
	return id, mine && ok && isPartID(path, id) && afterID.MatchString(rest)
}

// partIDs are the ids that a main file names.
type partIDs struct {
	own      []string // of its checkpoint
	replaced []string // of checkpoints that it replaced, whose parts may still exist
}

// readIDs returns the ids that the main file at the path names. It returns none if the file does
// not exist or has another format, and an error if it cannot be read.
func readIDs(path string) (partIDs, error) {
	f, err := safefile.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return partIDs{}, nil
	}
	if err != nil {
		return partIDs{}, err
	}
	defer f.Close() // only read
	read := pytorchIDs
	if isIndexPath(path) {
		read = indexIDs
	}
	ids, err := read(f, path)
	var failed *fs.PathError
	if errors.As(err, &failed) {
		return partIDs{}, err
	}
	if err != nil {
		return partIDs{}, nil
	}
	ids.replaced = slices.DeleteFunc(ids.replaced, func(id string) bool {
		return !isPartID(path, id) || slices.Contains(ids.own, id)
	})
	return ids, nil
}

// readReplaced returns the ids that the main file at the path names, which a save will replace. If
// the file cannot be read, the save must fail: no record would have the ids.
func readReplaced(path string) (partIDs, error) {
	ids, err := readIDs(path)
	if err != nil {
		return partIDs{}, fmt.Errorf("the file that the save replaces: %w: save again, or remove it", err)
	}
	return ids, nil
}

func indexIDs(f *os.File, path string) (ids partIDs, err error) {
	index, err := parseIndex(f)
	if err != nil {
		return ids, err
	}
	for _, name := range index.WeightMap {
		if id, ok := partID(path, name); ok && !slices.Contains(ids.own, id) {
			ids.own = append(ids.own, id)
		}
	}
	replaced, _ := index.Metadata[replacedKey].(string)
	ids.replaced = strings.Fields(replaced)
	return ids, nil
}

func pytorchIDs(f *os.File, path string) (ids partIDs, err error) {
	info, err := f.Stat()
	if err != nil {
		return ids, err
	}
	file, err := ptfile.Open(f, info.Size())
	if err != nil {
		return ids, err
	}
	if root, ok := file.Root.(*ptfile.Dict); ok {
		s, err := parseRankFiles(root, filepath.Dir(path))
		if err == nil && s != nil && s.base == filepath.Base(path) {
			ids.own = []string{s.id}
		}
	}
	if replaced, ok := strings.CutPrefix(file.Comment, replacesComment); ok {
		ids.replaced = strings.Fields(replaced)
	}
	return ids, nil
}

// unlinkParts removes the parts of the checkpoints with these ids. left is true if it cannot remove
// all of them.
func unlinkParts(path string, ids ...string) (removed, left bool) {
	if len(ids) == 0 {
		return false, false
	}
	dir := filepath.Dir(path)
	files, err := os.ReadDir(dir)
	if err != nil {
		return false, true
	}
	for _, f := range files {
		if id, ok := partID(path, f.Name()); !ok || !slices.Contains(ids, id) || !f.Type().IsRegular() {
			continue
		}
		err := os.Remove(filepath.Join(dir, f.Name()))
		removed = removed || err == nil
		left = left || err != nil && !errors.Is(err, fs.ErrNotExist)
	}
	return removed, left
}

// removeParts removes the parts of the checkpoint with this id. It returns false if some are left,
// or may be after a loss of power: their id must then stay in the name or in the record of a main
// file.
func removeParts(path, id string) bool {
	removed, left := unlinkParts(path, id)
	return !left && (!removed || safefile.SyncFolder(path) == nil)
}

// newMain starts a main file that will replace the file at the path. It removes the parts that the
// existing file has replaced. parts says whether the new checkpoint has parts.
func newMain(path string, kind safefile.Kind, parts bool) (*unfinished, error) {
	f, err := newUnfinished(path, path, kind)
	if err != nil {
		return nil, err
	}
	existing, err := readReplaced(path) // replacedIDs reads it again
	if err != nil {
		f.abandon() // it has no parts yet
		return nil, err
	}
	if parts || len(existing.replaced) > 0 {
		// A loss of power must not leave parts whose id no main file has, nor bring back a main
		// file without its parts: the process that replaced it may have died before its sync.
		if err := safefile.SyncFolder(path); err != nil {
			f.abandon() // it has no parts yet
			return nil, err
		}
	}
	for _, id := range existing.replaced {
		if removeParts(path, id) {
			f.removed = append(f.removed, id)
		}
	}
	return f, nil
}

// id returns the checkpoint's id.
func (f *unfinished) id() string { return strings.TrimPrefix(f.file.Name(), f.path+unfinishedInfix) }

// replacedIDs returns the ids of parts that nobody needs once f has its final name: the ids that
// the file at the path names, except those whose parts newMain has removed.
func (f *unfinished) replacedIDs() ([]string, error) {
	existing, err := readReplaced(f.path)
	if err != nil {
		return nil, err
	}
	return append(existing.own, slices.DeleteFunc(existing.replaced, func(id string) bool {
		return slices.Contains(f.removed, id)
	})...), nil
}

// finishMain renames the main file to its final name, and removes the parts that it replaces. After
// an error that wraps ErrNotDurable they stay, because a loss of power may bring back their main
// file.
func (f *unfinished) finishMain(replaced []string) error {
	if err := f.finish(); err != nil {
		return err
	}
	unlinkParts(f.path, replaced...) // those that stay or come back are in f's record
	return nil
}

// abandonMain removes the main file and its parts, unless the file has its final name.
func (f *unfinished) abandonMain() {
	if setAside(f.file) == nil {
		removeAbandoned(f.path, f.id())
	}
	f.file.Close()
}
