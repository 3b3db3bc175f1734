package cli

import (
	"flag"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
)

// Limits of -size in commands that train: an image's side in pixels.
const (
	MinSize = 32
	MaxSize = 28672 // evaluations resize images to 8/7 of this, 32768: the maximum of package transform
)

// CheckSize refuses a -size that is less than least, or too large for an evaluation.
func CheckSize(size, least int) error {
	if size < least || size > MaxSize {
		return Usagef("-size %d: must be from %d to %d, the pixels of an image's side", size, least, MaxSize)
	}
	return nil
}

// ParseDecode parses -decode.
func ParseDecode(name string) (prefetcher.Decode, error) {
	where, known := map[string]prefetcher.Decode{"host": prefetcher.Host, "auto": prefetcher.Auto,
		"device": prefetcher.Device}[name]
	if !known {
		return 0, Usagef("-decode %q: want host, auto or device", name)
	}
	return where, nil
}

// DecodeSMsHelp is the help text of -decode-sms.
const DecodeSMsHelp = "with -decode device or auto: the maximum `NUMBER` of the GPU's multiprocessors " +
	"that decode (default: all)"

// CheckSMs checks -decode-sms.
func CheckSMs(sms int, decode prefetcher.Decode) error {
	if sms < 0 || sms > 0 && decode == prefetcher.Host {
		return Usagef("-decode-sms %d: want a number of multiprocessors of at least 0, with -decode "+
			"device or auto", sms)
	}
	return nil
}

// ParseDevice parses -device.
func ParseDevice(name string) (cuda.Device, error) {
	if name == "cpu" {
		return cuda.CPU, nil
	}
	if name == "cuda" {
		name = "cuda:0"
	}
	number, found := strings.CutPrefix(name, "cuda:")
	n, err := strconv.Atoi(number)
	if !found || err != nil || n < 0 {
		return 0, Usagef("-device %q: want cpu, cuda, or cuda:0, cuda:1, ...", name)
	}
	if err := capi.Check(); err != nil {
		return 0, err
	}
	if count := cuda.DeviceCount(); n >= count {
		return 0, fmt.Errorf("-device %s: this machine has no such GPU (%d are usable): see torchstream doctor", name, count)
	}
	return cuda.Device(n), nil
}

// PickDevice is like ParseDevice, but "" selects the first GPU, or the CPU if there is none.
// Without LibTorch it returns an error, since the CPU needs LibTorch too.
func PickDevice(name string) (cuda.Device, error) {
	if name != "" {
		return ParseDevice(name)
	}
	return cuda.Default(), capi.Check()
}

// DeviceName returns a GPU's model name, or "cpu".
func DeviceName(d cuda.Device) (string, error) {
	if d == cuda.CPU {
		return d.String(), nil
	}
	properties, err := d.Properties()
	return properties.Name, err
}

// ReadingProgress shows the progress of reading a file, if stderr is a terminal.
func ReadingProgress(stderr io.Writer) (progress func(imageloader.Progress), done func()) {
	draw, done := bar(stderr, "reading", true)
	if draw == nil {
		return nil, done
	}
	return func(p imageloader.Progress) { draw(p.Bytes, p.TotalBytes) }, done
}

// DownloadProgress shows the progress of a download, if stderr is a terminal. A size of 0 means
// that the size is unknown.
func DownloadProgress(stderr io.Writer) (progress func(name string, have, size int64), done func()) {
	draw, done := bar(stderr, "downloading", true)
	return func(_ string, have, size int64) {
		if draw != nil && size > 0 {
			draw(have, size)
		}
	}, done
}

// ImageProgress shows how many images of a total are done, if stderr is a terminal. Otherwise draw
// is nil.
func ImageProgress(stderr io.Writer) (draw func(have, total int64), done func()) {
	return bar(stderr, "images", false)
}

// bar returns a function that draws a progress bar with the time left, or nil if stderr is not a
// terminal. If the numbers are bytes, it also draws the bytes per second.
func bar(stderr io.Writer, what string, bytes bool) (draw func(have, size int64), done func()) {
	f, ok := stderr.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return nil, func() {}
	}
	bar := progressbar.NewOptions64(-1, progressbar.OptionSetWriter(stderr),
		progressbar.OptionSetDescription(what), progressbar.OptionShowBytes(bytes),
		progressbar.OptionSetWidth(30), progressbar.OptionThrottle(100*time.Millisecond),
		progressbar.OptionClearOnFinish())
	return func(have, size int64) {
		bar.ChangeMax64(size)
		bar.Set64(have) // an error can only come from drawing
	}, func() { bar.Finish() }
}

// ArchiveKinds lists the kinds of archives that commands accept.
const ArchiveKinds = "a .tar, .tgz, .tar.zst, .zip or .parquet, a folder, shards ('train-{000..015}.tgz') or an " +
	"http(s) URL"

// ArchiveHelp is the help text of -archive.
const ArchiveHelp = "`FILE` of images: " + ArchiveKinds + "; directory = class, and in a .parquet a column"

// ThreadsOption adds -threads to a command that computes. The command must pass the value to
// [SetThreads] before it computes.
func ThreadsOption(set *flag.FlagSet) *int {
	return set.Int("threads", 0, "threads of LibTorch inside an operator on the CPU (default: the number "+
		"of cores, and at most GOMAXPROCS, which follows a container's quota)")
}

// SetThreads sets LibTorch's threads to the value of -threads. 0 leaves them unchanged.
func SetThreads(n int) error {
	switch {
	case n == 0:
		return nil
	case n < 0 || n > maxThreads:
		return Usagef("-threads %d: must be from 1 to %d", n, maxThreads)
	}
	return torch.SetNumThreads(n)
}

// SpinBriefly lets LibTorch's threads (GNU OpenMP) sleep after a wait of about 20 microseconds. A
// command calls it before LibTorch is loaded, if it decodes images while a network runs on the CPU.
// By default the threads of an operator spin for milliseconds, and take the cores from the decoders
// and from the operator's last thread. The environment variables for this take precedence.
func SpinBriefly() error {
	if os.Getenv("OMP_WAIT_POLICY") != "" || os.Getenv(spinCount) != "" {
		return nil
	}
	return os.Setenv(spinCount, "1000")
}

const spinCount = "GOMP_SPINCOUNT"

const maxThreads = 1 << 16 // limit of torch.SetNumThreads
