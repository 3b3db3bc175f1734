package archive

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/torchstream/torchstream/internal/safefile"
)

// tree walks the files below a directory in the order of their paths.
type tree struct {
	root   string
	walked bool
	names  []string // paths of files below root, with slashes
	infos  []fs.FileInfo
	at     int
	file   *os.File // the current file
	err    error    // of opening file
}

// walk lists the files.
func (t *tree) walk() error {
	t.walked = true
	return filepath.WalkDir(t.root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		if len(t.names) == MaxMembers {
			return fmt.Errorf("more than %d files", MaxMembers)
		}
		name, err := filepath.Rel(t.root, path)
		if err != nil {
			return err
		}
		info, err := os.Stat(path) // follows links
		if err != nil {
			if info, err = d.Info(); err != nil {
				return err
			}
		}
		t.names, t.infos = append(t.names, filepath.ToSlash(name)), append(t.infos, info)
		return nil
	})
}

// next moves to the next file. It returns io.EOF after the last file.
func (t *tree) next() (Member, error) {
	t.close()
	if !t.walked {
		if err := t.walk(); err != nil {
			return Member{}, err
		}
	}
	if t.at == len(t.names) {
		return Member{}, io.EOF
	}
	name, info := t.names[t.at], t.infos[t.at]
	t.at++
	m := Member{Name: name, Size: info.Size()}
	switch mode := info.Mode(); {
	case mode.IsRegular():
		t.file, t.err = safefile.Open(filepath.Join(t.root, filepath.FromSlash(name)))
	case mode&fs.ModeSymlink != 0:
		m.Kind = Symlink
	default:
		m.Kind = Other
	}
	return m, t.err
}

// read fills p from the current file.
func (t *tree) read(p []byte) error {
	_, err := io.ReadFull(t.file, p)
	return err
}

func (t *tree) close() {
	if t.file != nil {
		_ = t.file.Close() // nothing was written
		t.file = nil
	}
}
