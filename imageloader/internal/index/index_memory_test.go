package index

import (
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// TestContentsThatWillNotFitAreDroppedEarly: contents are dropped as soon as all of them are likely
// to take more than twice the limit.
func TestContentsThatWillNotFitAreDroppedEarly(t *testing.T) {
	const limit, size, total = 1 << 20, 1 << 10, 100 << 20
	for _, test := range []struct {
		name  string
		share float64 // of the archive's bytes that are contents
		kept  int64   // bytes after which the contents are dropped, or all of them
	}{
		{"most of the archive", 1, limit/surveyShare + size},
		{"more than twice the limit", 0.021, limit/surveyShare + size},
		{"less than twice the limit", 0.019, limit},
		{"less than the limit", 0.009, 921 << 10},
	} {
		h := heldContents{keeping: true, limit: limit}
		count := 0
		for h.keeping && float64(h.bytes) < test.share*total-size {
			read := int64(float64(h.bytes+size) / test.share)
			h.hold(count+1, h.room(size), size)
			count++
			h.survey(func() archive.Progress { return archive.Progress{Bytes: read, TotalBytes: total} })
		}
		if fits := test.share*total <= limit; h.keeping != fits || max(h.bytes-test.kept, test.kept-h.bytes) > size {
			t.Errorf("%s: kept %v, %d bytes; want %v, %d", test.name, h.keeping, h.bytes, fits, test.kept)
		}
		h.free()
	}
}
