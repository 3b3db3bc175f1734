package httpload

import (
	"errors"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"sync"
	"syscall"
	"testing"
	"time"
)

const answer = `{"classes":[{"class":"cat","label":7,"probability":0.5}]}`

// target returns a Target of a server with a handler.
func target(t *testing.T, timeout time.Duration, h http.HandlerFunc) *Target {
	t.Helper()
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	target := NewTarget(server.URL, [][]byte{[]byte("one"), []byte("two")}, timeout)
	t.Cleanup(target.Close)
	return target
}

func TestClassifySendsImagesInRotation(t *testing.T) {
	var bodies []string
	server := target(t, time.Minute, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		bodies = append(bodies, string(body))
		_, _ = io.WriteString(w, answer)
	})
	for i := range 3 {
		if label, err := server.Classify(t.Context(), i); label != 7 || err != nil {
			t.Fatalf("got %d, %v, want 7, nil", label, err)
		}
	}
	if len(bodies) != 3 || bodies[0] != "one" || bodies[1] != "two" || bodies[2] != "one" {
		t.Errorf("got %q, want one, two, one", bodies)
	}
}

// The server answers nothing until 20 requests have come, so a loop that waits for answers would
// hang.
func TestOpenLoopDoesNotWaitForAnswers(t *testing.T) {
	var together sync.WaitGroup
	together.Add(20)
	var mu sync.Mutex
	came := 0
	server := target(t, time.Minute, func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		came++
		if came <= 20 {
			together.Done()
		}
		mu.Unlock()
		together.Wait()
		_, _ = io.WriteString(w, answer)
	})
	r, err := server.Open(t.Context(), 1000, 200*time.Millisecond, 0)
	if err != nil {
		t.Fatal(err)
	}
	if r.Answered < 100 || r.Answered != r.Sent || r.Sent != came || r.Failure != nil {
		t.Errorf("got %+v after %d requests, want all answered, at least 100", r, came)
	}
	if r.Latency(0) <= 0 || r.Latency(0.5) < r.Latency(0) || r.Latency(1) < 10*time.Millisecond {
		t.Errorf("got latencies %v, %v, %v, want ascending ones, and at least 10ms for the first request, which waits for 19",
			r.Latency(0), r.Latency(0.5), r.Latency(1))
	}
}

func TestRequestsWithoutAnswerAreOverTheBound(t *testing.T) {
	for name, c := range map[string]struct {
		status          int
		refused, failed bool
	}{"busy": {503, true, false}, "limited": {429, true, false}, "broken": {500, false, true}} {
		t.Run(name, func(t *testing.T) {
			server := target(t, time.Minute, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(c.status) })
			r, err := server.Open(t.Context(), 1000, time.Minute, time.Minute)
			if err != nil {
				t.Fatal(err)
			}
			if !r.Stopped || r.Holds(time.Minute) || r.Answered != 0 || r.Latency(0) != Never {
				t.Errorf("got %+v, want a stopped run without answers", r)
			}
			if (r.Refused == r.Sent) != c.refused || (r.Failed == r.Sent) != c.failed || (r.Failure != nil) != c.failed {
				t.Errorf("got %+v, want all refused %v, all failed %v", r, c.refused, c.failed)
			}
		})
	}
}

func TestSlowAnswerIsAFailure(t *testing.T) {
	server := target(t, time.Millisecond, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // only then the server notices that the client has left
		<-r.Context().Done()
	})
	r, err := server.Closed(t.Context(), 2, 20*time.Millisecond)
	if err != nil || r.Failed != r.Sent || r.Sent < 2 || r.Latency(0.5) != Never {
		t.Errorf("got %+v, %v, want at least 2 failures", r, err)
	}
}

func TestClosedLoopKeepsItsClients(t *testing.T) {
	var mu sync.Mutex
	now, most := 0, 0
	server := target(t, time.Minute, func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		now++
		most = max(most, now)
		mu.Unlock()
		defer func() {
			mu.Lock()
			now--
			mu.Unlock()
		}()
		_, _ = io.WriteString(w, answer)
	})
	r, err := server.Closed(t.Context(), 3, 50*time.Millisecond)
	if err != nil || r.Answered != r.Sent || r.Sent < 6 || most > 3 || r.ClientCPU <= 0 || r.PerSecond() <= 0 {
		t.Errorf("got %+v, %v, %d requests at a time, want answers to at most 3 at a time", r, err, most)
	}
}

func TestLargestRateIsFound(t *testing.T) {
	for _, capacity := range []float64{10, 37.3, 100, 1000} {
		r, err := Largest(50, 16, func(rate float64) (*Result, bool, error) {
			return &Result{Answered: int(1000 * rate), Seconds: 1000}, rate <= capacity, nil
		})
		if err != nil || r == nil || math.Abs(r.PerSecond()/capacity-1) > 0.05 || r.PerSecond() > capacity {
			t.Errorf("got %+v, %v, want a rate just under %v", r, err, capacity)
		}
	}
	none, err := Largest(50, 5, func(float64) (*Result, bool, error) { return &Result{}, false, nil })
	if none != nil || err != nil {
		t.Errorf("got %+v, %v, want nil, nil", none, err)
	}
	want := errors.New("no server")
	if _, err := Largest(50, 5, func(float64) (*Result, bool, error) { return nil, false, want }); !errors.Is(err, want) {
		t.Errorf("got %v, want %v", err, want)
	}
}

func TestUsageOfAProcessGroup(t *testing.T) {
	group, err := syscall.Getpgid(0)
	if err != nil {
		t.Fatal(err)
	}
	u, err := UsageOf(group)
	if err != nil || u.Processes < 1 || u.Memory < 1<<20 || u.Anonymous > u.Memory || u.Threads < 2 || u.Descriptors < 3 {
		t.Errorf("got %+v, %v, want the figures of this process", u, err)
	}
	if u, err := UsageOf(1 << 30); err == nil {
		t.Errorf("got %+v for a group that does not exist, want an error", u)
	}
}
