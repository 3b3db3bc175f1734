//go:build linux

package cuda

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/torchstream/torchstream/internal/capi"
)

// TestMain fails if the stream sanitizer that the environment has started finds an error. Package
// cudatest does so for other packages; it imports this one.
func TestMain(m *testing.M) {
	code := m.Run()
	if s := RunningSanitizer(); code == 0 && s.Errors() > 0 {
		fmt.Fprintf(os.Stderr, "the stream sanitizer has %d findings\n", s.Errors())
		code = 66
	}
	os.Exit(code)
}

// until runs the garbage collector until done returns true.
func until(t *testing.T, condition string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !done(); {
		if time.Now().After(end) {
			t.Fatalf("%s did not happen within 20 s", condition)
		}
		runtime.GC()
		runtime.Gosched()
	}
}

// threadsUsed runs fn in the given number of goroutines, one after the other, and returns the
// number of threads that they used. A goroutine that ends locked takes its thread with it, so many
// threads mean that fn left its goroutine locked.
func threadsUsed(goroutines int, fn func()) int {
	threads := map[int64]bool{}
	for range goroutines {
		done := make(chan int64)
		go func() {
			fn()
			done <- capi.ThreadID()
		}()
		threads[<-done] = true
	}
	return len(threads)
}

// onGPU skips the test on machines with fewer than count GPUs. If the test hangs, it ends the
// process with all stacks.
func onGPU(t *testing.T, count int) {
	t.Helper()
	if n := DeviceCount(); n < count {
		// Like cudatest.RequireGPUs, whose package imports this one.
		if promised, err := strconv.Atoi(os.Getenv("TORCHSTREAM_REQUIRE_GPUS")); err == nil && promised >= count {
			t.Fatalf("needs %d GPU(s), this machine has %d of the %d that TORCHSTREAM_REQUIRE_GPUS "+
				"promises", count, n, promised)
		}
		t.Skipf("needs %d GPU(s), this machine has %d", count, n)
	}
	dog := time.AfterFunc(2*time.Minute, func() { panic(t.Name() + " hangs") })
	t.Cleanup(func() { dog.Stop() })
}

func must[T any](t *testing.T) func(T, error) T {
	return func(value T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newStreams returns distinct streams: the pool hands out 32 of a priority before it repeats.
func newStreams(t *testing.T, n int) []Stream {
	t.Helper()
	streams := make([]Stream, n)
	seen := map[Stream]bool{}
	for i := range streams {
		streams[i] = must[Stream](t)(NewStream(0, StreamOptions{Priority: -(i / 32)}))
		if seen[streams[i]] {
			t.Fatalf("%v was handed out twice in %d", streams[i], n)
		}
		seen[streams[i]] = true
	}
	return streams
}

// eachThread runs visit once on every live thread of used, and on the other threads that run Go
// code: it holds more locked goroutines at a time than there are threads.
func eachThread(t *testing.T, used *sync.Map, visit func() error) {
	t.Helper()
	tasks, err := os.ReadDir("/proc/self/task")
	check(t, err)
	type visited struct {
		thread int64
		err    error
	}
	arrived, release := make(chan visited), make(chan struct{})
	var all sync.WaitGroup
	threads := map[int64]bool{}
	hold := func(goroutines int) {
		for range goroutines {
			all.Go(func() {
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				arrived <- visited{capi.ThreadID(), visit()}
				<-release
			})
		}
		for range goroutines {
			v := <-arrived
			if v.err != nil {
				t.Errorf("thread %d: %v, want no error", v.thread, v.err)
			}
			if threads[v.thread] {
				t.Errorf("two locked goroutines are on thread %d", v.thread)
			}
			threads[v.thread] = true
		}
	}
	hold(len(tasks) + 16)
	missing := func() (thread int64) {
		used.Range(func(key, _ any) bool {
			_, err := os.Stat("/proc/self/task/" + strconv.FormatInt(key.(int64), 10))
			if err == nil && !threads[key.(int64)] {
				thread = key.(int64)
			}
			return thread == 0
		})
		return thread
	}
	// One thread may be waiting in the runtime's poller. A timer wakes that thread, which may then
	// run a goroutine of this test, or another thread takes its place there.
	for tries := 0; missing() != 0 && tries < 500; tries++ {
		<-time.After(time.Microsecond)
		hold(1)
	}
	close(release)
	all.Wait()
	if thread := missing(); thread != 0 {
		t.Errorf("thread %d used streams, is alive, and was not visited, want every thread visited", thread)
	}
}

func onDefaultStream() error {
	s, err := capi.GetCurrentCUDAStream(0)
	if err == nil && s != DefaultStream(0).s {
		err = fmt.Errorf("%v was left current", Stream{s})
	}
	return err
}

func requireDefaultStreams(t *testing.T, used *sync.Map) {
	t.Helper()
	eachThread(t, used, onDefaultStream)
}

type counter struct {
	x        *capi.Tensor
	add      *capi.Operator
	one      *capi.Tensor
	expected float64
}

func newCounter(t *testing.T) *counter {
	t.Helper()
	c := &counter{x: tensor(t, 1, 0), one: tensor(t, 1, 1)}
	c.add = must[*capi.Operator](t)(capi.FindOperator("aten::add_", "Tensor"))
	return c
}

func (c *counter) increase() error {
	c.expected++
	err := capi.CallOperator(c.add, []capi.Arg{{Kind: capi.ArgTensor}, {Kind: capi.ArgTensor, Value: 1}},
		[]*capi.Tensor{c.x, c.one}, nil, capi.CallNoGrad, nil)
	return err
}

// tensor returns n float32 elements on the first GPU, filled with value, and frees them at the end
// of the test.
func tensor(t *testing.T, n int64, value float32) *capi.Tensor {
	t.Helper()
	x := must[*capi.Tensor](t)(capi.EmptyTensor([]int64{n}, capi.Float32, 0, capi.Contiguous))
	t.Cleanup(func() { capi.FreeTensor(x) })
	check(t, fill(x, value))
	check(t, Device(0).Synchronize())
	return x
}

func fill(x *capi.Tensor, value float32) error {
	op, err := capi.FindOperator("aten::fill_", "Scalar")
	if err != nil {
		return err
	}
	err = capi.CallOperator(op,
		[]capi.Arg{{Kind: capi.ArgTensor}, {Kind: capi.ArgInt, Value: int64(value)}}, []*capi.Tensor{x},
		nil, capi.CallNoGrad, nil)
	return err
}

func requireCurrent(t *testing.T, want Stream) {
	t.Helper()
	if got := must[Stream](t)(GetCurrentCUDAStream(want.Device())); got != want {
		t.Errorf("%v is current, want %v", got, want)
	}
}

// work keeps a stream busy for tens of milliseconds, far longer than queueing the work takes.
type work struct{ a, b *capi.Tensor }

const workBytes = 256 << 20

func newWork(t *testing.T) work { return work{tensor(t, workBytes/4, 1), tensor(t, workBytes/4, 1)} }

func (w work) queue() error {
	for range 200 {
		if err := capi.CopyTensor(w.a, w.b, true); err != nil {
			return err
		}
	}
	return nil
}

// firstAndLast reads on a separate stream, so that the read orders nothing.
func firstAndLast(t *testing.T, x *capi.Tensor, n int) (ends [2]float32) {
	t.Helper()
	memory := make([]byte, 4*n)
	check(t, WithStream(must[Stream](t)(NewStream(0, StreamOptions{})),
		func() error { return capi.ReadTensor(x, memory) }))
	values := unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(memory))), n)
	return [2]float32{values[0], values[n-1]}
}

func (c *counter) value(t *testing.T) float64 {
	t.Helper()
	check(t, Device(0).Synchronize())
	return must[float64](t)(capi.TensorItem(c.x))
}

func operate(x *capi.Tensor, name string) error {
	op, err := capi.FindOperator(name, "")
	if err != nil {
		return err
	}
	err = capi.CallOperator(op, []capi.Arg{{Kind: capi.ArgTensor}}, []*capi.Tensor{x}, nil, 0, nil)
	return err
}

// mapped returns memory outside of the Go heap.
func mapped(t *testing.T, bytes int) []byte {
	t.Helper()
	m, err := syscall.Mmap(-1, 0, bytes, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	check(t, err)
	t.Cleanup(func() { syscall.Munmap(m) })
	return m
}

// sleepsIn waits until the thread sleeps inside of the C function, and returns true, or until ended
// is closed, and returns false. A goroutine that is locked to the thread makes one call of the
// function, and no other goroutine calls it. However busy the machine is, true means that the call
// has not returned: the call was running both before and after sleepsIn looked at the thread.
func sleepsIn(t *testing.T, thread int64, function string, ended <-chan struct{}) bool {
	t.Helper()
	stacks := make([]byte, 1<<20)
	inside := func() bool {
		for _, one := range strings.Split(string(stacks[:runtime.Stack(stacks, true)]), "\n\n") {
			state, _, _ := strings.Cut(one, "\n")
			if strings.Contains(state, "[syscall") && strings.Contains(one, "._Cfunc_"+function+"(") {
				return true
			}
		}
		return false
	}
	asleep := func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/stat", thread))
		check(t, err)
		_, state, _ := strings.Cut(string(stat[max(0, strings.LastIndexByte(string(stat), ')')):]), " ")
		return strings.HasPrefix(state, "S")
	}
	for {
		select {
		case <-ended:
			return false
		default:
		}
		if inside() && asleep() && inside() {
			return true
		}
		runtime.Gosched()
	}
}

// firstDifference returns the index of the first byte in which a and b differ, or -1.
func firstDifference(a, b []byte) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	if len(a) != len(b) {
		return min(len(a), len(b))
	}
	return -1
}
