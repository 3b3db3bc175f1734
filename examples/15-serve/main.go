// Command 15-serve serves a model that PyTorch exported: clients upload photographs over HTTP and
// get the most probable classes. Requests that arrive together are computed in one batch.
//
//	python3 tools/export.py torchvision:resnet50 --weights DEFAULT -o resnet50.pt2
//	go run ./examples/15-serve -model resnet50.pt2
//	curl --data-binary @photo.jpg http://localhost:8080/     # or open the address in a browser
//
// A package of tools/export.py contains native code, which this program runs. After SIGTERM or
// SIGINT, the program answers the requests that have started, and ends. The parts that use net/http
// alone are in internal/httpserve: reading bodies in bounded memory, the statuses of errors, the
// page, and the metrics.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/torchstream/torchstream/aoti"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/examples/internal/lesson"
	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/httpserve"
	"github.com/torchstream/torchstream/serve"
	"github.com/torchstream/torchstream/torch"
)

const (
	maxUpload  = 10 << 20  // bytes of a photograph
	maxUploads = 256 << 20 // bytes of all photographs that are in memory
	shown      = 5         // classes of an answer
	drain      = 30 * time.Second
)

type options struct {
	model, address string
	batch          int
}

func main() {
	var o options
	flag.StringVar(&o.model, "model", "resnet50.pt2", "serve this `package` of tools/export.py")
	flag.StringVar(&o.address, "address", "localhost:8080", "listen on this `host:port`; port 0 picks a free one")
	flag.IntVar(&o.batch, "batch", 32, "images in a batch, at most what the package takes")
	lesson.Usage(flag.CommandLine, "15-serve [options]", "Serves a model that PyTorch exported.")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx, o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "15-serve:", err)
		os.Exit(1)
	}
}

// run serves until ctx ends.
func run(ctx context.Context, o options, out io.Writer) (err error) {
	model, err := aoti.Load(o.model, aoti.Options{}) // this runs the package's code
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, model.Close()) }()
	s, err := newServer(model, o.batch)
	if err != nil {
		return fmt.Errorf("%s: %w", o.model, err)
	}
	defer func() {
		limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), drain)
		defer cancel()
		err = errors.Join(err, s.batcher.Close(limit)) // answers all requests first
	}()
	listener, err := net.Listen("tcp", o.address)
	if err != nil {
		return fmt.Errorf("-address %s: %w: -address localhost:0 picks a free port", o.address, err)
	}
	fmt.Fprintf(out, "http://%v/ in a browser, or: curl --data-binary @photo.jpg http://%[1]v/\n", listener.Addr())
	return httpserve.Run(ctx, listener, s.routes(), drain)
}

// server answers requests with a model.
type server struct {
	batcher *serve.Batcher
	uploads *httpserve.Uploads
	classes []string
}

// newServer starts the batcher. It runs the model once for each batch size.
func newServer(model *aoti.Model, batch int) (*server, error) {
	t, classes, err := describe(model)
	if err != nil {
		return nil, err
	}
	sizes := model.Inputs[0].Shape[0] // the batch sizes for which the model was exported
	if sizes.Max > 0 {
		batch = min(batch, int(sizes.Max))
	}
	buckets := []int{max(1, int(sizes.Min))}
	for size := 2 * buckets[0]; size <= batch; size *= 2 {
		buckets = append(buckets, size)
	}
	logits := max(0, slices.IndexFunc(model.Outputs, func(v aoti.Value) bool { return v.Name == "logits" }))
	s := &server{uploads: httpserve.NewUploads(maxUpload, maxUploads), classes: classes}
	s.batcher, err = serve.NewBatcher(serve.BatcherOptions{
		Devices: []cuda.Device{model.Device()},
		Buckets: buckets,
		Images:  serve.Options{Decode: decode.Options{Transform: t, MaxBytes: maxUpload, MaxPixels: 100_000_000}},
		Logger:  slog.Default(),
		Model: func(cuda.Device) (serve.Run, error) {
			return func(ctx context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
				outputs, err := model.Run(ctx, x)
				if err != nil {
					return nil, err
				}
				return []*torch.Tensor{outputs[logits].ToDType(torch.Float32).Softmax(1)}, nil
			}, nil
		},
	})
	return s, err
}

// describe returns the transform for a model's images, and the model's classes, from the metadata
// that tools/export.py wrote.
func describe(model *aoti.Model) (t transform.Transform, classes []string, err error) {
	if len(model.Inputs) != 1 || len(model.Inputs[0].Shape) != 4 {
		return t, nil, fmt.Errorf("its inputs are %v, want images [N 3 size size]", model.Inputs)
	}
	images := struct {
		Resize        int
		Interpolation string
		Mean, Std     [3]float32
	}{}
	err = errors.Join(json.Unmarshal([]byte(cmp.Or(model.Metadata["images"], "{}")), &images),
		json.Unmarshal([]byte(cmp.Or(model.Metadata["classes"], "[]")), &classes))
	in := model.Inputs[0]
	t = transform.Eval(images.Resize, int(in.Shape[2].Min)) // ImageNet's mean and standard deviation
	var unknown error
	t.Interpolation, unknown = transform.ParseInterpolation(images.Interpolation)
	err = errors.Join(err, unknown)
	if images.Std != [3]float32{} {
		t.Mean, t.Std = images.Mean, images.Std
	}
	t.Contiguous = in.MemoryFormat == "contiguous"
	t.DType = map[string]torch.DType{"float32": torch.Float32, "float16": torch.Float16, "bfloat16": torch.BFloat16}[in.DType]
	return t, classes, err
}

// routes returns the handler of all addresses.
func (s *server) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", httpserve.Page)
	mux.HandleFunc("POST /{$}", s.classify)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		if err := s.batcher.Err(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		}
	})
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		_ = httpserve.WriteMetrics(w, s.batcher.Stats(), nil) // fails if the client is gone
	})
	return mux
}

// classify answers an upload. If the client disconnects, the request's place in the queue and the
// upload's memory are free at once.
func (s *server) classify(w http.ResponseWriter, r *http.Request) {
	photo, release, err := s.uploads.Read(w, r)
	if err != nil {
		httpserve.WriteError(w, r, err)
		return
	}
	defer release()
	answer, err := s.batcher.Do(r.Context(), serve.Request{Image: photo})
	if err != nil {
		httpserve.WriteError(w, r, err)
		return
	}
	httpserve.WriteAnswer(w, r, httpserve.NewAnswer(answer, s.classes, shown))
}
