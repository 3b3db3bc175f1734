package imageloader

import (
	"cmp"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/count"
	"github.com/torchstream/torchstream/imageloader/internal/epoch"
)

// Stats holds the counts and times of a Loader since Open, over all epochs. Counting is always on,
// and costs a few clock readings for each sample. Times are sums over goroutines: the workers were
// busy for Decode / (Workers * Elapsed) of the time. Stats is a slog.LogValuer, and marshals to
// JSON with times in seconds.
type Stats struct {
	Samples  int64            // delivered samples
	Batches  int64            // delivered batches
	Bytes    int64            // compressed bytes of decoded images
	Bad      int64            // bad samples, each counted in every epoch that met it
	BadBy    map[Reason]int64 // bad samples by reason
	BadNamed []*SampleError   // the first 100 different bad samples, in order of occurrence; the log names all
	// Warned counts damaged images that were decoded, once for each epoch that met the damage: see
	// Options.Damaged. They are good samples, so Bad does not count them.
	Warned      int64
	WarnedNamed []*SampleError // the first 100 different ones, in order of occurrence; the log names all
	Ignored     int            // members of the archive that are not samples: not images, or not in a class's directory
	// Orphans counts the images among Ignored: images outside of any directory; with WebDataset,
	// images without a label; with a List, images that are not listed.
	Orphans int

	Workers    int   // Options.Workers
	Queue      int   // samples that have been read but not yet taken by a worker
	QueueBytes int64 // compressed bytes that have been read but not yet decoded, without shuffle buffers

	Decoded        map[DecodePath]int64 // images by decode path, including damaged images
	Cropped        int64                // images of which only a crop was needed
	GaveUp         int64                // JPEGs that our Huffman decoder left to libjpeg-turbo: damaged or unusual
	EntriesMade    int64                // JPEGs whose entry points were recorded
	EntriesRefused int64                // JPEGs whose entry points did not match their bytes, and were not used
	// TranscodedBytes is the current memory of baseline copies of progressive JPEGs: see
	// Options.MaxTranscodedBytes.
	TranscodedBytes int64

	Elapsed time.Duration // time that epochs ran; concurrent epochs count separately
	Read    time.Duration // waiting for the disk or the network
	Inflate time.Duration // inflating, including the checksums and headers of a compressed archive
	// Decode is the time of the workers for header, decode, crop, resize, and the operations of the
	// transform. For images of a stream that the prefetcher's device decodes, it is the time to
	// plan that work.
	Decode time.Duration
	// Plan is the time to plan what the prefetcher's device decodes, if the archive has random
	// access. Other goroutines than the workers plan: Options.Workers of them, and at least four.
	Plan time.Duration

	// time that workers, or planning goroutines, wait for samples: high if reading or the consumer
	// is the bottleneck
	WaitData time.Duration
	// time that samples wait for a free slot: high if the consumer is the bottleneck, as it should
	// be
	WaitSlot     time.Duration
	ConsumerWait time.Duration // time that the loop over Epoch waits for a batch; a prefetcher has a separate count
}

// DecodePath is a way to decode an image. All paths give the same pixels.
type DecodePath = count.DecodePath

// The paths. Formats other than JPEG have one each.
const (
	ByEntryPoints = count.ByEntryPoints // JPEG: only the part that the crop needs
	ByPlan        = count.ByPlan        // JPEG: decoded by the prefetcher's device
	ByHuffman     = count.ByHuffman     // JPEG: coefficients by our Huffman decoder, pixels by libjpeg-turbo
	ByLibJPEG     = count.ByLibJPEG     // JPEG: libjpeg-turbo only: progressive, CMYK, ...
	ByPNG         = count.ByPNG
	ByWebP        = count.ByWebP
	ByLibHEIF     = count.ByLibHEIF // AVIF or HEIC
	ByGo          = count.ByGo      // GIF, BMP or TIFF, by Go code
)

// Since returns the counts and times since an earlier Stats of the same loader. Gauges (Workers,
// Queue, QueueBytes, Ignored, Orphans, TranscodedBytes), BadNamed and WarnedNamed are not
// differences: they keep their present values.
func (s Stats) Since(before Stats) Stats {
	s.Samples -= before.Samples
	s.Batches -= before.Batches
	s.Bytes -= before.Bytes
	s.Bad -= before.Bad
	s.Warned -= before.Warned
	s.BadBy = maps.Clone(s.BadBy)
	for r, n := range before.BadBy {
		if s.BadBy[r] -= n; s.BadBy[r] == 0 {
			delete(s.BadBy, r)
		}
	}
	s.Decoded = maps.Clone(s.Decoded)
	for p, n := range before.Decoded {
		if s.Decoded[p] -= n; s.Decoded[p] == 0 {
			delete(s.Decoded, p)
		}
	}
	s.Cropped -= before.Cropped
	s.GaveUp -= before.GaveUp
	s.EntriesMade -= before.EntriesMade
	s.EntriesRefused -= before.EntriesRefused
	s.Elapsed -= before.Elapsed
	s.Read -= before.Read
	s.Inflate -= before.Inflate
	s.Decode -= before.Decode
	s.Plan -= before.Plan
	s.WaitData -= before.WaitData
	s.WaitSlot -= before.WaitSlot
	s.ConsumerWait -= before.ConsumerWait
	return s
}

// Stage is a stage between the archive and the consumer.
type Stage string

// The stages. Stats.Bottleneck returns the stage that the other stages wait for.
const (
	Reading   Stage = "reading"
	Inflating Stage = "inflating"
	Decoding  Stage = "decoding"
	Consuming Stage = "consuming"
)

// Bottleneck returns the stage that the other stages wait for, and a sentence with advice about it.
// The stage is "" while there are too few batches to tell. It is also "" if the workers wait, but
// no stage accounts for their waiting time. Over a loader's whole life the answer is an average:
// use Since to measure, for example, only the last minute.
func (s Stats) Bottleneck() (Stage, string) {
	workers := float64(s.Workers) * s.Elapsed.Seconds()
	if s.Batches < 2 || workers <= 0 {
		return "", "too few batches to say what the bottleneck is"
	}
	busy, idle, slot := s.Decode.Seconds()/workers, s.WaitData.Seconds()/workers, s.WaitSlot.Seconds()/s.Elapsed.Seconds()
	planners := epoch.Fetchers(s.Workers)
	planning := s.Plan.Seconds() / (float64(planners) * s.Elapsed.Seconds())
	switch {
	case planning >= 0.75 && planning > busy:
		return Decoding, fmt.Sprintf("planning for the device that decodes is the bottleneck: %d goroutines are "+
			"busy %.0f %% of the time: give the process more CPUs (GOMAXPROCS, the cgroup's quota, "+
			"Options.Workers)", planners, 100*planning)
	case busy >= 0.75:
		return Decoding, fmt.Sprintf("decoding is the bottleneck: the %d workers are busy %.0f %% of the "+
			"time: give the process more CPUs (GOMAXPROCS, the cgroup's quota, "+
			"Options.Workers), or store smaller images", s.Workers, 100*busy)
	case slot > idle/2:
		return Consuming, fmt.Sprintf("the consumer is the bottleneck, as it should be: samples wait for "+
			"a free slot %.0f %% of the time, and the workers are busy %.0f %%",
			100*slot, 100*busy)
	case (s.Read+s.Inflate).Seconds()/s.Elapsed.Seconds() < idle/2:
		return "", fmt.Sprintf("no stage is the bottleneck: the %d workers wait for samples %.0f %% of the "+
			"time, and reading and inflating take %.0f %% of it: measure longer epochs, on CPUs that "+
			"nothing else uses", s.Workers, 100*idle, 100*(s.Read+s.Inflate).Seconds()/s.Elapsed.Seconds())
	}
	if s.Inflate > s.Read {
		return Inflating, fmt.Sprintf("inflating is the bottleneck: the %d workers wait for samples %.0f "+
			"%% of the time: repack the archive as a plain .tar, "+
			"or, if it is a .tar.gz, make an index, so that several goroutines inflate it, "+
			"or let it stay in memory (Options.ShuffleBytes)", s.Workers, 100*idle)
	}
	return Reading, fmt.Sprintf("reading is the bottleneck: the %d workers wait for samples %.0f %% of "+
		"the time: keep the archive on a faster disk or nearer, in several shards, "+
		"or let it stay in memory (Options.ShuffleBytes)", s.Workers, 100*idle)
}

// LogValue returns one group of all fields, for slog. It omits BadNamed and WarnedNamed, because
// each of their samples has a separate log line.
func (s Stats) LogValue() slog.Value {
	stage, advice := s.Bottleneck()
	attrs := []slog.Attr{
		slog.Int64("samples", s.Samples), slog.Int64("batches", s.Batches), slog.Int64("bytes", s.Bytes),
		slog.Int64("bad", s.Bad), slog.Int64("warned", s.Warned),
		slog.Int("queue", s.Queue), slog.Int64("queue_bytes", s.QueueBytes), slog.Int("workers", s.Workers),
		slog.Int("ignored", s.Ignored), slog.Int("orphans", s.Orphans),
		slog.Duration("elapsed", s.Elapsed), slog.Duration("read", s.Read),
		slog.Duration("inflate", s.Inflate), slog.Duration("decode", s.Decode), slog.Duration("plan", s.Plan),
		slog.Duration("wait_data", s.WaitData), slog.Duration("wait_slot", s.WaitSlot),
		slog.Duration("consumer_wait", s.ConsumerWait),
		slog.Int64("cropped", s.Cropped), slog.Int64("gave_up", s.GaveUp),
		slog.Int64("entries_made", s.EntriesMade), slog.Int64("entries_refused", s.EntriesRefused),
		slog.Int64("transcoded_bytes", s.TranscodedBytes),
		slog.String("bottleneck", string(stage)), slog.String("advice", advice),
	}
	for _, p := range count.Paths {
		if n := s.Decoded[p]; n > 0 {
			attrs = append(attrs, slog.Int64("decoded "+string(p), n))
		}
	}
	for _, r := range slices.SortedFunc(maps.Keys(s.BadBy), cmp.Compare) {
		attrs = append(attrs, slog.Int64("bad "+string(r), s.BadBy[r]))
	}
	return slog.GroupValue(attrs...)
}

// MarshalJSON writes the form that Var publishes, with times in seconds.
func (s Stats) MarshalJSON() ([]byte, error) {
	stage, advice := s.Bottleneck()
	named := func(errors []*SampleError) []string {
		list := make([]string, len(errors))
		for i, e := range errors {
			list[i] = e.Error()
		}
		return list
	}
	return json.Marshal(struct {
		Samples      int64                `json:"samples"`
		Batches      int64                `json:"batches"`
		Bytes        int64                `json:"bytes"`
		Bad          int64                `json:"bad"`
		BadBy        map[Reason]int64     `json:"bad_by"`
		BadNamed     []string             `json:"bad_named"`
		Warned       int64                `json:"warned"`
		WarnedNamed  []string             `json:"warned_named"`
		Ignored      int                  `json:"ignored"`
		Orphans      int                  `json:"orphans"`
		Decoded      map[DecodePath]int64 `json:"decoded_by"`
		Cropped      int64                `json:"cropped"`
		GaveUp       int64                `json:"gave_up"`
		Made         int64                `json:"entries_made"`
		Refused      int64                `json:"entries_refused"`
		Transcoded   int64                `json:"transcoded_bytes"`
		Workers      int                  `json:"workers"`
		Queue        int                  `json:"queue"`
		QueueBytes   int64                `json:"queue_bytes"`
		Elapsed      float64              `json:"elapsed_seconds"`
		Read         float64              `json:"read_seconds"`
		Inflate      float64              `json:"inflate_seconds"`
		Decode       float64              `json:"decode_seconds"`
		Plan         float64              `json:"plan_seconds"`
		WaitData     float64              `json:"wait_data_seconds"`
		WaitSlot     float64              `json:"wait_slot_seconds"`
		ConsumerWait float64              `json:"consumer_wait_seconds"`
		Bottleneck   Stage                `json:"bottleneck"`
		Advice       string               `json:"advice"`
	}{s.Samples, s.Batches, s.Bytes, s.Bad, s.BadBy, named(s.BadNamed), s.Warned, named(s.WarnedNamed),
		s.Ignored, s.Orphans, s.Decoded, s.Cropped, s.GaveUp, s.EntriesMade, s.EntriesRefused,
		s.TranscodedBytes, s.Workers, s.Queue, s.QueueBytes,
		s.Elapsed.Seconds(), s.Read.Seconds(), s.Inflate.Seconds(), s.Decode.Seconds(), s.Plan.Seconds(),
		s.WaitData.Seconds(), s.WaitSlot.Seconds(), s.ConsumerWait.Seconds(), stage, advice})
}

// Stats may be called at any time, also while an epoch runs.
func (l *Loader) Stats() Stats {
	c := &l.counters
	duration := func(ns *atomic.Int64) time.Duration { return time.Duration(ns.Load()) }
	p, d, t := c.Problems(), &c.Decoded, &c.Times
	s := Stats{
		Samples: c.Delivered.Samples.Load(), Batches: c.Delivered.Batches.Load(), Bytes: d.Bytes.Load(),
		Bad: p.Bad, BadBy: p.BadBy, BadNamed: p.BadNamed, Warned: p.Warned, WarnedNamed: p.WarnedNamed,
		Workers: l.o.Workers, Queue: int(c.Queue.Samples.Load()), QueueBytes: c.Queue.Bytes.Load(),
		Decoded: d.Paths(), Cropped: d.Cropped.Load(), GaveUp: d.GaveUp.Load(),
		EntriesMade: d.EntriesMade.Load(), EntriesRefused: d.EntriesRefused.Load(),
		Elapsed: c.Elapsed(), Read: duration(&t.Read), Inflate: duration(&t.Inflate), Decode: duration(&t.Decode),
		Plan:     duration(&t.Plan),
		WaitData: duration(&t.WaitData), WaitSlot: duration(&t.WaitSlot), ConsumerWait: duration(&t.ConsumerWait),
	}
	if p := l.points.Load(); p != nil {
		s.TranscodedBytes = p.CopyBytes()
	}
	if x := l.index.Load(); x != nil {
		s.Ignored, s.Orphans = x.Ignored(), x.Orphans()
	}
	return s
}

// Var returns the loader's Stats as an expvar.Var. The program publishes it under any name:
// expvar.Publish("train", loader.Var()).
func (l *Loader) Var() fmt.Stringer { return statsVar{l} }

type statsVar struct{ l *Loader }

func (v statsVar) String() string {
	data, err := json.Marshal(v.l.Stats())
	if err != nil { // numbers and strings only
		return "null"
	}
	return string(data)
}
