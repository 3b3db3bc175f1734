// Package prometheus exports the statistics of a serve.Batcher to Prometheus. It is a separate
// module, so that programs that do not use it do not depend on client_golang.
//
//	b, err := serve.NewBatcher(serve.BatcherOptions{...})
//	...
//	registry.MustRegister(prometheus.NewCollector(b, client.Labels{"model": "resnet50"}))
package prometheus

import (
	"strconv"

	client "github.com/prometheus/client_golang/prometheus"

	"github.com/torchstream/torchstream/serve"
)

// Source provides the statistics: a *serve.Batcher.
type Source interface {
	Stats() serve.BatcherStats
}

// Collector is a prometheus.Collector. It counts nothing itself: each scrape calls Stats of its
// source once. It is safe for concurrent use.
type Collector struct {
	source     Source
	metrics    []metric
	histograms []histogram
	requests   *client.Desc
	batches    *client.Desc
	maxBatch   *client.Desc
	lost       *client.Desc
}

type metric struct {
	desc  *client.Desc
	kind  client.ValueType
	value func(*serve.BatcherStats) float64
}

type histogram struct {
	desc  *client.Desc
	value func(*serve.BatcherStats) serve.Latencies
}

// NewCollector returns a collector for source. Every metric has the given labels. Collectors of
// several batchers in one registry need different labels.
func NewCollector(source Source, labels client.Labels) *Collector {
	desc := func(name, help string, variable ...string) *client.Desc {
		return client.NewDesc("torchstream_batcher_"+name, help, variable, labels)
	}
	c := &Collector{
		source:   source,
		requests: desc("requests_total", "Requests by their result.", "result"),
		batches:  desc("batches_total", "Batches by the batch size with which the model ran.", "size"),
		maxBatch: desc("max_batch_requests", "Maximum number of requests in a batch, less after a lack of memory.",
			"index", "device"),
		lost: desc("device_lost", "1 if the device has failed for good, otherwise 0.", "index", "device"),
	}
	count := func(name, help string, value func(*serve.BatcherStats) int64) {
		c.metrics = append(c.metrics, metric{desc(name, help), client.CounterValue,
			func(s *serve.BatcherStats) float64 { return float64(value(s)) }})
	}
	gauge := func(name, help string, value func(*serve.BatcherStats) int) {
		c.metrics = append(c.metrics, metric{desc(name, help), client.GaugeValue,
			func(s *serve.BatcherStats) float64 { return float64(value(s)) }})
	}
	gauge("waiting_requests", "Requests that wait in the queue or are being decoded for it.",
		func(s *serve.BatcherStats) int { return s.Waiting })
	gauge("running_requests", "Requests in batches that run.", func(s *serve.BatcherStats) int { return s.Running })
	count("rows_total", "Rows of batches, without padding.", func(s *serve.BatcherStats) int64 { return s.Rows })
	count("padding_rows_total", "Rows that filled batches up to their size.",
		func(s *serve.BatcherStats) int64 { return s.Padding })
	count("replays_total", "Batches that ran as a CUDA graph.", func(s *serve.BatcherStats) int64 { return s.Replays })
	count("out_of_memory_total", "Batches that ran again in smaller ones for lack of memory.",
		func(s *serve.BatcherStats) int64 { return s.OutOfMemory })
	seconds := func(name, help string, value func(*serve.BatcherStats) serve.Latencies) {
		c.histograms = append(c.histograms, histogram{desc(name, help), value})
	}
	seconds("waited_seconds", "Time from a request's start until a worker took it, decoding on the host included.",
		func(s *serve.BatcherStats) serve.Latencies { return s.Waited })
	seconds("ran_seconds", "Time of a batch on its device, with its copies.",
		func(s *serve.BatcherStats) serve.Latencies { return s.Ran })
	seconds("took_seconds", "Time of an answered request.",
		func(s *serve.BatcherStats) serve.Latencies { return s.Took })
	return c
}

// Describe implements prometheus.Collector.
func (c *Collector) Describe(out chan<- *client.Desc) {
	for _, m := range c.metrics {
		out <- m.desc
	}
	for _, h := range c.histograms {
		out <- h.desc
	}
	out <- c.requests
	out <- c.batches
	out <- c.maxBatch
	out <- c.lost
}

// Collect implements prometheus.Collector.
func (c *Collector) Collect(out chan<- client.Metric) {
	s := c.source.Stats()
	for _, m := range c.metrics {
		out <- client.MustNewConstMetric(m.desc, m.kind, m.value(&s))
	}
	for _, h := range c.histograms {
		l := h.value(&s)
		buckets, below := map[float64]uint64{}, uint64(0)
		for i, bound := range serve.LatencyBounds() {
			below += uint64(l.Counts[i])
			buckets[bound.Seconds()] = below
		}
		out <- client.MustNewConstHistogram(h.desc, uint64(l.Count), l.Sum.Seconds(), buckets)
	}
	for result, n := range map[string]int64{"answered": s.Answered, "faulty": s.Faulty, "refused": s.Refused,
		"cancelled": s.Cancelled, "failed": s.Failed} {
		out <- client.MustNewConstMetric(c.requests, client.CounterValue, float64(n), result)
	}
	for _, b := range s.Buckets {
		out <- client.MustNewConstMetric(c.batches, client.CounterValue, float64(b.Batches), strconv.Itoa(b.Size))
	}
	for i, d := range s.Devices {
		lost := 0.0
		if d.Lost != nil {
			lost = 1
		}
		index, device := strconv.Itoa(i), d.Device.String()
		out <- client.MustNewConstMetric(c.maxBatch, client.GaugeValue, float64(d.MaxBatch), index, device)
		out <- client.MustNewConstMetric(c.lost, client.GaugeValue, lost, index, device)
	}
}
