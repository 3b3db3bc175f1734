package loaderbench

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/torchstream/torchstream/trace"
)

func near(a, b float64) bool { return math.Abs(a-b) < 1e-9 }

// TestSumKernels sums 8 ms of a 10 ms recording on a GPU with 100 multiprocessors.
func TestSumKernels(t *testing.T) {
	const ms = time.Millisecond
	kernel := func(name string, start, duration time.Duration, blocks int64) trace.Event {
		return trace.Event{
			Kind: trace.Kernel, Name: name, Start: start, Duration: duration,
			Launch: trace.Launch{Blocks: blocks, Threads: 128, Registers: 32, SharedBytes: 1024, Occupancy: 0.5},
		}
	}
	recorded := &trace.Trace{Events: []trace.Event{
		kernel("ts::decode::kernels::entropy(ts::decode::Work)", 0, 2*ms, 1000), // only its second half counts
		kernel("ts::decode::kernels::entropy(ts::decode::Work)", 3*ms, 2*ms, 50),
		kernel("void normalize<float>(int)", 4*ms, 2*ms, 80), // overlaps the previous one for 1 ms
		kernel("ts::decode::kernels::entropy(ts::decode::Work)", 9*ms, ms, 50),
		{Kind: trace.Copy, Name: "Memcpy HtoD", Start: 2 * ms, Duration: 5 * ms},
		{Kind: trace.Kernel, Name: "other", Device: 1, Start: 2 * ms, Duration: 5 * ms,
			Launch: trace.Launch{Blocks: 9}},
	}}
	k := sumKernels(recorded, 0, ms, 9*ms, 100, 0)
	if !near(k.Seconds, 0.008) || k.Multiprocessors != 100 || !near(k.BusyShare, 4.0/8) ||
		!near(k.SMTimeShare, (1+0.5+1+0.8)/8) || k.WhyNot != "" {
		t.Errorf("%+v", k)
	}
	if len(k.Kernels) != 2 {
		t.Fatalf("%d kernels, want 2: %+v", len(k.Kernels), k.Kernels)
	}
	e, n := k.Kernels[0], k.Kernels[1]
	if e.Kernel != "entropy" || e.Launches != 2 || !near(e.TotalMS, 3) || !near(e.MeanUS, 1500) ||
		!near(e.TimeShare, 3.0/8) || !near(e.SMTimeShare, 2.0/8) ||
		!near(e.Blocks, 525) || e.Threads != 128 || e.Registers != 32 || e.SharedBytes != 1024 || e.Occupancy != 0.5 {
		t.Errorf("entropy: %+v", e)
	}
	if n.Kernel != "normalize" || n.Launches != 1 || !near(n.SMTimeShare, 1.6/8) {
		t.Errorf("normalize: %+v", n)
	}

	// The limit applies to the decoding kernels only.
	if k = sumKernels(recorded, 0, ms, 9*ms, 100, 20); !near(k.SMTimeShare, (0.2+0.2+1+0.8)/8) {
		t.Errorf("with 20 multiprocessors: %+v", k)
	}
	var text strings.Builder
	if err := k.print(&text); err != nil || !strings.Contains(text.String(), "entropy") ||
		!strings.Contains(text.String(), "occupancy %") {
		t.Errorf("%v, %s", err, &text)
	}
	if k = sumKernels(recorded, 2, ms, 9*ms, 100, 0); k.WhyNot == "" {
		t.Errorf("of a device without kernels: %+v", k)
	}
	if err := (*KernelTimes)(nil).print(nil); err != nil {
		t.Error(err)
	}
}
