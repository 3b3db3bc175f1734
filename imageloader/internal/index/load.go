package index

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// Load looks for the index file of a newly opened archive. It returns nil without an error if it
// finds no index that it can use.
func Load(a *archive.Archive, c Config) (*Index, error) {
	c.byColumns(a)
	l := loading{a: a, c: &c}
	return l.search()
}

// loading is the search for an index in several places.
type loading struct {
	a           *archive.Archive
	c           *Config
	elsewhere   []otherPlace // places searched so far, without a usable index
	otherLabels error        // error for an index with labels from another source, which search returns
	again       bool         // an unusable index has already been logged
}

// search tries each place in turn.
func (l *loading) search() (*Index, error) {
	for _, path := range slices.Backward(indexPaths(l.c, l.a)) {
		x, err := l.try(path)
		if x != nil || err != nil {
			return x, err
		}
	}
	return nil, l.otherLabels
}

// try opens the index at path. It returns nil without an error if it can't use the index.
func (l *loading) try(path string) (*Index, error) {
	began := time.Now()
	b, err := NewBuilder(l.a.Path(), *l.c)
	if err != nil {
		return nil, err
	}
	s, err := openSidecar(path)
	if errors.Is(err, fs.ErrNotExist) {
		l.elsewhere = append(l.elsewhere, otherPlace{path, nil})
		return nil, nil
	}
	was, _ := os.Stat(path) // nil if the file is gone, so nothing is replaced there
	if err == nil {
		s.saving = saving{elsewhere: l.elsewhere, create: spoolBeside(indexPaths(l.c, l.a)), log: l.c.Logger}
		var x *Index
		if x, err = s.load(l.a, b); err == nil {
			if err = x.attach(s); err == nil {
				return l.accept(x, path, began)
			}
		}
		_ = s.close() // it has no entry points to save
	}
	return nil, l.refuse(path, was, err)
}

// accept prepares a loaded index for use.
func (l *loading) accept(x *Index, path string, began time.Time) (*Index, error) {
	var err error
	if x.Len() == 0 {
		err = x.noSamples(l.a.Path(), x.ignored, l.c)
	} else {
		err = x.hold(l.a, l.c)
	}
	if err != nil {
		_ = x.Close() // it has no entry points to save
		return nil, err
	}
	if l.c.WebDataset || l.c.Parquet {
		warnOfOrphans(l.c.Logger, l.a.Path(), x.orphans, x.orphansNamed)
	}
	x.logMixedLabels(l.a.Path(), l.c)
	l.c.Logger.Info("opened index", "archive", l.a.Path(), "index", path, "samples", x.Len(),
		"seconds", time.Since(began).Seconds())
	l.c.warn(l.a.Path(), x.left)
	return x, nil
}

// wrongLabel reports whether an error is about a label, a class or an empty part. Building a new
// index would give the same error.
func wrongLabel(err error) bool {
	var unknown *UnknownClassError
	var label *LabelError
	var pair *PairError
	var list *ListError
	return errors.Is(err, ErrNoSamples) || errors.As(err, &unknown) || errors.As(err, &label) ||
		errors.As(err, &pair) || errors.As(err, &list)
}

// refuse records and logs why the index at path is not used. If refuse returns an error, Load fails
// with this error.
func (l *loading) refuse(path string, was fs.FileInfo, err error) error {
	var reason errIndex
	if wrongLabel(err) {
		return err
	}
	if !errors.As(err, &reason) {
		reason = errIndex(err.Error())
	}
	if !slices.Contains(labelErrors, reason) {
		l.elsewhere = append(l.elsewhere, otherPlace{path, was})
	} else if l.c.RefuseOtherLabels {
		l.otherLabels = fmt.Errorf("imageloader: %s: %w: its loaders have other options than this call", path, reason)
		return nil
	}
	if l.again {
		return nil
	}
	if reason == errIndexVersion {
		l.c.Logger.Info("index is made again", "archive", l.a.Path(), "index", path, "reason", string(reason))
		return nil
	}
	l.c.Logger.Warn("index is not used", "archive", l.a.Path(), "index", path, "reason", string(reason))
	return nil
}
