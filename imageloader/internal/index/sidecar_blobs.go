package index

import (
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

const (
	maxBlobBytes  = 1 << 24   // maximum size of a member's blob
	maxBlobMemory = 512 << 20 // maximum size of all blobs, if they have to stay in memory
)

// blob returns a member's blob, or an empty slice if there is none. It stores the blob in buffer if
// it fits, and otherwise in new memory.
func (s *sidecar) blob(number int32, buffer []byte) []byte {
	if b := s.blobs.blob(number, buffer); b != nil {
		return b
	}
	begin, end, ok := s.placeOfBlob(number)
	if !ok {
		return nil
	}
	b := slices.Grow(buffer[:0], int(end-begin))[:end-begin]
	if _, err := s.file.ReadAt(b, int64(s.places[sectionBlobs].offset+begin)); err != nil {
		return nil
	}
	return b
}

// placeOfBlob returns the start and the end of a member's blob in the section of blobs. ok is false
// if the member has no blob.
func (s *sidecar) placeOfBlob(number int32) (begin, end uint64, ok bool) {
	s.ends.load.Do(func() {
		p := s.places[sectionBlobEnds]
		if p.count > p.size/8 {
			return
		}
		ends := make([]byte, 8*p.count)
		if _, err := s.file.ReadAt(ends, int64(p.offset)); err == nil {
			s.ends.bytes = ends
		}
	})
	begin, end, ok = s.ends.of(number)
	return begin, end, ok && begin < end && end <= s.places[sectionBlobs].size && end-begin <= maxBlobBytes
}

// of returns the start and the end of a member's blob. ok is false if the section does not have the
// member.
func (e *blobEnds) of(number int32) (begin, end uint64, ok bool) {
	if int(number) >= len(e.bytes)/8 {
		return 0, 0, false
	}
	le := binary.LittleEndian
	if number > 0 {
		begin = le.Uint64(e.bytes[8*int(number-1):])
	}
	return begin, le.Uint64(e.bytes[8*int(number):]), true
}

// keep copies a member's blob for save, unless it has already kept one for the member. If no file
// can be created, it keeps only as many blobs as fit in memory. It reports whether a blob of the
// member is kept.
func (s *sidecar) keep(number int32, blob []byte) bool {
	return s.blobs.keep(number, blob, s.places[sectionMembers].count, s.saving.create)
}

// blob returns the blob that keep has copied for a member, or nil if there is none. It stores the
// blob in buffer, or in a larger buffer.
func (u *unsavedBlobs) blob(number int32, buffer []byte) []byte {
	u.mu.RLock()
	defer u.mu.RUnlock()
	if u.kept == nil || u.kept[number] == 0 {
		return nil
	}
	at, size := u.kept[number]>>24, int(u.kept[number]&(maxBlobBytes-1))
	b := slices.Grow(buffer[:0], size)[:size]
	if _, err := u.spool.ReadAt(b, int64(at)); err != nil {
		return nil
	}
	return b
}

// keep copies the blob of a member, unless the member already has one. members is the number of all
// members. create makes the file for the blobs: see sidecar.keep.
func (u *unsavedBlobs) keep(number int32, blob []byte, members uint64, create func() (*os.File, error)) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.kept == nil {
		u.kept = make([]uint64, members)
		u.spool.create = create
	}
	if len(blob) == 0 || len(blob) >= maxBlobBytes || u.kept[number] != 0 ||
		u.spool.size() >= 1<<40 || len(u.spool.mem)+len(blob) > maxBlobMemory {
		return u.kept[number] != 0
	}
	u.kept[number] = uint64(u.spool.size())<<24 | uint64(len(blob))
	u.spool.write(blob)
	u.dirty = true
	return true
}

// save writes the index file again. The new file has the kept blobs and checksums, and also those
// that other processes have saved in the meantime. If the folder is not writable, save writes to
// another place. The open file stays valid. If save fails, it only logs the error, because the next
// run can compute everything again.
func (s *sidecar) save() {
	dirty := s.blobs.takeDirty()
	if s.sums != nil && s.sums.dirty.Swap(false) {
		dirty = true
	}
	if !dirty {
		return
	}
	other, mode, err := s.merges()
	if err != nil {
		s.saving.log.Info("entry points are not kept", "index", s.path, "reason", err.Error())
		return
	}
	defer other.file.Close() // only read
	if err = s.saveTo(s.path, mode, other); err == nil {
		return
	}
	for _, p := range s.saving.elsewhere {
		if s.saveElsewhere(p, mode, other) {
			return
		}
	}
	s.saving.log.Warn("entry points can't be kept: Options.IndexFile can name another place for the index",
		"index", s.path, "error", err)
}

// saveElsewhere saves in another place and reports whether it succeeded. It adds the blobs of the
// file other. If another process has meanwhile written an index of the same archive in that place,
// it adds the blobs of that index instead.
func (s *sidecar) saveElsewhere(p otherPlace, mode fs.FileMode, other *sidecar) bool {
	if now, err := os.Stat(p.path); err == nil && (p.was == nil || !os.SameFile(now, p.was)) {
		there, _, err := s.current(p.path)
		if err != nil {
			return false
		}
		defer there.file.Close() // only read
		if !s.describesAs(there) {
			return false
		}
		if s.sums != nil {
			s.sums.adopt(there)
		}
		other = there
	}
	_ = os.MkdirAll(filepath.Dir(p.path), 0o755) // if this fails, saveTo fails too
	return s.saveTo(p.path, mode, other) == nil
}

// merges returns the locked file at the sidecar's path, and the mode for the new file. save merges
// the locked file's blobs and checksums with this process's. The locked file may differ from the
// file that the sidecar has open, because each rank on a host builds and saves an index. It must
// then be an index of the same archive.
func (s *sidecar) merges() (other *sidecar, mode fs.FileMode, err error) {
	mine, err := s.file.Stat()
	if err != nil {
		return nil, 0, err
	}
	other, now, err := s.current(s.path)
	if err != nil {
		return nil, 0, err
	}
	if !os.SameFile(mine, now) && !s.describesAs(other) {
		_ = other.file.Close() // the next error is more useful
		return nil, 0, errors.New("another process has written another index since")
	}
	if s.sums != nil && !os.SameFile(mine, now) {
		s.sums.adopt(other)
	}
	return other, mine.Mode().Perm(), nil
}

// saveTo writes the index to path with the kept blobs. The blobs of the other members come from the
// other file, or else from the sidecar's file.
func (s *sidecar) saveTo(path string, mode fs.FileMode, other *sidecar) error {
	var list []output
	for _, kind := range append([]uint32{sectionShards, sectionDirs, sectionCounts, sectionOrphans}, largeSections...) {
		p := s.places[kind]
		list = append(list, output{kind, p.count, func(w io.Writer) error {
			_, err := io.Copy(w, io.NewSectionReader(s.file, int64(p.offset), int64(p.size)))
			return err
		}})
	}
	n := int32(s.places[sectionMembers].count)
	var ends spool
	defer ends.close()
	ends.create = s.saving.create
	at := uint64(0)
	// In a forged file, the blobs of several members may be the same bytes, which would then be
	// written once for each member.
	limit := s.places[sectionBlobs].size + other.places[sectionBlobs].size + uint64(s.blobs.spool.size())
	blobs := output{sectionBlobs, 0, func(w io.Writer) error {
		var b []byte
		var end [8]byte
		for i := range n {
			// The other file is newer. Its process may have replaced a wrong blob.
			kept := s.blobs.blob(i, b)
			if len(kept) == 0 {
				kept = other.blob(i, b)
			}
			if len(kept) == 0 {
				kept = s.blob(i, b)
			}
			b = kept
			if at+uint64(len(b)) > limit {
				b = b[:0]
			}
			if _, err := w.Write(b); err != nil {
				return err
			}
			at += uint64(len(b))
			ends.write(binary.LittleEndian.AppendUint64(end[:0], at))
		}
		return nil
	}}
	writeEnds := func(w io.Writer) error { return ends.section(int(n)).copyTo(w) }
	list = append(list, blobs, output{sectionBlobEnds, uint64(n), writeEnds})
	if s.sums != nil {
		list = append(list, output{sectionSums, uint64(n), s.sums.write})
	}
	f, err := writeSidecar(path, mode, list)
	if err != nil {
		return err
	}
	return f.Close()
}
