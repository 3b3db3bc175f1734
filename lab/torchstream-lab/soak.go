package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/lab/internal/httpload"
)

// soakOptions is the command line of soak.
type soakOptions struct {
	serversOptions
	minutes            float64
	every, swap, pause time.Duration
}

// soakReport is the output of soak.
type soakReport struct {
	Minutes  float64      `json:"minutes"`
	Counts   soakCounts   `json:"counts"`
	Samples  []soakSample `json:"samples"`
	Problems []string     `json:"problems"`
}

// soakCounts counts requests by their kind.
type soakCounts struct {
	Answered  int64 `json:"answered"`
	Refused   int64 `json:"refused"` // with status 503
	Wrong     int64 `json:"wrong"`   // good uploads with another answer than the first one, or without one
	Cancelled int64 `json:"cancelled"`
	Bad       int64 `json:"bad"`     // bad uploads with the right answer
	BadLost   int64 `json:"bad_not"` // bad uploads with another answer, or with none
	Slow      int64 `json:"slow"`
	Metrics   int64 `json:"metrics"`
	Swaps     int64 `json:"swaps"`        // of the weights
	Unswapped int64 `json:"swaps_failed"` // swaps that the server refused, or did not report in time
}

// soakSample is the server's use at one time.
type soakSample struct {
	Seconds     float64 `json:"seconds"`
	MemoryMB    float64 `json:"memory_mb"` // resident, without pages of files
	Threads     int     `json:"threads"`
	Descriptors int     `json:"descriptors"`
}

// benchSoak loads a server for minutes with good and bad clients.
func benchSoak(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	o := soakOptions{serversOptions: serversOptions{names: "torchstream"}}
	set := cli.Flags("torchstream-lab soak -models FOLDER -archive FILE",
		"Loads torchstream serve with clients that upload photographs, leave before the answer, send bad uploads or send\n"+
			"slowly. It fails if an answer or a swap of the weights is wrong, if the server's memory, threads or descriptors\n"+
			"grow, or if the server does not end with status 0.", stderr)
	o.register(set)
	set.Float64Var(&o.minutes, "minutes", 10, "how long")
	set.DurationVar(&o.every, "every", 5*time.Second, "`TIME` between two readings of /proc")
	set.DurationVar(&o.swap, "swap-every", 0, "replace the server's weights every so often (0: never), by those of "+
		"MODEL.safetensors and MODEL-other.safetensors in turn; needs a package of make_models.py --replaceable")
	set.DurationVar(&o.pause, "pause", 0, "`TIME` that each client waits between two requests, for a low load")
	asJSON := set.Bool("json", false, "print one JSON object")
	if err := cli.Parse(set, args, 0); err != nil {
		return err
	}
	if err := o.check(); err != nil {
		return err
	}
	if o.minutes <= 0 || o.every <= 0 || o.swap < 0 || o.pause < 0 {
		return cli.UsageError{Message: "-minutes and -every must be more than 0, and -swap-every and -pause not negative"}
	}
	if err := o.absolute(); err != nil {
		return err
	}
	images, err := o.read(ctx)
	if err != nil {
		return err
	}
	s := soak{options: &o, report: soakReport{Minutes: o.minutes}}
	if err := s.measure(ctx, images, stderr); err != nil {
		return err
	}
	if *asJSON {
		err = cli.WriteJSON(stdout, s.report)
	} else {
		err = s.report.table(stdout)
	}
	if len(s.report.Problems) > 0 {
		err = errors.Join(err, errors.New(strings.Join(s.report.Problems, "; ")))
	}
	return err
}

// soak runs the clients.
type soak struct {
	*serverProcess
	options *soakOptions
	weights *swappedWeights // nil if the weights are not swapped
	labels  [][]int         // of the images, for each set of weights, from the first answers
	report  soakReport
	failure atomic.Pointer[string] // the first wrong answer
}

// measure starts the server, runs the clients, and ends the server.
func (s *soak) measure(ctx context.Context, images [][]byte, stderr io.Writer) (err error) {
	o := s.options
	if o.swap > 0 {
		if s.weights, err = newSwappedWeights(o.folder, o.model); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, s.weights.remove()) }()
		o.options += " -weights " + s.weights.link
	}
	command, path := o.arguments("torchstream")
	if s.serverProcess, err = startServer(ctx, command, path, images, 30*time.Second); err != nil {
		return err
	}
	err = s.run(ctx, time.Duration(o.minutes*float64(time.Minute)), stderr)
	if ended := s.end(); ended != nil {
		s.report.Problems = append(s.report.Problems, ended.Error())
	}
	return errors.Join(err, s.close())
}

// run runs all clients for some time, and reads the server's use.
func (s *soak) run(ctx context.Context, length time.Duration, stderr io.Writer) error {
	if err := s.learn(ctx); err != nil {
		return err
	}
	loading, stop := context.WithTimeout(ctx, length)
	defer stop()
	var running sync.WaitGroup
	for i := range s.options.clients {
		running.Go(func() { s.good(loading, i) })
	}
	for i := range 2 {
		random := rand.New(rand.NewPCG(uint64(i), 1))
		running.Go(func() { s.cancelling(loading, random) })
		running.Go(func() { s.bad(loading, i) })
		running.Go(func() { s.slow(loading, random) })
	}
	running.Go(func() { s.readMetrics(loading) })
	if s.weights != nil {
		running.Go(func() { s.swapWeights(loading) })
	}
	err := s.watch(loading, stderr)
	stop()
	running.Wait()
	if err != nil || ctx.Err() != nil {
		return errors.Join(err, context.Cause(ctx))
	}
	if s.weights != nil && s.report.Counts.Swaps == 0 {
		s.report.Problems = append(s.report.Problems, "the server has not read its weights again")
	}
	if text := s.failure.Load(); text != nil {
		s.report.Problems = append(s.report.Problems, *text)
	}
	s.report.Problems = append(s.report.Problems, growth(s.report.Samples)...)
	return nil
}

// learn reads the classes of all images, with each set of weights. No image may have the same class
// with both sets.
func (s *soak) learn(ctx context.Context) error {
	for set := range 2 {
		var labels []int
		for i := range s.target.Images {
			label, err := s.target.Classify(ctx, i)
			if err != nil {
				return err
			}
			if set == 1 && label == s.labels[0][i] {
				return fmt.Errorf("photograph %d has class %d with both sets of weights", i, label)
			}
			labels = append(labels, label)
		}
		s.labels = append(s.labels, labels)
		if s.weights == nil {
			return nil
		}
		if err := s.weights.swap(ctx, s.serverProcess); err != nil { // to the other set, and back
			return err
		}
	}
	return nil
}

// watch reads the server's use until ctx ends.
func (s *soak) watch(ctx context.Context, stderr io.Writer) error {
	began := time.Now()
	for wait(ctx, s.options.every) {
		u, err := s.usage()
		if err != nil {
			return err
		}
		sample := soakSample{Seconds: time.Since(began).Seconds(), MemoryMB: float64(u.Anonymous) / 1e6, Threads: u.Threads,
			Descriptors: u.Descriptors}
		s.report.Samples = append(s.report.Samples, sample)
		fmt.Fprintf(stderr, "%4.0f s: %.1f MB, %d threads, %d descriptors; %d answers\n", sample.Seconds, sample.MemoryMB,
			sample.Threads, sample.Descriptors, atomic.LoadInt64(&s.report.Counts.Answered))
	}
	return nil
}

// good uploads photographs, and compares the classes with the first answers.
func (s *soak) good(ctx context.Context, first int) {
	for i := first; ctx.Err() == nil; i += s.options.clients {
		before := s.weights.now()
		label, err := s.target.Classify(ctx, i)
		after := s.weights.now()
		var status *httpload.StatusError
		switch {
		case ctx.Err() != nil:
		case errors.As(err, &status) && status.Code == http.StatusServiceUnavailable:
			atomic.AddInt64(&s.report.Counts.Refused, 1)
			wait(ctx, 50*time.Millisecond)
		case err != nil:
			s.wrong(&s.report.Counts.Wrong, fmt.Sprintf("a photograph was not answered: %v", err))
		default:
			s.check(i%len(s.target.Images), label, before, after)
		}
		if s.options.pause > 0 {
			wait(ctx, s.options.pause)
		}
	}
}

// check compares the class of an image with the first answers. before and after are the weights'
// states before and after the request.
func (s *soak) check(image, label int, before, after int64) {
	set, known := setOf(before)
	switch {
	case label == s.labels[set][image], (!known || before != after) && label == s.labels[1-set][image]:
		atomic.AddInt64(&s.report.Counts.Answered, 1)
	default:
		s.wrong(&s.report.Counts.Wrong, fmt.Sprintf("photograph %d had class %d, and now has %d", image, s.labels[set][image],
			label))
	}
}

func (s *soak) wrong(count *int64, text string) {
	atomic.AddInt64(count, 1)
	s.failure.CompareAndSwap(nil, &text)
}

// cancelling uploads photographs, and leaves after 0 to 40 ms.
func (s *soak) cancelling(ctx context.Context, random *rand.Rand) {
	for i := 0; wait(ctx, s.options.pause+time.Duration(random.IntN(20))*time.Millisecond); i++ {
		leaving, cancel := context.WithTimeout(ctx, time.Duration(random.IntN(40_000))*time.Microsecond)
		_, err := s.target.Classify(leaving, i)
		cancel()
		if err != nil {
			atomic.AddInt64(&s.report.Counts.Cancelled, 1)
		}
	}
}

// bad sends uploads that a server must refuse, and damaged photographs, which it may repair.
func (s *soak) bad(ctx context.Context, first int) {
	whole := s.target.Images[0]
	damaged := slices.Clone(whole)
	for i := len(damaged) / 4; i < len(damaged); i += 7 {
		damaged[i] = 0xff
	}
	uploads := [][]byte{nil, []byte("no image"), whole[:20], make([]byte, tooLarge), whole[:len(whole)/2], damaged}
	for i := first; wait(ctx, s.options.pause+20*time.Millisecond); i++ {
		body, mayRepair := uploads[i%len(uploads)], i%len(uploads) >= 4
		request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.target.URL, bytes.NewReader(body))
		if err != nil {
			s.wrong(&s.report.Counts.BadLost, err.Error())
			return
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil { // a body that is refused unread may break the connection
			if ctx.Err() == nil && len(body) < tooLarge {
				s.wrong(&s.report.Counts.BadLost, fmt.Sprintf("a bad upload of %d bytes was not answered: %v", len(body), err))
			}
			continue
		}
		_, _ = io.Copy(io.Discard, response.Body) // fails if ctx ends
		response.Body.Close()
		code := response.StatusCode
		if code/100 != 4 && code != http.StatusServiceUnavailable && !(mayRepair && code == http.StatusOK) {
			s.wrong(&s.report.Counts.BadLost, fmt.Sprintf("a bad upload of %d bytes was answered with status %d", len(body),
				code))
			continue
		}
		atomic.AddInt64(&s.report.Counts.Bad, 1)
	}
}

// tooLarge is more than the default of -max-bytes.
const tooLarge = 11 << 20

// slow sends the first bytes of an upload in small parts, and then leaves or stops sending.
func (s *soak) slow(ctx context.Context, random *rand.Rand) {
	address, err := url.Parse(s.target.URL)
	if err != nil {
		s.wrong(&s.report.Counts.Wrong, err.Error())
		return
	}
	for wait(ctx, s.options.pause+50*time.Millisecond) {
		connection, err := (&net.Dialer{}).DialContext(ctx, "tcp", address.Host)
		if err != nil {
			continue // the server's end is noticed by watch
		}
		image := s.target.Images[random.IntN(len(s.target.Images))]
		_, err = fmt.Fprintf(connection, "POST %s HTTP/1.1\r\nHost: slow\r\nContent-Length: %d\r\n\r\n", address.Path, len(image))
		for sent := 0; err == nil && sent < len(image)/4 && wait(ctx, 100*time.Millisecond); sent += 2048 {
			_, err = connection.Write(image[sent:min(sent+2048, len(image))])
		}
		if random.IntN(4) == 0 {
			wait(ctx, 6*time.Second) // the server gives up after 5 seconds
		}
		_ = connection.Close()
		atomic.AddInt64(&s.report.Counts.Slow, 1)
	}
}

// readMetrics reads the server's metrics, as Prometheus does.
func (s *soak) readMetrics(ctx context.Context) {
	for wait(ctx, time.Second) {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, s.target.URL+"metrics", nil)
		if err != nil {
			return
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			continue
		}
		_, _ = io.Copy(io.Discard, response.Body) // fails if ctx ends
		response.Body.Close()
		atomic.AddInt64(&s.report.Counts.Metrics, 1)
	}
}

// swapWeights replaces the server's weights until ctx ends.
func (s *soak) swapWeights(ctx context.Context) {
	for wait(ctx, s.options.swap) {
		// A swap that has started is completed after ctx.
		if err := s.weights.swap(context.WithoutCancel(ctx), s.serverProcess); err != nil {
			s.wrong(&s.report.Counts.Unswapped, err.Error())
			return // the clients do not know the weights any more
		}
		atomic.AddInt64(&s.report.Counts.Swaps, 1)
	}
}

// wait waits for some time, and reports whether ctx is alive.
func wait(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

// Allowed growth between the medians of the second and the last quarter of the time.
const (
	moreMemory      = 0.02 // share
	moreMemoryMB    = 8
	moreThreads     = 2
	moreDescriptors = 4
)

// growth compares the second quarter of the samples with the last one: the first one fills caches.
func growth(samples []soakSample) (problems []string) {
	if len(samples) < 8 {
		return []string{fmt.Sprintf("only %s: give more -minutes, or a shorter -every",
			printable.Counted(len(samples), "reading", "readings"))}
	}
	quarter := len(samples) / 4
	early, late := samples[quarter:2*quarter], samples[len(samples)-quarter:]
	for _, c := range []struct {
		name, unit string
		allowed    func(before float64) float64
		of         func(soakSample) float64
	}{
		{"memory", "MB", func(before float64) float64 { return before*(1+moreMemory) + moreMemoryMB },
			func(s soakSample) float64 { return s.MemoryMB }},
		{"threads", "threads", func(before float64) float64 { return before + moreThreads },
			func(s soakSample) float64 { return float64(s.Threads) }},
		{"descriptors", "descriptors", func(before float64) float64 { return before + moreDescriptors },
			func(s soakSample) float64 { return float64(s.Descriptors) }},
	} {
		before, after := medianOf(early, c.of), medianOf(late, c.of)
		if after > c.allowed(before) {
			problems = append(problems, fmt.Sprintf("%s: %.1f %s in the second quarter of the time, %.1f in the last", c.name,
				before, c.unit, after))
		}
	}
	return problems
}

func medianOf(samples []soakSample, of func(soakSample) float64) float64 {
	var values []float64
	for _, s := range samples {
		values = append(values, of(s))
	}
	slices.Sort(values)
	return values[len(values)/2]
}

func (r *soakReport) table(w io.Writer) error {
	c := &r.Counts
	fmt.Fprintf(w, "%.1f minutes: %d photographs answered, %d refused, %d wrong; %d cancelled, %d bad uploads refused, %d not; ",
		r.Minutes, c.Answered, c.Refused, c.Wrong, c.Cancelled, c.Bad, c.BadLost)
	fmt.Fprintf(w, "%d slow clients, %d readings of /metrics, %d swaps of the weights, %d failed\n", c.Slow, c.Metrics, c.Swaps,
		c.Unswapped)
	t := printable.NewTable(w, 0)
	fmt.Fprintln(t, "seconds\tMB\tthreads\tdescriptors")
	step := max(1, len(r.Samples)/10)
	for i := 0; i < len(r.Samples); i += step {
		s := r.Samples[i]
		fmt.Fprintf(t, "%.0f\t%.1f\t%d\t%d\n", s.Seconds, s.MemoryMB, s.Threads, s.Descriptors)
	}
	return t.Flush()
}
