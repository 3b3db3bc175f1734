package decode_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"

	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/imageloader/transform"
)

// One image, resized and centre-cropped for a network.
func ExampleDecoder_Decode() {
	d, err := decode.New(decode.Options{Transform: transform.Eval(256, 224)})
	if err != nil {
		log.Fatal(err)
	}
	defer d.Close()
	jpeg, err := os.ReadFile("../../cshim/test/data/420.jpg")
	if err != nil {
		log.Fatal(err)
	}
	pixels := make([]byte, d.Bytes()) // uint8 [224, 224, 3]
	if err := d.Decode(context.Background(), pixels, jpeg); err != nil {
		log.Fatal(err)
	}
	fmt.Println(len(pixels))
	// Output: 150528
}

// A server that reports the size of an uploaded photograph. Its limits hold over all requests.
func ExampleDecoder_Whole() {
	d, err := decode.New(decode.Options{MaxBytes: 10 << 20, MaxPixels: 50_000_000, MaxMemory: 512 << 20})
	if err != nil {
		log.Fatal(err)
	}
	defer d.Close()
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		upload, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 10<<20))
		if err != nil {
			http.Error(w, "the upload is too large or cut off", http.StatusBadRequest)
			return
		}
		image, err := d.Whole(r.Context(), upload, nil)
		switch {
		case errors.Is(err, decode.ErrTooLarge):
			http.Error(w, "the image is too large", http.StatusRequestEntityTooLarge)
		case errors.Is(err, decode.ErrNotImage), errors.Is(err, decode.ErrUnsupported):
			http.Error(w, "not an image that this server knows", http.StatusUnsupportedMediaType)
		case errors.As(err, new(decode.Errors)):
			http.Error(w, "the image is damaged", http.StatusUnprocessableEntity)
		case err != nil: // the machine's fault, or the client is gone
			http.Error(w, "try again", http.StatusServiceUnavailable)
		default:
			fmt.Fprintf(w, "%d x %d", image.Width, image.Height)
		}
	})

	jpeg, err := os.ReadFile("../../cshim/test/data/420.jpg")
	if err != nil {
		log.Fatal(err)
	}
	for _, upload := range []string{string(jpeg), string(jpeg[:len(jpeg)/2]), "GET"} {
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, httptest.NewRequest(http.MethodPost, "/", strings.NewReader(upload)))
		fmt.Println(answer.Code, strings.TrimSpace(answer.Body.String()))
	}
	// Output:
	// 200 211 x 157
	// 422 the image is damaged
	// 415 not an image that this server knows
}
