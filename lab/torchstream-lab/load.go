package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/lab/internal/httpload"
)

// photographs holds the options that choose the uploads.
type photographs struct {
	archive      string
	count, bytes int
}

func (p *photographs) register(set *flag.FlagSet) {
	set.StringVar(&p.archive, "archive", "", "`FILE`, .tar or .tar.gz, with the photographs to upload")
	set.IntVar(&p.count, "images", 64, "number of different photographs, which are uploaded in rotation")
	set.IntVar(&p.bytes, "bytes", 0, "upload the photographs whose sizes are nearest to this `SIZE` (0: the first ones)")
}

// read returns the photographs.
func (p *photographs) read(ctx context.Context) ([][]byte, error) {
	most := p.count
	if p.bytes > 0 {
		most = max(p.count, 4096)
	}
	data, sizes, err := readJPEGs(ctx, p.archive, most)
	if err != nil {
		return nil, err
	}
	images := make([][]byte, len(sizes))
	for i, size := range sizes {
		images[i], data = data[:size], data[size:]
	}
	if p.bytes > 0 {
		slices.SortStableFunc(images, func(a, b []byte) int {
			return cmp.Compare(max(len(a)-p.bytes, p.bytes-len(a)), max(len(b)-p.bytes, p.bytes-len(b)))
		})
	}
	return images[:min(p.count, len(images))], nil
}

// loadOptions is the command line of load.
type loadOptions struct {
	photographs
	url     string
	clients int
	rate    float64
	bound   time.Duration
	length  time.Duration
	timeout time.Duration
	runs    int
}

// loadRow holds the results of one run.
type loadRow struct {
	Loop      string   `json:"loop"`           // closed or open
	Clients   int      `json:"clients"`        // of a closed loop
	Rate      float64  `json:"rate,omitempty"` // of an open loop: requests a second that were due
	PerSecond float64  `json:"answers_per_second"`
	P50MS     *float64 `json:"p50_ms"` // null: too few requests have an answer
	P99MS     *float64 `json:"p99_ms"`
	P999MS    *float64 `json:"p999_ms"`
	ClientCPU float64  `json:"client_cpu_ms"`     // of this process, for each request
	Stopped   bool     `json:"stopped,omitempty"` // early, because it was over the bound
	requestCounts
}

// requestCounts are the requests of a run by their outcome.
type requestCounts struct {
	Sent    int    `json:"sent"`
	Refused int    `json:"refused"`
	Failed  int    `json:"failed"`
	Failure string `json:"failure,omitempty"`
}

// benchLoad sends photographs to a server.
func benchLoad(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var o loadOptions
	set := cli.Flags("torchstream-lab load -url URL -archive FILE",
		"POSTs photographs to a server and measures its answers: with -clients in a closed loop, with -rate in an open\n"+
			"loop, whose latencies count from the time at which a request was due. With -bound it looks for the largest\n"+
			"rate of which 99 % of the requests are answered in time.", stderr)
	o.register(set)
	set.StringVar(&o.url, "url", "http://localhost:8080/", "`ADDRESS` to POST to")
	set.IntVar(&o.clients, "clients", 16, "clients of the closed loop, which is also the first run with -bound")
	set.Float64Var(&o.rate, "rate", 0, "`REQUESTS` a second of an open loop (0: a closed loop)")
	set.DurationVar(&o.bound, "bound", 0, "look for the largest rate whose 99th percentile is at most this `TIME`")
	set.DurationVar(&o.length, "time", 5*time.Second, "length of a run")
	set.DurationVar(&o.timeout, "timeout", 10*time.Second, "longest time of a request; a longer one has failed")
	set.IntVar(&o.runs, "runs", 7, "runs that look for the largest rate")
	asJSON := set.Bool("json", false, "print one JSON object for each run")
	if err := cli.Parse(set, args, 0); err != nil {
		return err
	}
	if err := o.check(); err != nil {
		return err
	}
	images, err := o.read(ctx)
	if err != nil {
		return err
	}
	t := httpload.NewTarget(o.url, images, o.timeout)
	defer t.Close()
	return o.run(ctx, t, func(row loadRow) error {
		if *asJSON {
			return cli.WriteJSON(stdout, row)
		}
		_, err := fmt.Fprintln(stdout, row)
		return err
	})
}

func (o *loadOptions) check() error {
	switch {
	case o.archive == "":
		return cli.UsageError{Message: "load needs -archive FILE"}
	case o.clients < 1 || o.clients > 4096 || o.count < 1 || o.runs < 1:
		return cli.UsageError{Message: "-clients is from 1 to 4096, and -images and -runs are at least 1"}
	case o.rate < 0 || o.bound < 0 || o.length <= 0 || o.timeout <= 0 || o.bytes < 0:
		return cli.UsageError{Message: "-rate, -bound and -bytes must not be negative, and -time and -timeout more than 0"}
	}
	return nil
}

// run makes the runs of the options, and reports each.
func (o *loadOptions) run(ctx context.Context, t *httpload.Target, report func(loadRow) error) error {
	if o.rate > 0 && o.bound == 0 {
		r, err := t.Open(ctx, o.rate, o.length, 0)
		if err != nil {
			return err
		}
		return report(newLoadRow(r, 0, o.rate))
	}
	r, err := t.Closed(ctx, o.clients, o.length)
	if err != nil {
		return err
	}
	if err := report(newLoadRow(r, o.clients, 0)); err != nil || o.bound == 0 {
		return err
	}
	if r.Answered == 0 {
		return fmt.Errorf("%s has answered no request: %w", o.url, cmp.Or(r.Failure, errors.New("all were refused")))
	}
	best, err := httpload.Largest(cmp.Or(o.rate, r.PerSecond()), o.runs, func(rate float64) (*httpload.Result, bool, error) {
		r, err := t.Open(ctx, rate, o.length, o.bound)
		if err != nil {
			return nil, false, err
		}
		return r, r.Holds(o.bound), report(newLoadRow(r, 0, rate))
	})
	if err == nil && best == nil {
		err = fmt.Errorf("no rate had a 99th percentile of at most %v: give a longer -bound", o.bound)
	}
	return err
}

func newLoadRow(r *httpload.Result, clients int, rate float64) loadRow {
	row := loadRow{Loop: "open", Clients: clients, Rate: rate, PerSecond: r.PerSecond(), requestCounts: requestCounts{Sent: r.Sent,
		Refused: r.Refused, Failed: r.Failed}, ClientCPU: 1e3 * r.ClientCPU / float64(max(r.Sent, 1)), Stopped: r.Stopped,
		P50MS: milliseconds(r.Latency(0.5)), P99MS: milliseconds(r.Latency(0.99)), P999MS: milliseconds(r.Latency(0.999))}
	if clients > 0 {
		row.Loop = "closed"
	}
	if r.Failure != nil {
		row.Failure = r.Failure.Error()
	}
	return row
}

// milliseconds returns nil for a latency without an answer.
func milliseconds(d time.Duration) *float64 {
	if d == httpload.Never {
		return nil
	}
	ms := d.Seconds() * 1e3
	return &ms
}

func (r loadRow) String() string {
	what := fmt.Sprintf("closed loop, %s", printable.Counted(r.Clients, "client", "clients"))
	if r.Loop == "open" {
		what = fmt.Sprintf("open loop, %.1f requests/s", r.Rate)
	}
	text := fmt.Sprintf("%s: %.1f answers/s, p50 %s, p99 %s, p99.9 %s ms of %d, client CPU %.2f ms a request", what, r.PerSecond,
		shownMS(r.P50MS), shownMS(r.P99MS), shownMS(r.P999MS), r.Sent, r.ClientCPU)
	if r.Refused+r.Failed > 0 {
		text += fmt.Sprintf("; %d refused, %d failed %s", r.Refused, r.Failed, printable.Text(r.Failure))
	}
	if r.Stopped {
		text += "; stopped early: over the bound"
	}
	return text
}

func shownMS(ms *float64) string {
	if ms == nil {
		return "-"
	}
	return fmt.Sprintf("%.1f", *ms)
}
