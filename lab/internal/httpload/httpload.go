// Package httpload sends photographs to an HTTP server and measures the time of each answer.
//
// A closed loop sends the next request of a client when the previous one is answered. It measures
// the largest throughput. An open loop sends requests at random times of a given rate, whatever the
// server does, and measures each latency from the time at which the request was due. So a server
// that stalls delays all requests of that time, and not one for each client (coordinated omission).
package httpload

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/torchstream/torchstream/internal/system"
)

// Target is a server, and the images that it gets in rotation.
type Target struct {
	URL    string
	Images [][]byte
	// Timeout is the longest time of a request. A longer one has failed.
	Timeout time.Duration

	client http.Client
}

// NewTarget returns a Target with its own connections, which requests reuse.
func NewTarget(url string, images [][]byte, timeout time.Duration) *Target {
	t := &http.Transport{MaxIdleConns: 0, MaxIdleConnsPerHost: 4096, DisableCompression: true}
	return &Target{URL: url, Images: images, Timeout: timeout, client: http.Client{Transport: t}}
}

// Close closes the connections that no request uses.
func (t *Target) Close() { t.client.CloseIdleConnections() }

// Result has the measurements of one run.
type Result struct {
	Sent     int
	Answered int // with status 200
	Refused  int // with status 429 or 503
	Failed   int // all others
	Seconds  float64
	// ClientCPU is the CPU time of this process, in seconds.
	ClientCPU float64
	// Failure is the first failure; nil if there is none.
	Failure error
	// Stopped reports that the run ended early, because too many requests were over the bound.
	Stopped bool

	latencies []time.Duration // ascending; refused and failed requests count as Never
}

// Never is the latency of a request without an answer.
const Never = time.Duration(math.MaxInt64)

// PerSecond returns the number of answers in a second.
func (r *Result) PerSecond() float64 { return float64(r.Answered) / r.Seconds }

// Latency returns the latency that the given share of all requests do not exceed. It is Never if
// too few requests have an answer.
func (r *Result) Latency(share float64) time.Duration {
	if len(r.latencies) == 0 {
		return Never
	}
	i := int(math.Ceil(share*float64(len(r.latencies)))) - 1
	return r.latencies[min(max(i, 0), len(r.latencies)-1)]
}

// Classify sends image i, and returns the label of the most probable class.
func (t *Target) Classify(ctx context.Context, i int) (label int, err error) {
	ctx, cancel := context.WithTimeout(ctx, t.Timeout)
	defer cancel()
	image := t.Images[i%len(t.Images)]
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, t.URL, bytes.NewReader(image))
	if err != nil {
		return 0, err
	}
	request.Header.Set("Content-Type", "image/jpeg")
	response, err := t.client.Do(request)
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return 0, err
	}
	if response.StatusCode != http.StatusOK {
		return 0, &StatusError{response.StatusCode, string(body[:min(len(body), 200)])}
	}
	var answer struct{ Classes []struct{ Label int } }
	if err := json.Unmarshal(body, &answer); err != nil || len(answer.Classes) == 0 {
		return 0, fmt.Errorf("%s answered without classes (%v): %.200q", t.URL, err, body)
	}
	return answer.Classes[0].Label, nil
}

// StatusError is an answer with another status than 200.
type StatusError struct {
	Code int
	Text string
}

func (e *StatusError) Error() string { return fmt.Sprintf("status %d: %q", e.Code, e.Text) }

// recorder collects the outcomes of a run's requests.
type recorder struct {
	mu     sync.Mutex
	result Result
	bound  time.Duration
	late   atomic.Int64 // requests over the bound
}

// add records a request that took some time.
func (r *recorder) add(took time.Duration, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.result.Sent++
	var status *StatusError
	switch {
	case err == nil:
		r.result.Answered++
	case errors.As(err, &status) && (status.Code == http.StatusServiceUnavailable || status.Code == http.StatusTooManyRequests):
		r.result.Refused++
		took = Never
	default:
		r.result.Failed++
		took = Never
		if r.result.Failure == nil {
			r.result.Failure = err
		}
	}
	if took > r.bound {
		r.late.Add(1)
	}
	r.result.latencies = append(r.result.latencies, took)
}

// measure calls run, and returns the collected results.
func (r *recorder) measure(ctx context.Context, run func()) (*Result, error) {
	before, _, err := system.Usage()
	if err != nil {
		return nil, err
	}
	began := time.Now()
	run()
	r.result.Seconds = time.Since(began).Seconds()
	after, _, err := system.Usage()
	if err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	r.result.ClientCPU = (after - before).Seconds()
	slices.Sort(r.result.latencies)
	return &r.result, nil
}

// Closed runs clients that each send a request when their previous one is answered, for a time.
func (t *Target) Closed(ctx context.Context, clients int, length time.Duration) (*Result, error) {
	r := recorder{bound: Never}
	var next atomic.Int64
	return r.measure(ctx, func() {
		end := time.Now().Add(length)
		var running sync.WaitGroup
		for range clients {
			running.Go(func() {
				for time.Now().Before(end) && ctx.Err() == nil {
					began := time.Now()
					_, err := t.Classify(ctx, int(next.Add(1)))
					r.add(time.Since(began), err)
				}
			})
		}
		running.Wait()
	})
}

// Open sends requests at random times (a Poisson process with a fixed seed) of the given rate a
// second, and waits for all answers. If bound is more than 0, it stops once over 1 % of the
// requests that it would send took longer than that.
func (t *Target) Open(ctx context.Context, rate float64, length, bound time.Duration) (*Result, error) {
	r := recorder{bound: bound}
	if bound <= 0 {
		r.bound = Never
	}
	allowed := int64(rate * length.Seconds() / 100)
	return r.measure(ctx, func() {
		random := rand.New(rand.NewPCG(1, 2))
		began, due := time.Now(), time.Duration(0)
		var running sync.WaitGroup
		for i := 0; ctx.Err() == nil; i++ {
			due += time.Duration(random.ExpFloat64() / rate * float64(time.Second))
			if due > length {
				break
			}
			if r.late.Load() > allowed {
				r.result.Stopped = true
				break
			}
			at := began.Add(due)
			if !wait(ctx, time.Until(at)) {
				break
			}
			running.Go(func() {
				_, err := t.Classify(ctx, i)
				r.add(time.Since(at), err)
			})
		}
		running.Wait()
	})
}

// wait waits for some time, and reports whether ctx is alive.
func wait(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// Largest returns the run with the largest rate of those that hold, found in the given number of
// runs: it starts at a rate, changes it by half until one run holds and one does not, and bisects.
// It returns nil if no run holds. run reports whether its rate holds.
func Largest(start float64, runs int, run func(rate float64) (*Result, bool, error)) (*Result, error) {
	var best *Result
	held, failed := 0.0, math.Inf(1)
	rate := start
	for range runs {
		result, holds, err := run(rate)
		if err != nil {
			return nil, err
		}
		if holds {
			held, best = rate, result
		} else {
			failed = rate
		}
		switch {
		case math.IsInf(failed, 1):
			rate = held * 1.5
		case held == 0:
			rate = failed / 1.5
		default:
			rate = (held + failed) / 2
		}
	}
	return best, nil
}

// Holds reports whether 99 % of the requests were answered within the bound.
func (r *Result) Holds(bound time.Duration) bool { return !r.Stopped && r.Latency(0.99) <= bound }
