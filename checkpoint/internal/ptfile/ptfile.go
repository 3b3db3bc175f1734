// Package ptfile reads and writes the files of torch.save, which are zip archives of a pickle and
// of the tensors' storages. The reader executes nothing: its unpickler knows only the opcodes and
// globals needed for tensors and plain values. For the value of any other global it returns an
// Opaque, so a program can still read the other values.
//
// A file is an archive NAME.pt with these members, all in one folder:
//
//	NAME/data.pkl     a pickle, which refers to storages by persistent ids
//	NAME/byteorder    "little" or "big"
//	NAME/data/KEY     the bytes of a storage
//	NAME/version      the version of the format
//	NAME/torchstream.crc32    checksums, in files of this package
//
// Files are untrusted: no content makes the reader crash, loop, or allocate more than a multiple of
// the file's size.
package ptfile

import (
	"archive/zip"
	"bytes"
	"compress/flate"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"strconv"
	"strings"

	"github.com/torchstream/torchstream/checkpoint/internal/blocksum"
)

// A compressed member may unpack to as many bytes as the whole file has, or to minBound bytes if
// the file is smaller.
const minBound = 1 << 20

// File is an open file. Several goroutines may read its tensors at the same time.
type File struct {
	Root    any    // a value of one of the types that value.go lists
	Comment string // of the zip archive
	r       io.ReaderAt
	size    int64
	// members maps names without the folder to the archive's members.
	members  map[string]*zip.File
	big      bool
	storages map[string]*Storage
	sums     map[string][]byte // a storage's checksums by its key, in a file that Write wrote
}

// checksumsMember is the member for checksums in the files of Write. It holds the CRC-32 of the
// pickle, followed by the checksums of the storages' blocks, in the order of the storages' numbers.
const checksumsMember = "torchstream.crc32"

// IsZip reports whether a file that starts with head is a zip archive.
func IsZip(head []byte) bool { return bytes.HasPrefix(head, []byte("PK\x03\x04")) }

// IsLegacy reports whether a file that starts with head has the format of torch.save before PyTorch
// 1.6, which starts with a pickled magic number.
func IsLegacy(head []byte) bool {
	return bytes.HasPrefix(head, []byte("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"))
}

// ErrLegacy is the error for a file that IsLegacy recognizes.
var ErrLegacy = errors.New("a file of PyTorch before 1.6, which is not a zip archive: rewrite it in " +
	"Python with torch.save(torch.load(path, weights_only=True), path)")

// Open reads the structure of a file of the given size: the zip directory and the pickle. It does
// not read tensors. Read them with [Tensor.ReadBytes] while r is still open.
func Open(r io.ReaderAt, size int64) (*File, error) {
	head := make([]byte, min(size, 16))
	if n, err := r.ReadAt(head, 0); n < len(head) {
		return nil, err
	}
	switch {
	case IsLegacy(head):
		return nil, ErrLegacy
	case !IsZip(head):
		return nil, errors.New("not a zip archive as torch.save writes")
	}
	f := &File{r: r, size: size, members: map[string]*zip.File{}, storages: map[string]*Storage{}}
	folder, err := f.readDirectory()
	if err != nil {
		return nil, err
	}
	if f.members["constants.pkl"] != nil {
		return nil, errors.New("a TorchScript archive, which holds code: in Python, " +
			"torch.save(torch.jit.load(path).state_dict(), \"weights.pt\") writes its weights")
	}
	if m := f.members["byteorder"]; m != nil {
		order, err := f.readAll(m, 16)
		if err != nil {
			return nil, err
		}
		if f.big = string(order) == "big"; !f.big && string(order) != "little" {
			return nil, fmt.Errorf("%s is %q and not little or big", m.Name, order)
		}
	}
	pickle, err := f.readAll(f.members["data.pkl"], maxPickle)
	if err != nil {
		return nil, err
	}
	if err := f.readChecksums(pickle); err != nil {
		return nil, err
	}
	if f.Root, err = unpickle(pickle, usual(), f.storage); err != nil {
		return nil, fmt.Errorf("%s/data.pkl: %w", folder, err)
	}
	if o, ok := f.Root.(*Opaque); ok {
		return nil, fmt.Errorf("%s/data.pkl: refused: all of the file is one object, %s: in Python, save "+
			"model.state_dict() instead of the object", folder, o.What)
	}
	return f, nil
}

// readDirectory fills members and returns the name of their folder.
func (f *File) readDirectory() (folder string, err error) {
	archive, err := zip.NewReader(f.r, f.size)
	if err != nil && !errors.Is(err, zip.ErrInsecurePath) { // members are not extracted to paths
		return "", fmt.Errorf("a zip archive, as torch.save writes, that is cut short or damaged at its "+
			"end: copy or save it again: %w", err)
	}
	f.Comment = archive.Comment
	for _, m := range archive.File {
		if before, ok := strings.CutSuffix(m.Name, "/data.pkl"); ok && !strings.Contains(before, "/") {
			if folder != "" {
				return "", fmt.Errorf("there are two pickles: %s/data.pkl and %s", folder, m.Name)
			}
			folder = before
		}
	}
	if folder == "" {
		return "", errors.New(describeArchive(archive.File))
	}
	for _, m := range archive.File {
		name, ok := strings.CutPrefix(m.Name, folder+"/")
		if !ok {
			continue
		}
		if f.members[name] != nil {
			return "", fmt.Errorf("member %s comes twice", m.Name)
		}
		f.members[name] = m
	}
	return folder, nil
}

// describeArchive names the kind of a zip archive that torch.save did not write, with advice.
func describeArchive(files []*zip.File) string {
	arrays := len(files) > 0
	for _, m := range files {
		switch name := m.Name[strings.LastIndex(m.Name, "/")+1:]; name {
		case "archive_format", "serialized_exported_program.json":
			return "a program of torch.export (.pt2), which holds code: in Python, " +
				"torch.save(torch.export.load(path).state_dict, \"weights.pt\") writes its weights; " +
				"one of AOTInductor (model.so) has none that can be read: save the model's state_dict()"
		case "model.weights.h5":
			return "a model of Keras (.keras): in Python, save its weights as safetensors"
		default:
			arrays = arrays && strings.HasSuffix(name, ".npy")
		}
	}
	if arrays {
		return "arrays of NumPy (.npz): in Python, safetensors.numpy.save_file(dict(numpy.load(path)), " +
			"\"weights.safetensors\") writes them"
	}
	return "a zip archive without a data.pkl in its folder: torch.save did not write it: name another file"
}

// storage returns the storage of a key, the same one for every reference.
func (f *File) storage(key, location string) (*Storage, error) {
	if s := f.storages[key]; s != nil {
		return s, nil
	}
	m := f.members["data/"+key]
	if m == nil {
		return nil, fmt.Errorf("storage %q has no member data/%s", key, key)
	}
	read, err := f.reader(m)
	if err != nil {
		return nil, err
	}
	if sums, ok := f.sums[key]; ok {
		plain := read
		read = func(p []byte, offset int64) error {
			return blocksum.Read(p, offset, int64(m.UncompressedSize64), sums, plain)
		}
	}
	s := &Storage{Key: key, Location: location, Bytes: int64(m.UncompressedSize64), big: f.big, readAt: read}
	f.storages[key] = s
	return s, nil
}

// readAll returns a member's content.
func (f *File) readAll(m *zip.File, limit uint64) ([]byte, error) {
	if m.UncompressedSize64 > limit {
		return nil, fmt.Errorf("%s has %d bytes: at most %d are handled", m.Name, m.UncompressedSize64, limit)
	}
	read, err := f.reader(m)
	if err != nil {
		return nil, err
	}
	b := make([]byte, m.UncompressedSize64)
	return b, read(b, 0)
}

// readChecksums reads the checksums of the storages, if the file has any, and verifies the checksum
// of the pickle.
func (f *File) readChecksums(pickle []byte) error {
	m := f.members[checksumsMember]
	if m == nil {
		return nil
	}
	sums, err := f.readAll(m, uint64(f.size))
	if err != nil {
		return err
	}
	const changed = "%s: its bytes are not those that were written: copy the file again, or go on from " +
		"an older checkpoint"
	if len(sums) < 4 || crc32.ChecksumIEEE(sums) != m.CRC32 {
		return fmt.Errorf(changed, m.Name)
	}
	if crc32.ChecksumIEEE(pickle) != binary.LittleEndian.Uint32(sums) {
		return fmt.Errorf(changed, f.members["data.pkl"].Name)
	}
	sums, f.sums = sums[4:], map[string][]byte{}
	for i := 0; ; i++ {
		key := strconv.Itoa(i)
		storage := f.members["data/"+key]
		if storage == nil {
			break
		}
		n := uint64(blocksum.Size(int64(min(storage.UncompressedSize64, math.MaxInt64/2))))
		if n > uint64(len(sums)) {
			return fmt.Errorf("%s has no checksums of %s: copy the file again, or go on from an older "+
				"checkpoint", m.Name, storage.Name)
		}
		f.sums[key], sums = sums[:n:n], sums[n:]
	}
	if len(sums) > 0 {
		return fmt.Errorf("%s has checksums of a storage that is missing: copy the file again, or go on "+
			"from an older checkpoint", m.Name)
	}
	return nil
}

// reader checks a member's position and size, and returns a function that reads a part of its
// content. It does not verify the zip archive's checksums: torch.save can omit them, and torch.load
// ignores them.
func (f *File) reader(m *zip.File) (read func(p []byte, offset int64) error, err error) {
	start, err := m.DataOffset()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", m.Name, err)
	}
	size := m.CompressedSize64
	switch {
	case start < 0 || start > f.size || size > uint64(f.size-start):
		return nil, fmt.Errorf("%s: %d bytes at %d are outside of the file", m.Name, size, start)
	case m.Flags&1 != 0:
		return nil, fmt.Errorf("%s is encrypted", m.Name)
	case m.Method == zip.Store && m.UncompressedSize64 != size:
		return nil, fmt.Errorf("%s is not compressed and has the sizes %d and %d", m.Name, size, m.UncompressedSize64)
	case m.Method == zip.Store:
		return func(p []byte, offset int64) error {
			if n, err := f.r.ReadAt(p, start+offset); n < len(p) {
				return fmt.Errorf("%s: %w", m.Name, err)
			}
			return nil
		}, nil
	case m.Method != zip.Deflate:
		return nil, fmt.Errorf("%s: compression method %d is not handled", m.Name, m.Method)
	case m.UncompressedSize64 > uint64(max(f.size, minBound)):
		return nil, fmt.Errorf("%s unpacks to %d bytes, more than the whole file: write it without "+
			"compression", m.Name, m.UncompressedSize64)
	}
	return func(p []byte, offset int64) error {
		r := flate.NewReader(io.NewSectionReader(f.r, start, int64(size)))
		defer r.Close()
		_, err := io.CopyN(io.Discard, r, offset)
		if err == nil {
			_, err = io.ReadFull(r, p)
		}
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return fmt.Errorf("%s: %w", m.Name, err)
		}
		return nil
	}, nil
}
