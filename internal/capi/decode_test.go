package capi

import (
	"bytes"
	"errors"
	"image"
	"image/jpeg"
	"testing"
	"unsafe"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

func TestGPUDecoderNeedsAFlagForEachImage(t *testing.T) {
	if err := RunGPUDecoder(nil, nil, make([]GPUDecodeImage, 2), nil, make([]int32, 1),
		Stream{}); !errors.Is(err, CodeInvalidArgument) {
		t.Errorf("got %v, want an invalid argument", err)
	}
}

// onDevices runs a test on a GPU and on the CPU. memory allocates host memory for calls on the
// device; queue is a stream of the device.
func onDevices(t *testing.T, test func(t *testing.T, device int32, memory func(bytes int) []byte,
	queue func() Stream)) {
	t.Run("GPU", func(t *testing.T) {
		if DeviceCount() == 0 {
			t.Skip("needs 1 GPU(s), this machine has 0")
		}
		test(t, 0, func(bytes int) []byte {
			memory, err := NewPinned(bytes)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { FreePinned(memory) })
			return PinnedBytes(memory)
		}, func() Stream {
			stream, err := StreamFromPool(0, 0)
			if err != nil {
				t.Fatal(err)
			}
			// The results' memory was allocated on another stream.
			if err := SynchronizeDevice(0); err != nil {
				t.Fatal(err)
			}
			return stream
		})
	})
	t.Run("CPU", func(t *testing.T) {
		const align = 16
		test(t, DeviceCPU, func(bytes int) []byte {
			memory := make([]byte, bytes+align)
			skip := -uintptr(unsafe.Pointer(unsafe.SliceData(memory))) % align
			return memory[skip:][:bytes]
		}, func() Stream { return Stream{Device: DeviceCPU} })
	})
}

// waitForStream waits for a stream of onDevices.
func waitForStream(t *testing.T, queue Stream) {
	t.Helper()
	if queue.Device != DeviceCPU {
		if err := queue.Synchronize(); err != nil {
			t.Fatal(err)
		}
	}
}

// The batch is crops of one JPEG, with one window. cshim/test/decode covers every kind of image.
func TestGPUDecoderDecodesTheHostsPixels(t *testing.T) { onDevices(t, decoderDecodes) }

func decoderDecodes(t *testing.T, device int32, memory func(bytes int) []byte, queue func() Stream) {
	const side, count = 64, 5
	const pixels = side * side * 3
	picture := image.NewRGBA(image.Rect(0, 0, 300, 200))
	for i := range picture.Pix {
		picture.Pix[i] = byte(i * i / 7)
	}
	var file bytes.Buffer
	if err := jpeg.Encode(&file, picture, nil); err != nil {
		t.Fatal(err)
	}
	host, err := imagecapi.NewDecoder(0)
	if err != nil {
		t.Fatal(err)
	}
	defer imagecapi.FreeDecoder(host)
	blob := make([]byte, 1<<16)
	n, proof, err := imagecapi.MakeEntries(host, file.Bytes(), 4, blob)
	if err != nil || n == 0 {
		t.Fatalf("MakeEntries: %d bytes, %v", n, err)
	}
	blob = blob[:n]

	staging, used := memory(1<<20), GPUDecoderHeadBytes(count)
	failed := unsafe.Slice((*int32)(unsafe.Pointer(unsafe.SliceData(memory(4*count)))), count)
	want := make([]byte, count*pixels)
	var images []GPUDecodeImage
	for i := range count {
		g := &imagecapi.Geometry{CropX: int32(10 * i), CropY: int32(7 * i), CropWidth: int32(250 - 20*i),
			CropHeight: int32(90 + i), ResizeWidth: side,
			ResizeHeight: side, WindowWidth: side, WindowHeight: side, Flip: i%2 == 1}
		if err := imagecapi.DecodeEntries(host, file.Bytes(), g, want[i*pixels:], side*3, blob, &proof); err != nil {
			t.Fatal(err)
		}
		n, err := imagecapi.PlanSegments(host, file.Bytes(), g, blob, &proof, staging[used:])
		if err != nil || n == 0 || n > len(staging)-used {
			t.Fatalf("a plan of %d bytes, %v", n, err)
		}
		images = append(images, GPUDecodeImage{uintptr(used), uintptr(i * pixels)})
		used += n
	}

	decoder, err := NewGPUDecoder(device, count, 1<<20, 64<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer FreeGPUDecoder(decoder)
	results, err := EmptyTensor([]int64{count, side, side, 3}, Uint8, device, Contiguous)
	if err != nil {
		t.Fatal(err)
	}
	defer FreeTensor(results)
	stream := queue()
	if err := RunGPUDecoder(decoder, staging[:used], images, results, failed, stream); err != nil {
		t.Fatal(err)
	}
	waitForStream(t, stream)
	got := make([]byte, len(want))
	if err := ReadTensor(results, got); err != nil {
		t.Fatal(err)
	}
	for i := range count {
		if failed[i] != 0 || !bytes.Equal(got[i*pixels:(i+1)*pixels], want[i*pixels:(i+1)*pixels]) {
			t.Errorf("image %d: flag %d, or pixels that are not the host's", i, failed[i])
		}
	}
}
