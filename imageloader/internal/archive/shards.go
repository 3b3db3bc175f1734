package archive

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// ShardPaths returns the paths of the shards of the archive at path. A file, a directory or a URL
// has one shard, the path itself.
//
// In any other path, {a,b} is expanded to a and b, and {000..015} to the numbers in that range, as
// in a shell. If a resulting path has a *, ? or [, it is a pattern for file names. A pattern skips
// the files for which ignore returns true, unless ignore is nil. The shards are in the order of the
// expanded paths, and the files that match a pattern are sorted by name.
func ShardPaths(path string, ignore func(path string) bool) ([]string, error) {
	if !strings.ContainsAny(path, "{*?[") {
		return []string{path}, nil
	}
	if !IsURL(path) {
		if _, err := os.Lstat(path); err == nil {
			return []string{path}, nil
		}
	}
	list, err := expandBraces(path, nil)
	if err != nil {
		return nil, fmt.Errorf("imageloader: %s: %w", Shown(path), err)
	}
	var paths []string
	for _, p := range list {
		if IsURL(p) || !strings.ContainsAny(p, "*?[") {
			paths = append(paths, p)
			continue
		}
		found, err := filepath.Glob(p)
		if err != nil {
			return nil, fmt.Errorf("imageloader: %s: %w", p, err)
		}
		if ignore != nil {
			found = slices.DeleteFunc(found, ignore)
		}
		if len(found) == 0 {
			return nil, fmt.Errorf("imageloader: no file matches %s: %w", p, fs.ErrNotExist)
		}
		slices.Sort(found)
		paths = append(paths, found...)
	}
	if len(paths) > MaxShards {
		return nil, fmt.Errorf("imageloader: %s: %d shards, over the limit of %d", Shown(path), len(paths), MaxShards)
	}
	return paths, nil
}

// expandBraces appends the expansions of s to list.
func expandBraces(s string, list []string) ([]string, error) {
	open := strings.IndexByte(s, '{')
	if open < 0 {
		if len(list) > MaxShards {
			return nil, fmt.Errorf("more than %d shards", MaxShards)
		}
		return append(list, s), nil
	}
	commas, end := matchBrace(s, open)
	if end < 0 {
		return nil, fmt.Errorf("a { has no }")
	}
	var choices []string
	var err error
	if first, last, ok := strings.Cut(s[open+1:end], ".."); ok && len(commas) == 0 {
		if choices, err = numberRange(first, last); err != nil {
			return nil, err
		}
	} else {
		from := open
		for _, comma := range append(commas, end) {
			choices = append(choices, s[from+1:comma])
			from = comma
		}
	}
	for _, c := range choices {
		if list, err = expandBraces(s[:open]+c+s[end+1:], list); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// matchBrace returns the position of the } that closes the { at open, or -1, and the positions of
// the commas between them that are not in inner braces.
func matchBrace(s string, open int) (commas []int, end int) {
	depth := 0
	for i := open; i < len(s); i++ {
		switch s[i] {
		case '{':
			depth++
		case ',':
			if depth == 1 {
				commas = append(commas, i)
			}
		case '}':
			if depth--; depth == 0 {
				return commas, i
			}
		}
	}
	return commas, -1
}

// numberRange lists the numbers from first to last. They are padded to the width of first if first
// starts with 0 or is as wide as last.
func numberRange(first, last string) (list []string, err error) {
	from, err1 := strconv.ParseUint(first, 10, 31)
	to, err2 := strconv.ParseUint(last, 10, 31)
	if err1 != nil || err2 != nil || from > to || to-from >= MaxShards {
		return nil, fmt.Errorf("{%s..%s} is not a range of numbers", first, last)
	}
	width := 0
	if len(first) == len(last) || first[0] == '0' {
		width = len(first)
	}
	for n := from; n <= to; n++ {
		list = append(list, fmt.Sprintf("%0*d", width, n))
	}
	return list, nil
}

// totalInfo describes all shards of an archive together.
type totalInfo struct {
	name    string
	size    int64
	changed time.Time // the latest time
	version string    // the versions of the shards that have one
	shards  []Shard
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
