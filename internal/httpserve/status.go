package httpserve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"

	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/serve"
)

// WriteError answers a request with an error of Uploads.Read or serve.Batcher.Do. It discloses only
// errors of the request. It logs the others, and nothing if the client is gone.
func WriteError(w http.ResponseWriter, r *http.Request, err error) {
	if r.Context().Err() != nil && !errors.Is(err, ErrIncomplete) { // a slow body ends the context too
		return
	}
	code, text := statusOf(err)
	if code >= 500 && !busy(err) {
		slog.Error("a request failed", "error", err)
	}
	if code == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", "1")
	}
	if code == http.StatusUnsupportedMediaType && strings.HasPrefix(r.Header.Get("Content-Type"), "multipart/") {
		text += "; the body is a form: send the photograph alone, with curl --data-binary @photo.jpg"
	}
	http.Error(w, text, code)
}

func busy(err error) bool {
	return errors.Is(err, ErrBusy) || errors.Is(err, serve.ErrQueueFull) || errors.Is(err, serve.ErrClosed)
}

// statusOf returns the HTTP status and the text for an error.
func statusOf(err error) (code int, text string) {
	var long *http.MaxBytesError
	var fault *decode.Error
	switch {
	case errors.As(err, &long):
		return http.StatusRequestEntityTooLarge, fmt.Sprintf("over %d bytes", long.Limit)
	case errors.Is(err, ErrIncomplete):
		return http.StatusBadRequest, ErrIncomplete.Error()
	case errors.Is(err, ErrBusy), errors.Is(err, serve.ErrQueueFull):
		return http.StatusServiceUnavailable, "too many requests at a time: try again"
	case errors.Is(err, serve.ErrClosed), errors.Is(err, context.Canceled):
		return http.StatusServiceUnavailable, "the server is shutting down"
	case !errors.As(err, &fault):
		return http.StatusInternalServerError, "the image could not be computed: the server's log has the reason"
	case fault.Kind == decode.ErrTooLarge:
		code = http.StatusRequestEntityTooLarge
	case fault.Kind == decode.ErrDamaged:
		code = http.StatusUnprocessableEntity
	default:
		code = http.StatusUnsupportedMediaType
	}
	return code, fmt.Sprintf("%v: %v", fault.Kind, fault.Err)
}
