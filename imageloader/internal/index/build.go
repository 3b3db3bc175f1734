package index

import (
	"errors"
	"fmt"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// Build reads a newly opened archive to its end, builds its index and writes the index file, if
// possible. It fails if there are no samples. If another process is already building the index,
// Build waits for it and loads the result. The wait also ends when that process stops, or when the
// archive's context is done.
func Build(a *archive.Archive, c Config) (*Index, error) {
	c.byColumns(a)
	m, x, err := makeOrWait(a, &c, true)
	if x != nil || err != nil {
		return x, err
	}
	x, err = build(a, m.progress(c))
	m.end(x != nil && x.HasFile())
	if err != nil {
		return nil, err
	}
	if !x.memory.holds() && x.fits(c.HoldBytes, c.MaxSampleBytes) {
		if err := holdAfter(a, x, &c); err != nil {
			_ = x.Close() // err says more
			return nil, err
		}
	}
	return x, nil
}

// build implements Build, except that it ignores other processes and does not call holdAfter.
func build(a *archive.Archive, c Config) (*Index, error) {
	b, err := scan(a, c)
	if err != nil {
		return nil, err
	}
	defer b.Close()
	x, err := b.Finish(a)
	if wrongLabel(err) {
		return nil, err
	}
	if err != nil {
		return nil, fmt.Errorf("imageloader: %s: making the index: %w", a.Path(), err)
	}
	if x.Len() == 0 {
		_ = x.Close() // it has no entry points to save
		return nil, x.noSamples(a.Path(), a.Position(), &c)
	}
	x.logMixedLabels(a.Path(), &c)
	return x, nil
}

// holdAfter keeps the samples in memory if they fit. Only now is it known which members are
// samples. A loader that loads the index file would keep the same samples in memory, and both
// loaders must use the same order of epochs.
func holdAfter(a *archive.Archive, x *Index, c *Config) error {
	again, err := a.Reopen()
	if err != nil {
		return err
	}
	defer func() { _ = again.Close() }() // only read
	return x.hold(again, c)
}

// scan walks an archive only to index it. The caller closes the Builder.
func scan(a *archive.Archive, c Config) (*Builder, error) {
	began := time.Now()
	c.Logger.Info("scanning archive", "archive", a.Path(), "bytes", a.Info().Size())
	b, err := NewBuilder(a.Path(), c)
	if err != nil {
		return nil, err
	}
	if err := b.Walk(a, nil); err != nil {
		b.Close()
		return nil, err
	}
	c.Logger.Info("scanned archive", "archive", a.Path(), "members", b.records.count, "ignored", b.ignored,
		"seconds", time.Since(began).Seconds())
	switch {
	case c.WebDataset, c.Parquet:
		warnOfOrphans(c.Logger, a.Path(), b.orphans, b.orphansNamed)
	case b.orphans > 0:
		c.Logger.Warn("images outside of any directory have no class and are ignored",
			"archive", a.Path(), "images", b.orphans)
	}
	if n := a.Imageless(); n > 0 {
		c.Logger.Warn("rows without the bytes of an image are ignored", "archive", a.Path(), "rows", n)
	}
	if b.lacking.seconds > 0 {
		c.Logger.Warn("images beside the sample of their group are ignored",
			"archive", a.Path(), "images", b.lacking.seconds, "first", b.lacking.second)
	}
	if b.lacking.lone > 0 {
		c.Logger.Warn("labels without an image in their group are ignored",
			"archive", a.Path(), "labels", b.lacking.lone, "first", b.lacking.firstLone)
	}
	return b, nil
}

// Report describes an index that Make has built.
type Report struct {
	File        string // path of the index file
	Bytes       int64  // size of the index file
	Samples     int
	Classes     int
	Checkpoints int         // of gzip files
	List        *ListReport // nil: there is no list
	// Random reports whether samples can be read in any order. Work is the average number of bytes
	// to read or inflate for each byte of a sample, if samples are read in any order. Work is 0 if
	// the archive can only be read in its own order.
	Random bool
	Work   float64
}

// Make reads a newly opened archive to its end and writes its index file, even if an index file
// exists. It waits for no other process, but processes that need the index wait for Make.
func Make(a *archive.Archive, c Config) (_ *Report, err error) {
	c.byColumns(a)
	m, _, err := makeOrWait(a, &c, false)
	if err != nil {
		return nil, err
	}
	defer func() { m.end(err == nil) }()
	b, err := scan(a, m.progress(c))
	if err != nil {
		return nil, err
	}
	defer b.Close()
	r := &Report{Checkpoints: b.records.marked}
	survey := b.survey
	if c.Pairs != nil || c.List != nil {
		survey = b.surveyLoaded
	}
	if r.Samples, r.Work, err = survey(a); wrongLabel(err) || errors.Is(err, ErrNoSamples) {
		return nil, err
	} else if err != nil {
		return nil, fmt.Errorf("imageloader: %s: making the index: %w", a.Path(), err)
	}
	if r.Samples == 0 {
		if c.Parquet {
			return nil, noRows(a.Path(), b.orphans, b.orphansNamed)
		}
		if c.WebDataset {
			return nil, noLabels(a.Path(), a.Position(), b.orphans, b.orphansNamed)
		}
		return nil, leftOutError(b.clues.explain(NoSamples(a.Path(), a.Position(), b.orphans)), b.leftOut())
	}
	switch {
	case c.List != nil:
		labels, _ := c.List.resolve(&c) // survey has already checked for errors
		if r.List = b.listed; !c.List.numbered {
			r.Classes = len(labels.classes)
		}
	case c.Pairs == nil:
		classes, _, _ := b.dirs.labels()
		r.Classes = len(classes)
	}
	r.Random = randomBy(r.Work)
	s := b.writeFile(a)
	if s == nil {
		return nil, errors.New("imageloader: " + a.Path() +
			": the index can't be written, neither beside the archive nor in the cache folder: give " +
			"another place for it")
	}
	defer func() { _ = s.close() }() // it has no entry points to save
	info, err := s.file.Stat()
	if err != nil {
		return nil, fmt.Errorf("imageloader: %w", err)
	}
	r.File, r.Bytes = s.path, info.Size()
	return r, nil
}
