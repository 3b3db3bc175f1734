package imageloader

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

var errChaos = errors.New("input/output error")

// chaos is a file's fault. It is drawn once and applies to all readers of the file.
type chaos struct {
	mu     sync.Mutex
	rng    *rand.Rand
	calm   bool
	kind   string // "fails", "stalls", "is cut off", "reads short"
	after  int64  // number of bytes of the file that are read before the fault
	resume chan struct{}
}

// chaoticFile reads like a bad disk or network.
type chaoticFile struct {
	*os.File
	c *chaos
}

// read fills p from an offset, with the fault.
func (f *chaoticFile) read(p []byte, at int64, read func(p []byte) (int, error), whole bool) (int, error) {
	c := f.c
	c.mu.Lock()
	if c.calm || len(p) == 0 {
		c.mu.Unlock()
		return read(p)
	}
	for range c.rng.IntN(3) {
		runtime.Gosched()
	}
	n := len(p)
	if c.kind == "reads short" && !whole {
		n = 1 + c.rng.IntN(n)
	}
	c.mu.Unlock()
	past := at+int64(n) > c.after
	if past && !whole && at < c.after {
		n, past = int(c.after-at), false
	}
	switch {
	case past && c.kind == "fails":
		return 0, errChaos
	case past && c.kind == "is cut off":
		if whole && at < c.after {
			n, _ := read(p[:c.after-at])
			return n, io.EOF
		}
		return 0, io.EOF
	case past && c.kind == "stalls":
		<-c.resume
	}
	return read(p[:n])
}

func (f *chaoticFile) Read(p []byte) (int, error) {
	at, err := f.Seek(0, io.SeekCurrent)
	if err != nil {
		return 0, err
	}
	return f.read(p, at, f.File.Read, false)
}

func (f *chaoticFile) ReadAt(p []byte, at int64) (int, error) {
	return f.read(p, at, func(p []byte) (int, error) { return f.File.ReadAt(p, at) }, true)
}

// TestReaderFaultsEndEpochsCleanly: the reader fails, stalls, is cut off or reads short, at random.
// An epoch ends with all samples, or with an error that names the archive and a member, after the
// samples before that member. Bad samples are counted as in an epoch without faults. Nothing hangs,
// and nothing leaks.
func TestReaderFaultsEndEpochsCleanly(t *testing.T) {
	archivetest.NoLeaks(t)
	data := archivetest.Images(t, 150, func(i int) bool { return i%19 == 7 })
	zipped := archivetest.Gzip(t, data)
	paths := map[string]string{"tar": archivetest.WriteFile(t, "a.tar", data),
		"tgz": archivetest.WriteFile(t, "a.tgz", zipped)}
	wholeEpochs, errs := 0, 0
	for seed := range uint64(160) {
		rng := rand.New(rand.NewPCG(seed, 1))
		c := &chaos{rng: rng, calm: true,
			kind: []string{"fails", "stalls", "is cut off", "reads short"}[seed%4], resume: make(chan struct{})}
		format := []string{"tar", "tgz"}[seed/4%2]
		path := paths[format]
		size := int64(len(data))
		if format == "tgz" {
			size = int64(len(zipped))
		}
		c.after = rng.Int64N(size + size/8) // sometimes after the end of the file: no fault
		if c.kind == "reads short" {
			c.after = size + 1
		}
		o := Options{BatchSize: 1 + rng.IntN(20), Transform: Train(4), Workers: 1 + rng.IntN(6),
			BadSamples: Skip, Shuffle: seed%3 != 0, Seed: seed, ShuffleBuffer: 30, NoIndex: true}
		if rng.IntN(2) == 0 {
			o.ShuffleBytes = 15_000
		}
		if rng.IntN(2) == 0 {
			o.Classes = []string{"class0", "class1", "class2", "class3", "class4"}
		}
		t.Run(fmt.Sprint(seed, " ", format, " ", c.kind, " after ", c.after), func(t *testing.T) {
			archivetest.Within(t)
			l, err := open(t.Context(), path, o, func(path string) (archive.File, error) {
				f, err := os.Open(path)
				return &chaoticFile{f, c}, err
			}, fakeCodec{})
			if err != nil {
				t.Fatal(err)
			}
			want, err := collect(t, openFake(t, path, o), 1, 2)
			if err != nil {
				t.Fatal(err)
			}
			c.mu.Lock()
			c.calm = false
			c.mu.Unlock()
			ctx, cancel := context.WithCancelCause(t.Context())
			patience := errors.New("out of patience")
			patient, slots := rng.IntN(2000), 1+rng.IntN(3)
			if c.kind == "stalls" { // the consumer gives up, or the reader continues, in any order
				go func() {
					for range patient {
						runtime.Gosched()
					}
					if seed%8 < 4 {
						cancel(patience)
					}
					close(c.resume) // a program cannot stop a read that never returns
				}()
			}
			var got []copied
			var failed error
			var last State
			inOrder := 0 // batches
			for b, e := range l.epoch(ctx, 1, slots) {
				if e != nil {
					failed = e
					continue
				}
				if b.State.Batches() > inOrder {
					last, inOrder = b.State, len(got)+1
				}
				got = append(got, copied{append([]byte(nil), b.Images...),
					append([]int64(nil), b.Labels...), b.Samples})
			}
			cancel(nil)
			var a *ArchiveError
			switch {
			case failed == nil:
				wholeEpochs++
				if digest(got) != digest(want) {
					t.Errorf("an epoch without an error has %d samples in %d batches that differ from "+
						"the %d of a calm one", len(names(got)), len(got), len(names(want)))
				}
				if s := l.Stats(); s.Bad != 8 {
					t.Errorf("%d bad samples, want 8", s.Bad)
				}
			case c.kind == "stalls":
				if !errors.Is(failed, patience) {
					t.Errorf("error %v, want the error %v", failed, patience)
				}
			case !errors.As(failed, &a) || !strings.Contains(failed.Error(), path):
				t.Errorf("error %v", failed)
			default:
				errs++
				if a.Position > 0 && a.Member == "" {
					t.Errorf("the error %v names no member", failed)
				}
				if c.kind == "fails" && !errors.Is(failed, errChaos) || c.kind == "is cut off" &&
					!errors.Is(failed, io.ErrUnexpectedEOF) || c.kind == "reads short" {
					t.Errorf("a file that %s: error %v", c.kind, failed)
				}
			}
			// The epoch can be resumed when the reader works again. After an error the rest of a
			// shuffle buffer is delivered out of order. The resumed epoch delivers it again.
			if inOrder < len(got) && failed == nil {
				t.Errorf("%d of %d batches are in order", inOrder, len(got))
			}
			if failed != nil && inOrder > 0 {
				again := openFake(t, path, o)
				if err := again.Restore(t.Context(), last); err != nil {
					t.Fatal(err)
				}
				rest, err := collect(t, again, 1, 2)
				if err != nil || digest(append(got[:inOrder], rest...)) != digest(want) {
					t.Errorf("%d batches and then %d more are not the %d of a calm epoch; error %v",
						inOrder, len(rest), len(want), err)
				}
			}
			if s := l.Stats(); s.Queue != 0 || s.QueueBytes != 0 {
				t.Errorf("left over: %+v, want s.Queue = 0, s.QueueBytes = 0", s)
			}
			if err := l.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	if wholeEpochs < 20 || errs < 20 {
		t.Errorf("%d whole epochs and %d errors: the faults are too many or too few, want wholeEpochs "+
			"at least 20, errs at least 20", wholeEpochs, errs)
	}
}
