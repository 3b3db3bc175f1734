package index

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// maxListBytes is the maximum size of a list's file. The file is read into memory.
const maxListBytes = 1 << 30

// ListOptions configures OpenList.
type ListOptions struct {
	Format     ListFormat
	MultiLabel bool
	Archive    archive.Config
	Logger     *slog.Logger
}

// wrongList is an error in the content of a list.
type wrongList struct{ error }

func (e wrongList) Unwrap() error { return e.error }

// IsWrongList reports whether OpenList has read the list, but its content is wrong. The error then
// names the list.
func IsWrongList(err error) bool {
	var wrong wrongList
	return errors.As(err, &wrong)
}

// OpenList reads the list at a path or URL. If there is no such file, it reads the archive's member
// with this name.
func OpenList(ctx context.Context, list, archivePath string, o ListOptions) (*List, error) {
	var l *List
	err := OpenListFile(ctx, list, archivePath, o, func(file string, in io.Reader) (err error) {
		if l, err = ReadList(file, in, o.Format, o.MultiLabel); err != nil {
			return wrongList{err}
		}
		return nil
	})
	return l, err
}

// OpenListFile finds the file of a list as OpenList does, and calls read with its name and its
// content. It ignores o.Format and o.MultiLabel.
func OpenListFile(ctx context.Context, list, archivePath string, o ListOptions,
	read func(file string, in io.Reader) error) error {
	f, err := archive.OpenFile(ctx, list, o.Archive)
	if errors.Is(err, fs.ErrNotExist) && !archive.IsURL(list) && !filepath.IsAbs(list) {
		m, err := findListMember(ctx, list, archivePath, o.Archive, err)
		if err != nil {
			return err
		}
		o.Logger.Info("the list is a member of the archive", "archive", archive.Shown(archivePath), "name", m.name)
		return read(archive.Shown(archivePath)+":"+m.name, bytes.NewReader(m.data))
	}
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // nothing was written
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if err := checkListBytes(list, info.Size()); err != nil {
		return err
	}
	return read(list, f)
}

// NumberedList returns a list of names of images, in which the label of a name is its number, from
// 0. Errors count images from 1. described says where the file has names and boxes.
func NumberedList(file string, names []string, described string) (*List, error) {
	r := &listReader{List: &List{file: file, byPath: map[string]int32{}, columns: columns{labels: []int{1}, group: -1},
		listKind: listKind{numbered: true, text: described}},
		labels: map[string]int32{}, groups: map[string]int32{}}
	for i, name := range names {
		if err := r.add([]string{name, strconv.Itoa(i)}, i+1); err != nil {
			return nil, r.errorAt(i+1, err)
		}
	}
	return r.List, nil
}

// EveryImage returns a list of every image of an archive, without labels. Unless hidden is set,
// images in hidden directories are not in the list.
func EveryImage(hidden bool) *List {
	return &List{columns: columns{group: -1}, rows: []listRow{{}}, listKind: listKind{every: true, hidden: hidden}}
}

// checkListBytes returns an error if a list is too large.
func checkListBytes(name string, size int64) error {
	if size > maxListBytes {
		return fmt.Errorf("%s has %d bytes, over the limit of %d", name, size, maxListBytes)
	}
	return nil
}

// listMember is an archive's member that contains a list.
type listMember struct {
	name string
	data []byte
}

// findListMember reads a list from an archive. The member's path is the list's name, or ends with a
// slash and this name. missing is the error for the file that does not exist. If there is no such
// member, the error of findListMember contains missing.
func findListMember(ctx context.Context, list, archivePath string, c archive.Config, missing error) (*listMember, error) {
	a, err := archive.Open(ctx, archivePath, c)
	if err != nil {
		return nil, err
	}
	defer func() { _ = a.Close() }() // nothing was written
	var found, second *listMember
	var tables []string
	want := path.Clean(filepath.ToSlash(list))
	for m, err := range a.Members() {
		if err != nil {
			return nil, err
		}
		exact := m.Name == want
		if !exact && !strings.HasSuffix(m.Name, "/"+want) || m.Kind != archive.Regular {
			const most = 5
			if ext := strings.ToLower(path.Ext(m.Name)); (ext == ".csv" || ext == ".tsv") && len(tables) < most {
				tables = append(tables, strings.Clone(m.Name))
			}
			continue
		}
		member, err := readListMember(a, &m)
		if err != nil {
			return nil, err
		}
		switch {
		case exact:
			return member, nil
		case found == nil:
			found = member
		default:
			second = member
		}
	}
	switch {
	case second != nil:
		return nil, fmt.Errorf("%s may be %s or %s in %s: give the whole name", list, found.name, second.name, a.Path())
	case found != nil:
		return found, nil
	case len(tables) > 0:
		return nil, fmt.Errorf("%w, nor is it in %s, which has %s", missing, a.Path(), strings.Join(tables, ", "))
	}
	return nil, fmt.Errorf("%w, nor is it in %s", missing, a.Path())
}

// readListMember reads the archive's current member.
func readListMember(a *archive.Archive, m *archive.Member) (*listMember, error) {
	if err := checkListBytes(m.Name, m.Size); err != nil {
		return nil, err
	}
	member := &listMember{strings.Clone(m.Name), make([]byte, m.Size)}
	if err := a.Content(member.data); err != nil {
		return nil, fmt.Errorf("%s: %w", m.Name, err)
	}
	return member, nil
}
