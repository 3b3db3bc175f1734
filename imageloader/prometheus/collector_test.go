package prometheus

import (
	"reflect"
	"strings"
	"testing"
	"time"

	client "github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/torchstream/torchstream/imageloader"
)

type fixed imageloader.Stats

func (f fixed) Stats() imageloader.Stats { return imageloader.Stats(f) }

// A scrape has the values of Stats, and passes client_golang's own checks of names and help.
func TestScrapeHasTheValuesOfStats(t *testing.T) {
	s := fixed{
		Samples: 640, Batches: 10, Bytes: 12345, Bad: 3, Warned: 4,
		BadBy: map[imageloader.Reason]int64{imageloader.Damaged: 2, imageloader.Empty: 1}, Workers: 4,
		Queue: 5, QueueBytes: 678,
		Orphans: 9, Decoded: map[imageloader.DecodePath]int64{imageloader.ByPNG: 7,
			imageloader.ByEntryPoints: 600}, Inflate: 3 * time.Second,
		Elapsed: 2 * time.Second, Read: time.Second, Decode: 7 * time.Second, Plan: time.Minute, WaitSlot: time.Second / 2,
	}
	c := NewCollector(s, client.Labels{"loader": "train"})
	registry := client.NewPedanticRegistry()
	if err := registry.Register(c); err != nil {
		t.Fatal(err)
	}
	if err := registry.Register(NewCollector(s, client.Labels{"loader": "test"})); err != nil {
		t.Errorf("a second loader: %v, want no error", err)
	}
	problems, err := testutil.GatherAndLint(registry)
	if err != nil || len(problems) > 0 {
		t.Errorf("%v, error %v, want no error, len(problems) = 0", problems, err)
	}
	want := `
# HELP torchstream_loader_bad_samples_total Bad samples met, once for each epoch that met them.
# TYPE torchstream_loader_bad_samples_total counter
torchstream_loader_bad_samples_total{loader="train",reason="damaged"} 2
torchstream_loader_bad_samples_total{loader="train",reason="empty"} 1
# HELP torchstream_loader_bottleneck 1 for the stage that the others have waited for since the loader was opened, 0 for the others.
# TYPE torchstream_loader_bottleneck gauge
torchstream_loader_bottleneck{loader="train",stage="consuming"} 0
torchstream_loader_bottleneck{loader="train",stage="decoding"} 1
torchstream_loader_bottleneck{loader="train",stage="inflating"} 0
torchstream_loader_bottleneck{loader="train",stage="reading"} 0
# HELP torchstream_loader_decode_seconds_total Time that all workers spent on decoding and transforms.
# TYPE torchstream_loader_decode_seconds_total counter
torchstream_loader_decode_seconds_total{loader="train"} 7
# HELP torchstream_loader_decoded_images_total Images by how they were decoded.
# TYPE torchstream_loader_decoded_images_total counter
torchstream_loader_decoded_images_total{loader="train",path="jpeg by entry points"} 600
torchstream_loader_decoded_images_total{loader="train",path="png"} 7
# HELP torchstream_loader_inflate_seconds_total Time spent on inflating.
# TYPE torchstream_loader_inflate_seconds_total counter
torchstream_loader_inflate_seconds_total{loader="train"} 3
# HELP torchstream_loader_orphan_images Images that are no samples, because they have no class or label.
# TYPE torchstream_loader_orphan_images gauge
torchstream_loader_orphan_images{loader="train"} 9
# HELP torchstream_loader_queue_bytes Compressed bytes read and not yet decoded.
# TYPE torchstream_loader_queue_bytes gauge
torchstream_loader_queue_bytes{loader="train"} 678
# HELP torchstream_loader_samples_total Samples delivered.
# TYPE torchstream_loader_samples_total counter
torchstream_loader_samples_total{loader="train"} 640
`
	if err := testutil.CollectAndCompare(c, strings.NewReader(want), "torchstream_loader_bad_samples_total",
		"torchstream_loader_bottleneck",
		"torchstream_loader_decode_seconds_total", "torchstream_loader_decoded_images_total",
		"torchstream_loader_inflate_seconds_total", "torchstream_loader_orphan_images",
		"torchstream_loader_queue_bytes", "torchstream_loader_samples_total"); err != nil {
		t.Error(err)
	}
}

// Every number of Stats has a metric, so that a new field of Stats gets one too.
func TestEveryNumberHasAMetric(t *testing.T) {
	// Fields without a plain metric: Bad and BadBy are counted by reason, and Decoded by path;
	// BadNamed and WarnedNamed are for the log; Ignored does not change with time.
	elsewhere := map[string]bool{"Bad": true, "BadBy": true, "BadNamed": true, "WarnedNamed": true,
		"Ignored": true, "Decoded": true}
	numbers := 0
	s := reflect.TypeFor[imageloader.Stats]()
	for i := range s.NumField() {
		if !elsewhere[s.Field(i).Name] {
			numbers++
		}
	}
	if shown := len(NewCollector(fixed{}, nil).metrics); shown != numbers {
		t.Errorf("%d metrics for %d numbers in imageloader.Stats", shown, numbers)
	}
}

func TestLoaderIsASource(t *testing.T) {
	loader, err := imageloader.Open("../../examples/data/photos-test.tgz",
		imageloader.Options{BatchSize: 32, Transform: imageloader.Eval(32, 32)})
	if err != nil {
		t.Fatal(err)
	}
	defer loader.Close()
	for _, err := range loader.Epoch(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
	}
	registry := client.NewPedanticRegistry()
	registry.MustRegister(NewCollector(loader, nil))
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "torchstream_loader_samples_total" && f.Metric[0].Counter.GetValue() != 192 {
			t.Errorf("%v", f)
		}
	}
}
