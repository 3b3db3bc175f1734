package index

import (
	"cmp"
	"os"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// Finish writes the index file of an archive that has been walked to its end, and makes the Index
// from the file. If the file can't be written, or the archive needs none, it makes the Index from
// the Builder's spools.
func (b *Builder) Finish(a *archive.Archive) (*Index, error) {
	formats := make([]string, len(a.Shards()))
	for i, s := range a.Shards() {
		formats[i] = s.Format
	}
	if s := b.writeFile(a); s != nil {
		sections, err := s.large()
		if err == nil {
			var x *Index
			if x, err = b.index(a, formats, sections); err == nil {
				if err = x.attach(s); err == nil {
					return x, nil
				}
			}
		}
		_ = s.close() // it has no entry points to save
		if wrongLabel(err) {
			return nil, err
		}
		b.config.Logger.Warn("index that was just written is not readable", "index", s.path, "error", err)
	}
	x, err := b.index(a, formats, b.records.sections())
	if err != nil {
		return nil, err
	}
	x.spool = spoolOf(&b.config, a)
	return x, nil
}

// writeFile writes the index file of an archive that has been walked to its end, and opens the
// file. It writes to the first place that is writable. It returns nil if no place is writable.
func (b *Builder) writeFile(a *archive.Archive) *sidecar {
	paths, log := indexPaths(&b.config, a), b.config.Logger
	if b.records.count == 0 || len(paths) == 0 {
		return nil
	}
	list, err := outputs(a, b)
	if err != nil {
		log.Warn("index is not written", "archive", a.Path(), "error", err)
		return nil
	}
	for i, path := range paths {
		makeCacheFolder(path)
		var s *sidecar
		f, err := writeSidecar(path, indexMode(a), list)
		if err == nil {
			s, err = newSidecar(path, f)
		}
		if err != nil {
			log.Info("index can't be written here", "archive", a.Path(), "index", path, "error", err)
			continue
		}
		log.Info("wrote index", "archive", a.Path(), "index", path)
		s.saving = saving{create: spoolBeside(paths), log: log}
		for _, older := range paths[i+1:] {
			if CheckFile(older) == nil {
				_ = os.Remove(older) // if it stays, Load checks it and does not use it
			}
			s.saving.elsewhere = append(s.saving.elsewhere, otherPlace{older, nil})
		}
		return s
	}
	return nil
}

// labelError returns an error if the labels are unusable for an index.
func (b *Builder) labelError(a *archive.Archive) error {
	formats := make([]string, len(a.Shards()))
	for i, s := range a.Shards() {
		formats[i] = s.Format
	}
	x, err := b.index(a, formats, b.records.sections())
	if err == nil {
		err = cmp.Or(x.Close(), error(errIndexDamaged))
	}
	return err
}

// survey returns the number of samples and the work (see Index.Work) of the Index that the
// collected members would make.
func (b *Builder) survey(a *archive.Archive) (samples int, work float64, err error) {
	sections := b.records.sections()
	_, label, odd := b.dirs.labels()
	if odd >= 0 {
		return 0, 0, b.labelError(a)
	}
	marks := sections[sectionCheckpoints].reader(checkpointBytes)
	var w workMeter
	for _, s := range a.Shards() {
		w.shards = append(w.shards, shard{format: s.Format})
	}
	w.next = func() (int, int64, bool) {
		var item []byte
		if item, err = marks.next(); item == nil || err != nil {
			return 0, 0, false
		}
		shard, m := decodeMark(item)
		return int(shard), m.Output, true
	}
	for members := sections[sectionMembers].reader(memberBytes); err == nil; {
		var item []byte
		if item, err = members.next(); item == nil {
			break
		}
		var r record
		if r.decode(item); label[r.label] >= 0 {
			samples++
			w.sample(&r)
		}
	}
	return samples, w.work(), err
}

// surveyLoaded implements survey for pairs and for lists. For these, directories do not show which
// members are samples, so it loads the members.
func (b *Builder) surveyLoaded(a *archive.Archive) (samples int, work float64, err error) {
	x := &Index{}
	for _, s := range a.Shards() {
		x.shards = append(x.shards, shard{path: s.Path, info: s.Info, format: s.Format})
	}
	sections := b.records.sections()
	if err := x.loadMarks(sections); err != nil {
		return 0, 0, err
	}
	if err := b.load(x, sections); err != nil {
		return 0, 0, err
	}
	if x.Len() == 0 {
		err = x.noSamples(a.Path(), a.Position(), &b.config)
	}
	b.listed = x.listed.report
	return x.Len(), x.work, err
}
