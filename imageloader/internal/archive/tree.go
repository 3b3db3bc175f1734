package archive

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/torchstream/torchstream/internal/safefile"
)

// tree walks the files below a directory. It visits each directory in the order of names, and
// follows symbolic links to files and directories, as torchvision's ImageFolder does.
type tree struct {
	ctx    context.Context
	root   string
	walked bool
	found  []Member
	empty  []string // paths of directories without an entry
	count  int      // of files and directories
	at     int
	file   *os.File // the current file
}

// walk lists the files.
func (t *tree) walk() error {
	t.walked = true
	info, err := os.Stat(t.root)
	if err != nil {
		return err
	}
	return t.list("", []fs.FileInfo{info})
}

// list lists the files of a directory. name is its path below the root. above has the directories
// from the root down to this one, including it.
func (t *tree) list(name string, above []fs.FileInfo) error {
	entries, err := os.ReadDir(filepath.Join(t.root, filepath.FromSlash(name)))
	if err != nil {
		return err
	}
	if len(entries) == 0 && name != "" {
		t.empty = append(t.empty, name)
	}
	for _, entry := range entries {
		if err := t.add(path.Join(name, entry.Name()), entry, above); err != nil {
			return err
		}
	}
	return nil
}

// add adds a file, or all files below a directory.
func (t *tree) add(name string, entry fs.DirEntry, above []fs.FileInfo) error {
	if t.count++; t.count > MaxMembers {
		return fmt.Errorf("more than %d files and folders", MaxMembers)
	}
	if t.ctx.Err() != nil {
		return ErrStopped
	}
	info, err := os.Stat(filepath.Join(t.root, filepath.FromSlash(name))) // follows links
	m := Member{Name: name}
	switch {
	case err != nil && entry.Type()&fs.ModeSymlink != 0 && leadsNowhere(err):
		m.Kind = BrokenLink
	case err != nil:
		return err
	case info.IsDir() && slices.ContainsFunc(above, func(dir fs.FileInfo) bool { return os.SameFile(dir, info) }):
		m.Kind = LinkLoop
	case info.IsDir():
		return t.list(name, append(above, info))
	case info.Mode().IsRegular():
		m.Size = info.Size()
	default:
		m.Kind = Other
	}
	t.found = append(t.found, m)
	return nil
}

// leadsNowhere reports whether an error says that a link's target does not exist.
func leadsNowhere(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ELOOP) || errors.Is(err, syscall.ENOTDIR)
}

// next moves to the next file. It returns io.EOF after the last file.
func (t *tree) next() (m Member, err error) {
	t.close()
	if !t.walked {
		if err := t.walk(); err != nil {
			return Member{}, err
		}
	}
	if t.at == len(t.found) {
		return Member{}, io.EOF
	}
	m = t.found[t.at]
	t.at++
	if m.Kind == Regular {
		t.file, err = safefile.Open(filepath.Join(t.root, filepath.FromSlash(m.Name)))
	}
	return m, err
}

// read fills p from the current file.
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
