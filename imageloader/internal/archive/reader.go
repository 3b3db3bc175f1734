package archive

import (
	"io"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/digest"
	"github.com/torchstream/torchstream/internal/safefile"
	"github.com/torchstream/torchstream/internal/system"
)

// Reader reads any part of an archive, in any order. It belongs to one goroutine. Any number of
// Readers may read from one archive at the same time.
type Reader struct {
	a *Archive
	enteredShard
	timed   timedFile
	shard   int // -1: none
	inflate *rangeInflater
	zipped  []byte // the compressed member that was read last, with its header
	// packed is the result of Packed.
	packed struct{ begin, end int64 }
	// extra is the size of the extra fields in the last local header of a zip, less the size of the
	// fields in the central directory.
	extra int64
	// page is the last decompressed page of a Parquet file. It is at pageFrom of shard pageOf.
	page     []byte
	pageOf   int
	pageFrom int64
}

// enteredShard is the shard that a Reader has open.
type enteredShard struct {
	file   File
	mapped *mapping // nil: not mapped
	looks  int      // calls of stillMapped before it looks at the file again
}

// NewReader returns a Reader. The caller closes it before the archive.
func NewReader(a *Archive) *Reader { return &Reader{a: a, shard: -1} }

// ReadAt reads the raw bytes of a shard's file, compressed or not, like [io.ReaderAt].
func (r *Reader) ReadAt(shard int, p []byte, at int64) (int, error) {
	if err := r.enter(shard); err != nil {
		return 0, err
	}
	return r.file.ReadAt(p, at)
}

// ReadPieces is ReadAt for bytes that only a device reads. It also fills sums with the digests of
// p's pieces, so that the caller can compare them with an earlier read. After an error the digests
// are undefined. With Config.Mappings, ReadPieces is faster for bytes that are cached.
func (r *Reader) ReadPieces(shard int, p []byte, at int64, key *digest.Key, sums []uint64) (int, error) {
	if err := r.enter(shard); err != nil {
		return 0, err
	}
	defer runtime.KeepAlive(r.a.config.Mappings) // garbage collection of Mappings unmaps the files
	if from := r.mapped.part(len(p), at); from != nil && r.mapped.try(func() { key.Copy(p, from, sums) }) {
		return len(p), nil
	}
	n, err := r.file.ReadAt(p, at)
	if n == len(p) {
		key.Sum(p, sums)
	}
	return n, err
}

// DeviceBytes returns size bytes of a shard's file if devices can read them, and otherwise nil.
// With register they can soon after the first call for a part. The bytes are of the version that
// was opened, or changed since. They stay mapped while Config.Mappings is held.
func (r *Reader) DeviceBytes(shard, size int, at int64, register Register) []byte {
	if register == nil || r.enter(shard) != nil { // ReadPieces reports the error
		return nil
	}
	if r.mapped == nil || !r.stillMapped() {
		return nil
	}
	return r.mapped.forDevices(r.a.config.Mappings.held, size, at, register)
}

// deviceLooks is the number of calls of DeviceBytes for which one look at the file is enough.
const deviceLooks = 16

// stillMapped reports whether the open shard is as it was when it was mapped. Devices read the
// pages of that time, whatever happens to the file.
func (r *Reader) stillMapped() bool {
	if r.looks--; r.looks >= 0 {
		return true
	}
	file, _ := r.file.(*os.File)
	info, err := file.Stat()
	if err != nil || info.Size() != r.mapped.info.Size() ||
		system.ChangeTime(info) != system.ChangeTime(r.mapped.info) {
		r.looks = 0
		return false
	}
	r.looks = deviceLooks - 1
	return true
}

// ReadFile fills p with the first bytes of a file in a directory. name is the path below the
// directory, with slashes.
func (r *Reader) ReadFile(shard int, name string, p []byte) error {
	return readFile(r.a.shards[shard].Path, name, p)
}

func readFile(root, name string, p []byte) error {
	file, err := safefile.Open(filepath.Join(root, filepath.FromSlash(name)))
	if err != nil {
		return err
	}
	defer file.Close()
	_, err = io.ReadFull(file, p)
	return err
}

// Inflate fills head and then p with the inflated bytes of a gzip shard that start at offset. It
// starts inflating at the mark from, which is at or before offset. windows holds the mark's window.
// until is an upper bound for the end of the compressed bytes in the file.
func (r *Reader) Inflate(shard int, windows io.ReaderAt, from *Mark, offset, until int64, head, p []byte) error {
	if err := r.enter(shard); err != nil {
		return err
	}
	if r.inflate == nil {
		var err error
		if r.inflate, err = newRangeInflater(); err != nil {
			return err
		}
	}
	return r.inflate.read(&r.timed, windows, from, offset, until, head, p)
}

// InflatedTo returns the offset in the file right after the compressed bytes that the last call of
// Inflate consumed. It returns 0 if that call failed, or if the bytes span several gzip members.
func (r *Reader) InflatedTo() int64 {
	if r.inflate == nil {
		return 0
	}
	return r.inflate.end
}

// FileTime returns the time that Inflate and ReadZipped have waited for files, without the time for
// inflating. It leaves out the stored members of zips.
func (r *Reader) FileTime() time.Duration { return r.timed.spent }

// enter opens a shard.
func (r *Reader) enter(shard int) error {
	if r.shard == shard {
		return nil
	}
	r.leave()
	f, err := r.a.shared.acquire(shard, r.a.openAgain, r.a.config.Mappings)
	if err != nil {
		return err
	}
	r.enteredShard, r.timed.file, r.shard = enteredShard{file: f.file, mapped: f.mapped}, f.file, shard
	return nil
}

// leave releases the shard that was read last.
func (r *Reader) leave() {
	if r.shard >= 0 {
		r.a.shared.release(r.shard)
		r.enteredShard, r.shard = enteredShard{}, -1
	}
}

// Close releases the open shard and the C memory.
func (r *Reader) Close() {
	if r.inflate != nil {
		r.inflate.close()
		r.inflate = nil
	}
	r.leave()
}

// timedFile adds up the time that ReadAt takes.
type timedFile struct {
	file  io.ReaderAt
	spent time.Duration
}

func (f *timedFile) ReadAt(p []byte, at int64) (int, error) {
	began := time.Now()
	n, err := f.file.ReadAt(p, at)
	f.spent += time.Since(began)
	return n, err
}
