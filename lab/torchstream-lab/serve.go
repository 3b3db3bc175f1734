package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/serve"
)

// serveReport is the output of serve.
type serveReport struct {
	Device        string     `json:"device"`
	Images        int        `json:"images"`   // different ones, used in rotation
	LeftOut       int        `json:"left_out"` // files in the folder that are not images, or are too large
	BytesPerImage float64    `json:"bytes_per_image"`
	Request       int        `json:"request"` // images
	Clients       int        `json:"clients"`
	Rows          []serveRow `json:"rows"`
}

// serveRow holds the results of one way of decoding. Times are per request, from encoded bytes to
// the end of the device's work.
type serveRow struct {
	Decode          string  `json:"decode"` // host or device
	Requests        int     `json:"requests"`
	ImagesPerSecond float64 `json:"images_per_second"`
	MedianMS        float64 `json:"median_ms"`
	P90MS           float64 `json:"p90_ms"`
	P99MS           float64 `json:"p99_ms"`
	DecodedOnDevice int64   `json:"decoded_on_device"`
	DecodedAgain    int64   `json:"decoded_again"` // of DecodedOnDevice: again by the host
}

// serveBench runs the measurements of serve.
type serveBench struct {
	images           [][]byte
	leftOut          int // number of files
	request, clients int
	length           time.Duration
	o                serve.Options
}

// benchServe measures the latency of requests that turn encoded images into a normalised batch.
func benchServe(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set := cli.Flags("torchstream-lab serve -images FOLDER", "Makes normalised batches of requests of "+
		"encoded images, as a server does, for a while: the time of a request, from its bytes to the end of\n"+
		"the work on the device. On a GPU it measures both, images that the host decodes and images that "+
		"the GPU decodes.", stderr)
	folder := set.String("images", "",
		"`FOLDER` of images, or of folders of them; other files are left out, and so are images beyond 1 GiB in all")
	request := set.Int("request", 8, "images of a request")
	clients := set.Int("clients", 1, "requests at a time, each on a stream of its own")
	size := set.Int("size", 224, "pixels of a result's side: the centre of the image, resized to 8/7 of it")
	name := set.String("device", "", "cpu, cuda, cuda:1, ... (default: the first GPU, or cpu without one)")
	threads := cli.ThreadsOption(set)
	seconds := set.Float64("seconds", 3, "how long to measure each way")
	asJSON := set.Bool("json", false, "print one JSON object")
	if err := cli.Parse(set, args, 0); err != nil {
		return err
	}
	switch {
	case *folder == "":
		return cli.UsageError{Message: "serve needs -images FOLDER"}
	case *request < 1 || *clients < 1 || *clients > 64 || *seconds <= 0:
		return cli.UsageError{Message: "-request and -seconds are more than 0, and -clients is from 1 to 64"}
	}
	if err := cli.CheckSize(*size, 7); err != nil {
		return err
	}
	if err := cli.SetThreads(*threads); err != nil {
		return err
	}
	device, err := cli.PickDevice(*name)
	if err != nil {
		return err
	}
	b := serveBench{request: *request, clients: *clients, length: time.Duration(*seconds * float64(time.Second))}
	b.o = serve.Options{Device: device, Concurrent: *clients,
		Decode: decode.Options{Transform: transform.Eval(*size*8/7, *size)}}
	if err := b.read(ctx, *folder); err != nil {
		return err
	}
	report := serveReport{Device: device.String(), Images: len(b.images), LeftOut: b.leftOut,
		Request: *request, Clients: *clients}
	for _, image := range b.images {
		report.BytesPerImage += float64(len(image)) / float64(len(b.images))
	}
	for _, onDevice := range []bool{false, true} {
		if onDevice && device == cuda.CPU {
			break
		}
		b.o.OnDevice = onDevice
		row, err := b.measure(ctx)
		if err != nil {
			return err
		}
		report.Rows = append(report.Rows, row)
	}
	if *asJSON {
		return cli.WriteJSON(stdout, report)
	}
	return report.table(stdout)
}

// read reads the images of a folder and its subfolders, up to 1 GiB. It counts the files that it
// leaves out.
func (b *serveBench) read(ctx context.Context, folder string) error {
	root, err := filepath.EvalSymlinks(folder) // directory walks do not follow links
	if err != nil {
		return err
	}
	if info, err := os.Stat(root); err != nil {
		return err
	} else if !info.IsDir() {
		return fmt.Errorf("%s is a file: -images is a folder of images: unpack an archive first (tar -xf "+
			"ARCHIVE -C FOLDER)", printable.Name(folder))
	}
	d, err := decode.New(b.o.Decode)
	if err != nil {
		return err
	}
	defer d.Close()
	pixels := make([]byte, d.Bytes())
	left := int64(1 << 30)
	err = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		info, err := os.Stat(path) // describes a link's target
		if err != nil || !info.Mode().IsRegular() || info.Size() > left {
			b.leftOut++
			return ctx.Err()
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		var faults decode.Errors
		if err := d.Decode(ctx, pixels, data); errors.As(err, &faults) {
			b.leftOut++
			return nil
		} else if err != nil {
			return err
		}
		b.images, left = append(b.images, data), left-int64(len(data))
		return nil
	})
	if err == nil && len(b.images) == 0 {
		err = fmt.Errorf("%s has no images (%s left out): -images is a folder with them",
			printable.Name(folder), printable.Counted(b.leftOut, "file", "files"))
	}
	return err
}

// measure measures one way of decoding.
func (b *serveBench) measure(ctx context.Context) (row serveRow, err error) {
	d, err := serve.NewDecoder(b.o)
	if err != nil {
		return row, err
	}
	defer d.Close()
	for range 3 { // warm-up: allocates memory and starts workers
		if _, err := b.client(ctx, d, 0, 0); err != nil {
			return row, err
		}
	}
	before, began := d.Stats(), time.Now()
	took, failed := make([][]time.Duration, b.clients), make([]error, b.clients)
	var running sync.WaitGroup
	for c := range b.clients {
		running.Go(func() { took[c], failed[c] = b.client(ctx, d, c, b.length) })
	}
	running.Wait()
	if err := errors.Join(failed...); err != nil {
		return row, err
	}
	all, elapsed, after := slices.Concat(took...), time.Since(began), d.Stats()
	slices.Sort(all)
	at := func(share float64) float64 { return all[int(share*float64(len(all)-1))].Seconds() * 1e3 }
	row = serveRow{Decode: "host", Requests: len(all),
		ImagesPerSecond: float64(len(all)*b.request) / elapsed.Seconds(), MedianMS: at(0.5), P90MS: at(0.9),
		P99MS: at(0.99), DecodedOnDevice: after.Decoded - before.Decoded,
		DecodedAgain: after.DecodedAgain - before.DecodedAgain}
	if b.o.OnDevice {
		row.Decode = "device"
	}
	return row, nil
}

// client makes requests for the given duration, at least one, and returns their times.
func (b *serveBench) client(ctx context.Context, d *serve.Decoder, number int,
	length time.Duration) (took []time.Duration, err error) {
	if d.Device() == cuda.CPU {
		return b.requests(ctx, d, number, length, func() error { return nil })
	}
	s, err := cuda.NewOwnedStream(d.Device(), cuda.StreamOptions{})
	if err != nil {
		return nil, err
	}
	defer s.Close()
	err = cuda.WithStream(s.Stream, func() (err error) {
		took, err = b.requests(ctx, d, number, length, s.Synchronize)
		return err
	})
	return took, err
}

func (b *serveBench) requests(ctx context.Context, d *serve.Decoder, number int, length time.Duration,
	wait func() error) (took []time.Duration, err error) {
	images := make([][]byte, b.request)
	next := number * b.request
	for began := time.Now(); len(took) == 0 || time.Since(began) < length; {
		for i := range images {
			images[i] = b.images[next%len(b.images)]
			next++
		}
		start := time.Now()
		x, err := d.Batch(ctx, nil, images...)
		if err != nil {
			return nil, err
		}
		err = wait()
		took = append(took, time.Since(start))
		if err = errors.Join(err, x.Close()); err != nil {
			return nil, err
		}
	}
	return took, nil
}

func (r *serveReport) table(w io.Writer) error {
	if r.LeftOut > 0 {
		fmt.Fprintf(w, "%s; %s left out: no images, or more than 1 GiB\n",
			printable.Counted(r.Images, "image", "images"), printable.Counted(r.LeftOut, "file", "files"))
	}
	fmt.Fprintf(w, "requests of %s, %d at a time, of %.0f bytes an image, to %s\n",
		printable.Counted(r.Request, "image", "images"), r.Clients, r.BytesPerImage, r.Device)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "decoded by\tmedian ms\tp90\tp99\timages/s\trequests\ton the device\tagain\t")
	for _, row := range r.Rows {
		fmt.Fprintf(t, "%s\t%.3f\t%.3f\t%.3f\t%.0f\t%d\t%d\t%d\t\n", row.Decode, row.MedianMS, row.P90MS,
			row.P99MS, row.ImagesPerSecond, row.Requests,
			row.DecodedOnDevice, row.DecodedAgain)
	}
	return t.Flush()
}
