// Command 03-p2p shows when a copy from one GPU to another overlaps with computation, and why it
// sometimes does not. It copies a tensor four times while the receiver, or both GPUs, multiply. On
// the sender, the copy uses the default stream or a separate one, and likewise on the receiver. All
// four combinations are measured with torch.CopyPeer, which names both streams, and with
// Tensor.CopyFrom inside cuda.WithStreams, blocking and non-blocking (which makes no difference
// between GPUs).
//
//	go run ./examples/03-p2p                         # our times and PyTorch's
//	go run ./examples/03-p2p -timeline p2p.svg       # and a picture of two choices
//	go run ./examples/03-p2p -json
//
// It needs two GPUs: -device and the next one. Result: a copy between GPUs overlaps with
// computation only if neither of the copy's streams computes and the sender's stream is not the
// default stream. The driver orders the default stream against the work of both devices.
package main

import (
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/examples/internal/lesson"
)

//go:embed peer.py
var peer string

func main() {
	var w workload
	lesson.Main("03-p2p", "Shows when a copy from one GPU to another runs beside compute, by the streams "+
		"of both sides.", 2, w.flags, w.run)
}

// workload holds the sizes of the experiment.
type workload struct {
	MiB      int `json:"mib"`
	Copies   int `json:"copies"`
	Products int `json:"products"`
	Rounds   int `json:"rounds"`
}

func (w *workload) flags(f *flag.FlagSet) {
	f.IntVar(&w.MiB, "mib", 1024, "size of the tensor in `MiB`")
	f.IntVar(&w.Copies, "copies", 4, "number of copies")
	f.IntVar(&w.Products, "products", 8, "products of four factors on each computing GPU")
	f.IntVar(&w.Rounds, "rounds", 9, "rounds: figures are their medians")
}

func (w *workload) bytes() float64 { return float64(w.MiB) * (1 << 20) * float64(w.Copies) }

// report is the output of -json. All times are medians in milliseconds.
type report struct {
	Workload workload  `json:"workload"`
	GPU      string    `json:"gpu"`
	Direct   bool      `json:"peer_access"`
	Raw      float64   `json:"raw_gb_per_s"` // LibTorch's copy, alone on the same streams
	Copy     float64   `json:"copy_ms"`      // CopyPeer alone
	Link     float64   `json:"copy_gb_per_s"`
	OfRaw    float64   `json:"of_raw"`
	Computes []compute `json:"computes"`
	Peer     *peerJSON `json:"pytorch,omitempty"`
	PeerNote string    `json:"pytorch_note,omitempty"`
}

// compute holds the results for one choice of computing GPUs.
type compute struct {
	On      string   `json:"on"` // "receiver" or "both"
	Alone   float64  `json:"compute_ms"`
	Choices []choice `json:"choices"`
}

// choice holds the results for one choice of streams.
type choice struct {
	Sender      bool    `json:"sender_side_stream"`
	Receiver    bool    `json:"receiver_side_stream"`
	CopyPeer    float64 `json:"copy_peer_ms"`
	Blocking    float64 `json:"copy_from_ms"`
	NonBlocking float64 `json:"copy_from_non_blocking_ms"`
	// Hidden is how much of the shorter time, CopyPeer's or the computation's, the overlap hides,
	// from 0 to 1.
	Hidden float64 `json:"hidden"`
}

type peerJSON struct {
	Copy      float64 `json:"copy_ms"`
	Workloads []struct {
		Compute float64 `json:"compute_ms"`
		Choices []struct {
			Blocking    float64 `json:"blocking_ms"`
			NonBlocking float64 `json:"non_blocking_ms"`
		} `json:"choices"`
	} `json:"workloads"`
}

// hidden returns how much of the shorter of the times a and b is hidden if both activities run at
// once and take together, from 0 to 1.
func hidden(a, b, together float64) float64 {
	return max(0, min(1, (a+b-together)/min(a, b)))
}

// why explains the effect of a choice of streams while the default streams compute.
func why(on string, c choice) string {
	switch {
	case c.Sender && c.Receiver:
		return "overlaps: neither of its streams has other work, so the copy engine works beside the multiprocessors"
	case !c.Sender && on == "both":
		return "serial: the copy is in the stream in which the sender computes"
	case c.Sender:
		return "serial: the receiver's default stream waits for the copy, and its compute is behind that wait"
	case c.Receiver:
		return "serial: the copy is on the sender's default stream, which the driver orders against work " +
			"of both devices"
	}
	return "serial: both: the receiver's default stream waits, and the driver orders the sender's"
}

func (w *workload) run(ctx context.Context, l *lesson.Lesson) error {
	if w.MiB < 1 || w.Copies < 1 || w.Products < 1 || w.Rounds < 1 {
		return errors.New("-mib, -copies, -products and -rounds must be at least 1")
	}
	e, err := newExperiment(l.Device, l.Device+1, *w)
	if err != nil {
		return err
	}
	defer e.close()
	r, err := e.measure(ctx)
	if err != nil {
		return err
	}
	var p peerJSON
	err = l.Peer(ctx, peer, &p, fmt.Sprint(int(l.Device)), fmt.Sprint(w.MiB), fmt.Sprint(w.Copies),
		fmt.Sprint(w.Products), fmt.Sprint(w.Rounds))
	switch {
	case errors.Is(err, lesson.ErrNoPeer):
		r.PeerNote = err.Error()
	case err != nil:
		return err
	case len(p.Workloads) != len(r.Computes):
		return fmt.Errorf("peer.py measured %d workloads of %d", len(p.Workloads), len(r.Computes))
	default:
		r.Peer = &p
	}
	if _, err := l.Record("a copy between two GPUs beside compute: neither side on a side stream, then both", e.both); err != nil {
		return err
	}
	return l.Result(r, func() error { return r.print(l) })
}

func (r *report) print(l *lesson.Lesson) error {
	direct := "direct"
	if !r.Direct {
		direct = "through the host: the two have no peer access"
	}
	fmt.Fprintf(l.Out, "%s: %d copies of %d MiB, %s. Alone %.1f ms, %.1f GB/s, %.1f %% of the %.1f GB/s "+
		"of LibTorch's copy in this run.\n",
		r.GPU, r.Workload.Copies, r.Workload.MiB, direct, r.Copy, r.Link, 100*r.OfRaw, r.Raw)
	for i, c := range r.Computes {
		fmt.Fprintf(l.Out, "\nCompute on %s: alone %.1f ms. Copy and compute, ms:\n", c.On, c.Alone)
		rows := [][]string{{"sender, receiver", "CopyPeer", "hidden", "CopyFrom", "non-blocking", "PyTorch",
			"non_blocking"}}
		for k, choice := range c.Choices {
			row := []string{name(choice.Sender) + ", " + name(choice.Receiver), ms(choice.CopyPeer),
				fmt.Sprintf("%.0f %%", 100*choice.Hidden),
				ms(choice.Blocking), ms(choice.NonBlocking), "-", "-"}
			if r.Peer != nil && k < len(r.Peer.Workloads[i].Choices) {
				peers := r.Peer.Workloads[i].Choices[k]
				row[5], row[6] = ms(peers.Blocking), ms(peers.NonBlocking)
			}
			rows = append(rows, row)
		}
		if err := l.Table(rows); err != nil {
			return err
		}
		for _, choice := range c.Choices {
			fmt.Fprintf(l.Out, "  %s, %s: %s\n", name(choice.Sender), name(choice.Receiver), why(c.On, choice))
		}
	}
	if r.PeerNote != "" {
		fmt.Fprintln(l.Out, "\nPyTorch:", r.PeerNote)
	}
	return nil
}

func name(side bool) string {
	if side {
		return "side"
	}
	return "default"
}

func ms(v float64) string { return fmt.Sprintf("%.2f", v) }

func device(d cuda.Device) (string, error) {
	p, err := d.Properties()
	return p.Name, err
}
