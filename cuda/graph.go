package cuda

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/origin"
)

// Graph is a sequence of work on one GPU. [Capture] records the sequence once, and one call then
// queues all of it again. Use it for sequences of short kernels, whose launches cost the host more
// time than their execution costs the device.
//
// A replay repeats exactly the captured work: the same kernels, on the same addresses, with the
// same numbers. Copy new input into the tensors that existed at the capture. Read results from the
// tensors that the captured function made: they are in the graph's own memory, and every replay
// overwrites them. The graph's operators also use other tensors (parameters, inputs). The graph
// keeps these alive, even if they are closed. If such a tensor has received other memory since the
// capture (SetData, a dropped gradient), Replay returns [ErrStale] instead of computing on the old
// memory. Pinned memory that a captured copy reads is the exception: do not close it before the
// graph.
//
// Several goroutines may use a Graph at once. Its replays run one after the other on the device, on
// whatever streams they are queued. Close every graph. The garbage collector eventually frees a
// graph that becomes unreachable before its Close, and [Leaks] counts it.
type Graph struct {
	*graph
	cleanup runtime.Cleanup
}

// graph is the part of a Graph that lives until the last call that uses it returns.
type graph struct {
	made   origin.Origin
	c      *capi.Graph
	device Device
	side   *sideStream // nil: captured on the caller's stream
	closed atomic.Bool
	refs   atomic.Int64 // calls in progress, plus one until Close
}

// sideStream is the capture stream of graphs whose CaptureOptions name no stream. All graphs that
// share memory use the same sideStream, because the allocator reuses memory on one stream only.
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
	// Stream is captured, and is the current stream while the function runs. A default stream
	// cannot be captured: it only selects the device. The capture then uses a separate side stream
	// with the priority of the device's current stream, or the side stream of SharePool. Nothing
	// else may use the stream during the capture. Kernels of a graph have the priority of the
	// stream on which they were captured, whatever stream the graph is replayed on.
	Stream Stream

	// SharePool is a graph on the same device whose memory the new graph uses too. Two graphs that
	// never run at the same time then need only the memory of the larger one. The library orders
	// their replays on all streams. Captures on different Streams do not share memory: give both
	// the same Stream, or none.
	//
	// A tensor that an earlier captured function made, and that is still open when the new graph is
	// captured, keeps its memory: only a replay of the earlier graph overwrites it. A replay of the
	// new graph may overwrite all other results in the shared memory: tensors that were closed
	// before the new graph's capture, and the results of later captures. Use these results before
	// such a replay.
	SharePool *Graph

	// Debug keeps the data that Graph.DOT needs, in host memory.
	Debug bool
}

// Capture runs fn once and records the work that fn queues as a graph, instead of running that
// work. fn runs on the calling goroutine, locked to its OS thread, with the captured stream as the
// current stream. The capture includes streams that fn forks from the captured stream ([Fork]) and
// joins again, whichever goroutine uses them. They must be of the same GPU, because a graph has
// memory of one GPU. A stream of another GPU may be forked for torch.CopyPeer, which needs no
// memory there.
//
// fn must not make the host wait for the device or query the device's state. Calls that read
// values, Synchronize, Query, blocking copies, [MemoryPool.Use] and a nested Capture return
// [ErrCapture], which names the call, before they break the capture. An operator that LibTorch
// cannot capture breaks the capture, and Capture's error names the operator. Shapes, and numbers
// passed from Go, stay as they are at the capture. Run the code of fn once on this thread and
// stream before the capture, because libraries such as cuDNN prepare themselves at their first
// call. Dropout and other random operators draw new numbers at each replay: the numbers that they
// would draw without a graph.
//
// After an error, including fn's own, the stream, the allocator and the random generators are in
// the state from before the capture, and tensors that fn made are undefined. A function that queues
// no work is an error.
//
// Other goroutines and streams continue during a capture. Four operations wait for its end, because
// they would break the capture: another capture in this process, operators outside of the capture
// that draw random numbers, [Device.Synchronize], and [EmptyCache]. fn must therefore not wait for
// a goroutine that runs one of them. Captures do not nest.
func Capture(o CaptureOptions, fn func() error) (*Graph, error) {
	if fn == nil {
		return nil, invalid("Capture", "fn is nil: pass the function to capture")
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
			current, err := GetCurrentCUDAStream(stream.Device())
			if err != nil {
				return nil, err
			}
			own, err := NewSideStream(current)
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
			// End the capture on this thread on every path, including a panic or runtime.Goexit in
			// fn.
			if !finished {
				if left := capi.FreeGraph(c); left != nil {
					err = errors.Join(err, left)
				}
				c = nil
			}
		}()
		if o.Debug {
			if err := capi.KeepGraph(c); err != nil {
				return checked(err)
			}
		}
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
		if c != nil { // captured, but WithStream could not restore the earlier stream
			err = errors.Join(err, capi.FreeGraph(c))
		}
		return nil, fmt.Errorf("cuda.Capture on %v: %w", stream, err)
	}
	kept = true
	return newGraph(c, stream.Device(), side), nil
}

func newGraph(c *capi.Graph, d Device, side *sideStream) *Graph {
	g := &Graph{graph: &graph{made: origin.New("graph"), c: c, device: d, side: side}}
	g.refs.Store(1)
	g.cleanup = runtime.AddCleanup(g, func(inner *graph) {
		leakedGraphs.Add(1)
		inner.made.Leaked()
		slog.Debug("cuda: a Graph became unreachable before Close; freed")
		inner.close()
	}, g.graph)
	return g
}

// use returns the C graph for a call. A call of done must follow.
func (g *Graph) use(origin string) (*capi.Graph, error) {
	if g == nil || g.graph == nil {
		return nil, invalid(origin, "the Graph is nil or zero: make graphs with Capture")
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
		if err := capi.FreeGraph(g.c); err != nil { // no memory even for this call: the graph stays
			slog.Debug("cuda: a Graph could not be freed", "error", err)
			return
		}
		g.side.done()
	}
}

func (g *graph) close() {
	if !g.closed.Swap(true) {
		g.made.Closed()
		g.done()
	}
}

// Replay queues the graph's work on s, which may be any stream of the graph's device, including the
// default stream. The host does not wait. Replay returns [ErrStale] if an operand has moved: see
// [Graph].
func (g *Graph) Replay(s Stream) error {
	c, err := g.use("Graph.Replay")
	if err != nil {
		return err
	}
	defer g.done()
	return checked(capi.ReplayGraph(c, s.s))
}

// Device returns the GPU of the capture.
func (g *Graph) Device() Device {
	if g == nil || g.graph == nil {
		return 0
	}
	return g.device
}

// NodeKinds counts the nodes of a graph by kind.
type NodeKinds struct {
	Kernels, Copies, Fills, HostFunctions int
	// EventRecords and EventWaits count the records and waits of events with EventOptions.External.
	EventRecords, EventWaits int
	Empty                    int // joins of several edges
	Others                   int
}

// NodeKinds returns the number of nodes by kind. Their sum is Nodes.
func (g *Graph) NodeKinds() (NodeKinds, error) {
	c, err := g.use("Graph.NodeKinds")
	if err != nil {
		return NodeKinds{}, err
	}
	defer g.done()
	n, err := capi.GraphNodeKinds(c)
	return NodeKinds(n), checked(err)
}

// DOT returns the nodes and edges of the graph as a file of Graphviz (dot -Tsvg), verbose with the
// parameters of every node. It needs CaptureOptions.Debug, and otherwise returns
// [ErrInvalidArgument].
func (g *Graph) DOT(verbose bool) ([]byte, error) {
	c, err := g.use("Graph.DOT")
	if err != nil {
		return nil, err
	}
	defer g.done()
	b, err := capi.DumpGraph(c, verbose)
	return b, checked(err)
}

// Handles returns the graph's cudaGraphExec_t and, with CaptureOptions.Debug, its cudaGraph_t, for
// code that calls CUDA directly. Without Debug, graph is 0. The handles are valid until Close.
func (g *Graph) Handles() (exec, graph uintptr, err error) {
	c, err := g.use("Graph.Handles")
	if err != nil {
		return 0, 0, err
	}
	defer g.done()
	exec, graph, err = capi.GraphHandles(c)
	return exec, graph, checked(err)
}

// String returns a name for messages: "graph of 12 nodes on cuda:0", "closed graph".
func (g *Graph) String() string {
	n := g.Nodes()
	if n == 0 {
		return "closed graph"
	}
	return fmt.Sprintf("graph of %d nodes on %v", n, g.Device())
}

// Nodes returns the number of nodes in a replay, such as kernels, copies and fills; 0 after Close.
func (g *Graph) Nodes() int {
	c, err := g.use("Graph.Nodes")
	if err != nil {
		return 0
	}
	defer g.done()
	return capi.GraphNodes(c)
}

// Close frees the graph. Queued replays still run, and a Replay in another goroutine finishes.
// Tensors that the captured function made and that are still open keep their memory and their last
// values. Further calls, and calls on nil, do nothing. Close never fails.
func (g *Graph) Close() error {
	if g != nil && g.graph != nil {
		g.cleanup.Stop()
		g.close()
	}
	return nil
}
