//go:build linux && cgo

package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/torchstream/torchstream/aoti"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/httpserve"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/internal/safefile"
	"github.com/torchstream/torchstream/serve"
)

// serveOptions is the command line of serve.
type serveOptions struct {
	network                 networkOptions
	images                  cli.Images
	labels, address, decode string
	weights                 string
	batch, top, threads     int
	delay, drain            time.Duration
	maxBytes, maxMemory     int64
}

// maxDrain is the maximum of -drain. A command that has not ended a minute after a signal is ended
// at once, so maxDrain is shorter.
const maxDrain = 50 * time.Second

// maxWorkers is the maximum of -workers. Each worker has memory for a batch.
const maxWorkers = 256

// serveCommand classifies images that are uploaded over HTTP.
func serveCommand(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var o serveOptions
	set := cli.Flags("torchstream serve",
		"Classifies the image of each POST to / with a package (.pt2) of tools/export.py or a checkpoint of\n"+
			"torchstream train. Requests at the same time form batches. A GET of / is a page to try it, /metrics has figures\n"+
			"for Prometheus, and /healthz is 200 while the server can answer. SIGTERM and SIGINT end it when the requests\n"+
			"that have started are answered.", stderr)
	o.network.usual = "logits"
	o.network.register(set)
	o.images.Register(set, cli.UprightOption)
	set.StringVar(&o.labels, "labels", "", "`FILE` with the name of each class, one a line (default: the model's names)")
	set.StringVar(&o.weights, "weights", "", "with a package: `FILE` of weights (.safetensors, .pt) to use instead of "+
		"the package's. SIGUSR1 reads it again")
	set.StringVar(&o.address, "address", "localhost:8080", "`HOST:PORT` to listen on; port 0 picks a free one, and "+
		":8080 listens on all addresses")
	set.IntVar(&o.batch, "batch", 32, "largest number of images in a batch; at most what a package takes")
	set.IntVar(&o.network.instances, "workers", 0, "`BATCHES` that a device computes at the same time (default: 1 on the CPU, "+
		"2 on a GPU). On busy CPU cores -workers 2 -threads 1 answers more requests a second; a single one takes longer")
	set.DurationVar(&o.delay, "max-delay", 0, "longest `TIME` that an image waits for others while a device is idle (default 0s)")
	set.IntVar(&o.top, "top", 5, "number of classes in an answer, the most probable first")
	set.StringVar(&o.decode, "decode", "host", "where images are decoded: host, or device (a GPU); the images are the same")
	set.Func("max-bytes", "largest `SIZE` of an upload, such as 10M (default 10M)", sizeOption(&o.maxBytes))
	set.Func("max-memory", "`SIZE` of all uploads in memory; further ones are answered with 503 (default 256M)",
		sizeOption(&o.maxMemory))
	set.DurationVar(&o.drain, "drain", 30*time.Second,
		"after a signal, longest `TIME` to answer the requests that have started")
	threads := cli.ThreadsOption(set)
	o.maxBytes, o.maxMemory = 10<<20, 256<<20
	if err := cli.Parse(set, args, 0); err != nil {
		return err
	}
	o.threads = *threads
	if err := o.check(); err != nil {
		return err
	}
	return o.run(ctx, set, stdout, stderr)
}

// sizeOption parses a number of bytes.
func sizeOption(to *int64) func(string) error {
	return func(text string) (err error) {
		*to, err = parseBytes(text)
		return err
	}
}

// check refuses impossible options.
func (o *serveOptions) check() error {
	switch {
	case o.network.instances < 0 || o.network.instances > maxWorkers:
		return cli.Usagef("-workers %d: must be from 0 to %d", o.network.instances, maxWorkers)
	case o.batch < 1 || o.top < 1:
		return cli.UsageError{Message: "-batch and -top are at least 1"}
	case o.delay < 0 || o.drain < 0 || o.drain > maxDrain:
		return cli.Usagef("-max-delay and -drain must not be negative, and -drain at most %v", maxDrain)
	case o.maxBytes < 1 || o.maxMemory < o.maxBytes:
		return cli.UsageError{Message: "-max-bytes is at least 1, and -max-memory at least -max-bytes"}
	case o.decode != "host" && o.decode != "device":
		return cli.Usagef("-decode %q: want host or device", o.decode)
	}
	return nil
}

// run serves until ctx ends.
func (o *serveOptions) run(ctx context.Context, set *flag.FlagSet, stdout, stderr io.Writer) (err error) {
	signals, stop := reloadSignals()
	defer stop()
	if err := cmp.Or(cli.SpinBriefly(), cli.SetThreads(o.threads)); err != nil {
		return err
	}
	listener, err := net.Listen("tcp", o.address) // before the model, so that a port in use fails early
	if err != nil {
		return fmt.Errorf("-address %s: %w: -address localhost:0 picks a free port", printable.Name(o.address), err)
	}
	defer listener.Close()
	networks, err := o.openNetworks()
	defer func() {
		for _, n := range networks {
			err = errors.Join(err, n.close())
		}
	}()
	if err != nil {
		return err
	}
	n := networks[0]
	for _, n := range networks {
		if err := n.setUpright(set, o.images.Upright); err != nil {
			return err
		}
	}
	if err := o.loadWeights(ctx, networks); err != nil {
		return err
	}
	if given(set, "batch") && n.batch.Max > 0 && int64(o.batch) > n.batch.Max {
		return cli.Usagef("-batch %d: %s takes at most %d images", o.batch, printable.Name(n.path), n.batch.Max)
	}
	classes, err := o.classNames(n)
	if err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	batcher, err := o.newBatcher(networks, log)
	if err != nil {
		return err
	}
	defer func() {
		limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), o.drain)
		defer cancel()
		err = errors.Join(err, batcher.Close(limit))
	}()
	defer o.reloadOnSignal(ctx, signals, networks, stdout, log)()
	h := &imageHandler{batcher: batcher, classes: classes, top: o.top,
		uploads: httpserve.NewUploads(o.maxBytes, o.maxMemory)}
	fmt.Fprintf(stdout, "http://%v/ in a browser, or: curl --data-binary @photo.jpg http://%[1]v/\n", listener.Addr())
	return httpserve.Run(ctx, listener, h.routes(), o.drain)
}

// openNetworks opens -model once for each device of -device. After an error it returns the networks
// that are already open.
func (o *serveOptions) openNetworks() (networks []*network, err error) {
	for name := range strings.SplitSeq(o.network.device, ",") {
		one := o.network
		one.device = name
		n, err := one.open()
		if err != nil {
			return networks, err
		}
		networks = append(networks, n)
	}
	return networks, nil
}

// classNames returns the names of the classes: from -labels, from the model, or numbers.
func (o *serveOptions) classNames(n *network) (names []string, err error) {
	if n.width == 0 {
		return nil, fmt.Errorf("%s: its output is not [N classes]: choose another with -output", printable.Name(n.path))
	}
	names, from := n.classes, n.path
	if o.labels != "" {
		if names, err = readLabels(o.labels); err != nil {
			return nil, err
		}
		from = o.labels
	}
	if names == nil {
		for label := range n.width {
			names = append(names, strconv.FormatInt(label, 10))
		}
	}
	if int64(len(names)) != n.width {
		return nil, fmt.Errorf("%s names %s, and the model has %d: give -labels a file with a line for each",
			printable.Name(from), printable.Counted(len(names), "class", "classes"), n.width)
	}
	return names, nil
}

// newBatcher makes the batcher of the networks.
func (o *serveOptions) newBatcher(networks []*network, log *slog.Logger) (*serve.Batcher, error) {
	of := map[cuda.Device]*network{}
	var devices []cuda.Device
	for _, n := range networks {
		if o.decode == "device" && n.device == cuda.CPU {
			return nil, cli.UsageError{Message: "-decode device needs a GPU, and the device is the CPU: use -decode host"}
		}
		if of[n.device] != nil {
			return nil, cli.Usagef("-device %s names %v twice", o.network.device, n.device)
		}
		of[n.device], devices = n, append(devices, n.device)
	}
	return serve.NewBatcher(serve.BatcherOptions{
		Devices: devices, Workers: o.network.instances, Buckets: buckets(networks[0].batch, o.batch), MaxDelay: o.delay,
		Logger: log,
		Images: serve.Options{OnDevice: o.decode == "device", Decode: decode.Options{
			Transform: networks[0].transform, MaxBytes: o.maxBytes, MaxPixels: 100_000_000}},
		Model: func(d cuda.Device) (serve.Run, error) { return of[d].probabilities, nil },
	})
}

// buckets returns the batch sizes with which a network runs: its minimum, the powers of two above
// that, and its maximum or most, whichever is smaller.
func buckets(sizes aoti.Dim, most int) []int {
	if sizes.Max > 0 {
		most = min(most, int(sizes.Max))
	}
	least := max(1, int(sizes.Min))
	most = max(most, least)
	all := []int{least}
	for size := 1; size < most; size *= 2 {
		if size > least {
			all = append(all, size)
		}
	}
	if most > least {
		all = append(all, most)
	}
	return all
}

// readLabels reads the names of classes.
func readLabels(path string) ([]string, error) {
	text, err := safefile.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("-labels: %w", err)
	}
	names := strings.Split(strings.TrimRight(string(text), "\r\n"), "\n")
	for i, name := range names {
		names[i] = strings.TrimSpace(name)
	}
	return names, nil
}

// imageHandler answers uploads.
type imageHandler struct {
	batcher *serve.Batcher
	uploads *httpserve.Uploads
	classes []string
	top     int
	counts  httpserve.Counts
}

// routes returns the handler of all addresses.
func (h *imageHandler) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", httpserve.Page)
	mux.Handle("POST /{$}", h.counts.Handler(h))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		if err := h.batcher.Err(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		_ = httpserve.WriteMetrics(w, h.batcher.Stats(), &h.counts) // fails if the client is gone
	})
	return mux
}

// ServeHTTP classifies an upload.
func (h *imageHandler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	image, release, err := h.uploads.Read(w, r)
	if err != nil {
		httpserve.WriteError(w, r, err)
		return
	}
	defer release()
	answer, err := h.batcher.Do(r.Context(), serve.Request{Image: image})
	if err != nil {
		httpserve.WriteError(w, r, err)
		return
	}
	httpserve.WriteAnswer(w, r, httpserve.NewAnswer(answer, h.classes, h.top))
}
