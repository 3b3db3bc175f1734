package loaderbench

import (
	"io"
	"testing"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/clitest"
)

const photos = "../../examples/data/photos-test.tgz"

// The loader runs in the background until body has returned.
func TestLoaderRunsBeside(t *testing.T) {
	m := Measurement{archive: photos, warm: 1,
		o: imageloader.Options{BatchSize: 16, Workers: 2, Transform: imageloader.Train(32)}}
	body := Measurement{archive: photos, epochs: 2, o: m.o}
	var failed error
	rate, err := m.Beside(t.Context(), func() { failed = body.Run(t.Context(), io.Discard) })
	if err != nil || failed != nil || body.Result.Images == 0 || rate <= 0 {
		t.Errorf("%v images a second, %v; %d images of the body, %v", rate, err, body.Result.Images, failed)
	}
	m.archive = clitest.WriteTar(t, map[string]string{"a/broken.jpg": "\xff\xd8\xff\xe0 not a picture"})
	if _, err := m.Beside(t.Context(), func() { t.Error("body was called, want no call") }); err == nil {
		t.Error("Beside with an archive without good samples: got no error, want one")
	}
}
