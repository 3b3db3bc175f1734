package cuda

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/capi"
)

// Graph is a sequence of work on one GPU that was captured once, by [Capture], and is queued again
// by one call: for sequences of short kernels, where queueing each costs the host more than running
// it costs the device.
//
// A replay does exactly what was captured: the same kernels, on the same addresses, with the same
// numbers. So new input is copied into the tensors that were there at the capture, and results are
// read from the tensors that the captured function made: memory of the graph's own, that every
// replay writes again. Tensors from outside that operators worked on (parameters, inputs) are kept
// alive by the graph, also those that are closed; when one was given other memory since (SetData, a
// dropped gradient), Replay returns [ErrStale] instead of computing on the old. Pinned memory that
// a captured copy reads is the exception: it must not be closed before the graph.
//
// A Graph may be used by several goroutines at once; its replays run one after the other on the
// device, on whatever streams. It must be closed; one that becomes unreachable before is freed by
// the garbage collector, some time, and counted by [Leaks].
type Graph struct {
	*graph
	cleanup runtime.Cleanup
}

// graph is the part that outlives its Graph for as long as a call uses it.
type graph struct {
	c      *capi.Graph
	device Device
	side   *sideStream // nil: it was captured on the caller's
	closed atomic.Bool
	refs   atomic.Int64 // calls in progress, and one until it is closed
}

// sideStream is what graphs are captured on that were given no stream: one for all that share
// memory, because the allocator hands out memory again on one stream only.
type sideStream struct {
	own    *OwnedStream
	graphs atomic.Int64
}

func (s *sideStream) done() {
	if s != nil && s.graphs.Add(-1) == 0 {
		s.own.Close()
	}
}

// CaptureOptions are the options of [Capture]. The zero value captures on the first GPU.
type CaptureOptions struct {
	// Stream is captured, and is current while the function runs. A default stream, which cannot be
	// captured, stands for its device: the capture then has a side stream of its own. Nothing else
	// may use the stream meanwhile.
	Stream Stream

	// SharePool is a graph whose memory the new one uses too, on the same device: two graphs that
	// never run at the same time then need the memory of the larger. They overwrite each other's
	// results: what a replay computed is to be used before the next replay of any graph that shares
	// the memory. The library orders those replays, whatever streams they are on. What was captured
	// on another Stream than SharePool is no longer shared: give both the same one, or none.
	SharePool *Graph
}

// Capture runs fn once and records what it queues, instead of running it, as a graph. fn runs on
// this goroutine, locked to its OS thread, with the captured stream as the current one. Streams
// that fn forks from it ([Fork]) and joins again are captured with it, used by whatever goroutine.
// They are of the same GPU: a graph has memory of one. A stream of another GPU may be forked for
// torch.CopyPeer, which needs none.
//
// fn must not make the host wait for the device or ask for its state: reading values, Synchronize,
// Query and copies that block are refused with [ErrCapture], which names the call, before they
// break the capture; so is [MemoryPool.Use], and a Capture inside of it. Operators that LibTorch
// cannot capture break it, and Capture's error names the operator. Shapes, and numbers given from
// Go, are what they are at the capture. What fn uses for the first time should have run once on
// this thread and stream before (a library like cuDNN prepares itself at its first call). Dropout
// and the like draw new numbers at each replay, those that they would draw without a graph.
//
// After an error, fn's own included, the stream, the allocator and the random generators are as if
// there had been no capture, and tensors that fn made are undefined. A function that queues nothing
// is an error.
//
// Other goroutines and streams go on meanwhile, with nearly anything. Four things wait for the end
// of a capture: another capture in this process, operators that draw random numbers outside of it,
// [Device.Synchronize] and [EmptyCache] (CUDA would break the capture for them); so fn must not
// wait for a goroutine that does one of them. Captures do not nest.
func Capture(o CaptureOptions, fn func() error) (*Graph, error) {
	if fn == nil {
		return nil, invalid("Capture", "there is no function to call")
	}
	stream := o.Stream
	var share *capi.Graph
	var side *sideStream
	if o.SharePool != nil {
		c, err := o.SharePool.use("Capture")
		if err != nil {
			return nil, fmt.Errorf("cuda.Capture: SharePool: %w", err)
		}
		defer o.SharePool.done()
		share = c
	}
	if stream == DefaultStream(stream.Device()) {
		if share != nil && o.SharePool.side != nil && o.SharePool.device == stream.Device() {
			side = o.SharePool.side
		} else {
			own, err := NewOwnedStream(stream.Device(), StreamOptions{})
			if err != nil {
				return nil, err
			}
			side = &sideStream{own: own}
		}
		side.graphs.Add(1)
		stream = side.own.Stream
	}
	var c *capi.Graph
	kept := false
	defer func() {
		if !kept { // fn may have panicked
			side.done()
		}
	}()
	err := WithStream(stream, func() (err error) {
		if c, err = capi.BeginCapture(stream.s, share); err != nil {
			return checked(err)
		}
		finished := false
		defer func() {
			// On every way out, fn's panic and runtime.Goexit included: the capture ends on this
			// thread.
			if !finished {
				if left := capi.FreeGraph(c); left != nil {
					err = errors.Join(err, left)
				}
				c = nil
			}
		}()
		if err := fn(); err != nil {
			return err
		}
		if err := capi.EndCapture(c); err != nil {
			return checked(err)
		}
		finished = true
		return nil
	})
	if err != nil {
		if c != nil { // captured, but the stream from before could not be brought back
			err = errors.Join(err, capi.FreeGraph(c))
		}
		return nil, fmt.Errorf("cuda.Capture on %v: %w", stream, err)
	}
	kept = true
	return newGraph(c, stream.Device(), side), nil
}

func newGraph(c *capi.Graph, d Device, side *sideStream) *Graph {
	g := &Graph{graph: &graph{c: c, device: d, side: side}}
	g.refs.Store(1)
	g.cleanup = runtime.AddCleanup(g, func(inner *graph) {
		leakedGraphs.Add(1)
		slog.Debug("cuda: a Graph became unreachable before Close; freed")
		inner.close()
	}, g.graph)
	return g
}

// use returns the C graph for a call; done follows the call.
func (g *Graph) use(origin string) (*capi.Graph, error) {
	if g == nil || g.graph == nil {
		return nil, invalid(origin, "a nil or zero Graph: Capture makes graphs")
	}
	for {
		n := g.refs.Load()
		if n == 0 || g.closed.Load() {
			return nil, ErrClosed
		}
		if g.refs.CompareAndSwap(n, n+1) {
			return g.c, nil
		}
	}
}

func (g *graph) done() {
	if g.refs.Add(-1) == 0 {
		if err := capi.FreeGraph(g.c); err != nil { // not even memory for the call: the graph stays
			slog.Debug("cuda: a Graph could not be freed", "error", err)
			return
		}
		g.side.done()
	}
}

func (g *graph) close() {
	if !g.closed.Swap(true) {
		g.done()
	}
}

// Replay queues the graph's work on the stream, which is of the graph's device and may be any, the
// default stream too. The host does not wait. [ErrStale]: see [Graph].
func (g *Graph) Replay(s Stream) error {
	c, err := g.use("Graph.Replay")
	if err != nil {
		return err
	}
	defer g.done()
	return checked(capi.ReplayGraph(c, s.s))
}

// Device returns the GPU that the graph was captured on.
func (g *Graph) Device() Device {
	if g == nil || g.graph == nil {
		return 0
	}
	return g.device
}

// Nodes returns how many kernels, copies and fills a replay runs; 0 after Close.
func (g *Graph) Nodes() int {
	c, err := g.use("Graph.Nodes")
	if err != nil {
		return 0
	}
	defer g.done()
	return capi.GraphNodes(c)
}

// Close frees the graph. Replays that are queued run as if it were there, and a Replay in another
// goroutine finishes. The tensors that the captured function made and that are not closed keep
// their memory and their last values. Further calls, and calls on nil, do nothing; it never fails.
func (g *Graph) Close() error {
	if g != nil && g.graph != nil {
		g.cleanup.Stop()
		g.close()
	}
	return nil
}
