package cudatest

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/leaks"
	"github.com/torchstream/torchstream/torch"
)

// grace is how long goroutines and work on the devices may take to end after a test.
const grace = 10 * time.Second

// NoLeaks fails the test if the test leaves one of the following behind that did not exist when
// NoLeaks was called:
//
//   - tensors and scopes, open, or left to the garbage collector
//   - events, graphs, owned streams and pinned memory left to the garbage collector
//   - device memory in use, and pinned memory
//   - goroutines
//   - OS threads, beyond the number that LibTorch and Go's runtime may start themselves: twice the
//     number of CPUs, plus 16
//
// Call it first, so that it looks after all other cleanups. It gives goroutines, and work on the
// GPUs, 10 seconds to end. The number of objects that the garbage collector had to free cannot fall
// again, so NoLeaks does not wait if only these are left. With the tag debug the message has the
// stacks that made the leaked objects. Goroutines are always printed with their stacks. NoLeaks
// sees the whole process, so no other test may run at the same time.
func NoLeaks(t testing.TB) {
	t.Helper()
	noLeaks(t, grace)
}

func noLeaks(t testing.TB, grace time.Duration) {
	t.Helper()
	before, err := look()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		t.Helper()
		last := ""
		for end := time.Now().Add(grace); ; {
			after, err := look()
			if err != nil {
				t.Errorf("cudatest.NoLeaks: %v", err)
				return
			}
			left, mayEnd := after.minus(before)
			if len(left) == 0 {
				return
			}
			// The collector may have more to free, which the next look finds.
			text := strings.Join(left, "\n")
			if !mayEnd && text == last || time.Now().After(end) {
				t.Errorf("cudatest.NoLeaks: the test left behind:\n%s", text)
				return
			}
			last = text
			runtime.Gosched()
		}
	})
}

// state lists everything that a test can leave behind.
type state struct {
	tensors, caught int64
	events, graphs  int64
	streams, pinned int64
	pinnedBytes     int64
	memory          []int64 // bytes of device memory in live tensors, by GPU
	threads         map[string]string
	goroutines      map[string]string // stacks by the goroutine's number
	// by place; collected counts objects that the garbage collector had to free
	open, collected map[string]leaks.Site
}

// look collects unreachable objects, and returns the rest.
func look() (state, error) {
	// The first collection runs the finalizers and cleanups of unreachable objects, which may make
	// other objects unreachable.
	runtime.GC()
	runtime.GC()
	s := state{
		tensors:     torch.LiveTensors(),
		caught:      torch.Caught(),
		pinnedBytes: cuda.PinnedBytes(),
		goroutines:  goroutines(),
		open:        byPlace(leaks.Open()),
	}
	l := cuda.Leaks()
	s.events, s.graphs, s.streams, s.pinned = l.Events, l.Graphs, l.Streams, l.Pinned
	for i := range cuda.DeviceCount() {
		d := cuda.Device(i)
		if err := d.Synchronize(); err != nil {
			return s, err
		}
		m, err := d.Memory()
		if err != nil {
			return s, err
		}
		s.memory = append(s.memory, m.Allocated)
	}
	s.collected = byPlace(leaks.Caught())
	var err error
	s.threads, err = threads()
	return s, err
}

// minus returns one or more lines for each kind of object that has become more numerous since
// before. mayEnd reports whether some of them may still end. Objects that the garbage collector had
// to free stay counted.
func (s state) minus(before state) (left []string, mayEnd bool) {
	count := func(now, then int64, format string, args ...any) {
		if now > then {
			left = append(left, fmt.Sprintf("  "+format, append([]any{now - then}, args...)...))
		}
	}
	count(s.caught, before.caught, "%d tensor(s) that the garbage collector had to free%s", debugHint())
	count(s.events, before.events, "%d event(s) that the garbage collector had to free")
	count(s.graphs, before.graphs, "%d graph(s) that the garbage collector had to free")
	count(s.streams, before.streams, "%d owned stream(s) that nobody closed")
	count(s.pinned, before.pinned, "%d pinned buffer(s) that nobody closed")
	left = append(left, more(s.collected, before.collected, " that the garbage collector had to free")...)
	final := len(left)

	count(s.tensors, before.tensors, "%d open tensor(s): close them, or make them in a scope that ends%s", debugHint())
	count(s.pinnedBytes, before.pinnedBytes, "%d bytes of pinned memory")
	for i, now := range s.memory {
		count(now, before.memory[i], "%d bytes of memory on %v", cuda.Device(i))
	}
	if extra := len(s.threads) - len(before.threads); extra > 2*runtime.NumCPU()+16 {
		left = append(left, fmt.Sprintf("  %d OS threads, now %d: %s", extra, len(s.threads),
			names(s.threads, before.threads)))
	}
	left = append(left, more(s.open, before.open, "")...)
	for _, number := range slices.Sorted(maps.Keys(s.goroutines)) {
		if _, there := before.goroutines[number]; !there {
			left = append(left, indent(s.goroutines[number]))
		}
	}
	return left, len(left) > final
}

// more returns the sites with higher counts than before, each described by its kind and by what.
func more(now, before map[string]leaks.Site, what string) (text []string) {
	for _, place := range slices.Sorted(maps.Keys(now)) {
		site := now[place]
		if site.Count -= before[place].Count; site.Count > 0 {
			site.Kind += what
			text = append(text, indent(site.String()))
		}
	}
	return text
}

func debugHint() string {
	if leaks.Enabled {
		return ""
	}
	return " (go test -tags debug names the lines)"
}

// byPlace returns the sites by their places.
func byPlace(sites leaks.Sites) map[string]leaks.Site {
	out := map[string]leaks.Site{}
	for _, site := range sites {
		out[place(site)] = site
	}
	return out
}

// place identifies a site by its kind and stack.
func place(s leaks.Site) string {
	s.Count = 0
	return s.String()
}

func indent(text string) string {
	return "  " + strings.ReplaceAll(strings.TrimRight(text, "\n"), "\n", "\n  ")
}

// header is the first line of a goroutine's stack.
var header = regexp.MustCompile(`^goroutine (\d+) `)

// goroutines returns the stacks of all goroutines by their numbers, which are never reused. It
// omits three kinds: the caller, the testing package's goroutines, which start and end at any time,
// and the runtime's.
func goroutines() map[string]string {
	text := make([]byte, 1<<16)
	for {
		n := runtime.Stack(text, true)
		if n < len(text) {
			text = text[:n]
			break
		}
		text = make([]byte, 2*len(text))
	}
	out := map[string]string{}
	_, others, _ := bytes.Cut(text, []byte("\n\n")) // the caller's stack is the first
	for stack := range bytes.SplitSeq(others, []byte("\n\n")) {
		match := header.FindSubmatch(stack)
		if match == nil || bytes.Contains(stack, []byte("\ncreated by testing.")) ||
			bytes.Contains(stack, []byte("\ncreated by runtime")) {
			continue
		}
		out[string(match[1])] = string(stack)
	}
	return out
}

// threads returns the names of the process's OS threads by their numbers.
func threads() (map[string]string, error) {
	tasks, err := filepath.Glob("/proc/self/task/*")
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, task := range tasks {
		name, err := os.ReadFile(filepath.Join(task, "comm"))
		if err != nil {
			continue // the thread has ended
		}
		out[filepath.Base(task)] = strings.TrimSpace(string(name))
	}
	return out, nil
}

// names lists the names of the threads that are not in before, with their counts.
func names(now, before map[string]string) string {
	counts := map[string]int{}
	for id, name := range now {
		if _, there := before[id]; !there {
			counts[name]++
		}
	}
	var out []string
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		out = append(out, fmt.Sprintf("%d %q", counts[name], name))
	}
	return strings.Join(out, ", ")
}
