//go:build linux && cgo

package main

import (
	"bufio"
	"encoding/binary"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/internal/safefile"
)

// vectorFile writes rows of float32 numbers to a .safetensors or .npy file, and the names of the
// rows to a text file. It writes to files with the suffix .part, and renames them when they are
// complete. A journal, in a third file, has the number of rows that are safe on the disk.
type vectorFile struct {
	out, names    string // the paths of the complete files
	header        func(rows, width int64) ([]byte, error)
	vectors, list *os.File
	rows          *bufio.Writer
	lines         *bufio.Writer
	claim         *safefile.Claim // nil: the file system has no locks
	journal       vectorJournal
	saved         int64                           // rows that the journal on the disk counts
	classOf       func(imageloader.Sample) string // for a table of names
}

// vectorJournal describes the .part files.
type vectorJournal struct {
	Embed    map[string]string  `json:"torchstream_embed"` // the settings on which the files' bytes depend
	Rows     int64              `json:"rows"`
	Width    int64              `json:"width"` // numbers of a row; 0 before the first row
	Names    int64              `json:"names"` // bytes of the names
	State    *imageloader.State `json:"state"` // the loader's position after the rows; nil before the first row
	Complete bool               `json:"complete"`
}

// Kinds of files of a vectorFile.
var (
	npyFile     = safefile.Prefix("a NumPy file", "\x93NUMPY")
	namesTable  = safefile.Prefix("a table of embed", "name,class\n")
	journalFile = safefile.Prefix("a journal of embed", `{"torchstream_embed":`)
)

// part is the suffix of incomplete files.
const part = ".part"

func (f *vectorFile) journalPath() string { return f.out + part + ".json" }

// openVectors opens the files at out and names. It keeps the rows of an interrupted run with the
// same settings. classOf returns the class of a sample, for a table of names. about goes into the
// header of a .safetensors file.
func openVectors(out, names string, classOf func(imageloader.Sample) string, about, settings map[string]string) (
	_ *vectorFile, err error) {
	f := &vectorFile{out: out, names: names, classOf: classOf, journal: vectorJournal{Embed: settings}}
	kind := safefile.Safetensors
	f.header = func(rows, width int64) ([]byte, error) { return safetensorsHeader(about, rows, width) }
	switch {
	case isNPY(out):
		kind, f.header = npyFile, npyHeader
	case filepath.Ext(out) != ".safetensors":
		return nil, cli.Usagef("-o %s: want a .safetensors or a .npy file", printable.Name(out))
	}
	list := namesTable
	if !isCSV(names) {
		list = safefile.Raw
	}
	if err := errors.Join(safefile.Check(out, kind), safefile.Check(names, list)); err != nil {
		return nil, err
	}
	f.claim, err = safefile.NewClaim(out + part + ".lock")
	if err != nil && !errors.Is(err, safefile.ErrNoLocks) {
		return nil, err
	}
	defer func() {
		if err != nil {
			f.close()
		}
	}()
	if err := f.readJournal(settings); err != nil {
		return nil, err
	}
	if f.journal.Complete {
		return f, f.rename()
	}
	return f, f.openParts()
}

func isNPY(path string) bool { return filepath.Ext(path) == ".npy" }
func isCSV(path string) bool { return filepath.Ext(path) == ".csv" }

// readJournal reads the journal, or writes a new one. It refuses a journal of other settings.
func (f *vectorFile) readJournal(settings map[string]string) error {
	text, err := safefile.ReadFile(f.journalPath())
	if errors.Is(err, fs.ErrNotExist) {
		for _, path := range []string{f.out + part, f.names + part} {
			if fileExists(path) {
				return fmt.Errorf("%s exists, and no journal says that embed wrote it: remove or rename it",
					printable.Name(path))
			}
		}
		return f.writeJournal()
	}
	if err != nil {
		return err
	}
	var j vectorJournal
	if err := json.Unmarshal(text, &j); err != nil || j.Embed == nil {
		return fmt.Errorf("%s is no journal of embed: remove or rename it", printable.Name(f.journalPath()))
	}
	for _, key := range byName(settings) {
		if before, now := j.Embed[key], settings[key]; before != now {
			return fmt.Errorf("%s is unfinished, with %s %s, which is %s now: give the options of the interrupted run, or "+
				"remove %[1]s, %s and %s to start anew", printable.Name(f.out+part), key, printable.Text(before),
				printable.Text(now), printable.Name(f.names+part), printable.Name(f.journalPath()))
		}
	}
	f.journal, f.saved = j, j.Rows
	return nil
}

func (f *vectorFile) writeJournal() error {
	text, err := json.Marshal(&f.journal)
	if err != nil {
		return err
	}
	file, err := safefile.Replace(f.journalPath(), journalFile, 0o644, func(file *os.File) error {
		_, err := file.Write(append(text, '\n'))
		return err
	})
	if err != nil {
		return err
	}
	return file.Close()
}

// openParts opens the .part files, to append to the rows that the journal counts.
func (f *vectorFile) openParts() (err error) {
	head, err := f.header(0, 0)
	if err != nil {
		return err
	}
	j := &f.journal
	if f.vectors, err = openAt(f.out+part, int64(len(head))+j.Rows*j.Width*4, j.Rows == 0); err != nil {
		return err
	}
	if f.list, err = openAt(f.names+part, j.Names, j.Rows == 0); err != nil {
		return err
	}
	f.rows, f.lines = bufio.NewWriterSize(f.vectors, 1<<20), bufio.NewWriter(f.list)
	if j.Rows == 0 && isCSV(f.names) {
		_, err = f.lines.WriteString("name,class\n")
	}
	return err
}

// openAt opens a file for writing at an offset, and removes the bytes after it. If isNew is false,
// a file that is shorter is an error.
func openAt(path string, offset int64, isNew bool) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o666)
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err == nil && !isNew && info.Size() < offset {
		err = fmt.Errorf("%s has %d bytes, and its journal says %d: remove the files %[1]s and start anew",
			printable.Name(path), info.Size(), offset)
	}
	if err == nil {
		err = file.Truncate(offset)
	}
	if err == nil {
		_, err = file.Seek(offset, io.SeekStart)
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// append adds rows, given as the bytes of float32 numbers, and their names and classes. It checks
// all names before it writes anything. After an error of a file, all later writes fail.
func (f *vectorFile) append(rows []byte, samples []imageloader.Sample) error {
	if len(samples) == 0 {
		return nil
	}
	for _, s := range samples {
		if !isCSV(f.names) && strings.ContainsAny(s.Name, "\r\n") {
			return fmt.Errorf("the name %s has more than one line: give -names a .csv file", printable.Name(s.Name))
		}
	}
	if _, err := f.rows.Write(rows); err != nil {
		return err
	}
	if err := f.appendNames(samples); err != nil {
		return err
	}
	f.journal.Rows += int64(len(samples))
	f.journal.Width = int64(len(rows) / len(samples) / 4)
	return nil
}

func (f *vectorFile) appendNames(samples []imageloader.Sample) error {
	if isCSV(f.names) {
		w := csv.NewWriter(f.lines)
		for _, s := range samples {
			w.Write([]string{s.Name, f.classOf(s)}) // Error returns its error
		}
		w.Flush()
		return w.Error()
	}
	for _, s := range samples {
		if _, err := f.lines.WriteString(s.Name + "\n"); err != nil {
			return err
		}
	}
	return nil
}

// save syncs the rows to the disk, and then the journal. state is the loader's position after these
// rows.
func (f *vectorFile) save(state imageloader.State) error {
	if err := errors.Join(f.rows.Flush(), f.lines.Flush(), f.vectors.Sync(), f.list.Sync()); err != nil {
		return err
	}
	at, err := f.list.Seek(0, io.SeekCurrent)
	if err != nil {
		return err
	}
	f.journal.Names, f.journal.State = at, &state
	if err := f.writeJournal(); err != nil {
		return err
	}
	f.saved = f.journal.Rows
	return nil
}

// finish completes the files.
func (f *vectorFile) finish() error {
	head, err := f.header(f.journal.Rows, f.journal.Width)
	if err != nil {
		return err
	}
	if err := errors.Join(f.rows.Flush(), f.lines.Flush()); err != nil {
		return err
	}
	if _, err := f.vectors.WriteAt(head, 0); err != nil {
		return err
	}
	if err := errors.Join(f.vectors.Sync(), f.list.Sync()); err != nil {
		return err
	}
	f.journal.Complete = true
	if err := f.writeJournal(); err != nil {
		return err
	}
	if err := safefile.SyncFolder(f.journalPath()); err != nil {
		return err
	}
	return f.rename()
}

// rename gives the complete files their names and removes the journal. A killed process may have
// renamed some of them already. The journal remains until the new names are on the disk.
func (f *vectorFile) rename() error {
	for _, path := range []string{f.out, f.names} {
		err := os.Rename(path+part, path)
		if errors.Is(err, fs.ErrNotExist) && !fileExists(path) {
			return fmt.Errorf("%s is missing, and %s says that it is complete: remove %[2]s to start anew",
				printable.Name(path), printable.Name(f.journalPath()))
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := errors.Join(safefile.SyncFolder(f.out), safefile.SyncFolder(f.names)); err != nil {
		return err
	}
	return os.Remove(f.journalPath())
}

// close closes the .part files. They remain for the next run unless they are complete.
func (f *vectorFile) close() {
	for _, file := range []*os.File{f.vectors, f.list} {
		if file != nil {
			_ = file.Close() // save has synced what the journal counts
		}
	}
	if f.claim != nil {
		_ = f.claim.Release() // the kernel releases it with the process
	}
}

// safetensorsHead is the size of a header in bytes, with room for long names.
const safetensorsHead = 4096

// safetensorsHeader returns the header of a file with one tensor, vectors [rows width].
func safetensorsHeader(about map[string]string, rows, width int64) ([]byte, error) {
	text, err := json.Marshal(map[string]any{
		"__metadata__": about,
		"vectors": map[string]any{"dtype": "F32", "shape": []int64{rows, width},
			"data_offsets": []int64{0, rows * width * 4}},
	})
	if err != nil {
		return nil, err
	}
	if len(text) > safetensorsHead-8 {
		return nil, fmt.Errorf("the header has %d bytes, more than %d", len(text), safetensorsHead-8)
	}
	head := binary.LittleEndian.AppendUint64(nil, safetensorsHead-8)
	return padded(append(head, text...), safetensorsHead), nil
}

// npyHead is the size of the header of a .npy file in bytes.
const npyHead = 128

// npyHeader returns the header of a .npy file of version 1.0.
func npyHeader(rows, width int64) ([]byte, error) {
	head := fmt.Appendf([]byte("\x93NUMPY\x01\x00"), "%c%c", npyHead-10, 0)
	head = fmt.Appendf(head, "{'descr': '<f4', 'fortran_order': False, 'shape': (%d, %d), }", rows, width)
	return append(padded(head, npyHead-1), '\n'), nil
}

// padded adds spaces.
func padded(text []byte, size int) []byte {
	return append(text, slices.Repeat([]byte{' '}, size-len(text))...)
}
