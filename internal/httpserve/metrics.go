package httpserve

import (
	"bufio"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"sync"

	"github.com/torchstream/torchstream/serve"
)

// Counts counts the responses of a handler by their status.
type Counts struct {
	mu     sync.Mutex
	byCode map[int]int64
}

// Handler returns a handler that counts the responses of another one.
func (c *Counts) Handler(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		code := &statusWriter{w, http.StatusOK}
		h.ServeHTTP(code, r)
		if r.Context().Err() != nil {
			code.status = 499 // the client closed the request: the usual number, which no client gets
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.byCode == nil {
			c.byCode = map[int]int64{}
		}
		c.byCode[code.status]++
	})
}

// statusWriter keeps the status of a response.
type statusWriter struct {
	http.ResponseWriter
	status int
}

func (w *statusWriter) WriteHeader(status int) {
	w.status = status
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap is for http.ResponseController.
func (w *statusWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// WriteMetrics writes the figures of a batcher, and the responses of counts if it is not nil, in
// the text format of Prometheus. Package serve/prometheus has the same names for the batcher's
// metrics; this module cannot import it.
func WriteMetrics(w io.Writer, s serve.BatcherStats, counts *Counts) error {
	m := metrics{bufio.NewWriter(w)}
	m.head("requests_total", "counter", "Requests by their result.")
	for _, r := range []struct {
		result string
		n      int64
	}{{"answered", s.Answered}, {"faulty", s.Faulty}, {"refused", s.Refused}, {"cancelled", s.Cancelled}, {"failed", s.Failed}} {
		m.value("requests_total", "result", r.result, float64(r.n))
	}
	m.head("batches_total", "counter", "Batches by the batch size with which the model ran.")
	for _, b := range s.Buckets {
		m.value("batches_total", "size", strconv.Itoa(b.Size), float64(b.Batches))
	}
	for _, c := range []struct {
		name, kind, help string
		n                int64
	}{
		{"waiting_requests", "gauge", "Requests that wait in the queue or are being decoded for it.", int64(s.Waiting)},
		{"running_requests", "gauge", "Requests in batches that run.", int64(s.Running)},
		{"rows_total", "counter", "Rows of batches, without padding.", s.Rows},
		{"padding_rows_total", "counter", "Rows that filled batches up to their size.", s.Padding},
		{"replays_total", "counter", "Batches that ran as a CUDA graph.", s.Replays},
		{"out_of_memory_total", "counter", "Batches that ran again in smaller ones for lack of memory.", s.OutOfMemory},
	} {
		m.head(c.name, c.kind, c.help)
		m.value(c.name, "", "", float64(c.n))
	}
	m.devices(s.Devices)
	m.histogram("waited_seconds", "Time from a request's start until a worker took it, decoding on the host included.", s.Waited)
	m.histogram("ran_seconds", "Time of a batch on its device, with its copies.", s.Ran)
	m.histogram("took_seconds", "Time of an answered request.", s.Took)
	if counts != nil {
		counts.write(m)
	}
	return m.Flush()
}

// devices writes the metrics of each device.
func (m metrics) devices(all []serve.DeviceStats) {
	m.head("max_batch_requests", "gauge", "Maximum number of requests in a batch, less after a lack of memory.")
	for i, d := range all {
		fmt.Fprintf(m, "%smax_batch_requests{device=%q,index=\"%d\"} %d\n", prefix, d.Device, i, d.MaxBatch)
	}
	m.head("device_lost", "gauge", "1 if the device has failed for good, otherwise 0.")
	for i, d := range all {
		lost := 0
		if d.Lost != nil {
			lost = 1
		}
		fmt.Fprintf(m, "%sdevice_lost{device=%q,index=\"%d\"} %d\n", prefix, d.Device, i, lost)
	}
}

func (c *Counts) write(m metrics) {
	c.mu.Lock()
	defer c.mu.Unlock()
	const name = "http_responses_total"
	m.head(name, "counter", "Responses by status; 499 if the client had gone.")
	for _, code := range slices.Sorted(maps.Keys(c.byCode)) {
		m.value(name, "code", strconv.Itoa(code), float64(c.byCode[code]))
	}
}

// metrics writes samples. Flush returns the first error.
type metrics struct{ *bufio.Writer }

const prefix = "torchstream_batcher_"

func (m metrics) head(name, kind, help string) {
	fmt.Fprintf(m, "# HELP %s%s %s\n# TYPE %[1]s%[2]s %[4]s\n", prefix, name, help, kind)
}

// value writes a sample with one label, or without one.
func (m metrics) value(name, label, of string, value float64) {
	if label != "" {
		label = fmt.Sprintf("{%s=%q}", label, of)
	}
	fmt.Fprintf(m, "%s%s%s %v\n", prefix, name, label, value)
}

// histogram writes a histogram of seconds.
func (m metrics) histogram(name, help string, l serve.Latencies) {
	m.head(name, "histogram", help)
	below := int64(0)
	for i, bound := range serve.LatencyBounds() {
		below += l.Counts[i]
		m.value(name+"_bucket", "le", fmt.Sprint(bound.Seconds()), float64(below))
	}
	m.value(name+"_bucket", "le", "+Inf", float64(l.Count))
	m.value(name+"_sum", "", "", l.Sum.Seconds())
	m.value(name+"_count", "", "", float64(l.Count))
}
