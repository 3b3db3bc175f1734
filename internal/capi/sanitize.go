//go:build linux

package capi

/*
#include "torchstream.h"
#cgo noescape ts_tensor_get_extents
#cgo nocallback ts_tensor_get_extents
#cgo nocallback ts_sanitizer_start
#cgo nocallback ts_sanitizer_stop
*/
import "C"

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/torchstream/torchstream/internal/racecheck"
)

// sanitizer receives the actions of this package's functions. It is nil unless the stream sanitizer
// runs; each function then costs one atomic load.
var sanitizer atomic.Pointer[Sanitizer]

// Sanitizer reports the reads, writes and synchronisations of this package's calls to a
// racecheck.Checker.
type Sanitizer struct {
	check     *racecheck.Checker
	operators sync.Map               // of *racecheck.Operator by *Operator
	log       func(room []entry) int // takeLog, except in tests

	mu      sync.Mutex // one goroutine at a time takes entries of the log, and applies them
	room    [64]entry  // for take
	streams map[Stream]racecheck.Queue
	handles map[queueKey]racecheck.Queue
	notices map[uint64][]uint64 // clocks by token
	capture capturing
	pass    *racecheck.Place // the latest backward pass
}

// capturing is the capture whose end is not reported yet. The sanitizer's mu guards it.
type capturing struct {
	graph, share *Graph    // graph is nil if there is none
	ends         sync.Cond // on mu: graph is nil again, or stopped is set
	stopped      bool      // ends are no longer reported
}

// begin waits until the previous capture has ended, and makes g the graph being captured. Captures
// exclude each other, but the end of the previous one may not be reported yet.
func (c *capturing) begin(g, share *Graph) {
	for c.graph != nil && !c.stopped {
		c.ends.Wait()
	}
	c.graph, c.share = g, share
}

func (c *capturing) end() {
	c.graph, c.share = nil, nil
	c.ends.Broadcast()
}

// stop ends all waiting: no capture must wait for another's end, which is no longer reported.
func (c *capturing) stop() {
	c.stopped = true
	c.ends.Broadcast()
}

type queueKey struct {
	device int32
	handle uintptr
}

// ErrSanitizing is returned by StartSanitizer while a sanitizer runs.
var ErrSanitizing = &Error{Code: CodeInvalidArgument, Origin: "StartSanitizer",
	Message: "the process has a stream sanitizer already"}

// StartSanitizer reports all calls to a new Checker from now on, until Stop.
func StartSanitizer(o racecheck.Options) (*Sanitizer, *racecheck.Checker, error) {
	if err := Check(); err != nil {
		return nil, nil, err
	}
	o.Fingerprint = fingerprint
	check := racecheck.New(o)
	s, err := startSanitizer(check)
	return s, check, err
}

func newSanitizer(check *racecheck.Checker) *Sanitizer {
	s := &Sanitizer{
		check: check, log: takeLog,
		streams: map[Stream]racecheck.Queue{}, handles: map[queueKey]racecheck.Queue{}, notices: map[uint64][]uint64{},
	}
	s.capture.ends.L = &s.mu
	return s
}

func startSanitizer(check *racecheck.Checker) (*Sanitizer, error) {
	s := newSanitizer(check)
	if !sanitizer.CompareAndSwap(nil, s) {
		return nil, ErrSanitizing
	}
	if err := failure(C.ts_sanitizer_start()); err != nil {
		sanitizer.Store(nil)
		return nil, err
	}
	return s, nil
}

// Stop ends the sanitizer. Further calls do nothing.
func (s *Sanitizer) Stop() {
	if sanitizer.CompareAndSwap(s, nil) {
		C.ts_sanitizer_stop()
		s.mu.Lock()
		defer s.mu.Unlock()
		s.capture.stop()
	}
}

// sanitizeFromEnvironment starts the sanitizer that the environment asks for.
func sanitizeFromEnvironment() error {
	check, err := racecheck.FromEnvironment(fingerprint)
	if err != nil || check == nil {
		return err
	}
	_, err = startSanitizer(check)
	return err
}

// CurrentSanitizer returns the Checker of the running sanitizer, or nil.
func CurrentSanitizer() *racecheck.Checker {
	if s := sanitizer.Load(); s != nil {
		return s.check
	}
	return nil
}

// ---- Streams

// queue returns the number of a stream. Streams with the same cudaStream_t are one queue.
func (s *Sanitizer) queue(st Stream) racecheck.Queue {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.queueLocked(st)
}

func (s *Sanitizer) queueLocked(st Stream) racecheck.Queue {
	if q, ok := s.streams[st]; ok {
		return q
	}
	handle, err := st.Handle()
	if err != nil {
		handle = uintptr(st.ID)
	}
	q := s.handleLocked(st.Device, handle)
	s.check.NameQueue(q, nameOf(st, q), s.check.Made(q))
	s.streams[st] = q
	return q
}

// handleLocked returns the number of a cudaStream_t.
func (s *Sanitizer) handleLocked(device int32, handle uintptr) racecheck.Queue {
	k := queueKey{device, handle}
	q, ok := s.handles[k]
	if !ok {
		name := fmt.Sprintf("cuda:%d stream %#x", device, handle)
		if handle == 0 {
			name = fmt.Sprintf("cuda:%d default stream", device)
		}
		q = s.check.NewQueue(name, device)
		s.handles[k] = q
	}
	return q
}

// maxPoolStream is larger than any stream id of LibTorch's pool, and smaller than any address.
const maxPoolStream = 1 << 14

// nameOf names a stream for reports. Outside LibTorch's pool the stream's id is an address, which
// is not useful in a report.
func nameOf(st Stream, q racecheck.Queue) string {
	switch {
	case st.ID == 0:
		return fmt.Sprintf("cuda:%d default stream", st.Device)
	case st.ID > maxPoolStream:
		return fmt.Sprintf("cuda:%d stream own%d", st.Device, q)
	}
	return fmt.Sprintf("cuda:%d stream %d", st.Device, st.ID)
}

func (s *Sanitizer) queues(streams []Stream) []racecheck.Queue {
	qs := make([]racecheck.Queue, len(streams))
	for i, st := range streams {
		qs[i] = s.queue(st)
	}
	return qs
}

// madeStream records where the program got a stream.
func (s *Sanitizer) madeStream(st Stream, what string, shared bool) {
	at := s.check.Here(what, 1)
	q := s.queue(st)
	if before := s.check.Made(q); shared && before != nil {
		s.check.Note(racecheck.KindSharedStream, before, at)
	}
	s.check.NameQueue(q, nameOf(st, q), at)
}

func (s *Sanitizer) wait(waiter, on Stream) { s.check.Wait(s.queue(waiter), s.queue(on)) }

func (s *Sanitizer) fork(from Stream, to []Stream) { s.check.Fork(s.queue(from), s.queues(to)...) }

func (s *Sanitizer) join(into Stream, from []Stream) { s.check.Wait(s.queue(into), s.queues(from)...) }

func (s *Sanitizer) synchronized(st Stream) { s.check.Wait(racecheck.Host, s.queue(st)) }

// ---- Events

func eventKey(e *Event) uintptr { return uintptr(unsafe.Pointer(e)) }

func (s *Sanitizer) recorded(e *Event, st Stream) {
	s.check.Record(eventKey(e), s.queue(st), s.check.Here("Event.Record", 1))
}

// awaited records that a stream waits for the event, or that the call failed.
func (s *Sanitizer) awaited(st Stream, e *Event, err error) {
	switch {
	case err == nil:
		s.check.WaitEvent(s.queue(st), eventKey(e))
	case errors.Is(err, CodeNotRecorded):
		s.check.Note(racecheck.KindNotRecorded, nil, s.check.Here("Stream.WaitEvent", 1))
	}
}

// reached records that the host knows that the event is done.
func (s *Sanitizer) reached(e *Event) { s.check.WaitEvent(racecheck.Host, eventKey(e)) }

func (s *Sanitizer) dropped(e *Event) { s.check.Drop(eventKey(e), s.check.Here("Event.Close", 1)) }

func (s *Sanitizer) notified(st Stream, token uint64) {
	taken := s.check.Snapshot(s.queue(st))
	s.mu.Lock()
	s.notices[token] = taken
	s.mu.Unlock()
}

func (s *Sanitizer) noticed(tokens []uint64) {
	for _, token := range tokens {
		s.mu.Lock()
		taken := s.notices[token]
		delete(s.notices, token)
		s.mu.Unlock()
		s.check.WaitSnapshot(taken)
	}
}

// ---- Tensors

// extents describes tensors, some of which may be nil. The result uses room if it fits.
func extents(room []C.ts_tensor_extent, tensors []*Tensor) []C.ts_tensor_extent {
	if len(tensors) > len(room) {
		room = make([]C.ts_tensor_extent, len(tensors))
	}
	room = room[:len(tensors)]
	if err := failure(C.ts_tensor_get_extents(unsafe.SliceData(tensors), C.int64_t(len(tensors)),
		unsafe.SliceData(room))); err != nil {
		return nil
	}
	return room
}

func onGPU(all []C.ts_tensor_extent) bool {
	for i := range all {
		if all[i].device >= 0 {
			return true
		}
	}
	return false
}

func memoryOf(e *C.ts_tensor_extent) racecheck.Memory {
	m := racecheck.Memory{
		Device: int32(e.device), Storage: uintptr(e.storage), StorageBytes: uintptr(e.storage_bytes),
		Region: racecheck.Region{Begin: uintptr(e.begin), Row: uintptr(e.row_bytes), Rows: int64(e.rows),
			Pitch: uintptr(e.pitch)},
		Shape: racecheck.Shape{DType: int32(e.dtype), NDim: int32(e.ndim)},
	}
	for i := range m.Shape.Sizes {
		m.Shape.Sizes[i] = int64(e.sizes[i])
	}
	return m
}

// queueOf returns the queue of an operator on the tensor.
func (s *Sanitizer) queueOf(e *C.ts_tensor_extent) racecheck.Queue {
	if e.device < 0 {
		return racecheck.Host
	}
	return s.queue(Stream{int64(e.stream.id), int32(e.stream.device)})
}

// begin precedes a call whose events and synchronisations are in the log. They belong to the
// calling thread, so begin locks the goroutine to it until end. s may be nil.
//
// begin applies the log entries that the thread's earlier calls have left. Otherwise end would
// apply them together with this call's entries, after this call's accesses, and a synchronisation
// among them would hide races of this call.
func (s *Sanitizer) begin() {
	if s != nil {
		runtime.LockOSThread()
		s.freed("an earlier call")
	}
}

// end follows a call after begin. s may be nil.
func (s *Sanitizer) end() {
	if s != nil {
		runtime.UnlockOSThread()
	}
}

// failed replaces end after a call that returned an error. s may be nil.
func (s *Sanitizer) failed(what string) {
	if s != nil {
		s.freed(what)
		s.end()
	}
}

// call wraps a call that is not an operator's, and calls after if it succeeds.
func (s *Sanitizer) call(fn func() error, after func()) error {
	s.begin()
	if err := fn(); err != nil {
		s.failed("a failed call")
		return err
	}
	after()
	s.end()
	return nil
}

// operated follows a successful operator call.
func (s *Sanitizer) operated(op *Operator, args []Arg, tensors, results []*Tensor) {
	s.operator(op, args, tensors, results)
	s.end()
}

func (s *Sanitizer) effects(op *Operator) *racecheck.Operator {
	if e, ok := s.operators.Load(op); ok {
		return e.(*racecheck.Operator)
	}
	e := racecheck.Effects(OperatorSchema(op))
	kept, _ := s.operators.LoadOrStore(op, &e)
	return kept.(*racecheck.Operator)
}

// effectsOnOperands appends what the operator does to each operand.
func effectsOnOperands(does []racecheck.Effect, operands int, e *racecheck.Operator, args []Arg) []racecheck.Effect {
	for range operands {
		does = append(does, racecheck.Reads) // an argument that the schema does not name
	}
	for i, a := range args[:min(len(args), len(e.Args))] {
		switch a.Kind {
		case ArgTensor:
			does[a.Value] = e.Args[i]
		case ArgTensors:
			for j := a.Value; j < a.Value+int64(a.Count); j++ {
				does[j] = e.Args[i]
			}
		}
	}
	return does
}

// operator reports an operator call's reads and writes to the checker.
func (s *Sanitizer) operator(op *Operator, args []Arg, tensors, results []*Tensor) {
	var room [16]C.ts_tensor_extent
	var few [16]*Tensor
	all := extents(room[:], append(append(few[:0], tensors...), results...))
	if all == nil || !onGPU(all) && !s.check.Tracks(DeviceCPU) {
		return
	}
	e := s.effects(op)
	at := s.check.Here(e.Name, 2)
	own := s.take(e.Name, at)
	operands, made := all[:len(tensors)], all[len(tensors):]
	var effects [16]racecheck.Effect
	does := effectsOnOperands(effects[:0], len(operands), e, args)
	base, _, _ := strings.Cut(strings.TrimPrefix(e.Name, "aten::"), ".")
	if base == "copy_" || base == "to" || base == "_to_copy" {
		s.copied(at, base, operands, made, args, tensors)
		s.finish(own)
		return
	}
	var fewAccesses [16]racecheck.Access
	accesses := fewAccesses[:0]
	for i := range operands {
		o := &operands[i]
		if does[i] == racecheck.Views && shares(made, o) || does[i] == racecheck.Metadata || o.storage == 0 {
			continue
		}
		accesses = append(accesses,
			racecheck.Access{Memory: memoryOf(o), Queue: s.queueOf(o), Write: does[i] == racecheck.Writes})
	}
	for i := range made {
		if m := &made[i]; m.storage != 0 && !shares(operands, m) {
			accesses = append(accesses, s.fresh(m, s.queueOf(m)))
		}
	}
	s.check.Do(racecheck.Launch{At: at, Accesses: accesses})
	s.finish(own)
}

// fresh returns an operator's access to its result's memory.
func (s *Sanitizer) fresh(m *C.ts_tensor_extent, q racecheck.Queue) racecheck.Access {
	if m.device < 0 && s.check.Tracks(DeviceCPU) {
		s.check.Unmap(DeviceCPU, uintptr(m.storage), uintptr(m.storage_bytes)) // if stale
	}
	return racecheck.Access{Memory: memoryOf(m), Queue: q, Write: true, Fresh: true}
}

// shares reports whether one of the tensors shares its memory with t.
func shares(tensors []C.ts_tensor_extent, t *C.ts_tensor_extent) bool {
	for i := range tensors {
		if tensors[i].storage == t.storage && tensors[i].device == t.device {
			return true
		}
	}
	return false
}

// copied tells the checker about the operators copy_ and to, which may copy between devices.
func (s *Sanitizer) copied(at *racecheck.Place, base string, operands, made []C.ts_tensor_extent,
	args []Arg, tensors []*Tensor) {
	switch {
	case base == "copy_" && len(operands) == 2:
		nonBlocking := len(args) > 2 && args[2].Kind == ArgBool && args[2].Value == 1
		s.move(at, &operands[0], &operands[1], false, nonBlocking, pinnedOf(tensors, operands))
	case len(operands) > 0 && len(made) == 1 && !shares(operands, &made[0]):
		// LibTorch pins the result of a non-blocking copy to the host.
		s.move(at, &made[0], &operands[0], true, hasTrue(args), made[0].device < 0 || pinnedOf(tensors, operands))
	}
}

// hasTrue reports whether a flag among the arguments is set: non_blocking, or copy, which makes no
// difference here.
func hasTrue(args []Arg) bool {
	for _, a := range args {
		if a.Kind == ArgBool && a.Value == 1 {
			return true
		}
	}
	return false
}

// pinnedOf reports whether the tensors on the host are pinned.
func pinnedOf(tensors []*Tensor, all []C.ts_tensor_extent) bool {
	for i, t := range tensors {
		if all[i].device < 0 && t != nil {
			if info, err := DescribeTensor(t); err != nil || !info.Pinned {
				return false
			}
		}
	}
	return true
}

// move reports a copy to the checker. pinned says whether the host side is pinned memory. The log
// has a synchronisation for a blocking copy.
func (s *Sanitizer) move(at *racecheck.Place, dst, src *C.ts_tensor_extent, fresh, nonBlocking, pinned bool) {
	to, from := s.queueOf(dst), s.queueOf(src)
	on := from // a copy between two GPUs runs on the sender's stream, and is ordered on both
	switch {
	case dst.device >= 0 && src.device < 0:
		on = to
	case dst.device >= 0 && src.device >= 0 && dst.device != src.device:
		s.check.Wait(from, to)
		defer s.check.Wait(to, from)
	}
	mixed := (dst.device < 0) != (src.device < 0)
	write := racecheck.Access{Memory: memoryOf(dst), Queue: on, Write: true}
	if fresh {
		write = s.fresh(dst, on)
	}
	read := racecheck.Access{Memory: memoryOf(src), Queue: on}
	write.Track = mixed && pinned && nonBlocking // the host knows the end of a blocking copy
	read.Track = write.Track
	s.check.Do(racecheck.Launch{At: at, Accesses: []racecheck.Access{read, write}})
	if mixed && nonBlocking && !pinned {
		s.check.Note(racecheck.KindPageable, nil, at)
		if dst.device < 0 {
			s.check.Wait(racecheck.Host, on) // CUDA returns when pageable memory has its values
		}
	}
}

// moved follows a call that copies src to dst on the current stream of the GPU.
func (s *Sanitizer) moved(what string, dst, src *Tensor, fresh, nonBlocking bool) {
	pair := [2]*Tensor{dst, src}
	var room [2]C.ts_tensor_extent
	all := extents(room[:], pair[:])
	if all == nil || !onGPU(all) && !s.check.Tracks(DeviceCPU) {
		return
	}
	at := s.check.Here(what, 2)
	own := s.take(what, at)
	if !fresh || !shares(all[1:], &all[0]) {
		s.move(at, &all[0], &all[1], fresh, nonBlocking, pinnedOf(pair[:], all))
	}
	s.finish(own)
}

// used follows a call that creates, writes and reads tensors on their current streams.
func (s *Sanitizer) used(what string, made, writes, reads []*Tensor) {
	var few [16]*Tensor
	var room [16]C.ts_tensor_extent
	all := extents(room[:], append(append(append(few[:0], made...), writes...), reads...))
	if all == nil || !onGPU(all) && !s.check.Tracks(DeviceCPU) {
		return
	}
	at := s.check.Here(what, 2)
	own := s.take(what, at)
	var accesses []racecheck.Access
	for i := range all {
		q := s.queueOf(&all[i])
		switch {
		case i < len(made):
			accesses = append(accesses, s.fresh(&all[i], q))
		case all[i].storage != 0:
			accesses = append(accesses,
				racecheck.Access{Memory: memoryOf(&all[i]), Queue: q, Write: i < len(made)+len(writes)})
		}
	}
	s.check.Do(racecheck.Launch{At: at, Accesses: accesses})
	s.finish(own)
}

// transferred follows CopyBatch and CopyPeer: copies on a given stream, with pinned host memory.
func (s *Sanitizer) transferred(what string, on Stream, dst, src []*Tensor) {
	var few [16]*Tensor
	var room [16]C.ts_tensor_extent
	all := extents(room[:], append(append(few[:0], dst...), src...))
	at := s.check.Here(what, 2)
	own := s.take(what, at)
	q := s.queue(on)
	var accesses []racecheck.Access
	for i := range all {
		accesses = append(accesses, racecheck.Access{Memory: memoryOf(&all[i]), Queue: q, Write: i < len(dst)})
		accesses[i].Track = true
	}
	s.check.Do(racecheck.Launch{At: at, Accesses: accesses})
	s.finish(own)
}

func (s *Sanitizer) copyBatch(on Stream, after *Event, dst, src []*Tensor, done *Event) {
	if after != nil {
		s.check.WaitEvent(s.queue(on), eventKey(after))
	}
	s.transferred("torch.CopyBatch", on, dst, src)
	if done != nil {
		s.check.Record(eventKey(done), s.queue(on), s.check.Here("torch.CopyBatch", 1))
	}
}

func (s *Sanitizer) copyPeer(to Stream, dst []*Tensor, from Stream, src []*Tensor) {
	s.wait(from, to)
	s.transferred("torch.CopyPeer", from, dst, src)
	s.wait(to, from)
}

func (s *Sanitizer) recordStream(t *Tensor, st Stream) {
	var room [1]C.ts_tensor_extent
	one := [1]*Tensor{t}
	if all := extents(room[:], one[:]); all != nil {
		s.check.Use(int32(all[0].device), uintptr(all[0].storage), s.queue(st))
	}
}

// ---- Pinned memory

// fingerprint hashes up to 512 words of host memory, evenly spread.
func fingerprint(begin, n uintptr) uint64 {
	memory := unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&begin))), int(n)) // C memory
	const words = 512
	sum := uint64(14695981039346656037) // FNV-1a, by words
	step := max(8, len(memory)/words&^7)
	for at := 0; at+8 <= len(memory); at += step {
		sum = (sum ^ binary.NativeEndian.Uint64(memory[at:])) * 1099511628211
	}
	for _, b := range memory[len(memory)&^7:] {
		sum = (sum ^ uint64(b)) * 1099511628211
	}
	return sum
}

func (s *Sanitizer) unpinned(begin, bytes uintptr) {
	s.check.Free(DeviceCPU, begin, s.check.Here("Pinned.Close", 1))
	s.check.Unmap(DeviceCPU, begin, bytes)
}

// registered is like pinned for memory of RegisterReadOnly. The checker must not read its content,
// which may be of a file that has lost its pages.
func (s *Sanitizer) registered(p *Pinned) {
	b := PinnedBytes(p)
	s.check.Register(DeviceCPU, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)),
		s.check.Here("cuda.RegisterReadOnly", 1))
}

func (s *Sanitizer) pinned(p *Pinned) {
	if b := PinnedBytes(p); len(b) > 0 {
		s.check.Allocate(DeviceCPU, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)),
			racecheck.Host, s.check.Here("cuda.NewPinned", 1))
	}
}

// ---- Graphs

func graphKey(g *Graph) uintptr { return uintptr(unsafe.Pointer(g)) }

func (s *Sanitizer) began(g *Graph, st Stream, share *Graph) {
	q := s.queue(st)
	s.mu.Lock()
	s.capture.begin(g, share)
	s.mu.Unlock()
	s.check.Begin(q)
}

// ended records the end of the capture of g; ok says whether the graph can be replayed.
func (s *Sanitizer) ended(g *Graph, ok bool) {
	s.freed("Capture")
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.capture.graph != g:
		return
	case ok:
		s.check.End(graphKey(g), graphKey(s.capture.share))
	default:
		s.check.End(0, 0)
	}
	s.capture.end()
}

func (s *Sanitizer) replayed(g *Graph, st Stream) {
	s.check.Replay(graphKey(g), s.queue(st), s.check.Here("Graph.Replay", 1))
}

// freeing precedes the destruction of a graph. It comes first, because once a graph is freed,
// another graph may get its address, and another goroutine may apply the log entries for the
// graph's memory. freeing reports whether g is being captured.
func (s *Sanitizer) freeing(g *Graph) (captured bool) {
	s.check.FreeGraph(graphKey(g))
	s.mu.Lock()
	defer s.mu.Unlock()
	return g != nil && s.capture.graph == g
}

// freedGraph follows the destruction of a graph, or a failed capture. captured is the result of
// freeing.
func (s *Sanitizer) freedGraph(g *Graph, captured bool) {
	s.freed("Graph.Close")
	if captured {
		s.ended(g, false)
	}
}
