package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/internal/httpserve"
	"github.com/torchstream/torchstream/serve"
	"github.com/torchstream/torchstream/torch"
)

const (
	maxUpload    = 10 << 20 // bytes per photograph
	maxUploads   = 32       // read and predicted at a time: at most 320 MiB of photographs
	maxComputing = 2        // computed at a time: LibTorch uses all cores for each
)

func serveCommand(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set := flags("serve [options]",
		"Predicts photographs that are uploaded over HTTP, with a checkpoint of train.", stderr)
	checkpoint := set.String("checkpoint", "01-train.safetensors", "checkpoint `FILE` that train wrote")
	deviceName := set.String("device", "", "cpu, cuda or cuda:N (default: a GPU if there is one)")
	address := set.String("address", "localhost:8080", "`HOST:PORT` to listen on; port 0 picks a free one")
	if err := parse(set, args); err != nil {
		return err
	}
	if set.NArg() > 0 {
		return usageError{"serve takes no arguments: clients upload photographs"}
	}
	p, err := newPredictor(*checkpoint, *deviceName)
	if err != nil {
		return err
	}
	handler, err := newHandler(p)
	if err != nil {
		return err
	}
	defer handler.decoder.Close()
	listener, err := net.Listen("tcp", *address)
	if err != nil {
		return fmt.Errorf("-address %s: %w: -address localhost:0 picks a free port", *address, err)
	}
	fmt.Fprintf(stdout, "curl --data-binary @photo.jpg http://%v/\n", listener.Addr())
	return httpserve.Run(ctx, listener, handler, time.Minute)
}

// handler answers an uploaded photograph with its most probable classes, as JSON.
type handler struct {
	p         predictor
	decoder   *serve.Decoder
	uploads   *httpserve.Uploads
	places    chan struct{} // limits concurrent uploads
	computing chan struct{} // limits concurrent forward passes, which no cancellation ends
}

// answer is one of the classes in a response.
type answer struct {
	Class       string  `json:"class"`
	Probability float64 `json:"probability"`
}

// newHandler makes a handler. Its decoder's limits apply to all requests together.
func newHandler(p predictor) (*handler, error) {
	decoder, err := serve.NewDecoder(serve.Options{
		Decode: decode.Options{Transform: evalTransform(p.settings.Size), MaxBytes: maxUpload, MaxPixels: 100_000_000},
		Device: p.device,
	})
	return &handler{p, decoder, httpserve.NewUploads(maxUpload, maxUploads*maxUpload), make(chan struct{}, maxUploads),
		make(chan struct{}, maxComputing)}, err
}

func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		http.Error(w, "POST a photograph", http.StatusMethodNotAllowed)
		return
	}
	select {
	case h.places <- struct{}{}:
		defer func() { <-h.places }()
	default: // a queue would hold photographs of clients that have given up
		httpserve.WriteError(w, r, httpserve.ErrBusy)
		return
	}
	upload, release, err := h.uploads.Read(w, r)
	if err != nil {
		httpserve.WriteError(w, r, err)
		return
	}
	defer release()
	answers, err := h.predict(r.Context(), upload)
	if err != nil {
		httpserve.WriteError(w, r, err)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(answers) // fails if the client is gone
}

// predict returns the most probable classes. Requests decode concurrently, and maxComputing of them
// compute. The end of ctx ends each wait. A scope for each request frees its tensors.
func (h *handler) predict(ctx context.Context, upload []byte) (answers []answer, err error) {
	scope := torch.NewScope("request")
	defer scope.Close()
	x, err := h.decoder.Batch(ctx, scope, upload)
	if err != nil {
		return nil, err
	}
	select {
	case h.computing <- struct{}{}:
		defer func() { <-h.computing }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	best, err := h.p.best(x)
	if err != nil {
		return nil, err
	}
	for _, g := range best[0] {
		answers = append(answers, answer{h.p.settings.Classes[g.class], g.probability})
	}
	return answers, nil
}
