// Package prometheus exports a loader's statistics to Prometheus. It is a separate module, so that
// programs that do not use it do not depend on client_golang.
//
//	loader, err := imageloader.Open("train.tgz", imageloader.Options{...})
//	...
//	registry.MustRegister(prometheus.NewCollector(loader, client.Labels{"loader": "train"}))
package prometheus

import (
	client "github.com/prometheus/client_golang/prometheus"

	"github.com/torchstream/torchstream/imageloader"
)

// Source provides the statistics: an *imageloader.Loader.
type Source interface {
	Stats() imageloader.Stats
}

// Collector is a prometheus.Collector. It counts nothing itself: each scrape calls Stats of its
// source once. It is safe for concurrent use.
type Collector struct {
	source  Source
	metrics []metric
	bad     *client.Desc
	decoded *client.Desc
	stage   *client.Desc
}

type metric struct {
	desc  *client.Desc
	kind  client.ValueType
	value func(*imageloader.Stats) float64
}

// stages are the values of the label "stage" of torchstream_loader_bottleneck.
var stages = [...]imageloader.Stage{imageloader.Reading, imageloader.Inflating, imageloader.Decoding,
	imageloader.Consuming}

// NewCollector returns a collector for source. Every metric has the given labels. Collectors of
// several loaders in one registry need different labels.
func NewCollector(source Source, labels client.Labels) *Collector {
	desc := func(name, help string, variable ...string) *client.Desc {
		return client.NewDesc("torchstream_loader_"+name, help, variable, labels)
	}
	c := &Collector{
		source:  source,
		bad:     desc("bad_samples_total", "Bad samples met, once for each epoch that met them.", "reason"),
		decoded: desc("decoded_images_total", "Images by how they were decoded.", "path"),
		stage: desc("bottleneck",
			"1 for the stage that the others have waited for since the loader was opened, 0 for the others.", "stage"),
	}
	count := func(name, help string, value func(*imageloader.Stats) float64) {
		c.metrics = append(c.metrics, metric{desc(name, help), client.CounterValue, value})
	}
	gauge := func(name, help string, value func(*imageloader.Stats) float64) {
		c.metrics = append(c.metrics, metric{desc(name, help), client.GaugeValue, value})
	}
	count("samples_total", "Samples delivered.", func(s *imageloader.Stats) float64 { return float64(s.Samples) })
	count("batches_total", "Batches delivered.", func(s *imageloader.Stats) float64 { return float64(s.Batches) })
	count("decoded_bytes_total", "Compressed bytes of decoded images.",
		func(s *imageloader.Stats) float64 { return float64(s.Bytes) })
	count("warned_samples_total",
		"Damaged samples that were decoded all the same, once for each epoch that met the damage.",
		func(s *imageloader.Stats) float64 { return float64(s.Warned) })
	count("cropped_images_total", "Decoded images of which less than all was wanted.",
		func(s *imageloader.Stats) float64 { return float64(s.Cropped) })
	count("huffman_gave_up_total", "JPEGs that the own Huffman decoder handed on to libjpeg-turbo.",
		func(s *imageloader.Stats) float64 { return float64(s.GaveUp) })
	count("entry_points_made_total", "JPEGs whose entry points were noted.",
		func(s *imageloader.Stats) float64 { return float64(s.EntriesMade) })
	count("entry_points_refused_total", "JPEGs whose entry points were not those of their bytes.",
		func(s *imageloader.Stats) float64 { return float64(s.EntriesRefused) })
	count("elapsed_seconds_total", "Time in epochs.", func(s *imageloader.Stats) float64 { return s.Elapsed.Seconds() })
	count("read_seconds_total", "Time spent on waiting for the disk or the network.",
		func(s *imageloader.Stats) float64 { return s.Read.Seconds() })
	count("inflate_seconds_total", "Time spent on inflating.",
		func(s *imageloader.Stats) float64 { return s.Inflate.Seconds() })
	count("decode_seconds_total", "Time that all workers spent on decoding and transforms.",
		func(s *imageloader.Stats) float64 { return s.Decode.Seconds() })
	count("plan_seconds_total", "Time that all goroutines spent on planning what a device decodes.",
		func(s *imageloader.Stats) float64 { return s.Plan.Seconds() })
	count("wait_data_seconds_total", "Time that all workers waited for samples.",
		func(s *imageloader.Stats) float64 { return s.WaitData.Seconds() })
	count("wait_slot_seconds_total", "Time that samples waited for a free slot.",
		func(s *imageloader.Stats) float64 { return s.WaitSlot.Seconds() })
	count("consumer_wait_seconds_total", "Time that the loop over Epoch waited for a batch.",
		func(s *imageloader.Stats) float64 { return s.ConsumerWait.Seconds() })
	gauge("transcoded_bytes", "Memory of baseline copies of progressive JPEGs.",
		func(s *imageloader.Stats) float64 { return float64(s.TranscodedBytes) })
	gauge("orphan_images", "Images that are no samples, because they have no class or label.",
		func(s *imageloader.Stats) float64 { return float64(s.Orphans) })
	gauge("workers", "Workers that decode.", func(s *imageloader.Stats) float64 { return float64(s.Workers) })
	gauge("queue_samples", "Samples read and not yet taken by a worker.",
		func(s *imageloader.Stats) float64 { return float64(s.Queue) })
	gauge("queue_bytes", "Compressed bytes read and not yet decoded.",
		func(s *imageloader.Stats) float64 { return float64(s.QueueBytes) })
	return c
}

// Describe implements prometheus.Collector.
func (c *Collector) Describe(out chan<- *client.Desc) {
	for _, m := range c.metrics {
		out <- m.desc
	}
	out <- c.bad
	out <- c.decoded
	out <- c.stage
}

// Collect implements prometheus.Collector.
func (c *Collector) Collect(out chan<- client.Metric) {
	s := c.source.Stats()
	for _, m := range c.metrics {
		out <- client.MustNewConstMetric(m.desc, m.kind, m.value(&s))
	}
	for reason, n := range s.BadBy {
		out <- client.MustNewConstMetric(c.bad, client.CounterValue, float64(n), string(reason))
	}
	for path, n := range s.Decoded {
		out <- client.MustNewConstMetric(c.decoded, client.CounterValue, float64(n), string(path))
	}
	bottleneck, _ := s.Bottleneck()
	for _, stage := range stages {
		value := 0.0
		if stage == bottleneck {
			value = 1
		}
		out <- client.MustNewConstMetric(c.stage, client.GaugeValue, value, string(stage))
	}
}
