package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/lab/internal/httpload"
)

// serverKinds are the values of -servers: torchstream serve, and the engines and the ways to batch
// of lab/serving/server.py.
var serverKinds = map[string][]string{
	"torchstream":      nil,
	"eager":            {"--engine=eager", "--batching=none"},
	"eager-queue":      {"--engine=eager", "--batching=queue"},
	"compile":          {"--engine=compile", "--batching=none"},
	"compile-queue":    {"--engine=compile", "--batching=queue"},
	"onnx":             {"--engine=onnx", "--batching=none"},
	"onnx-queue":       {"--engine=onnx", "--batching=queue"},
	"litserve-eager":   {"--engine=eager", "--batching=litserve"},
	"litserve-compile": {"--engine=compile", "--batching=litserve"},
	"litserve-onnx":    {"--engine=onnx", "--batching=litserve"},
}

// serversOptions is the command line of servers.
type serversOptions struct {
	photographs
	modelOptions
	names, processors    string
	program, script      string
	peerOptions, options string
	bound                time.Duration
	length               time.Duration
	clients, rounds      int
	runs                 int
}

// modelOptions choose what the servers serve.
type modelOptions struct{ folder, model, pack, python string }

// serverRow has the results of one server; medians if there are several rounds.
type serverRow struct {
	Server string `json:"server"`
	WhyNot string `json:"why_not,omitempty"` // the reason why the server is not measured
	Differ int    `json:"differ"`            // photographs with another class than the first server's

	Full     fullFigures  `json:"full"`
	Bound    boundFigures `json:"bound"`
	Tenth    tenthFigures `json:"tenth"`
	MemoryMB float64      `json:"memory_mb"`         // resident, after all
	Failed   int          `json:"refused_or_failed"` // requests of the closed loop and at the tenth
	Failure  string       `json:"failure,omitempty"`
}

// fullFigures are the measurements of the closed loop. CPU times are for each answer.
type fullFigures struct {
	PerSecond float64 `json:"answers_per_second"`
	CPU       float64 `json:"cpu_ms"`        // of the server
	ClientCPU float64 `json:"client_cpu_ms"` // of this process
}

// boundFigures describe the largest rate whose 99th percentile is within the bound, or are zero.
type boundFigures struct {
	Rate float64 `json:"requests_per_second"`
	P50  float64 `json:"p50_ms"`
}

// tenthFigures are latencies at a tenth of the slowest server's closed loop.
type tenthFigures struct {
	Rate float64 `json:"requests_per_second"`
	P50  float64 `json:"p50_ms"`
	P99  float64 `json:"p99_ms"`
}

// serversReport is the output of servers.
type serversReport struct {
	Model         string       `json:"model"`
	Device        string       `json:"device"`
	Processors    string       `json:"server_cpus,omitempty"`
	BytesPerImage float64      `json:"bytes_per_image"`
	BoundMS       float64      `json:"bound_ms"`
	Rounds        int          `json:"rounds"`
	Clients       int          `json:"clients"`
	Rows          []*serverRow `json:"rows"`
}

// measuredServer is a running server with its results by round.
type measuredServer struct {
	*serverProcess
	row    *serverRow
	rounds map[string][]float64 // by the name of a figure
}

// benchServers compares servers of one network.
func benchServers(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var o serversOptions
	set := cli.Flags("torchstream-lab servers -models FOLDER -archive FILE",
		"Compares torchstream serve with servers in Python, in turn on the same cores: the largest throughput, the largest\n"+
			"rate whose 99th percentile is within -bound, and the latency at a tenth of the full load. First all must give\n"+
			"the same class for each photograph.", stderr)
	o.register(set)
	set.StringVar(&o.names, "servers", "torchstream,eager,eager-queue,compile-queue,onnx,onnx-queue,litserve-onnx",
		"`NAMES` of the servers: "+strings.Join(slices.Sorted(func(yield func(string) bool) {
			for name := range serverKinds {
				if !yield(name) {
					return
				}
			}
		}), ", "))
	set.StringVar(&o.processors, "server-cpus", "", "`LIST` of the CPUs on which servers run, such as 0,1 or 0-3 (default: all)")
	asJSON := set.Bool("json", false, "print one JSON object")
	if err := cli.Parse(set, args, 0); err != nil {
		return err
	}
	if err := o.check(); err != nil {
		return err
	}
	report, err := o.measure(ctx, stderr)
	if err != nil {
		return err
	}
	if *asJSON {
		err = cli.WriteJSON(stdout, report)
	} else {
		err = report.table(stdout)
	}
	return errors.Join(err, report.problem())
}

// register adds the options that servers has in common with soak and embed.
func (o *serversOptions) register(set *flag.FlagSet) {
	o.photographs.register(set)
	o.modelOptions.register(set)
	set.StringVar(&o.program, "torchstream", "bin/torchstream", "`PROGRAM` torchstream")
	set.StringVar(&o.script, "script", "lab/serving/server.py", "`FILE`: the servers in Python")
	set.StringVar(&o.options, "serve-options", "", "`OPTIONS` of torchstream serve, separated by blanks")
	set.StringVar(&o.peerOptions, "peer-options", "--max-batch 8", "`OPTIONS` of the servers in Python, separated by blanks")
	set.DurationVar(&o.bound, "bound", 150*time.Millisecond, "longest `TIME` of 99 % of the requests")
	set.DurationVar(&o.length, "time", 4*time.Second, "length of a run; at a tenth of the load it is three to five times as long")
	set.IntVar(&o.clients, "clients", 16, "clients of the closed loop")
	set.IntVar(&o.rounds, "rounds", 1, "rounds in turn; the results are medians")
	set.IntVar(&o.runs, "runs", 5, "runs that look for the largest rate")
}

func (o *modelOptions) register(set *flag.FlagSet) {
	set.StringVar(&o.folder, "models", "", "`FOLDER` that lab/serving/make_models.py has written")
	set.StringVar(&o.model, "model", "resnet18", "`NAME` of the network in that folder")
	set.StringVar(&o.pack, "package", "", "`FILE` for torchstream serve in that folder (default: the model's only .pt2)")
	set.StringVar(&o.python, "python", "python3", "`PROGRAM`: a Python with the packages of lab/serving/peers.txt")
}

func (o *serversOptions) check() error {
	switch {
	case o.archive == "" || o.folder == "":
		return cli.UsageError{Message: "servers needs -archive FILE and -models FOLDER"}
	case o.clients < 1 || o.clients > 4096 || o.count < 1 || o.rounds < 1 || o.runs < 1:
		return cli.UsageError{Message: "-clients is from 1 to 4096, and -images, -rounds and -runs are at least 1"}
	case o.bound <= 0 || o.length <= 0 || o.bytes < 0:
		return cli.UsageError{Message: "-bound and -time must be more than 0, and -bytes not negative"}
	}
	for name := range strings.SplitSeq(o.names, ",") {
		if _, known := serverKinds[name]; !known {
			return cli.Usagef("-servers %s: there is no server %q", o.names, name)
		}
	}
	return nil
}

// absolute makes the paths absolute, because servers run in another folder, and finds the package.
func (o *serversOptions) absolute() (err error) {
	if o.python, err = absolutePython(o.python); err != nil {
		return err
	}
	for _, path := range []*string{&o.folder, &o.program, &o.script} {
		if *path, err = filepath.Abs(*path); err != nil {
			return err
		}
	}
	if o.pack != "" {
		o.pack = filepath.Join(o.folder, o.pack)
		return nil
	}
	found, err := filepath.Glob(filepath.Join(o.folder, o.model+"-*.pt2"))
	if err != nil {
		return err
	}
	if len(found) != 1 {
		return cli.Usagef("%s has %d packages of %s: choose one with -package", printable.Name(o.folder), len(found), o.model)
	}
	o.pack = found[0]
	return nil
}

// arguments returns the command line of a server, and the path to which photographs are posted.
func (o *serversOptions) arguments(name string) (args []string, path string) {
	if name == "torchstream" {
		return append([]string{o.program, "serve", "-model", o.pack, "-address", "127.0.0.1:{port}"},
			strings.Fields(o.options)...), "/"
	}
	args = append([]string{o.python, o.script, o.folder, "--model", o.model, "--port", "{port}"}, serverKinds[name]...)
	args = append(args, strings.Fields(o.peerOptions)...)
	if strings.HasPrefix(name, "litserve") {
		return args, "/predict"
	}
	return args, "/"
}

// measure starts all servers and measures them in turn. Only one runs at a time: the others are
// stopped.
func (o *serversOptions) measure(ctx context.Context, stderr io.Writer) (*serversReport, error) {
	if err := o.absolute(); err != nil {
		return nil, err
	}
	images, err := o.read(ctx)
	if err != nil {
		return nil, err
	}
	report := &serversReport{Model: o.model, Device: "cpu", BoundMS: 1e3 * o.bound.Seconds(), Rounds: o.rounds,
		Processors: o.processors, Clients: o.clients}
	if _, after, found := strings.Cut(o.peerOptions, "--device "); found {
		report.Device = strings.Fields(after)[0]
	}
	for _, image := range images {
		report.BytesPerImage += float64(len(image)) / float64(len(images))
	}
	var servers []*measuredServer
	defer func() {
		for _, s := range servers {
			_ = s.close() // the measurements are done
		}
	}()
	var labels []int
	for name := range strings.SplitSeq(o.names, ",") {
		fmt.Fprintln(stderr, name, "starts")
		row := &serverRow{Server: name}
		report.Rows = append(report.Rows, row)
		args, path := o.arguments(name)
		if o.processors != "" {
			args = append([]string{"taskset", "-c", o.processors}, args...)
		}
		process, err := startServer(ctx, args, path, images, max(10*time.Second, 4*o.bound))
		if err != nil {
			row.WhyNot = err.Error()
			continue
		}
		s := &measuredServer{process, row, map[string][]float64{}}
		servers = append(servers, s)
		if _, err := s.alone(ctx, func() (err error) {
			labels, err = s.compare(ctx, labels)
			return err
		}); err != nil {
			return nil, err
		}
	}
	for round := range o.rounds {
		if err := o.round(ctx, servers, round, stderr); err != nil {
			return nil, err
		}
	}
	return report, nil
}

// compare counts the photographs whose class is not the expected one. It returns the expected
// classes, or the server's if there are none.
func (s *measuredServer) compare(ctx context.Context, want []int) ([]int, error) {
	var labels []int
	for i := range s.target.Images {
		label, err := s.target.Classify(ctx, i)
		if err != nil {
			return want, fmt.Errorf("photograph %d: %w", i, err)
		}
		labels = append(labels, label)
		if want != nil && want[i] != label {
			s.row.Differ++
		}
	}
	if want != nil {
		return want, nil
	}
	return labels, nil
}

// round measures each server once at full load, and then each at the same tenth of it. A server
// that fails is not measured any more.
func (o *serversOptions) round(ctx context.Context, servers []*measuredServer, round int, stderr io.Writer) error {
	least := 0.0
	for _, s := range servers {
		if measured, err := s.alone(ctx, func() error { return o.full(ctx, s) }); err != nil {
			return err
		} else if !measured {
			continue
		}
		full := s.rounds["full"][round]
		fmt.Fprintf(stderr, "round %d: %s: %.1f answers/s, %.1f requests/s within the bound\n", round+1, s.row.Server, full,
			s.rounds["bound"][round])
		if least == 0 || full < least {
			least = full
		}
	}
	for _, s := range servers {
		if measured, err := s.alone(ctx, func() error { return o.tenth(ctx, s, least/10) }); err != nil {
			return err
		} else if measured {
			fmt.Fprintf(stderr, "round %d: %s at %.1f requests/s: p99 %.1f ms\n", round+1, s.row.Server, least/10,
				s.rounds["tenth p99"][round])
		}
	}
	return nil
}

// alone continues a stopped server, calls measure, and stops the server again. It reports whether
// the server is measured. If it has failed, its row has the reason. The error is ctx's cause.
func (s *measuredServer) alone(ctx context.Context, measure func() error) (measured bool, err error) {
	if s.row.WhyNot != "" {
		return false, nil
	}
	if err = s.signal(syscall.SIGCONT); err == nil {
		err = measure()
	}
	u, failed := s.usage()
	if err = errors.Join(err, failed, s.signal(syscall.SIGSTOP)); ctx.Err() != nil {
		return false, context.Cause(ctx)
	}
	if err != nil {
		s.row.WhyNot = fmt.Sprintf("%v; it printed: %s", err, s.lastLine())
		return false, nil
	}
	s.record("memory", float64(u.Memory)/1e6, &s.row.MemoryMB)
	return true, nil
}

// record adds a round's figure, and sets to to the median of all rounds.
func (s *measuredServer) record(name string, value float64, to *float64) {
	s.rounds[name] = append(s.rounds[name], value)
	*to = median(slices.Clone(s.rounds[name]))
}

// warmUp is the maximum length of the closed loop before a measurement.
const warmUp = 500 * time.Millisecond

// full measures the closed loop, and looks for the largest rate within the bound.
func (o *serversOptions) full(ctx context.Context, s *measuredServer) error {
	if _, err := s.target.Closed(ctx, o.clients, min(warmUp, o.length)); err != nil {
		return err
	}
	before, err := s.usage()
	if err != nil {
		return err
	}
	r, err := s.target.Closed(ctx, o.clients, o.length)
	if err != nil {
		return err
	}
	after, err := s.usage()
	if err != nil {
		return err
	}
	if r.Answered == 0 {
		return fmt.Errorf("no request was answered: %d refused, %d failed: %w", r.Refused, r.Failed, r.Failure)
	}
	s.count(r)
	s.record("full", r.PerSecond(), &s.row.Full.PerSecond)
	s.record("cpu", 1e3*(after.CPU-before.CPU)/float64(r.Answered), &s.row.Full.CPU)
	s.record("client", 1e3*r.ClientCPU/float64(r.Answered), &s.row.Full.ClientCPU)
	rate := 0.0
	best, err := httpload.Largest(0.8*r.PerSecond(), o.runs, func(next float64) (*httpload.Result, bool, error) {
		r, err := s.target.Open(ctx, next, o.length, o.bound)
		if err != nil {
			return nil, false, err
		}
		if r.Holds(o.bound) {
			rate = max(rate, next)
		}
		return r, r.Holds(o.bound), nil
	})
	if err != nil {
		return err
	}
	s.record("bound", rate, &s.row.Bound.Rate)
	if best != nil {
		s.record("bound p50", 1e3*best.Latency(0.5).Seconds(), &s.row.Bound.P50)
	}
	return nil
}

// tenth measures latencies at a low rate.
func (o *serversOptions) tenth(ctx context.Context, s *measuredServer, rate float64) error {
	if _, err := s.target.Closed(ctx, 1, min(warmUp, o.length)); err != nil {
		return err
	}
	r, err := s.target.Open(ctx, rate, min(max(3*o.length, time.Duration(100/rate*float64(time.Second))), 5*o.length), 0)
	if err != nil {
		return err
	}
	s.count(r)
	if r.Latency(0.99) == httpload.Never {
		return fmt.Errorf("at %.1f requests/s %d of %d requests were answered", rate, r.Answered, r.Sent)
	}
	s.record("tenth", rate, &s.row.Tenth.Rate)
	s.record("tenth p50", 1e3*r.Latency(0.5).Seconds(), &s.row.Tenth.P50)
	s.record("tenth p99", 1e3*r.Latency(0.99).Seconds(), &s.row.Tenth.P99)
	return nil
}

// count adds a run's requests without an answer.
func (s *measuredServer) count(r *httpload.Result) {
	s.row.Failed += r.Refused + r.Failed
	if r.Failure != nil && s.row.Failure == "" {
		s.row.Failure = r.Failure.Error()
	}
}

// problem returns an error if servers compute different classes, or do not run.
func (r *serversReport) problem() error {
	var errs []error
	for _, row := range r.Rows {
		switch {
		case row.WhyNot != "":
			errs = append(errs, fmt.Errorf("%s is not measured: %s", row.Server, row.WhyNot))
		case row.Differ > 0:
			errs = append(errs, fmt.Errorf("%s has another class than %s for %s", row.Server, r.Rows[0].Server,
				printable.Counted(row.Differ, "photograph", "photographs")))
		}
	}
	return errors.Join(errs...)
}

func (r *serversReport) table(w io.Writer) error {
	where := printable.Counted(runtime.NumCPU(), "core", "cores")
	if r.Processors != "" {
		where = "servers on the CPUs " + r.Processors
	}
	fmt.Fprintf(w, "%s on %s, photographs of %.0f bytes, %d clients, %s, %s\n", r.Model, r.Device, r.BytesPerImage, r.Clients,
		where, printable.Counted(r.Rounds, "round", "rounds"))
	t := printable.NewTable(w, 0)
	fmt.Fprintf(t, "server\tanswers/s\tserver CPU ms\tclient CPU ms\trequests/s, p99 < %.0f ms\tp50 ms\t"+
		"p50, p99 ms at\trequests/s\tMB\tfailed\n", r.BoundMS)
	for _, row := range r.Rows {
		if row.WhyNot != "" {
			fmt.Fprintf(t, "%s\tnot measured: %s\n", row.Server, printable.Text(row.WhyNot))
			continue
		}
		fmt.Fprintf(t, "%s\t%.1f\t%.1f\t%.2f\t%.1f\t%.1f\t%.1f, %.1f\t%.1f\t%.0f\t%d\n", row.Server, row.Full.PerSecond,
			row.Full.CPU, row.Full.ClientCPU, row.Bound.Rate, row.Bound.P50, row.Tenth.P50, row.Tenth.P99, row.Tenth.Rate, row.MemoryMB,
			row.Failed)
	}
	return t.Flush()
}
