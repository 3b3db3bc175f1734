package train_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"testing"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/train"
)

// TestResumeAfterADamagedImageIsExact: before the error of a damaged image, an epoch gives a short
// batch of the samples before the image. Run does not train on this batch. So a run that is resumed
// with the repaired archive has the bits of an undisturbed one.
func TestResumeAfterADamagedImageIsExact(t *testing.T) {
	whole := newJob(t, job{})
	want := whole.run(t)
	bits := whole.bits(t)
	file, err := os.ReadFile(whole.path)
	if err != nil {
		t.Fatal(err)
	}
	damage := func(n int) []byte { // image n
		damaged := bytes.Clone(file)
		at := 0
		for range n + 1 {
			at += bytes.Index(damaged[at:], []byte("\x89PNG")) + 4
		}
		copy(damaged[at-4:], "no image")
		return damaged
	}
	write := func(data []byte) {
		if err := os.WriteFile(whole.path, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for n := 0; n < classes*perC; n += 4 {
		for _, wrapped := range []bool{false, true} {
			t.Run(fmt.Sprintf("image %d, without loader %t", n, wrapped), func(t *testing.T) {
				o := job{path: whole.path, wrapped: wrapped,
					Config: train.Config{Dir: t.TempDir(), Resume: true, SaveSteps: 1}}
				write(damage(n))
				_, err := train.Run(context.Background(), newJob(t, o).Config)
				var bad *imageloader.SampleError
				if !errors.As(err, &bad) {
					t.Fatalf("with a damaged image: got the error %v, want one that names it", err)
				}
				write(file)
				resumed := newJob(t, o)
				if got := resumed.run(t); !reflect.DeepEqual(figures(got), figures(want)) || got.Steps != want.Steps {
					t.Errorf("%d steps, figures %+v\nwant %d, %+v", got.Steps, figures(got), want.Steps, figures(want))
				}
				for name, values := range resumed.bits(t) {
					if !reflect.DeepEqual(values, bits[name]) {
						t.Errorf("%s differs, want the bits of the undisturbed run", name)
					}
				}
			})
		}
	}
}
