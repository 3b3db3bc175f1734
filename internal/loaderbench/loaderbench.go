// Package loaderbench measures how fast a loader turns an archive into batches, on the host or on a
// device, and where the time is spent.
package loaderbench

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/internal/resident"
	"github.com/torchstream/torchstream/internal/safefile"
	"github.com/torchstream/torchstream/internal/system"
	"github.com/torchstream/torchstream/tensor"
)

// Result holds the results of a measurement. All fields except OpenSeconds, FirstBatchSeconds and
// PeakRSSBytes describe the time after the first batch.
type Result struct {
	ImagesPerSecond   float64 `json:"images_per_second"`
	CPUSecondsPer1000 float64 `json:"cpu_seconds_per_1000_images"`
	PeakRSSBytes      int64   `json:"peak_rss_bytes"`
	Workers           int     `json:"workers"`
	Batch             int     `json:"batch"`
	BadSamples        int64   `json:"bad_samples"` // each counts once for each epoch
	Size              int     `json:"size"`
	MemoryMB          int64   `json:"memory_mb"`
	Contract          string  `json:"contract"`
	Device            string  `json:"device"`
	Images            int64   `json:"images"`
	Epochs            int     `json:"epochs"` // started
	Seconds           float64 `json:"seconds"`
	OpenSeconds       float64 `json:"open_seconds"`
	FirstBatchSeconds float64 `json:"first_batch_seconds"`
	// share of the workers' time: near 1, reading the archive is the bottleneck
	WorkersWaitedForData float64           `json:"workers_waited_for_data"`
	Cores                int               `json:"cores"`
	Bottleneck           imageloader.Stage `json:"bottleneck"`
	Advice               string            `json:"advice"`
	// host time for queueing the finish on a GPU, or for running it on the CPU
	FinishSeconds    float64 `json:"finish_seconds"`
	HostCores        float64 `json:"host_cores"` // CPU seconds per second
	Decode           string  `json:"decode,omitempty"`
	BusBytesPerImage float64 `json:"bus_bytes_per_image,omitempty"` // bytes copied to the GPU
	// maximum number of multiprocessors for decoding; 0: all
	DecodeSMs       int   `json:"decode_sms,omitempty"`
	DecodedOnDevice int64 `json:"decoded_on_device,omitempty"` // images passed to the GPU
	// images in DecodedOnDevice that the host decoded again
	DecodedAgain int64 `json:"decoded_again,omitempty"`
	// images in a .tgz that were passed to the GPU compressed
	InflatedOnDevice int64 `json:"inflated_on_device,omitempty"`
	// images whose compressed bytes the GPU has read from the mapping of the archive
	MappedOnDevice int64             `json:"mapped_on_device,omitempty"`
	DecoderBytes   int64             `json:"decoder_bytes,omitempty"` // device memory of the decoders
	Threads        []threadsRow      `json:"threads"`                 // breakdown of HostCores
	Stats          imageloader.Stats `json:"stats"`
	RSSAfterEpoch  []int64           `json:"rss_bytes_after_epoch,omitempty"` // with -epochs
	Kernels        *KernelTimes      `json:"kernels,omitempty"`               // with -device cuda
}

// contracts are the ways to convert an image, by the value of -contract.
var contracts = map[string]struct {
	transform func(size int) imageloader.Transform
	says      string
	floats    bool // the finish normalises
}{
	"train":          {imageloader.Train, "RandomResizedCrop(%d) antialiased + flip, uint8", false},
	"train-float":    {floats, "RandomResizedCrop(%d) antialiased + flip, normalised float32 NCHW", true},
	"train-bfloat16": {halves, "RandomResizedCrop(%d) antialiased + flip, normalised bfloat16 channels_last", true},
	"eval": {func(size int) imageloader.Transform { return imageloader.Transform{Size: size} },
		"Resize and CenterCrop(%d) antialiased, uint8", false},
}

func floats(size int) imageloader.Transform {
	t := imageloader.Train(size)
	t.Contiguous = true
	return t
}

func halves(size int) imageloader.Transform {
	t := imageloader.Train(size)
	t.DType = tensor.BFloat16
	return t
}

// contractTransform parses -contract. It returns the transform, a description, and whether its
// results are normalised.
func contractTransform(contract string, size int) (t imageloader.Transform, says string, floats bool, err error) {
	kind, known := contracts[contract]
	if !known {
		return t, "", false, cli.Usagef("there is no contract %q: %s are known", contract,
			strings.Join(slices.Sorted(maps.Keys(contracts)), ", "))
	}
	t, says = kind.transform(size), fmt.Sprintf(kind.says, size)
	return t, says, kind.floats, nil
}

// Options are the options of a command that measures a loader.
type Options struct {
	Archive, Contract    string
	Images               cli.Images
	Batch, Workers, Size int
	Seconds              float64
	Outputs              string // file for the pixels of the first images; empty: measure instead
	JSON                 bool

	name                 string // name of the command
	memoryMB             int64
	device, decode       string
	multiprocessors      int
	trustIndex, noIndex  bool
	warm, repeat, epochs int
	images               int
	profile              string
}

// Flags returns the flag set of a command that measures a loader, and the options that it sets.
// line and about are the arguments of [cli.Flags].
func Flags(line, about string, stderr io.Writer) (*flag.FlagSet, *Options) {
	set, o := cli.Flags(line, about, stderr), &Options{}
	o.name = set.Name()
	set.StringVar(&o.Archive, "archive", "", cli.ArchiveHelp)
	set.IntVar(&o.Batch, "batch", 64, "images per batch")
	set.IntVar(&o.Workers, "workers", 0, "goroutines that decode (default: the CPUs that there are)")
	set.IntVar(&o.Size, "size", 224, "pixels of a result's side")
	set.Int64Var(&o.memoryMB, "memory", 256, "`MB` of compressed images: a .tgz that fits in is read "+
		"once, a larger one is inflated and shuffled anew every epoch")
	set.StringVar(&o.Contract, "contract", "train", "what an image becomes: train (random crop and flip, "+
		"bytes), train-float (the same, normalised float32), train-bfloat16 (bfloat16, channels last) or "+
		"eval (resize and centre crop, bytes)")
	o.Images.Register(set, cli.LabelOptions|cli.MultiLabelOptions|cli.UprightOption|cli.AugmentOptions)
	set.StringVar(&o.device, "device", "", "where the batches are wanted, normalised: cpu, cuda, cuda:1, "+
		"... (default: host memory, as bytes; for train-float cpu)")
	set.StringVar(&o.decode, "decode", "host",
		"where images are decoded: host, device, or auto, which is the device if it can")
	set.IntVar(&o.multiprocessors, "decode-sms", 0, cli.DecodeSMsHelp)
	set.BoolVar(&o.trustIndex, "trust-index", false,
		"do not compare the index's entry points with the images: the GPU does not search for them in the first epoch")
	set.IntVar(&o.warm, "warm", 0, "number of epochs before the clock starts; the first one makes entry points (default 0)")
	set.IntVar(&o.repeat, "repeat", 1, "number of passes over the archive in an epoch")
	set.BoolVar(&o.noIndex, "no-index", false,
		"neither read nor write the archive's index; with -epochs 1 only a first pass is measured, which makes entry points")
	set.Float64Var(&o.Seconds, "seconds", 10, "how long to measure")
	set.IntVar(&o.epochs, "epochs", 0,
		"number of whole epochs to measure, with the size of the process after each (default: -seconds decides)")
	set.StringVar(&o.Outputs, "outputs", "", "measure nothing; write the pixels of the first -images "+
		"images, by name, to this `FILE`: bytes [images, size, size, 3] (not for train-float and train-bfloat16)")
	set.IntVar(&o.images, "images", 64, "number of images of -outputs")
	set.StringVar(&o.profile, "cpuprofile", "",
		"write a profile of the CPU time that is measured to this `FILE`, for go tool pprof")
	set.BoolVar(&o.JSON, "json", false, "print one JSON object")
	return set, o
}

// Measurement checks the options and returns the measurement. With [Options.Outputs] it returns the
// argument for WriteOutputs.
func (o *Options) Measurement() (*Measurement, error) {
	t, says, floats, err := contractTransform(o.Contract, o.Size)
	switch {
	case o.Archive == "":
		return nil, cli.Usagef("%s needs -archive FILE", o.name)
	case o.Batch < 1 || o.Workers < 0 || o.memoryMB < 1 || o.Seconds <= 0 || o.epochs < 0 || o.warm < 0 || o.repeat < 1:
		return nil, cli.Usagef("-batch, -memory, -seconds and -repeat are more than 0, -workers, -epochs " +
			"and -warm at least 0")
	case err != nil:
		return nil, err
	case o.device == "" && o.decode != "host":
		return nil, cli.Usagef("-decode %s needs -device", o.decode)
	case floats && o.device == "":
		o.device = "cpu"
	}
	m := &Measurement{archive: o.Archive, length: time.Duration(o.Seconds * float64(time.Second)),
		epochs: o.epochs, warm: o.warm, profile: o.profile}
	m.o = imageloader.Options{BatchSize: o.Batch, Workers: o.Workers, Transform: t, NoIndex: o.noIndex}
	settings, err := o.setImages(&m.o)
	if err != nil {
		return nil, err
	}
	if o.Outputs != "" {
		if floats || o.images < 1 {
			return nil, cli.Usagef("-outputs is for the contracts of bytes, and -images at least 1")
		}
		return m, nil
	}
	if m.target, err = pickTarget(o.device, o.decode, o.multiprocessors); err != nil {
		return nil, err
	}
	m.o.Shuffle, m.o.ShuffleBytes, m.o.Seed, m.o.BadSamples = true, o.memoryMB<<20, 1, imageloader.Skip
	m.o.TrustIndex, m.o.Repeat = o.trustIndex, o.repeat
	m.Result.Contract, m.Result.Device = says+settings, "host memory"
	if m.target != nil {
		m.Result.Device, m.Result.Decode = m.target.String(), o.decode
	}
	return m, nil
}

// setImages checks the options about images and sets them for a loader. It returns a description
// of those that are set, for the result's contract.
func (o *Options) setImages(options *imageloader.Options) (says string, err error) {
	if err := cmp.Or(cli.CheckSize(o.Size, 1), o.Images.Check(), o.Images.Set(options)); err != nil {
		return "", err
	}
	settings := o.Images.Settings()
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		if name != "policy" { // the name of a policy is clear without the word
			says += ", " + name
		} else {
			says += ","
		}
		says += " " + settings[name]
	}
	return says, nil
}

// WriteOutputs writes the pixels of the first images to the file [Options.Outputs], and their
// number to stdout. m is the result of o.Measurement.
func (o *Options) WriteOutputs(ctx context.Context, m *Measurement, stdout io.Writer) error {
	n, err := writeOutputs(ctx, o.Outputs, o.Archive, o.images, m.o)
	if err != nil {
		return err
	}
	return cli.WriteJSON(stdout, map[string]int{"images": n})
}

// DType returns the name of the dtype of the contract's results. It is "uint8" unless the finish
// normalises.
func (o *Options) DType() string {
	switch kind := contracts[o.Contract]; {
	case !kind.floats:
		return "uint8"
	case kind.transform(1).DType == tensor.BFloat16:
		return "bfloat16"
	}
	return "float32"
}

// Print prints the result as text.
func (result *Result) Print(stdout io.Writer) error {
	s := result.Stats
	if result.DecodedOnDevice > 0 {
		if _, err := fmt.Fprintf(stdout, "%d of %d images decoded on %s, %d of them inflated there, %d "+
			"read from the archive's mapping, %d again on the host; %.0f bytes an image on the bus, %.1f host cores\n",
			result.DecodedOnDevice, result.Images, result.Device, result.InflatedOnDevice, result.MappedOnDevice,
			result.DecodedAgain, result.BusBytesPerImage, result.HostCores); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(stdout, "%.0f images/s, %.2f CPU seconds per 1,000 images, %.0f MB peak "+
		"memory\n%s on %s, batches of %d, %d x %d pixels, in %s; %s\n"+
		"busy of %.1f s: reading %.1f s, inflating %.1f s, decoding %.1f s on %s, finish %.1f s; "+
		"waiting: workers for samples %.1f s, samples for a slot %.1f s\n%s\n",
		result.ImagesPerSecond, result.CPUSecondsPer1000, float64(result.PeakRSSBytes)/1e6,
		printable.Counted(result.Workers, "worker", "workers"),
		printable.Counted(result.Cores, "core", "cores"), result.Batch, result.Size, result.Size, result.Device,
		printable.Counted(result.BadSamples, "bad sample", "bad samples"), s.Elapsed.Seconds(),
		s.Read.Seconds(), s.Inflate.Seconds(), s.Decode.Seconds(),
		printable.Counted(s.Workers, "worker", "workers"), result.FinishSeconds, s.WaitData.Seconds(),
		s.WaitSlot.Seconds(), result.Advice)
	for i, rss := range result.RSSAfterEpoch {
		if err == nil {
			_, err = fmt.Fprintf(stdout, "after epoch %d: %.1f MB\n", i, float64(rss)/1e6)
		}
	}
	return errors.Join(err, result.Kernels.print(stdout))
}

// writeOutputs writes the pixels of the first n samples by name, and returns their number.
func writeOutputs(ctx context.Context, path, archive string, n int, o imageloader.Options) (int, error) {
	if err := safefile.CheckWrite(path, safefile.Raw); err != nil {
		return 0, err
	}
	loader, err := imageloader.OpenContext(ctx, archive, o)
	if err != nil {
		return 0, err
	}
	defer loader.Close()
	type output struct {
		name   string
		pixels []byte
	}
	var first []output
	for batch, err := range loader.Epoch(ctx, 0) {
		if err != nil {
			return 0, err
		}
		size := len(batch.Images) / batch.N
		for i, s := range batch.Samples {
			at, _ := slices.BinarySearchFunc(first, s.Name,
				func(o output, name string) int { return strings.Compare(o.name, name) })
			if at < n {
				first = slices.Insert(first, at, output{s.Name, slices.Clone(batch.Images[i*size : (i+1)*size])})
				first = first[:min(n, len(first))]
			}
		}
	}
	file, err := safefile.Create(path, safefile.Raw)
	if err != nil {
		return 0, err
	}
	for _, o := range first {
		if _, err = file.Write(o.pixels); err != nil {
			break
		}
	}
	return len(first), errors.Join(err, file.Close())
}

// target is a device that batches are copied to.
type target interface {
	fmt.Stringer
	feed(*imageloader.Loader) (feeder, error)
}

// feeder copies a loader's batches to a device.
type feeder interface {
	// epoch calls count with the size n of each batch, until count returns false or an error.
	epoch(ctx context.Context, epoch int, count func(n int) (more bool, err error)) error
	// stats returns the figures since the feeder started.
	stats() deviceStats
	Close() error
}

// deviceStats are the statistics of a feeder.
type deviceStats struct {
	finish                                                       time.Duration // host time
	bytes, decoded, decodedAgain, inflated, mapped, decoderBytes int64
	multiprocessors                                              int // maximum number for decoding; 0: all
}

// Measurement is one run of a loader.
type Measurement struct {
	archive string
	length  time.Duration
	epochs  int // 0: run for length
	warm    int // epochs before the clock starts
	o       imageloader.Options
	target  target // nil: host memory
	profile string // file for a profile of the CPU time; empty: none
	// Another goroutine uses these while the measurement runs in the background.
	started chan struct{} // closed when the clock starts; nil if nobody waits
	seen    atomic.Int64  // images since then
	stopped atomic.Bool   // stops the run
	// record, if not nil, starts a recording when the clock starts. The run then ends after length,
	// even if epochs is set.
	record func() error

	// Result is complete after Run, except for Kernels, which RecordKernels adds.
	Result Result
	warmed int // number of warm-up epochs so far
	first  bool
	begin  time.Time
	cpu    time.Duration
	tasks  map[int]threadTime
	cpuOut *os.File          // the file m.profile
	stats  imageloader.Stats // when the clock started
	device deviceStats       // when the clock started
}

// Run measures. It prints the archive's numbers of samples and classes to stderr.
func (m *Measurement) Run(ctx context.Context, stderr io.Writer) error {
	r := &m.Result
	r.Batch, r.Size, r.MemoryMB, r.Cores = m.o.BatchSize, m.o.Transform.Size, m.o.ShuffleBytes>>20, runtime.GOMAXPROCS(0)
	if err := m.openProfile(); err != nil {
		return err
	}
	defer m.cpuOut.Close() // endProfile closes it, unless an error occurs before
	m.begin = time.Now()
	var read func()
	m.o.Progress, read = cli.ReadingProgress(stderr)
	loader, err := imageloader.OpenContext(ctx, m.archive, m.o)
	read()
	if err != nil {
		return err
	}
	defer loader.Close()
	r.OpenSeconds = time.Since(m.begin).Seconds()
	fmt.Fprintf(stderr, "%s: %s of %s\n", printable.ArchiveName(m.archive),
		printable.Counted(loader.Len(), "sample", "samples"),
		printable.Counted(len(loader.Classes()), "class", "classes"))

	var feed feeder
	if m.target != nil {
		if feed, err = m.target.feed(loader); err != nil {
			return err
		}
		defer feed.Close()
	}
	for ; m.warmed < m.warm; m.warmed++ {
		if err := m.epoch(ctx, loader, feed); err != nil {
			return err
		}
	}
	m.begin, m.first = time.Now(), true
	for !m.over() {
		before := r.Images
		if err := m.epoch(ctx, loader, feed); err != nil {
			return err
		}
		if m.first || r.Images == before && r.Epochs > 0 {
			return fmt.Errorf("%s: not one sample could be decoded: see `torchstream inspect`",
				printable.ArchiveName(m.archive))
		}
		r.Epochs++
		if m.epochs > 0 {
			debug.FreeOSMemory() // garbage does not count as the loader's memory
			rss, err := resident.Bytes()
			if err != nil {
				return err
			}
			r.RSSAfterEpoch = append(r.RSSAfterEpoch, rss)
		}
	}
	elapsed := time.Since(m.begin)
	after, err := CPUTime()
	if err != nil {
		return err
	}
	if r.Threads, err = threadsSince(m.tasks, elapsed); err != nil {
		return err
	}
	if err := m.endProfile(); err != nil {
		return err
	}
	_, peak, err := system.Usage()
	if err != nil {
		return err
	}
	r.Stats = loader.Stats().Since(m.stats)
	if feed != nil {
		now, before := feed.stats(), m.device
		r.FinishSeconds = (now.finish - before.finish).Seconds()
		r.BusBytesPerImage = float64(now.bytes-before.bytes) / float64(r.Images)
		r.DecodedOnDevice, r.DecodedAgain = now.decoded-before.decoded, now.decodedAgain-before.decodedAgain
		r.InflatedOnDevice, r.MappedOnDevice = now.inflated-before.inflated, now.mapped-before.mapped
		r.DecoderBytes, r.DecodeSMs = now.decoderBytes, now.multiprocessors
	}
	r.Seconds = elapsed.Seconds()
	r.HostCores = (after - m.cpu).Seconds() / r.Seconds
	r.ImagesPerSecond = float64(r.Images) / r.Seconds
	r.CPUSecondsPer1000 = (after - m.cpu).Seconds() / float64(r.Images) * 1000
	r.PeakRSSBytes = peak
	r.BadSamples, r.Workers = r.Stats.Bad, r.Stats.Workers
	r.Bottleneck, r.Advice = r.Stats.Bottleneck()
	r.Advice = cli.InFlags(strings.ReplaceAll(r.Advice, "Options.ShuffleBytes", "-memory"))
	if busy := r.Stats.Decode + r.Stats.WaitData; busy > 0 {
		r.WorkersWaitedForData = r.Stats.WaitData.Seconds() / busy.Seconds()
	}
	return nil
}

func (m *Measurement) over() bool {
	if m.stopped.Load() {
		return true
	}
	if m.epochs > 0 && m.Result.Epochs >= m.epochs {
		return true
	}
	return m.timed() && m.Result.Images > 0 && time.Since(m.begin) >= m.length
}

// timed reports whether the run ends after length.
func (m *Measurement) timed() bool { return m.epochs == 0 || m.record != nil }

// epoch runs one epoch, or a part of it if the time is over.
func (m *Measurement) epoch(ctx context.Context, loader *imageloader.Loader, feed feeder) error {
	count := func(n int) (bool, error) { return m.count(n, loader, feed) }
	if feed != nil {
		return feed.epoch(ctx, m.warmed+m.Result.Epochs, count)
	}
	for batch, err := range loader.Epoch(ctx, m.warmed+m.Result.Epochs) {
		if err != nil {
			return err
		}
		if more, err := count(batch.N); !more || err != nil {
			return err
		}
	}
	return nil
}

// count counts a batch of n images. The first batch starts the clock instead.
func (m *Measurement) count(n int, loader *imageloader.Loader, feed feeder) (more bool, err error) {
	if m.warmed < m.warm {
		return true, nil
	}
	if m.first {
		m.first = false
		m.Result.FirstBatchSeconds = time.Since(m.begin).Seconds()
		m.stats = loader.Stats()
		if feed != nil {
			m.device = feed.stats()
		}
		if err := m.beginProfile(); err != nil {
			return false, err
		}
		if m.tasks, err = threadTimes(); err != nil {
			return false, err
		}
		if m.record != nil {
			if err := m.record(); err != nil {
				return false, err
			}
		}
		m.cpu, err = CPUTime()
		m.begin = time.Now()
		if m.started != nil {
			close(m.started)
		}
		return true, err
	}
	m.Result.Images += int64(n)
	m.seen.Add(int64(n))
	return !m.stopped.Load() && (!m.timed() || time.Since(m.begin) < m.length), nil
}

// openProfile creates the profile's file, if there is one.
func (m *Measurement) openProfile() (err error) {
	if m.profile != "" {
		m.cpuOut, err = safefile.Create(m.profile, safefile.Raw)
	}
	return err
}

// beginProfile starts the profile, if there is one.
func (m *Measurement) beginProfile() error {
	if m.cpuOut == nil {
		return nil
	}
	return pprof.StartCPUProfile(m.cpuOut)
}

// endProfile writes the profile, if there is one.
func (m *Measurement) endProfile() error {
	if m.cpuOut == nil {
		return nil
	}
	pprof.StopCPUProfile()
	return m.cpuOut.Close()
}

// CPUTime returns the CPU time of this process so far.
func CPUTime() (time.Duration, error) {
	cpu, _, err := system.Usage()
	return cpu, err
}
