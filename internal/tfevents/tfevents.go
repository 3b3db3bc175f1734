// Package tfevents writes TensorBoard's event files, which consist of records that contain
// TensorFlow's protocol buffers. The package writes only scalars.
//
// A record is the length of its data (8 bytes, little-endian), the masked CRC-32C of these 8 bytes,
// the data, and the masked CRC-32C of the data (tensorflow/core/lib/io/record_writer.h). The data
// is an Event message (tensorflow/core/util/event.proto).
package tfevents

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"os"
	"path/filepath"
	"time"
)

// Scalar is a number with TensorBoard's name for its curve, such as "loss/train".
type Scalar struct {
	Tag   string
	Value float64 // written as float32
}

// Writer appends events to a file. Only one goroutine may use it at a time.
type Writer struct {
	file *os.File
	now  func() time.Time
}

// Create creates a new file in dir, under a name that TensorBoard recognizes. TensorBoard joins the
// files of a folder, so a program that resumes creates another one. first is the first step that
// the program may write. TensorBoard drops the scalars of earlier files from that step on, because
// a program that resumes from an older checkpoint writes them again.
func Create(dir string, first int64) (*Writer, error) {
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	now := time.Now()
	name := fmt.Sprintf("events.out.tfevents.%d.%s.%d.%09d", now.Unix(), filepath.Base(host), os.Getpid(),
		now.Nanosecond())
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return nil, err
	}
	return start(f, first)
}

// start writes the first records. If it fails, it closes the file.
func start(f *os.File, first int64) (*Writer, error) {
	w := &Writer{f, time.Now}
	if err := w.begin(first); err != nil {
		f.Close()
		return nil, err
	}
	return w, nil
}

func (w *Writer) begin(first int64) error {
	// Every file starts with the version and the start of the session.
	if err := w.record(bytesField(w.event(0), 3, []byte("brain.Event:2"))); err != nil {
		return err
	}
	start := []byte{1 << 3, 1} // SessionLog.status: START
	return w.record(bytesField(w.event(first), 7, start))
}

// Write appends the scalars of a step. They are in the file when Write returns, so a running
// TensorBoard can show them.
func (w *Writer) Write(step int64, scalars ...Scalar) error {
	var summary []byte
	for _, s := range scalars {
		value := bytesField(nil, 1, []byte(s.Tag))
		value = append(value, 2<<3|5) // simple_value, 32 bits
		value = binary.LittleEndian.AppendUint32(value, math.Float32bits(float32(s.Value)))
		summary = bytesField(summary, 1, value)
	}
	return w.record(bytesField(w.event(step), 5, summary))
}

// event returns the start of an Event, with wall_time and step.
func (w *Writer) event(step int64) []byte {
	e := []byte{1<<3 | 1} // wall_time, 64 bits
	e = binary.LittleEndian.AppendUint64(e, math.Float64bits(float64(w.now().UnixMicro())/1e6))
	if step != 0 {
		e = binary.AppendUvarint(append(e, 2<<3), uint64(step))
	}
	return e
}

// bytesField appends a length-delimited field.
func bytesField(message []byte, field byte, content []byte) []byte {
	message = binary.AppendUvarint(append(message, field<<3|2), uint64(len(content)))
	return append(message, content...)
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// masked returns the masked CRC-32C. The mask is for data that contains CRCs itself.
func masked(data []byte) uint32 {
	c := crc32.Checksum(data, castagnoli)
	return (c>>15 | c<<17) + 0xa282ead8
}

func (w *Writer) record(data []byte) error {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(data)))
	b = binary.LittleEndian.AppendUint32(b, masked(b))
	b = append(b, data...)
	b = binary.LittleEndian.AppendUint32(b, masked(data))
	_, err := w.file.Write(b)
	return err
}

// Close syncs the file to disk and closes it.
func (w *Writer) Close() error {
	if err := w.file.Sync(); err != nil {
		w.file.Close()
		return err
	}
	return w.file.Close()
}
