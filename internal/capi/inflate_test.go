package capi

import (
	"bytes"
	"compress/flate"
	"errors"
	"hash/crc32"
	"testing"
	"unsafe"
)

func TestGPUInflaterNeedsAResultForEachRange(t *testing.T) {
	if err := RunGPUInflater(nil, nil, make([]GPUInflateRange, 2), nil, make([]GPUInflateResult, 1),
		Stream{}); !errors.Is(err, CodeInvalidArgument) {
		t.Errorf("got %v, want an invalid argument", err)
	}
}

// The batch is ranges of one stream. cshim/test/decode covers every kind of stream.
func TestGPUInflaterInflates(t *testing.T) { onDevices(t, inflaterInflates) }

func inflaterInflates(t *testing.T, device int32, memory func(bytes int) []byte, queue func() Stream) {
	const count, size, room = 5, 100_000, 32768 + 100_000
	content := make([]byte, size)
	for i := range content {
		content[i] = byte(i * i / 7 % 251)
	}
	var stream bytes.Buffer
	w, err := flate.NewWriter(&stream, 6)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(content); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}

	staging := memory(1 << 20)
	head := GPUInflaterHeadBytes(count)
	used := head + copy(staging[head:], stream.Bytes())
	results := unsafe.Slice((*GPUInflateResult)(unsafe.Pointer(unsafe.SliceData(memory(8*count)))), count)
	var ranges []GPUInflateRange
	for i := range uintptr(count) {
		ranges = append(ranges, GPUInflateRange{Input: uintptr(head), InputBytes: uintptr(stream.Len()),
			Skip: 1000 * i, Bytes: size - 3000*i, Room: room * i})
	}
	ranges[3].InputBytes /= 4 // cut off

	inflater, err := NewGPUInflater(device, count, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer FreeGPUInflater(inflater)
	rooms, err := EmptyTensor([]int64{count, room}, Uint8, device, Contiguous)
	if err != nil {
		t.Fatal(err)
	}
	defer FreeTensor(rooms)
	on := queue()
	if err := RunGPUInflater(inflater, staging[:used], ranges, rooms, results, on); err != nil {
		t.Fatal(err)
	}
	waitForStream(t, on)
	got := make([]byte, count*room)
	if err := ReadTensor(rooms, got); err != nil {
		t.Fatal(err)
	}
	for i, r := range ranges {
		if i == 3 {
			if results[i].Failed != 1 {
				t.Errorf("range %d is cut off: Failed is %v, want 1", i, results[i].Failed)
			}
			continue
		}
		want := content[r.Skip : r.Skip+r.Bytes]
		at := r.Room + 32768 + r.Skip
		if results[i] != (GPUInflateResult{0, crc32.ChecksumIEEE(want)}) || !bytes.Equal(got[at:at+r.Bytes], want) {
			t.Errorf("range %d: %+v, or other bytes", i, results[i])
		}
	}
}
