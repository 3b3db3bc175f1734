package index

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"path/filepath"
	"slices"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// load makes the Index of an archive with an empty Builder. If it returns an errIndex, the sidecar
// is unusable.
func (s *sidecar) load(a *archive.Archive, b *Builder) (*Index, error) {
	formats, err := s.loadShards(a)
	if err != nil {
		return nil, err
	}
	if !s.plausible(a, formats) {
		return nil, errIndexDamaged
	}
	if err := s.loadDirectories(b.dirs); err != nil {
		return nil, err
	}
	if err := s.loadCounts(b); err != nil {
		return nil, err
	}
	if a.Format() == archive.Parquet {
		if err := s.checkColumns(a, b.dirs); err != nil {
			return nil, err
		}
	}
	if b.orphansNamed, err = s.loadOrphans(); err != nil {
		return nil, err
	}
	sections, err := s.large()
	if err != nil {
		return nil, err
	}
	return b.index(a, formats, sections)
}

// loadShards checks that the archive has the shards that were indexed. It returns their formats.
func (s *sidecar) loadShards(a *archive.Archive) (formats []string, err error) {
	size := 0
	for _, shard := range a.Shards() {
		size += shardBytes + len(shardName(shard.Path))
	}
	if p := s.places[sectionShards]; p.count != uint64(len(a.Shards())) || p.size != uint64(size) {
		return nil, errIndexStale
	}
	data, _, err := s.read(sectionShards, shardBytes)
	if err != nil {
		return nil, err
	}
	r := archive.NewReader(a)
	defer r.Close()
	for i := range a.Shards() {
		item, name, rest, ok := nextShard(data)
		if !ok {
			return nil, errIndexDamaged
		}
		format := shardFormats[binary.LittleEndian.Uint32(item[20:])]
		if err := checkShard(a, r, i, item, name, format); err != nil {
			return nil, err
		}
		formats = append(formats, format)
		data = rest
	}
	return formats, nil
}

// shardName returns the name of a shard as an index has it. It omits the folder and possible
// secrets of a URL, because others may read the index file. An index therefore also fits a URL with
// another signature.
func shardName(path string) string { return filepath.Base(archive.Shown(path)) }

// nextShard splits off the first item of the section of shards. The item's format must be known.
func nextShard(data []byte) (item []byte, name string, rest []byte, ok bool) {
	if len(data) < shardBytes {
		return nil, "", nil, false
	}
	item, rest = data[:shardBytes], data[shardBytes:]
	n := binary.LittleEndian.Uint32(item[24:])
	if uint64(n) > uint64(len(rest)) || binary.LittleEndian.Uint32(item[20:]) >= uint32(len(shardFormats)) {
		return nil, "", nil, false
	}
	return item, string(rest[:n]), rest[n:], true
}

// checkShard checks that an item describes this shard.
func checkShard(a *archive.Archive, r *archive.Reader, shard int, item []byte, name, format string) error {
	le := binary.LittleEndian
	now := &a.Shards()[shard]
	if int64(le.Uint64(item)) != now.Info.Size() || name != shardName(now.Path) {
		return errIndexStale
	}
	if int64(le.Uint64(item[8:])) == now.Info.ModTime().UnixNano() && !now.Info.ModTime().IsZero() {
		return nil
	}
	// The times differ if the archive was copied, and some archives have no time. Then the first
	// and last bytes of the shard decide. They can't decide for a plain tar or a Parquet file,
	// because their samples may have no checksums.
	if format == archive.Tar || format == archive.Parquet {
		return errIndexStale
	}
	digest, err := shardDigest(a, r, shard)
	if err != nil {
		return err
	}
	if digest != le.Uint32(item[16:]) {
		return errIndexStale
	}
	return nil
}

// edgeBytes is the number of bytes at each end of a shard that its digest covers.
const edgeBytes = 64 << 10

// shardDigest returns the CRC-32 of a shard's first and last bytes.
func shardDigest(a *archive.Archive, r *archive.Reader, shard int) (uint32, error) {
	s := &a.Shards()[shard]
	size := s.Info.Size()
	b := make([]byte, min(size, edgeBytes))
	sum := uint32(0)
	for _, at := range []int64{0, size - int64(len(b))} {
		if n, err := r.ReadAt(shard, b, at); n < len(b) {
			return 0, fmt.Errorf("%s: %w", archive.Shown(s.Path), archive.Explain(err))
		}
		sum = crc32.Update(sum, crc32.IEEETable, b)
	}
	return sum, nil
}

// shardFormats lists the formats of shards by their numbers in a sidecar.
var shardFormats = []string{archive.Tar, archive.TarGzip, archive.TarZstd, archive.Parquet}

func formatNumber(format string) uint32 { return uint32(slices.Index(shardFormats, format)) }

// plausible reports whether an archive of this size can have sections of the claimed sizes. Call it
// before allocating memory for the sections, because a sparse file can claim terabytes.
func (s *sidecar) plausible(a *archive.Archive, formats []string) bool {
	members := int64(0) // each member has a header
	for i, shard := range a.Shards() {
		stream := archive.MaxStreamBytes(formats[i], shard.Info.Size())
		members = min(archive.MaxMembers, members+stream/archive.BlockBytes)
	}
	records, dirs, names := s.places[sectionMembers], s.places[sectionDirs], s.places[sectionNames]
	return records.count <= uint64(members) && records.size == records.count*memberBytes &&
		dirs.count <= uint64(members) && dirs.size <= dirs.count*(4+archive.MaxNameBytes) && dirs.size <= maxDirBytes &&
		names.size <= min(records.count*archive.MaxNameBytes, math.MaxUint32) &&
		s.places[sectionHeaders].size == records.count*headerBytes &&
		s.places[sectionCheckpoints].size <= uint64(members+int64(len(a.Shards())))*checkpointBytes &&
		s.places[sectionCounts].size == countsBytes
}

// loadDirectories reads the directories.
func (s *sidecar) loadDirectories(d *directories) error {
	le := binary.LittleEndian
	b, n, err := s.read(sectionDirs, 4)
	if err != nil {
		return err
	}
	for range n {
		if len(b) < 4 || uint64(le.Uint32(b)>>1) > uint64(len(b)-4) {
			return errIndexDamaged
		}
		length := le.Uint32(b) >> 1
		name := string(b[4 : 4+length])
		if _, twice := d.numbers[name]; twice || name == "" {
			return errIndexDamaged
		}
		number, err := d.number(name)
		if err != nil {
			return errIndexDamaged
		}
		d.claimed[number] = le.Uint32(b)&1 != 0
		b = b[4+length:]
	}
	return nil
}

// encodeColumns returns the section with the names of a Parquet file's columns. The length of each
// name precedes the name.
func encodeColumns(columns []string) (data []byte) {
	for _, name := range columns {
		data = binary.LittleEndian.AppendUint32(data, uint32(len(name)))
		data = append(data, name...)
	}
	return data
}

// checkColumns returns an error if the index was made for other columns than those that are
// selected now. It reads the names of the classes from the archive.
func (s *sidecar) checkColumns(a *archive.Archive, d *directories) error {
	data, _, err := s.read(sectionColumns, 4)
	if err != nil {
		return err
	}
	d.named, d.columns = a.Table()
	if !bytes.Equal(data, encodeColumns(d.columns)) {
		return errIndexStale
	}
	return nil
}

// loadCounts reads the section of counts, which also says where the labels come from.
func (s *sidecar) loadCounts(b *Builder) error {
	le := binary.LittleEndian
	counts, _, err := s.read(sectionCounts, 8)
	if err != nil || len(counts) != countsBytes {
		return errIndexDamaged
	}
	if n := le.Uint64(counts[16:]); n >= uint64(len(labelErrors)) {
		return errIndexDamaged
	} else if n != labelling(&b.config) {
		return labelErrors[n]
	}
	b.ignored, b.orphans = int(le.Uint64(counts)), int(le.Uint64(counts[8:]))
	if b.ignored < 0 || b.orphans < 0 {
		return errIndexDamaged
	}
	return nil
}

// labelling returns the number that stands for the source of the labels in a sidecar:
//
//	0  directories
//	1  WebDataset members
//	2  none: images and masks have no labels
//	3  a list, or files of boxes
//	4  WebDataset members with lists of labels
//	5  columns of Parquet files
//	6  columns of Parquet files with lists of labels
func labelling(c *Config) uint64 {
	switch {
	case c.Parquet && c.MultiLabel:
		return 6
	case c.Parquet:
		return 5
	case c.List != nil, c.Pairs != nil && c.Pairs.Boxes:
		return 3
	case c.MultiLabel:
		return 4
	case c.WebDataset:
		return 1
	case c.Pairs != nil:
		return 2
	}
	return 0
}
