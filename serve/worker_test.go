package serve

import (
	"bytes"
	"errors"
	"runtime"
	"testing"
	"testing/synctest"

	"github.com/torchstream/torchstream/cuda"
)

// TestBatchWaitsForAllRows holds the rows of a large batch, as cancelled calls do, and lets all
// except one continue: the batch must wait for that one, whichever goroutine writes it.
func TestBatchWaitsForAllRows(t *testing.T) {
	const rows = 4
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(rows))
	want := make([]byte, rows*bytesPerWriter)
	for i := range want {
		want[i] = byte(1 + i/bytesPerWriter)
	}
	for last := range rows {
		synctest.Test(t, func(t *testing.T) {
			var part []*request
			for i := range rows {
				r := newRequest(Interactive)
				r.lent = want[i*bytesPerWriter : (i+1)*bytesPerWriter]
				r.hold()
				part = append(part, r)
			}
			memory, written := make([]byte, len(want)), make(chan struct{})
			go func() {
				writeRows(memory, part)
				close(written)
			}()
			synctest.Wait()
			for i, r := range part {
				if i != last {
					r.release()
				}
			}
			synctest.Wait()
			select {
			case <-written:
				t.Errorf("the batch is complete without row %d, want it to wait", last)
			default:
			}
			part[last].release()
			<-written
			if !bytes.Equal(memory, want) {
				t.Errorf("with row %d written last the batch has other bytes than its rows", last)
			}
		})
	}
}

// TestCancelledRowsAreZero checks a large batch of which one call has left.
func TestCancelledRowsAreZero(t *testing.T) {
	row := bytes.Repeat([]byte{7}, bytesPerWriter)
	var part []*request
	for range 3 {
		r := newRequest(Interactive)
		r.lent = row
		part = append(part, r)
	}
	part[1].leave()
	memory := bytes.Repeat([]byte{9}, len(part)*len(row))
	writeRows(memory, part)
	for i, want := range []byte{7, 0, 7} {
		if got := memory[i*len(row):][:len(row)]; bytes.Count(got, []byte{want}) != len(row) {
			t.Errorf("row %d has other bytes than %d, want them alone", i, want)
		}
	}
}

// LibTorch ends the process if a worker frees memory of a failed GPU. A worker without requests
// leaves because another one has failed, and learns of the failure only from its stream.
func TestWorkerKeepsTheMemoryOfALostGPU(t *testing.T) {
	for name, c := range map[string]struct {
		known bool
		probe error
		want  bool
	}{
		"the GPU works":                      {},
		"another worker's first batch fails": {probe: errors.New("lost"), want: true},
		"a batch has failed":                 {known: true, want: true},
	} {
		d := &device{name: "cuda:0", limit: 1}
		q := newQueue(1, 0, []*device{d, {name: "cuda:1", limit: 1}})
		if c.known {
			q.lose(d, errors.New("lost"))
		}
		w := &worker{core: &core{queue: q, hooks: hooks{probe: func(*worker) error { return c.probe }}}, device: d}
		if w.lost() {
			t.Errorf("%s: a worker on the CPU has lost its GPU", name)
		}
		w.stream = new(cuda.OwnedStream)
		if got := w.lost(); got != c.want {
			t.Errorf("%s: got lost %v, want %v", name, got, c.want)
		}
	}
}
