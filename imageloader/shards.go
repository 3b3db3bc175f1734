package imageloader

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/torchstream/torchstream/internal/safefile"
)

// shardPaths says which files an archive has. A path that names a file, a directory or a URL is that. In any other, {a,b} stands for either and {000..015} for
// each number of the range, as in a shell, and what then holds *, ? or [ is a pattern for file names; the shards come in the order written, of a pattern in
// that of their names.
func shardPaths(path string) ([]string, error) {
	if !strings.ContainsAny(path, "{*?[") {
		return []string{path}, nil
	}
	if !isURL(path) {
		if _, err := os.Lstat(path); err == nil {
			return []string{path}, nil
		}
	}
	list, err := expandBraces(path, nil)
	if err != nil {
		return nil, fmt.Errorf("imageloader: %s: %w", path, err)
	}
	var paths []string
	for _, p := range list {
		if isURL(p) || !strings.ContainsAny(p, "*?[") {
			paths = append(paths, p)
			continue
		}
		found, err := filepath.Glob(p)
		if err != nil {
			return nil, fmt.Errorf("imageloader: %s: %w", p, err)
		}
		found = slices.DeleteFunc(found, func(name string) bool {
			return strings.HasSuffix(name, sidecarSuffix) || unfinished(filepath.Base(name))
		})
		if len(found) == 0 {
			return nil, fmt.Errorf("imageloader: no file is called like %s: %w", p, fs.ErrNotExist)
		}
		slices.Sort(found)
		paths = append(paths, found...)
	}
	if len(paths) > maxShards {
		return nil, fmt.Errorf("imageloader: %s: %d shards, over the limit of %d", path, len(paths), maxShards)
	}
	return paths, nil
}

// expandBraces adds what s stands for to list.
func expandBraces(s string, list []string) ([]string, error) {
	open := strings.IndexByte(s, '{')
	if open < 0 {
		if len(list) > maxShards {
			return nil, fmt.Errorf("more than %d shards", maxShards)
		}
		return append(list, s), nil
	}
	depth, end := 0, -1
	commas := []int{open}
	for i := open; i < len(s) && end < 0; i++ {
		switch s[i] {
		case '{':
			depth++
		case ',':
			if depth == 1 {
				commas = append(commas, i)
			}
		case '}':
			if depth--; depth == 0 {
				end = i
			}
		}
	}
	if end < 0 {
		return nil, fmt.Errorf("a { has no }")
	}
	var choices []string
	if first, last, ok := strings.Cut(s[open+1:end], ".."); ok && len(commas) == 1 {
		from, err1 := strconv.ParseUint(first, 10, 31)
		to, err2 := strconv.ParseUint(last, 10, 31)
		if err1 != nil || err2 != nil || from > to || to-from >= maxShards {
			return nil, fmt.Errorf("{%s..%s} is no range of numbers", first, last)
		}
		width := 0
		if len(first) == len(last) || first[0] == '0' {
			width = len(first)
		}
		for n := from; n <= to; n++ {
			choices = append(choices, fmt.Sprintf("%0*d", width, n))
		}
	} else {
		commas = append(commas, end)
		for i := range len(commas) - 1 {
			choices = append(choices, s[commas[i]+1:commas[i+1]])
		}
	}
	var err error
	for _, c := range choices {
		if list, err = expandBraces(s[:open]+c+s[end+1:], list); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// totalInfo describes the shards of an archive together.
type totalInfo struct {
	name    string
	size    int64
	changed time.Time // the latest
	version string    // of those that have one
}

func (t *totalInfo) add(info fs.FileInfo) {
	t.size += info.Size()
	if info.ModTime().After(t.changed) {
		t.changed = info.ModTime()
	}
	if s, ok := info.Sys().(SourceInfo); ok {
		t.version += s.Version + "\n"
	}
}

func (t totalInfo) Name() string       { return t.name }
func (t totalInfo) Size() int64        { return t.size }
func (t totalInfo) Mode() fs.FileMode  { return 0 }
func (t totalInfo) ModTime() time.Time { return t.changed }
func (t totalInfo) IsDir() bool        { return false }
func (t totalInfo) Sys() any           { return t.version }

// tree walks the files below a directory in the order of their paths.
type tree struct {
	root   string
	walked bool
	names  []string // below root, with slashes; of those that are not directories
	infos  []fs.FileInfo
	at     int
	file   *os.File // the current one
	err    error    // of opening it
}

// walk lists the files.
func (t *tree) walk() error {
	t.walked = true
	return filepath.WalkDir(t.root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		if len(t.names) == maxMembers {
			return fmt.Errorf("more than %d files", maxMembers)
		}
		name, err := filepath.Rel(t.root, path)
		if err != nil {
			return err
		}
		info, err := os.Stat(path) // what a link stands for
		if err != nil {
			if info, err = d.Info(); err != nil {
				return err
			}
		}
		t.names, t.infos = append(t.names, filepath.ToSlash(name)), append(t.infos, info)
		return nil
	})
}

func (t *tree) next() (member, error) {
	t.close()
	if !t.walked {
		if err := t.walk(); err != nil {
			return member{}, err
		}
	}
	if t.at == len(t.names) {
		return member{}, io.EOF
	}
	name, info := t.names[t.at], t.infos[t.at]
	t.at++
	m := member{name: name, size: info.Size()}
	switch mode := info.Mode(); {
	case mode.IsRegular():
		t.file, t.err = safefile.Open(filepath.Join(t.root, filepath.FromSlash(name)))
	case mode&fs.ModeSymlink != 0:
		m.kind = kindSymlink
	default:
		m.kind = kindOther
	}
	return m, t.err
}

func (t *tree) read(p []byte) error {
	_, err := io.ReadFull(t.file, p)
	return err
}

func (t *tree) close() {
	if t.file != nil {
		_ = t.file.Close() // only read
		t.file = nil
	}
}
