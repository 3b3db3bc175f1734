package pack

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/internal/safefile"
)

// JournalFile is the name of the journal in the output folder. The journal records what has been
// written.
const JournalFile = "pack.jsonl"

// lockFile is locked while a process packs into the folder.
const lockFile = "pack.lock"

const journalVersion = 2

// line is a line of the journal. It has exactly one of the fields.
type line struct {
	Pack  *header `json:"torchstream_pack,omitempty"`
	Start string  `json:"start,omitempty"` // the name of a shard that this pack starts to write
	Shard *shard  `json:"shard,omitempty"` // a shard that is complete
	// Again is the name of the first shard that is missing or was changed. That shard and all later
	// ones are written again.
	Again string `json:"again,omitempty"`
	Done  bool   `json:"done,omitempty"`
}

// header identifies the input and the options of a pack.
type header struct {
	Version int               `json:"version"`
	Input   digests           `json:"inputs"`
	Options map[string]string `json:"options"`
}

// digests identify an input.
type digests struct {
	Files   string `json:"files"`   // sizes and modification times of the input's files
	Samples string `json:"samples"` // names and sizes of the images, and of the other members of samples
	Labels  string `json:"labels"`  // classes, and the label of each sample
}

// shard is a complete shard.
type shard struct {
	Name    string    `json:"name"`
	Part    string    `json:"part"`
	Bytes   int64     `json:"bytes"`
	Samples int       `json:"samples"`
	Resized int       `json:"resized,omitempty"`
	End     int       `json:"end"` // position in the part, just after the shard's last sample
	LeftOut []leftOut `json:"left_out,omitempty"`
}

// leftOut is a bad sample.
type leftOut struct {
	Sample int    `json:"sample"`
	Name   string `json:"name"`
	Reason string `json:"reason"`
	Detail string `json:"detail,omitempty"`
}

// journal is the open journal of an output folder.
type journal struct {
	dir     string
	file    *os.File
	claim   *safefile.Claim // nil: the file system has no locks
	shards  []shard         // complete shards
	started map[string]bool // names of all shards that this pack has started to write
	done    bool
}

// openJournal opens the output folder for a new pack, or to continue one. A new pack is refused
// if the folder has other files.
func openJournal(dir string, h header) (_ *journal, err error) {
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return nil, fmt.Errorf("pack: %w", err)
	}
	j := &journal{dir: dir, started: map[string]bool{}}
	j.claim, err = safefile.NewClaim(filepath.Join(dir, lockFile))
	if err != nil && !errors.Is(err, safefile.ErrNoLocks) {
		return nil, fmt.Errorf("pack: %w", err)
	}
	defer func() {
		if err != nil {
			j.close()
		}
	}()
	path := filepath.Join(dir, JournalFile)
	text, err := safefile.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("pack: %w", err)
	}
	whole := bytes.LastIndexByte(text, '\n') + 1 // a killed process may leave half a line
	if whole == 0 {
		if err := onlyOurs(dir, string(text)); err != nil {
			return nil, err
		}
	}
	if j.file, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o666); err != nil {
		return nil, fmt.Errorf("pack: %w", err)
	}
	if whole > 0 {
		if err := j.read(text[:whole], h); err != nil {
			return nil, err
		}
	}
	if err := j.file.Truncate(int64(whole)); err != nil {
		return nil, fmt.Errorf("pack: %w", err)
	}
	if _, err := j.file.Seek(int64(whole), io.SeekStart); err != nil {
		return nil, fmt.Errorf("pack: %w", err)
	}
	if whole == 0 {
		return j, j.write(line{Pack: &h})
	}
	return j, j.check()
}

// onlyOurs is called if the journal has no complete line. It returns an error if text, the content
// of the journal, is not the start of a journal, or if the folder has other files.
func onlyOurs(dir, text string) error {
	const start = `{"torchstream_pack":`
	if n := min(len(text), len(start)); text[:n] != start[:n] {
		return fmt.Errorf("pack: %s is not the journal of a pack: give another folder", filepath.Join(dir, JournalFile))
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("pack: %w", err)
	}
	for _, e := range entries {
		if e.Name() != lockFile && e.Name() != JournalFile {
			return fmt.Errorf("pack: %s has other files (%q), and no pack to continue: give an empty or a new folder",
				dir, e.Name())
		}
	}
	return nil
}

// read reads the lines of a journal, and compares the journal's header with h.
func (j *journal) read(text []byte, h header) error {
	path := filepath.Join(j.dir, JournalFile)
	number := 0
	for l := range bytes.Lines(text) {
		number++
		var entry line
		if err := json.Unmarshal(l, &entry); err != nil || (entry.Pack != nil) != (number == 1) {
			return fmt.Errorf("pack: %s:%d is not a line of a pack's journal: give another folder, or remove this one",
				path, number)
		}
		switch {
		case entry.Pack != nil:
			if difference := entry.Pack.difference(h); difference != "" {
				return fmt.Errorf("pack: %s has a pack %s: give another folder, or remove this one", j.dir, difference)
			}
		case entry.Shard != nil:
			j.shards = append(j.shards, *entry.Shard)
		case entry.Again != "":
			j.dropFrom(entry.Again)
		}
		if entry.Start != "" {
			j.started[entry.Start] = true
		}
		j.done = entry.Done
	}
	return nil
}

// dropFrom removes a shard and all later ones from the list of complete shards.
func (j *journal) dropFrom(name string) {
	if at := slices.IndexFunc(j.shards, func(s shard) bool { return s.Name == name }); at >= 0 {
		j.shards = j.shards[:at]
	}
}

// difference describes how h, the header in the folder, differs from the header of the present
// call. It returns "" if they are the same.
func (h *header) difference(want header) string {
	if h.Version != want.Version {
		return fmt.Sprintf("of version %d, not %d", h.Version, want.Version)
	}
	names := slices.Collect(maps.Keys(h.Options))
	names = slices.AppendSeq(names, maps.Keys(want.Options))
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		if a, b := h.Options[name], want.Options[name]; a != b {
			return fmt.Sprintf("with %s %q, not %q", name, a, b)
		}
	}
	switch {
	case h.Input.Files != want.Input.Files:
		return "of another input, or of files that have changed since"
	case h.Input.Samples != want.Input.Samples:
		return "of an input with other samples"
	case h.Input.Labels != want.Input.Labels:
		return "with other labels, or a list that has changed since"
	}
	return ""
}

// check finds the first complete shard whose file is missing or has another size. That shard and
// all later ones will be written again.
func (j *journal) check() error {
	for _, s := range j.shards {
		info, err := os.Lstat(filepath.Join(j.dir, s.Name))
		if err == nil && info.Mode().IsRegular() && info.Size() == s.Bytes {
			continue
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("pack: %w", err)
		}
		j.dropFrom(s.Name)
		j.done = false
		return j.write(line{Again: s.Name})
	}
	return nil
}

// write appends a line, and waits until it is on the disk.
func (j *journal) write(l line) error {
	text, err := json.Marshal(l)
	if err == nil {
		_, err = j.file.Write(append(text, '\n'))
	}
	if err == nil {
		err = j.file.Sync()
	}
	if err != nil {
		return fmt.Errorf("pack: %s: %w", j.file.Name(), err)
	}
	return nil
}

// start records that the pack starts to write a shard. It returns the shard's path, and the kind of
// file that may be replaced. Only a file of this pack may be replaced.
func (j *journal) start(name string) (path string, kind safefile.Kind, err error) {
	path, kind = filepath.Join(j.dir, name), safefile.Raw
	if !j.started[name] {
		if err := safefile.Check(path, kind); err != nil { // before the journal names it as a shard of this pack
			return "", kind, fmt.Errorf("pack: %w", err)
		}
		j.started[name] = true
		return path, kind, j.write(line{Start: name})
	}
	kind = safefile.Kind{Name: "a shard", Is: func([]byte) bool { return true }}
	left, err := filepath.Glob(path + ".*.tmp") // temporary files of a killed process
	if err != nil {
		return "", kind, fmt.Errorf("pack: %w", err)
	}
	for _, temporary := range left {
		number := strings.TrimSuffix(strings.TrimPrefix(temporary, path+"."), ".tmp")
		if strings.Trim(number, "0123456789") == "" {
			if err := os.Remove(temporary); err != nil {
				return "", kind, fmt.Errorf("pack: %w", err)
			}
		}
	}
	return path, kind, nil
}

// end records that a shard is complete.
func (j *journal) end(s shard) error {
	j.shards = append(j.shards, s)
	return j.write(line{Shard: &s})
}

// finish records that the pack is complete.
func (j *journal) finish() error {
	if j.done {
		return nil
	}
	j.done = true
	return j.write(line{Done: true})
}

func (j *journal) close() {
	if j.file != nil {
		_ = j.file.Close() // each line was synced
	}
	if j.claim != nil {
		_ = j.claim.Release() // the lock ends with the process in any case
	}
}
