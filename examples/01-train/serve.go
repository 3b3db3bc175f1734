package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/torchstream/torchstream/imageloader/decode"
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
	// Shutdown waits for uploads that have started, so a stalled client must time out.
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: time.Minute}
	answered := make(chan error, 1)
	cancel := context.AfterFunc(ctx, func() { answered <- server.Shutdown(context.WithoutCancel(ctx)) })
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		cancel()
		return err
	}
	return <-answered // after all started requests have been answered
}

// handler answers an uploaded photograph with its most probable classes, as JSON.
type handler struct {
	p         predictor
	decoder   *serve.Decoder
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
	return &handler{p, decoder, make(chan struct{}, maxUploads), make(chan struct{}, maxComputing)}, err
}

func (h *handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		http.Error(w, "POST a photograph", http.StatusMethodNotAllowed)
		return
	}
	if r.ContentLength > maxUpload { // refused before a byte of it is read
		tooLong(w)
		return
	}
	select {
	case h.places <- struct{}{}:
		defer func() { <-h.places }()
	default: // a queue would hold photographs of clients that have given up
		w.Header().Set("Retry-After", "1")
		http.Error(w, fmt.Sprintf("%d photographs are being predicted: try again", cap(h.places)),
			http.StatusServiceUnavailable)
		return
	}
	upload, err := readBody(http.MaxBytesReader(w, r.Body, maxUpload), r.ContentLength)
	var long *http.MaxBytesError
	if errors.As(err, &long) {
		tooLong(w)
		return
	}
	if err != nil {
		http.Error(w, "the photograph did not arrive whole", http.StatusBadRequest)
		return
	}
	answers, err := h.predict(r.Context(), upload)
	if r.Context().Err() != nil {
		return // the client is gone
	}
	if err != nil {
		code, text := statusOf(err)
		if strings.HasPrefix(r.Header.Get("Content-Type"), "multipart/") {
			text += "; the body is a form: send the photograph alone, with curl --data-binary @photo.jpg"
		}
		if code == http.StatusServiceUnavailable {
			slog.Error("01-train: predicting an upload", "error", err)
		}
		http.Error(w, text, code)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(answers) // fails if the client is gone
}

func tooLong(w http.ResponseWriter) {
	http.Error(w, fmt.Sprintf("over %d bytes", maxUpload), http.StatusRequestEntityTooLarge)
}

// readBody reads a body of length bytes, or of an unknown length if length is -1. If the length is
// known, it allocates the body's memory once. Otherwise it uses a growing buffer of at most
// maxUpload bytes.
func readBody(body io.Reader, length int64) ([]byte, error) {
	if length < 0 {
		length = 64 << 10
	}
	data := make([]byte, 0, length+1) // room for a read that finds the end
	for {
		n, err := body.Read(data[len(data):cap(data)])
		data = data[:len(data)+n]
		if err == io.EOF {
			return data, nil
		}
		if err != nil {
			return nil, err
		}
		if len(data) == cap(data) {
			data = append(make([]byte, 0, min(2*cap(data), maxUpload+1)), data...)
		}
	}
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

// statusOf returns the HTTP status of an error. It discloses only errors in the upload.
func statusOf(err error) (code int, text string) {
	var fault *decode.Error
	switch {
	case !errors.As(err, &fault):
		return http.StatusServiceUnavailable, "the photograph could not be predicted: try again"
	case fault.Kind == decode.ErrTooLarge:
		code = http.StatusRequestEntityTooLarge
	case fault.Kind == decode.ErrDamaged:
		code = http.StatusUnprocessableEntity
	default:
		code = http.StatusUnsupportedMediaType
	}
	return code, fmt.Sprintf("%v: %v", fault.Kind, fault.Err)
}
