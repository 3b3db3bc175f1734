package serve

import (
	"bytes"
	"context"
	"errors"
	"image"
	"image/png"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/torchstream/torchstream/imageloader/decode"
)

// newTestQueue returns a queue for one device with the given maximum batch.
func newTestQueue(places, limit int, delay time.Duration) (*queue, *device) {
	d := &device{name: "test", limit: limit}
	return newQueue(places, delay, []*device{d}), d
}

// join gives a request of the class a place and puts it into the line.
func join(t *testing.T, q *queue, class Priority) *request {
	t.Helper()
	if err := q.enter(); err != nil {
		t.Fatalf("enter: %v, want no error", err)
	}
	r := newRequest(class)
	q.push(r)
	return r
}

// TestQueueReturnsFullBatchAtOnce checks that a full batch does not wait for the delay, and that
// requests leave in the order in which they came.
func TestQueueReturnsFullBatchAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, d := newTestQueue(8, 3, time.Hour)
		var want []*request
		for range 4 {
			want = append(want, join(t, q, Interactive))
		}
		began := time.Now()
		if got := q.take(d); !slices.Equal(got, want[:3]) {
			t.Errorf("the batch is %v, want the first three requests %v", got, want[:3])
		}
		if waited := time.Since(began); waited != 0 {
			t.Errorf("a full batch waited %v, want 0", waited)
		}
	})
}

// TestQueueWaitsForDelayOfOldestRequest checks the start of a batch that is not full.
func TestQueueWaitsForDelayOfOldestRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const delay = 10 * time.Millisecond
		q, d := newTestQueue(8, 4, delay)
		began := time.Now()
		go func() {
			for _, class := range []Priority{Interactive, Background, Interactive} {
				time.Sleep(4 * time.Millisecond) // of the bubble's clock
				if q.enter() == nil {
					q.push(newRequest(class))
				}
			}
		}()
		batch := q.take(d)
		if waited, want := time.Since(began), 4*time.Millisecond+delay; len(batch) != 3 || waited != want {
			t.Errorf("%d requests after %v, want 3 after %v", len(batch), waited, want)
		}
		// The oldest request leaves: the next one's delay counts.
		first := join(t, q, Interactive)
		time.Sleep(6 * time.Millisecond)
		second := join(t, q, Interactive)
		began = time.Now()
		if !q.cancel(first) {
			t.Error("cancel of a waiting request is false, want true")
		}
		batch = q.take(d)
		if waited := time.Since(began); len(batch) != 1 || batch[0] != second || waited != delay {
			t.Errorf("%d requests after %v, want the second one after %v", len(batch), waited, delay)
		}
	})
}

// TestFullBatchOfASmallerDeviceDoesNotWait checks two devices whose maximum batches differ: the
// order in which their workers wait does not matter.
func TestFullBatchOfASmallerDeviceDoesNotWait(t *testing.T) {
	for order := range 2 {
		synctest.Test(t, func(t *testing.T) {
			devices := []*device{{name: "small", limit: 2}, {name: "large", limit: 8}}
			q := newQueue(16, time.Hour, devices)
			taken := []chan []*request{make(chan []*request, 1), make(chan []*request, 1)}
			for i := range devices {
				of := (i + order) % 2
				go func() { taken[of] <- q.take(devices[of]) }()
				synctest.Wait()
			}
			for range 2 {
				join(t, q, Interactive)
				synctest.Wait()
			}
			select {
			case batch := <-taken[0]:
				if len(batch) != 2 {
					t.Errorf("order %d: the small device got %d requests, want 2", order, len(batch))
				}
			default:
				t.Errorf("order %d: the small device waits for the delay, want its full batch at once", order)
			}
			q.stop(ErrClosed)
		})
	}
}

// TestDecodingAfterTheLastDeviceReturnsItsLoss checks a request that was being decoded when the
// workers left and closed the decoder.
func TestDecodingAfterTheLastDeviceReturnsItsLoss(t *testing.T) {
	decoder, err := decode.New(decode.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := decoder.Close(); err != nil {
		t.Fatal(err)
	}
	var photo bytes.Buffer
	if err := png.Encode(&photo, image.NewGray(image.Rect(0, 0, 8, 8))); err != nil {
		t.Fatal(err)
	}
	q, d := newTestQueue(8, 2, 0)
	c := &core{queue: q, decoders: []*Decoder{{d: decoder}}, gate: gate{room: 2},
		buffers: buffers{size: 224 * 224 * 3}}
	prepare := func() error {
		return c.prepare(t.Context(), newRequest(Interactive), Request{Image: photo.Bytes()})
	}
	if err := prepare(); err != ErrClosed {
		t.Errorf("a closed decoder: %v, want ErrClosed", err)
	}
	q.lose(d, ErrDeviceLost)
	if err := prepare(); !errors.Is(err, ErrDeviceLost) {
		t.Errorf("after the last device is lost: %v, want ErrDeviceLost", err)
	}
}

// TestQueueRefusesRequestsBeyondItsPlaces checks that a place is free as soon as its request is
// cancelled, or in a batch.
func TestQueueRefusesRequestsBeyondItsPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, d := newTestQueue(2, 1, 0)
		first := join(t, q, Interactive)
		join(t, q, Interactive)
		if err := q.enter(); !errors.Is(err, ErrQueueFull) {
			t.Errorf("enter of a third request: %v, want ErrQueueFull", err)
		}
		if !q.cancel(first) || q.cancel(first) {
			t.Error("cancel succeeds twice or never, want once")
		}
		join(t, q, Interactive)
		if err := q.enter(); !errors.Is(err, ErrQueueFull) {
			t.Errorf("enter after one cancel and one request: %v, want ErrQueueFull", err)
		}
		batch := q.take(d)
		if len(batch) != 1 || q.cancel(batch[0]) {
			t.Errorf("a batch of %d, or cancel of a taken request is true: want 1, false", len(batch))
		}
		if err := q.enter(); err != nil {
			t.Errorf("enter after a batch: %v, want no error", err)
		}
		q.exit()
		if n := q.waiting(); n != 1 {
			t.Errorf("%d requests have a place, want 1", n)
		}
	})
}

// TestBackgroundRequestsDoNotStarve checks the order of the classes over several batches.
func TestBackgroundRequestsDoNotStarve(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, d := newTestQueue(100, 3, 0)
		for range 5 {
			join(t, q, Background)
		}
		for range 16 {
			join(t, q, Interactive)
		}
		got := ""
		for q.waiting() > 0 {
			for _, r := range q.take(d) {
				got += map[Priority]string{Interactive: "i", Background: "b"}[r.class]
			}
		}
		if want := "iiiiiiibiiiiiiibiibbb"; got != want {
			t.Errorf("the order of the classes is %s, want %s", got, want)
		}
	})
}

// TestClosedQueueDrains checks that a closed queue refuses requests, serves the others without the
// delay, and then lets its workers leave.
func TestClosedQueueDrains(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, d := newTestQueue(8, 4, time.Hour)
		if err := q.enter(); err != nil { // still decoding
			t.Fatal(err)
		}
		join(t, q, Interactive)
		batches := make(chan []*request)
		for range 2 {
			go func() {
				for batch := q.take(d); batch != nil; batch = q.take(d) {
					batches <- batch
				}
				batches <- nil
			}()
		}
		synctest.Wait()
		began := time.Now()
		q.close()
		if err := q.enter(); !errors.Is(err, ErrClosed) {
			t.Errorf("enter: %v, want ErrClosed", err)
		}
		if n := len(<-batches); n != 1 {
			t.Errorf("the first batch has %d requests, want 1", n)
		}
		late := newRequest(Interactive)
		q.push(late)
		if batch := <-batches; len(batch) != 1 || batch[0] != late {
			t.Errorf("the second batch has %d requests, want the one that was decoded meanwhile", len(batch))
		}
		if a, b := <-batches, <-batches; a != nil || b != nil {
			t.Error("a worker got a batch from a drained queue, want none")
		}
		if waited := time.Since(began); waited != 0 {
			t.Errorf("draining waited %v, want 0", waited)
		}
	})
}

// TestStoppedQueueAnswersEveryRequest checks that a request gets the reason, wherever it is.
func TestStoppedQueueAnswersEveryRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, d := newTestQueue(8, 4, time.Hour)
		reason := errors.New("the reason")
		waits := join(t, q, Background)
		if err := q.enter(); err != nil {
			t.Fatal(err)
		}
		left := make(chan []*request)
		go func() { left <- q.take(d) }()
		synctest.Wait()
		q.stop(reason)
		q.stop(errors.New("another reason"))
		if batch := <-left; batch != nil {
			t.Errorf("a worker got %d requests, want none", len(batch))
		}
		decoded := newRequest(Interactive)
		q.push(decoded)
		for name, r := range map[string]*request{"waiting": waits, "decoded later": decoded} {
			if out := <-r.answered; out.err != reason {
				t.Errorf("%s: %v, want %v", name, out.err, reason)
			}
		}
		if err, n := q.enter(), q.waiting(); err != reason || n != 0 {
			t.Errorf("enter: %v, and %d places taken, want %v, 0", err, n, reason)
		}
	})
}

// TestQueueServesUntilTheLastDeviceIsLost checks that each device leaves alone.
func TestQueueServesUntilTheLastDeviceIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := &device{name: "a", limit: 2}, &device{name: "b", limit: 2}
		q := newQueue(8, 0, []*device{a, b})
		left := make(chan []*request)
		go func() { left <- q.take(a) }()
		synctest.Wait()
		lost := errors.New("a is lost")
		if !q.lose(a, lost) || q.lose(a, lost) {
			t.Error("lose reports a lost device twice or never, want once")
		}
		if batch := <-left; batch != nil {
			t.Errorf("a worker of the lost device got %d requests, want none", len(batch))
		}
		join(t, q, Interactive)
		if n := len(q.take(b)); n != 1 {
			t.Errorf("the other device got %d requests, want 1", n)
		}
		r := join(t, q, Interactive)
		last := errors.New("b is lost")
		q.lose(b, last)
		if out := <-r.answered; out.err != last {
			t.Errorf("the waiting request got %v, want %v", out.err, last)
		}
		if err := q.err(); err != last {
			t.Errorf("err is %v, want %v", err, last)
		}
	})
}

// TestGateLetsRequestsPassByClass checks the order at the gate, and that a cancelled request gives
// its turn to the next one.
func TestGateLetsRequestsPassByClass(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &gate{room: 1}
		if err := g.enter(t.Context(), newRequest(Background)); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		passed := make(chan string, 3)
		for _, c := range []struct {
			name  string
			class Priority
			ctx   context.Context
		}{{"background", Background, t.Context()}, {"cancelled", Interactive, ctx}, {"interactive", Interactive, t.Context()}} {
			go func() {
				if err := g.enter(c.ctx, newRequest(c.class)); err != nil {
					passed <- err.Error()
					return
				}
				passed <- c.name
				g.leave()
			}()
			synctest.Wait()
		}
		cancel()
		if got := <-passed; got != context.Canceled.Error() {
			t.Errorf("first %s, want %v", got, context.Canceled)
		}
		g.leave()
		for _, want := range []string{"interactive", "background"} {
			if got := <-passed; got != want {
				t.Errorf("%s passes, want %s", got, want)
			}
		}
		synctest.Wait()
		if g.room != 1 || g.line.len() != 0 {
			t.Errorf("room for %d, %d wait, want 1, 0", g.room, g.line.len())
		}
	})
}

// TestLatenciesCountByInterval checks durations at and next to the bounds.
func TestLatenciesCountByInterval(t *testing.T) {
	bounds := LatencyBounds()
	if len(bounds) != 16 || bounds[0] != 250*time.Microsecond || bounds[15] != 8192*time.Millisecond {
		t.Fatalf("the bounds are %v, want 16 from 250µs to 8.192s", bounds)
	}
	var l Latencies
	for _, d := range []time.Duration{0, bounds[0], bounds[0] + 1, bounds[15], bounds[15] + 1, time.Hour} {
		l.add(d)
	}
	want := Latencies{Count: 6, Sum: 2*bounds[0] + 1 + 2*bounds[15] + 1 + time.Hour}
	want.Counts[0], want.Counts[1], want.Counts[15], want.Counts[16] = 2, 1, 1, 2
	if l != want {
		t.Errorf("%+v, want %+v", l, want)
	}
}
