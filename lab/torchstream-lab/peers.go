package main

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/loaderbench"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/lab/internal/labcapi"
)

//go:embed gpu_peers.py
var gpuPeers string

// gpuPeer is another decoder, measured on the archive's images and the same GPU in the same run.
type gpuPeer struct {
	Peer            string  `json:"peer"` // nvjpeg, torchvision or dali
	Way             string  `json:"way"`  // description
	Threads         int     `json:"threads,omitempty"`
	Batch           int64   `json:"batch,omitempty"`
	Images          int64   `json:"images,omitempty"`   // decoded in the measured time
	LeftOut         int64   `json:"left_out,omitempty"` // images that the engines cannot decode
	Seconds         float64 `json:"seconds,omitempty"`
	ImagesPerSecond float64 `json:"images_per_second,omitempty"`
	HostCores       float64 `json:"host_cores,omitempty"` // CPU seconds per second
	Engines         int32   `json:"engines,omitempty"`    // JPEG engines of the GPU
	// LoaderImagesPerSecond is the rate of the loader if it runs at the same time. HostCores then
	// includes the loader.
	LoaderImagesPerSecond float64 `json:"loader_images_per_second,omitempty"`
	// WhyNot says why there is no result.
	WhyNot string `json:"why_not,omitempty"`
}

// rate computes the fields that depend on images, seconds and CPU seconds.
func (p *gpuPeer) rate(cpuSeconds float64) {
	p.ImagesPerSecond, p.HostCores = float64(p.Images)/p.Seconds, cpuSeconds/p.Seconds
}

// peerNames are the values of -peers.
var peerNames = []string{"nvjpeg", "torchvision", "dali"}

// peerBench runs the measurements of -peers.
type peerBench struct {
	names   []string
	python  string
	archive string
	device  cuda.Device
	batch   int
	size    int
	dtype   string
	seconds float64
}

const (
	peerBatches    = 8       // number of different batches
	peerBytes      = 1 << 30 // maximum size of the images, which stay in memory
	maxPeerSeconds = 3       // per row
)

// peersOf parses -peers, for a loader whose batches are copied to a device. It returns nil if no
// peers are requested.
func peersOf(names string, o *loaderbench.Options, to cuda.Device) (*peerBench, error) {
	if names == "" {
		return nil, nil
	}
	p := &peerBench{names: strings.Split(names, ","), archive: o.Archive, device: to, batch: o.Batch,
		size: o.Size, dtype: o.DType(), seconds: min(o.Seconds, maxPeerSeconds)}
	if names == "all" {
		p.names = peerNames
	}
	for _, name := range p.names {
		if !slices.Contains(peerNames, name) {
			return nil, cli.Usagef("-peers %s: there is no peer %q: want all, or some of %s", names, name,
				strings.Join(peerNames, ","))
		}
	}
	switch {
	case len(o.Images.Settings()) > 0:
		return nil, cli.Usagef("-peers %s is for -policy none, and takes no -list, -webdataset, "+
			"-upright, -balanced, -mixup or -cutmix: the peers crop and flip, and read no labels", names)
	case to == cuda.CPU:
		return nil, cli.Usagef("-peers %s needs -device cuda: the peers decode on a GPU", names)
	case o.Contract == "eval":
		return nil, cli.Usagef("-peers %s is for the contracts with a random crop, not eval", names)
	}
	if _, _, err := readJPEGs(context.Background(), o.Archive, 1); err != nil {
		return nil, err
	}
	return p, nil
}

// run measures every peer. If a peer cannot run, its row gives the reason.
func (p *peerBench) run(ctx context.Context, m *loaderbench.Measurement) ([]gpuPeer, error) {
	data, sizes, err := readJPEGs(ctx, p.archive, peerBatches*p.batch)
	if err != nil {
		return nil, err
	}
	var rows []gpuPeer
	for _, name := range p.names {
		if name == "nvjpeg" {
			rows = append(rows, p.nvjpeg(data, sizes)...)
			rows = append(rows, p.besideLoader(ctx, m, data, sizes))
		} else {
			rows = append(rows, p.inPython(ctx, name)...)
		}
		if err := ctx.Err(); err != nil {
			return nil, context.Cause(ctx)
		}
	}
	return rows, nil
}

// threads returns the numbers of host threads to measure a peer with.
func (p *peerBench) threads() []int {
	if runtime.GOMAXPROCS(0) < 4 {
		return []int{1}
	}
	return []int{1, 4}
}

// nvjpeg measures NVIDIA's library without the loader: with the GPU's engines, and with CUDA cores.
func (p *peerBench) nvjpeg(data []byte, sizes []uintptr) []gpuPeer {
	var rows []gpuPeer
	for _, threads := range p.threads() {
		rows = append(rows, p.engines("whole images to uint8 RGB, no crop", threads, data, sizes))
	}
	for _, threads := range p.threads() {
		rows = append(rows, p.decoded(labcapi.NVJPEGCUDA, "CUDA cores, whole images to uint8 RGB, no crop",
			threads, data, sizes))
	}
	return rows
}

// besideLoader measures the engines while the loader runs, to see whether both together decode
// more.
func (p *peerBench) besideLoader(ctx context.Context, m *loaderbench.Measurement, data []byte,
	sizes []uintptr) gpuPeer {
	threads := p.threads()
	var row gpuPeer
	rate, err := m.Beside(ctx,
		func() { row = p.engines("while the loader runs", threads[len(threads)-1], data, sizes) })
	if err != nil {
		return gpuPeer{Peer: "nvjpeg", Way: row.Way, WhyNot: err.Error()}
	}
	row.LoaderImagesPerSecond = rate
	return row
}

func (p *peerBench) engines(says string, threads int, data []byte, sizes []uintptr) gpuPeer {
	return p.decoded(labcapi.NVJPEGHardware, "JPEG engines, "+says, threads, data, sizes)
}

func (p *peerBench) decoded(implementation int, says string, threads int, data []byte, sizes []uintptr) gpuPeer {
	row := gpuPeer{Peer: "nvjpeg", Way: says, Threads: threads}
	r, err := labcapi.NVJPEG(int32(p.device), implementation, data, sizes, p.batch, threads, p.seconds)
	if err != nil {
		row.WhyNot = err.Error()
		return row
	}
	row.Batch, row.Images, row.LeftOut, row.Seconds, row.Engines = r.Batch, r.Images, r.LeftOut, r.Seconds, r.Engines
	row.rate(r.CPUSeconds)
	return row
}

// inPython measures a Python library.
func (p *peerBench) inPython(ctx context.Context, name string) []gpuPeer {
	absent := func(why string) []gpuPeer { return []gpuPeer{{Peer: name, Way: "not measured", WhyNot: why}} }
	if p.python == "" {
		return absent("not requested: -python is empty")
	}
	archive, err := filepath.Abs(p.archive) // Python runs in another folder
	if err != nil {
		return absent(err.Error())
	}
	job, err := json.Marshal(map[string]any{
		"peer": name, "archive": archive, "images": peerBatches * p.batch, "bytes": peerBytes,
		"device": int(p.device), "batch": p.batch, "size": p.size,
		"dtype": p.dtype, "seconds": p.seconds, "threads": p.threads(),
	})
	if err != nil {
		return absent(err.Error())
	}
	var answer struct {
		Rows []struct {
			gpuPeer
			CPUSeconds float64 `json:"cpu_seconds"`
		} `json:"rows"`
	}
	if err := runPython(ctx, p.python, gpuPeers, &answer, string(job)); err != nil {
		return absent(err.Error())
	}
	var rows []gpuPeer
	for _, row := range answer.Rows {
		row.Peer = name
		if row.Images < 1 || row.Seconds <= 0 {
			return absent(fmt.Sprintf("%s: it printed a row without images or time: %s", p.python,
				printable.Text(row.Way)))
		}
		row.rate(row.CPUSeconds)
		rows = append(rows, row.gpuPeer)
	}
	return rows
}

// readJPEGs returns the first JPEGs of a .tar or .tar.gz, back to back, and their sizes. It selects
// the same ones as gpu_peers.py.
func readJPEGs(ctx context.Context, archive string, max int) (data []byte, sizes []uintptr, err error) {
	fail := func(err error) ([]byte, []uintptr, error) {
		return nil, nil, fmt.Errorf("%s: other decoders get the JPEGs of a file, .tar or .tar.gz: %w",
			printable.ArchiveName(archive), err)
	}
	file, err := os.Open(archive)
	if err != nil {
		return fail(err)
	}
	defer file.Close()
	buffered := bufio.NewReaderSize(file, 1<<20)
	var plain io.Reader = buffered
	if magic, _ := buffered.Peek(2); bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		if plain, err = gzip.NewReader(buffered); err != nil {
			return fail(err)
		}
	}
	for r := tar.NewReader(plain); len(sizes) < max && len(data) < peerBytes; {
		if err := ctx.Err(); err != nil {
			return nil, nil, context.Cause(ctx)
		}
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fail(err)
		}
		if header.Typeflag != tar.TypeReg || header.Size > peerBytes {
			continue
		}
		before := len(data)
		data = slices.Grow(data, int(header.Size))[:before+int(header.Size)]
		if _, err := io.ReadFull(r, data[before:]); err != nil {
			return fail(err)
		}
		if !bytes.HasPrefix(data[before:], []byte{0xff, 0xd8, 0xff}) {
			data = data[:before]
			continue
		}
		sizes = append(sizes, uintptr(header.Size))
	}
	if len(sizes) == 0 {
		return fail(errors.New("it has no JPEGs"))
	}
	return data, sizes, nil
}

// printPeers prints the peers as text.
func printPeers(w io.Writer, peers []gpuPeer) error {
	if len(peers) == 0 {
		return nil
	}
	fmt.Fprintln(w)
	t := printable.NewTable(w, 0)
	fmt.Fprintln(t, "peer\timages/s\thost cores\tthreads\twhat it does")
	for _, p := range peers {
		rate, cores, says := "-", "-", p.Way
		switch {
		case p.WhyNot != "":
			says += ": " + p.WhyNot
		case p.LeftOut > 0:
			says += fmt.Sprintf("; %d images left out, which it does not decode", p.LeftOut)
		}
		if p.LoaderImagesPerSecond > 0 {
			says += fmt.Sprintf(", at %.0f images/s", p.LoaderImagesPerSecond)
		}
		if p.WhyNot == "" {
			rate, cores = fmt.Sprintf("%.0f", p.ImagesPerSecond), fmt.Sprintf("%.1f", p.HostCores)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%s\n", p.Peer, rate, cores, p.Threads, printable.Text(says))
	}
	return t.Flush()
}
