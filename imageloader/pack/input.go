package pack

import (
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"log/slog"
	"os"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
)

// Limits of imageloader.Options if its fields are 0.
const (
	maxSampleBytes = 256 << 20
	maxPixels      = 178_956_970
)

// input is the archive that is packed.
type input struct {
	a       *archive.Archive
	x       *index.Index
	rules   sample.Rules
	damaged imageloader.DamagePolicy
	groups  groups
}

// openInput opens the archive and its index. It copies the members that do not have random access
// to the file that spool creates.
func openInput(ctx context.Context, path string, o *imageloader.Options, progress func(imageloader.Progress),
	spool func() (*os.File, error)) (_ *input, err error) {
	log := o.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	config := archive.Config{OpenSource: o.OpenSource, Ignore: index.IsFile, Requests: &archive.Requests{Logger: log},
		Columns: archive.Columns{Image: o.Columns.Image, Labels: o.Columns.Labels, Unlabelled: o.List != ""}}
	in := &input{damaged: o.Damaged, rules: sample.Rules{File: archive.Shown(path),
		MaxBytes:  cmp.Or(o.MaxSampleBytes, maxSampleBytes),
		MaxPixels: cmp.Or(o.MaxPixels, maxPixels)}}
	c := index.Config{WebDataset: o.WebDataset, MaxSampleBytes: in.rules.MaxBytes, MaxPixels: in.rules.MaxPixels,
		File: o.IndexFile, NoFile: o.NoIndex, Codec: sample.Library{}, Logger: log, Progress: progress}
	if o.List != "" {
		if c.List, err = index.OpenList(ctx, o.List, path, index.ListOptions{Format: o.ListFormat, Archive: config,
			Logger: log}); err != nil {
			return nil, fmt.Errorf("pack: list: %w", err)
		}
	}
	defer func() {
		if err != nil {
			in.close()
		}
	}()
	if in.x, err = loadIndex(ctx, path, config, c); err != nil {
		return nil, err
	}
	config.Again = true
	if in.a, err = archive.Open(ctx, path, config); err != nil {
		return nil, err
	}
	if err := in.x.Changed(in.a); err != nil {
		return nil, err
	}
	if !o.WebDataset && in.x.Random() {
		return in, nil
	}
	walked, err := in.a.Reopen()
	if err != nil {
		return nil, err
	}
	defer func() { _ = walked.Close() }() // only read
	return in, in.groups.walk(walked, in.x, o.WebDataset, in.rules.MaxBytes, progress, spool)
}

// loadIndex opens the archive's index, or makes one.
func loadIndex(ctx context.Context, path string, config archive.Config, c index.Config) (*index.Index, error) {
	a, err := archive.Open(ctx, path, config)
	if err != nil {
		return nil, err
	}
	defer func() { _ = a.Close() }() // only read
	if c.WebDataset && a.InParquet() {
		return nil, fmt.Errorf("pack: %s is a Parquet file, whose labels are in a column: leave out Options.WebDataset",
			a.Path())
	}
	x, err := index.Load(a, c)
	if x != nil || err != nil {
		return x, err
	}
	return index.Build(a, c)
}

// inParquet reports whether the samples are rows of Parquet files.
func (in *input) inParquet() bool { return in.a.Format() == archive.Parquet }

func (in *input) close() {
	in.groups.close()
	if in.a != nil {
		_ = in.a.Close() // only read
	}
	if in.x != nil {
		_ = in.x.Close() // no entry points were kept
	}
}

// member is a further member of a WebDataset sample: one that is not the image.
type member struct {
	name   string
	shard  int
	offset int64 // the same as archive.Member.Offset
	size   int64
	kind   archive.Kind
	at     int64 // offset in the spool, or -1
}

// groups describes samples with several members, and samples without random access.
type groups struct {
	first   []int32 // by sample: number of its first further member; at the end: the number of members
	members []member
	images  []int64  // by sample: offset of its content in the spool, or -1; nil: no sample is in the spool
	formats []string // of the shards
	spool   *spool   // nil: empty
}

// of returns the further members of sample i.
func (g *groups) of(i int) []member {
	if g.first == nil {
		return nil
	}
	return g.members[g.first[i]:g.first[i+1]]
}

func (g *groups) close() {
	if g.spool != nil {
		_ = g.spool.file.Close() // nothing is kept
	}
}

// walk finds the members of the samples' groups. It copies to the spool all content without random
// access: further members in compressed shards, and all samples if the archive has no random
// access.
func (g *groups) walk(a *archive.Archive, x *index.Index, web bool, limit int64,
	progress func(imageloader.Progress), create func() (*os.File, error)) error {
	w := groupWalk{groups: g, a: a, x: x, web: web, limit: limit, create: create, sample: -1}
	g.first = make([]int32, 0, x.Len()+1)
	if !x.Random() {
		g.images = make([]int64, x.Len())
	}
	for m, err := range a.Members() {
		if err != nil {
			return err
		}
		if progress != nil && a.Position()%64 == 1 {
			progress(a.Progress())
		}
		if err := w.add(&m); err != nil {
			return err
		}
	}
	w.endGroup()
	if w.next != x.Len() {
		return a.Fail(archive.ErrSourceChanged)
	}
	g.first = append(g.first, int32(len(g.members)))
	for _, s := range a.Shards() {
		g.formats = append(g.formats, s.Format)
	}
	if g.spool != nil {
		return g.spool.w.Flush()
	}
	return nil
}

// groupWalk is a running walk.
type groupWalk struct {
	*groups
	a      *archive.Archive
	x      *index.Index
	web    bool
	limit  int64 // on the size of a member
	create func() (*os.File, error)

	numbers index.Groups
	group   int
	pending []member // further members of the current group
	sample  int      // the sample of the current group, or -1
	next    int      // the next sample of the index
}

// add processes the archive's current member.
func (w *groupWalk) add(m *archive.Member) error {
	group := 0
	if w.web {
		if group = w.numbers.Next(m); group > 0 && group != w.group {
			w.endGroup()
			w.group = group
		}
	}
	if w.next < w.x.Len() {
		shard, offset := w.x.Place(w.next)
		if s := w.x.Sample(w.next); m.Shard == shard && m.Offset == offset && m.Name == s.Name {
			return w.addSample(m)
		}
	}
	if group == 0 {
		return nil
	}
	at, err := w.keep(m, w.a.Streamed() || w.a.InParquet())
	w.pending = append(w.pending, member{m.Name, m.Shard, m.Offset, m.Size, m.Kind, at})
	return err
}

func (w *groupWalk) addSample(m *archive.Member) (err error) {
	w.sample = w.next
	w.next++
	if w.images != nil {
		w.images[w.sample], err = w.keep(m, w.a.Streamed() || w.a.InParquet())
	}
	if !w.web {
		w.endGroup()
	}
	return err
}

// keep copies the current member to the spool if copied is set. It returns the member's offset in
// the spool, or -1 if the member was not copied.
func (w *groupWalk) keep(m *archive.Member, copied bool) (at int64, err error) {
	if !copied || m.Kind != archive.Regular || m.Size > w.limit {
		return -1, nil
	}
	if w.spool == nil {
		file, err := w.create()
		if err != nil {
			return -1, err
		}
		w.spool = &spool{file: file, w: bufio.NewWriterSize(file, 1<<20)}
	}
	at = w.spool.size
	return at, w.a.Pieces(func(piece []byte) error {
		n, err := w.spool.w.Write(piece)
		w.spool.size += int64(n)
		return err
	})
}

// endGroup assigns the members of the current group to the group's sample.
func (w *groupWalk) endGroup() {
	if w.sample >= 0 {
		w.first = append(w.first, int32(len(w.members)))
		w.members = append(w.members, w.pending...)
	}
	w.pending, w.sample = w.pending[:0], -1
}

// spool is a temporary file.
type spool struct {
	file *os.File
	w    *bufio.Writer
	size int64
}

// digests returns digests of everything in the input that determines the bytes of the shards.
func (in *input) digests() digests {
	samples, labels, files := sha256.New(), sha256.New(), sha256.New()
	for _, class := range in.x.Classes() {
		digestText(labels, class)
	}
	for i := range in.x.Len() {
		s := in.x.Sample(i)
		digestText(samples, s.Name)
		digestNumbers(samples, s.Size, int64(s.Kind))
		digestNumbers(labels, int64(s.Label))
		for _, m := range in.groups.of(i) {
			digestText(samples, m.name)
			digestNumbers(samples, m.size, int64(m.kind))
		}
	}
	for _, s := range in.a.Shards() {
		if !s.Info.IsDir() {
			digestNumbers(files, s.Info.Size(), s.Info.ModTime().UnixNano())
		}
	}
	text := func(h hash.Hash) string { return hex.EncodeToString(h.Sum(nil)[:16]) }
	return digests{Files: text(files), Samples: text(samples), Labels: text(labels)}
}

func digestText(h hash.Hash, text string) {
	digestNumbers(h, int64(len(text)))
	_, _ = io.WriteString(h, text) // a Hash returns no error
}

func digestNumbers(h hash.Hash, numbers ...int64) {
	for _, n := range numbers {
		_, _ = h.Write(binary.LittleEndian.AppendUint64(nil, uint64(n))) // a Hash returns no error
	}
}

// reader reads samples in any order. It belongs to one goroutine.
type reader struct {
	in      *input
	samples *index.Reader
	members *archive.Reader
}

func (in *input) newReader() *reader {
	return &reader{in, index.NewReader(in.x, in.a), archive.NewReader(in.a)}
}

func (r *reader) close() {
	r.samples.Close()
	r.members.Close()
}

// image returns the content of sample i, valid until the next call.
func (r *reader) image(i int) ([]byte, error) {
	g := &r.in.groups
	if g.images == nil || g.images[i] < 0 {
		return r.samples.Content(i)
	}
	return g.spool.read(g.images[i], r.in.x.Size(i))
}

// content returns the content of a further member.
func (r *reader) content(m *member) ([]byte, error) {
	g := &r.in.groups
	if m.at >= 0 {
		return g.spool.read(m.at, m.size)
	}
	p := make([]byte, m.size)
	var err error
	switch g.formats[m.shard] {
	case archive.Tree:
		err = r.members.ReadFile(m.shard, m.name, p)
	case archive.Zip:
		err = r.members.ReadZipped(m.shard, m.offset, p)
	default:
		_, err = r.members.ReadAt(m.shard, p, m.offset)
	}
	if err != nil && !errors.Is(err, archive.ErrStopped) {
		err = &archive.Error{File: archive.Shown(r.in.a.Shards()[m.shard].Path), Member: m.name, Err: archive.Explain(err)}
	}
	return p, err
}

func (s *spool) read(at, size int64) ([]byte, error) {
	p := make([]byte, size)
	_, err := s.file.ReadAt(p, at)
	return p, err
}
