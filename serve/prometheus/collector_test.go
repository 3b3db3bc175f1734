package prometheus

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	client "github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/serve"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
)

type fixed serve.BatcherStats

func (f fixed) Stats() serve.BatcherStats { return serve.BatcherStats(f) }

// A scrape has the values of Stats, and passes client_golang's own checks of names and help.
func TestScrapeHasTheValuesOfStats(t *testing.T) {
	s := fixed{Answered: 5, Faulty: 1, Refused: 2, Cancelled: 3, Failed: 4, Waiting: 6, Running: 7, Rows: 8, Padding: 9,
		Replays: 10, OutOfMemory: 11,
		Buckets: []serve.BucketStats{{Size: 1, Batches: 2, Rows: 2}, {Size: 4, Batches: 3, Rows: 6}},
		Devices: []serve.DeviceStats{{Device: 0, MaxBatch: 4}, {Device: 1, MaxBatch: 1, Lost: errors.New("lost")}}}
	s.Took = serve.Latencies{Count: 5, Sum: 20 * time.Second}
	s.Took.Counts[0], s.Took.Counts[3], s.Took.Counts[16] = 1, 3, 1
	c := NewCollector(s, client.Labels{"model": "a"})
	registry := client.NewPedanticRegistry()
	for _, collector := range []*Collector{c, NewCollector(s, client.Labels{"model": "b"})} {
		if err := registry.Register(collector); err != nil {
			t.Fatal(err)
		}
	}
	problems, err := testutil.GatherAndLint(registry)
	if err != nil || len(problems) > 0 {
		t.Errorf("%v, error %v, want no error, len(problems) = 0", problems, err)
	}
	want := `
# HELP torchstream_batcher_batches_total Batches by the batch size with which the model ran.
# TYPE torchstream_batcher_batches_total counter
torchstream_batcher_batches_total{model="a",size="1"} 2
torchstream_batcher_batches_total{model="a",size="4"} 3
# HELP torchstream_batcher_device_lost 1 if the device has failed for good, otherwise 0.
# TYPE torchstream_batcher_device_lost gauge
torchstream_batcher_device_lost{device="cuda:0",index="0",model="a"} 0
torchstream_batcher_device_lost{device="cuda:1",index="1",model="a"} 1
# HELP torchstream_batcher_requests_total Requests by their result.
# TYPE torchstream_batcher_requests_total counter
torchstream_batcher_requests_total{model="a",result="answered"} 5
torchstream_batcher_requests_total{model="a",result="cancelled"} 3
torchstream_batcher_requests_total{model="a",result="failed"} 4
torchstream_batcher_requests_total{model="a",result="faulty"} 1
torchstream_batcher_requests_total{model="a",result="refused"} 2
# HELP torchstream_batcher_took_seconds Time of an answered request.
# TYPE torchstream_batcher_took_seconds histogram
torchstream_batcher_took_seconds_bucket{model="a",le="0.00025"} 1
torchstream_batcher_took_seconds_bucket{model="a",le="0.0005"} 1
torchstream_batcher_took_seconds_bucket{model="a",le="0.001"} 1
torchstream_batcher_took_seconds_bucket{model="a",le="0.002"} 4
torchstream_batcher_took_seconds_bucket{model="a",le="0.004"} 4
torchstream_batcher_took_seconds_bucket{model="a",le="0.008"} 4
torchstream_batcher_took_seconds_bucket{model="a",le="0.016"} 4
torchstream_batcher_took_seconds_bucket{model="a",le="0.032"} 4
torchstream_batcher_took_seconds_bucket{model="a",le="0.064"} 4
torchstream_batcher_took_seconds_bucket{model="a",le="0.128"} 4
torchstream_batcher_took_seconds_bucket{model="a",le="0.256"} 4
torchstream_batcher_took_seconds_bucket{model="a",le="0.512"} 4
torchstream_batcher_took_seconds_bucket{model="a",le="1.024"} 4
torchstream_batcher_took_seconds_bucket{model="a",le="2.048"} 4
torchstream_batcher_took_seconds_bucket{model="a",le="4.096"} 4
torchstream_batcher_took_seconds_bucket{model="a",le="8.192"} 4
torchstream_batcher_took_seconds_bucket{model="a",le="+Inf"} 5
torchstream_batcher_took_seconds_sum{model="a"} 20
torchstream_batcher_took_seconds_count{model="a"} 5
# HELP torchstream_batcher_waiting_requests Requests that wait in the queue or are being decoded for it.
# TYPE torchstream_batcher_waiting_requests gauge
torchstream_batcher_waiting_requests{model="a"} 6
`
	if err := testutil.CollectAndCompare(c, strings.NewReader(want), "torchstream_batcher_batches_total",
		"torchstream_batcher_device_lost", "torchstream_batcher_requests_total", "torchstream_batcher_took_seconds",
		"torchstream_batcher_waiting_requests"); err != nil {
		t.Error(err)
	}
}

// Every number of Stats has a metric, so that a new field of Stats gets one too.
func TestEveryNumberHasAMetric(t *testing.T) {
	// Fields without a plain metric: requests are counted by result, batches by size, and devices
	// have two gauges each.
	elsewhere := map[string]bool{"Answered": true, "Faulty": true, "Refused": true, "Cancelled": true, "Failed": true,
		"Buckets": true, "Devices": true}
	numbers := 0
	s := reflect.TypeFor[serve.BatcherStats]()
	for i := range s.NumField() {
		if !elsewhere[s.Field(i).Name] {
			numbers++
		}
	}
	c := NewCollector(fixed{}, nil)
	if shown := len(c.metrics) + len(c.histograms); shown != numbers {
		t.Errorf("%d metrics for %d numbers in serve.BatcherStats", shown, numbers)
	}
}

func TestBatcherIsASource(t *testing.T) {
	b, err := serve.NewBatcher(serve.BatcherOptions{Devices: []cuda.Device{cuda.CPU},
		Input: tensor.Spec{DType: torch.Float32, Shape: []int64{1}},
		Model: func(cuda.Device) (serve.Run, error) {
			return func(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) { return []*torch.Tensor{x}, nil }, nil
		}})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close(t.Context())
	if _, err := b.Do(t.Context(), serve.Request{Row: serve.RowOf([]float32{1})}); err != nil {
		t.Fatal(err)
	}
	if err := testutil.CollectAndCompare(NewCollector(b, nil), strings.NewReader(`
# HELP torchstream_batcher_rows_total Rows of batches, without padding.
# TYPE torchstream_batcher_rows_total counter
torchstream_batcher_rows_total 1
`), "torchstream_batcher_rows_total"); err != nil {
		t.Error(err)
	}
}
