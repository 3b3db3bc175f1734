package index

import (
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// jpegCodec is the image library's codec for JPEG, PNG and WebP.
type jpegCodec struct{}

func (jpegCodec) Header(data []byte) (imagecapi.Info, error) { return imagecapi.Header(data) }

// TestIndexKeepsEveryFieldOfAHeader: an index keeps every field of a header.
func TestIndexKeepsEveryFieldOfAHeader(t *testing.T) {
	c := jpegCodec{}
	for _, m := range archivetest.Mixed(t) {
		want, err := c.Header([]byte(m.Data))
		h, found := headerOf(c, []byte(m.Data), true)
		got, _, ok := h.info()
		if found != (err == nil) || ok != found || found && got != want || !found &&
			h[8] != headerUnusable &&
			(h[8] != headerNoImage && h[8] != headerForeign || codec.Sniff([]byte(m.Data)) != "") {
			t.Errorf("%s: %+v, %v, want %+v, %v", m.Name, got, found, want, err)
		}
		if h, found := headerOf(c, []byte(m.Data)[:min(20, len(m.Data))], false); found ||
			codec.Sniff([]byte(m.Data)) != "" && h != (header{}) {
			t.Errorf("%s: %v of twenty bytes", m.Name, h)
		}
	}
}
