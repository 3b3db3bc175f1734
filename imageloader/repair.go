package imageloader

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/audit"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/internal/imagecapi"
	"github.com/torchstream/torchstream/internal/safefile"
)

// FixOptions set what Fix may do. The zero value works.
type FixOptions struct {
	// DropClasses lets Fix leave out classes that have no good sample. Removing a class changes the
	// labels of all later classes.
	DropClasses bool
}

// FixReport describes the archive that Fix has written.
type FixReport struct {
	File      string
	Bytes     int64
	Members   int      // number of members written
	LeftOut   int      // number of members that were left out
	Rewritten int      // number of images among Members that were rewritten as PNG
	Dropped   []string // classes that no longer have a sample
}

// Fix inspects an archive and writes a new one without the bad samples. The name of the new file
// selects its format: .tar, .tar.gz or .tgz, .tar.zst. The other members keep their names, bytes
// and order, and the samples keep their labels. Fix copies only the names and sizes of the tar
// headers, so that the same input always gives the same file. Members that are not regular files
// are left out. Options are the same as for Inspect, except that List is not allowed.
//
// Damaged images that o.Damaged tolerates are kept unchanged, except under Partial. Under Partial,
// Fix replaces each image that Warned refuses by a PNG. The PNG has the same name, the pixels that
// Partial gives, and the EXIF orientation. Loaders with the default options thus accept all
// samples.
//
// With Options.WebDataset, Fix also leaves out the other members of a bad sample's group, because
// otherwise another image of the group would become the sample. It is an error if samples in
// several shards have the same key, because the new archive is one shard.
//
// Fix fails before it writes if the archive itself is damaged, if no sample is good, if a class
// would lose all samples (see FixOptions), or if the new file already exists and is not empty. The
// new file is complete or does not exist. If writing fails, Fix returns the Report with the error.
func Fix(ctx context.Context, path, out string, o Options, f FixOptions, progress func(Progress)) (*Report,
	*FixReport, error) {
	if o.List != "" {
		return nil, nil, errors.New(
			"imageloader: Fix takes no Options.List: the list would name samples that are left out")
	}
	l, err := inspectedBy(path, o, nil, sample.Library{})
	if err != nil {
		return nil, nil, err
	}
	compress, err := fixFormat(out)
	if err != nil {
		return nil, nil, err
	}
	a, err := archive.Open(ctx, path, l.archiveConfig())
	if err != nil {
		return nil, nil, archive.StopCause(ctx, err)
	}
	defer func() { _ = a.Close() }() // nothing was written
	if a.Format() == archive.Parquet {
		return nil, nil, fmt.Errorf("imageloader: %s is a Parquet file, whose rows are no members of an archive: "+
			"Fix does not write one; Options.BadSamples leaves bad samples out of training", a.Path())
	}
	if err := checkFixed(a, out); err != nil {
		return nil, nil, err
	}
	x := fixing{l: l, a: a, progress: progress, names: audit.NewNames()}
	report, err := l.inspect(ctx, progress, x.names, x.take)
	if err != nil {
		return report, nil, err
	}
	if err := x.unchanged(); err != nil {
		return report, nil, archive.StopCause(ctx, err)
	}
	dropped, err := droppedClasses(report, f)
	if err != nil {
		return report, nil, err
	}
	mode := fs.FileMode(0o644)
	for _, s := range a.Shards() {
		mode &= s.Info.Mode().Perm() | 0o600
	}
	file, err := safefile.Replace(out, safefile.Raw, mode, func(f *os.File) error { return x.write(ctx, f, compress) })
	if err != nil {
		return report, nil, archive.StopCause(ctx, fixError(out, err))
	}
	info, err := file.Stat()
	if err := errors.Join(err, file.Close()); err != nil {
		return report, nil, fixError(out, err)
	}
	x.report.File, x.report.Bytes, x.report.Dropped = out, info.Size(), dropped
	return report, &x.report, nil
}

// fixError names the new archive in an error of writing it. Other errors stay unchanged.
func fixError(out string, err error) error {
	var damage *ArchiveError
	if errors.As(err, &damage) || errors.Is(err, archive.ErrStopped) {
		return err
	}
	return fmt.Errorf("imageloader: writing %s: %w", out, err)
}

// compression returns a writer that compresses its input.
type compression func(w io.Writer) (io.WriteCloser, error)

// fixFormat chooses the compression by the file's name.
func fixFormat(out string) (compression, error) {
	name := strings.ToLower(filepath.Base(out))
	is := func(suffixes ...string) bool {
		return slices.ContainsFunc(suffixes, func(s string) bool { return strings.HasSuffix(name, s) })
	}
	switch {
	case archive.IsURL(out):
	case is(".tar"):
		return func(w io.Writer) (io.WriteCloser, error) { return unpacked{w}, nil }, nil
	case is(".tgz", ".tar.gz"):
		return func(w io.Writer) (io.WriteCloser, error) { return gzip.NewWriter(w), nil }, nil
	case is(".tar.zst"):
		return func(w io.Writer) (io.WriteCloser,
			error) {
			return zstd.NewWriter(w, zstd.WithEncoderConcurrency(1))
		}, nil
	}
	return nil, fmt.Errorf("imageloader: %s: the name of a fixed archive is that of a local file and "+
		"ends in .tar, .tgz, .tar.gz or .tar.zst", out)
}

// unpacked is a compression that does not compress.
type unpacked struct{ io.Writer }

func (unpacked) Close() error { return nil }

// checkFixed returns an error if out is part of the input, or is a file that is not empty: such a
// file may hold the only copy of its images.
func checkFixed(a *archive.Archive, out string) error {
	existing, err := os.Stat(out)
	if err != nil {
		existing = nil // no file to compare with; safefile's Check reports other errors
	}
	folder, err := os.Stat(filepath.Dir(out))
	if err != nil {
		return fmt.Errorf("imageloader: %w", err)
	}
	for _, s := range a.Shards() {
		if archive.IsURL(s.Path) {
			continue
		}
		if existing != nil && os.SameFile(existing, s.Info) {
			return fmt.Errorf("imageloader: %s is the archive that is read: give the fixed one another name", out)
		}
		if s.Info.IsDir() && inside(filepath.Dir(out), folder, s.Info) {
			return fmt.Errorf("imageloader: %s lies inside of %s, which is read: write the fixed archive "+
				"elsewhere", out, s.Path)
		}
	}
	if existing != nil && existing.Mode().IsRegular() && existing.Size() > 0 {
		return fmt.Errorf("imageloader: %s exists, and a fixed archive replaces no file: give another "+
			"name, or remove it first", out)
	}
	if err := safefile.Check(out, safefile.Raw); err != nil {
		return fmt.Errorf("imageloader: %w", err)
	}
	return nil
}

// inside reports whether folder is the directory dir or below it. info describes folder.
func inside(folder string, info, dir fs.FileInfo) bool {
	path, err := filepath.Abs(folder)
	if err == nil {
		path, err = filepath.EvalSymlinks(path)
	}
	for err == nil && !os.SameFile(info, dir) {
		parent := filepath.Dir(path)
		if parent == path {
			return false
		}
		path = parent
		info, err = os.Stat(path)
	}
	return err == nil
}

// droppedClasses lists the classes without a good sample. Without FixOptions.DropClasses they are
// an error.
func droppedClasses(r *Report, f FixOptions) (dropped []string, err error) {
	good := 0
	for _, c := range r.Classes {
		good += c.Samples - c.Bad
		if c.Samples > 0 && c.Samples == c.Bad {
			dropped = append(dropped, c.Name)
		}
	}
	switch {
	case good == 0:
		return nil, fmt.Errorf("%w in %s that is good: there is nothing to write", ErrNoSamples, r.File)
	case len(dropped) > 0 && !f.DropClasses:
		return nil, fmt.Errorf("imageloader: %s: all samples of %d classes are bad (%q is the first): "+
			"without them the labels of other classes change (FixOptions.DropClasses leaves them out)",
			r.File, len(dropped), dropped[0])
	}
	return dropped, nil
}

// fixing is a running Fix.
type fixing struct {
	l *Loader
	a *archive.Archive
	// left holds the positions of bad samples, and damaged the positions of samples with tolerated
	// damage. groups holds the WebDataset groups of the bad samples.
	left, damaged, groups bits
	// expected and met sum the digests of the names at these positions. expected sums over the
	// inspected archive, met over the copied one.
	names         *audit.Names
	expected, met uint64
	report        FixReport
	progress      func(Progress)
}

// bits is a set of numbers.
type bits []uint64

func (b *bits) add(n int) {
	*b = append(*b, make(bits, max(0, n/64+1-len(*b)))...)
	(*b)[n/64] |= 1 << (n % 64)
}

func (b bits) has(n int) bool { return n/64 < len(b) && b[n/64]>>(n%64)&1 != 0 }

// take records the verdict on a sample.
func (x *fixing) take(v verdict) {
	switch {
	case v.bad:
		x.left.add(int(v.position))
		x.groups.add(int(v.group))
	case x.l.o.Damaged == Partial:
		x.damaged.add(int(v.position))
	default:
		return
	}
	x.expected += v.name
}

// unchanged checks that the archive to be copied is still the inspected one.
func (x *fixing) unchanged() error {
	now, err := x.a.Reopen()
	if err != nil {
		return err
	}
	defer func() { _ = now.Close() }() // nothing was written
	return now.Changed(x.a.Info())
}

// write writes the new archive.
func (x *fixing) write(ctx context.Context, file io.Writer, compress compression) error {
	buffered := bufio.NewWriterSize(file, 1<<20)
	packed, err := compress(buffered)
	if err != nil {
		return err
	}
	w := tar.NewWriter(packed)
	if err := x.copy(ctx, w); err != nil {
		_ = packed.Close() // err is the first error
		return err
	}
	for _, finish := range []func() error{w.Close, packed.Close, buffered.Flush} {
		if err := finish(); err != nil {
			return err
		}
	}
	return nil
}

// copy copies the members that are not left out.
func (x *fixing) copy(ctx context.Context, w *tar.Writer) error {
	d := &decoders{l: x.l}
	defer d.close()
	var groups index.Groups
	for m, err := range x.a.Members() {
		if err != nil {
			return err
		}
		if ctx.Err() != nil {
			return archive.ErrStopped
		}
		position := x.a.Position()
		if x.progress != nil && position%64 == 1 {
			x.progress(x.a.Progress())
		}
		if x.left.has(position) || x.damaged.has(position) {
			x.met += x.names.Digest(m.Name)
		}
		group := groups.Next(&m)
		if x.left.has(position) || x.l.o.WebDataset && x.groups.has(group) || m.Kind != archive.Regular {
			x.report.LeftOut++
			continue
		}
		if err := x.copyMember(w, &m, position, d); err != nil {
			return err
		}
		x.report.Members++
	}
	if x.met != x.expected { // other members are at these positions
		return x.a.Fail(archive.ErrSourceChanged)
	}
	return nil
}

func (x *fixing) copyMember(w *tar.Writer, m *archive.Member, position int, d *decoders) error {
	if x.damaged.has(position) {
		data := make([]byte, m.Size)
		if err := x.a.Content(data); err != nil {
			return err
		}
		again, err := d.rewrite(data)
		if err != nil {
			return fmt.Errorf("%q: %w", m.Name, err)
		}
		if again != nil {
			data = again
			x.report.Rewritten++
		}
		if err := writeHeader(w, m.Name, int64(len(data))); err != nil {
			return err
		}
		_, err = w.Write(data)
		return err
	}
	if err := writeHeader(w, m.Name, m.Size); err != nil {
		return err
	}
	return x.a.Pieces(func(piece []byte) error {
		_, err := w.Write(piece)
		return err
	})
}

func writeHeader(w *tar.Writer, name string, size int64) error {
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Size: size, Mode: 0o644}); err != nil {
		return fmt.Errorf("%q: %w", name, err)
	}
	return nil
}

// decoders rewrites damaged images. It makes its two decoders when it rewrites the first image.
type decoders struct {
	l               *Loader
	warned, partial sample.Decoder
}

func (d *decoders) close() {
	if d.warned != nil {
		d.warned.Close()
	}
	if d.partial != nil {
		d.partial.Close()
	}
}

// rewrite returns the image as a PNG, or nil if Warned decodes it.
func (d *decoders) rewrite(data []byte) (_ []byte, err error) {
	for _, m := range []struct {
		d *sample.Decoder
		p DamagePolicy
	}{{&d.warned, Warned}, {&d.partial, Partial}} {
		if *m.d == nil {
			if *m.d, err = sample.NewDecoder(d.l.codec, d.l.o.MaxPixels, m.p); err != nil {
				return nil, err
			}
		}
	}
	info, err := d.partial.Header(data)
	if err != nil {
		return nil, err
	}
	g := imagecapi.Geometry{CropWidth: info.Width, CropHeight: info.Height, ResizeWidth: 8, ResizeHeight: 8,
		WindowWidth: 8, WindowHeight: 8}
	var small [8 * 8 * 3]byte
	err = d.warned.Decode(data, &g, small[:], 8*3)
	if !errors.Is(err, imagecapi.CodeDecode) {
		return nil, err
	}
	g.ResizeWidth, g.ResizeHeight, g.WindowWidth, g.WindowHeight = info.Width, info.Height, info.Width, info.Height
	pixels := audit.RGB{Pix: make([]byte, 3*int(info.Width)*int(info.Height)), Width: int(info.Width),
		Height: int(info.Height)}
	if err := d.partial.Decode(data, &g, pixels.Pix, 3*pixels.Width); err != nil {
		return nil, err
	}
	return pixels.PNG(info.Orientation)
}
