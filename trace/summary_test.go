package trace

import (
	"strings"
	"testing"
	"time"
)

func TestSummaryGolden(t *testing.T) {
	golden(t, "overlapping.txt", []byte(overlapping().Summary().String()))
}

func TestShortNamesOmitTypes(t *testing.T) {
	for _, c := range []struct{ name, want string }{
		{"void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, " +
			"std::array<char*, 3ul> >(int)", "vectorized_elementwise_kernel"},
		{"void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(cutlass_80_simt_sgemm::Params)",
			"cutlass_80_simt_sgemm_256x128_8x4_nn_align1"},
		{"void (anonymous namespace)::softmax<float>(float*)", "softmax"},
		{"Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)"},
		{"aten::add", "aten::add"},
		{"sm90_xmma_gemm_f32f32_tf32f32", "sm90_xmma_gemm_f32f32_tf32f32"},
		{"", ""},
		{"<>", "<>"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := ShortName(c.name); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

// Streams that compute at the same time count once. A copy within a device counts as compute. Each
// device has its own figures.
func TestSummaryOfSeveralStreamsAndDevices(t *testing.T) {
	tr := &Trace{Events: []Event{
		{Kind: Kernel, Name: "a", Start: 0, Duration: 10 * us, Device: 0, Lane: 7},
		{Kind: Kernel, Name: "b", Start: 5 * us, Duration: 10 * us, Device: 0, Lane: 13},
		{Kind: Copy, Name: "Memcpy DtoD (Device -> Device)", Start: 15 * us, Duration: 5 * us, Device: 0,
			Lane: 13, Bytes: 1000},
		{Kind: Copy, Name: "Memcpy HtoD (Pinned -> Device)", Start: 12 * us, Duration: 20 * us, Device: 0,
			Lane: 17, Bytes: 1_000_000},
		{Kind: Copy, Name: "Memcpy HtoD (Pinned -> Device)", Start: 22 * us, Duration: 20 * us, Device: 0,
			Lane: 21, Bytes: 500_000},
		{Kind: Kernel, Name: "z", Start: 40 * us, Duration: 0, Device: 0, Lane: 7},
		{Kind: Kernel, Name: "c", Start: 90 * us, Duration: 10 * us, Device: 1, Lane: 7},
	}}
	s := tr.Summary()
	if s.Span() != 100*us || len(s.Devices) != 2 {
		t.Fatalf("got %+v, want a span of %v and 2 devices", s, 100*us)
	}
	d := s.Devices[0]
	d.LongestGap = nil
	want := DeviceSummary{Device: 0, Streams: 4, Compute: 20 * us, Copy: 30 * us, Hidden: 8 * us,
		Idle: 58 * us, Total: 100 * us}
	if d != want {
		t.Errorf("got %+v, want %+v", d, want)
	}
	if d := s.Devices[1]; d.Idle != 90*us || d.IdleShare() != 0.9 || d.LongestGap != nil || d.HiddenShare() != 0 {
		t.Errorf("got %+v, want Idle %v, IdleShare 0.9, no gap, HiddenShare 0", d, 90*us)
	}
	if len(s.Copies) != 2 || s.Copies[0].Name() != "D2D" || s.Copies[1].Name() != "H2D pinned" ||
		s.Copies[1].Count != 2 || s.Copies[1].GBs() != 50 {
		t.Errorf("%+v", s.Copies)
	}
}

func TestGapsAndTheirCauses(t *testing.T) {
	kernel := func(start, duration time.Duration, correlation int64) Event {
		return Event{Kind: Kernel, Name: "k", Start: start, Duration: duration, Lane: 7, Correlation: correlation}
	}
	call := func(name string, start, duration time.Duration, thread, correlation int64) Event {
		return Event{Kind: Runtime, Name: name, Start: start, Duration: duration, Device: Host,
			Lane: thread, Correlation: correlation}
	}
	for _, c := range []struct {
		name   string
		events []Event
		gap    span
		cause  string
		host   int
	}{
		{"the host waited", []Event{
			kernel(0, 10*us, 1), kernel(50*us, 10*us, 2), call("cudaLaunchKernel", 45*us, 3*us, 1, 2),
			call("cudaStreamSynchronize", 8*us, 32*us, 1, 3),
			{Kind: Operator, Name: "aten::item", Start: 7 * us, Duration: 35 * us, Device: Host, Lane: 1},
			call("cudaEventSynchronize", 8*us, 90*us, 2, 4),
		}, span{10 * us, 50 * us},
			"only after 35.0 µs; until then it was in cudaStreamSynchronize 30.0 µs, aten::item 2.00 µs", 2},
		{"the host did nothing",
			[]Event{kernel(0, 10*us, 1), kernel(50*us, 10*us, 2), call("cudaLaunchKernel", 45*us, 3*us, 1, 2)},
			span{10 * us, 50 * us}, "was in no recorded call until then", 0},
		{"it was queued", []Event{call("cudaLaunchKernel", 2*us, 3*us, 1, 2), kernel(3*us, 7*us, 1),
			kernel(50*us, 10*us, 2)},
			span{10 * us, 50 * us}, "was queued 8.00 µs before the gap began: it waited", 0},
		{"not recorded", []Event{kernel(0, 10*us, 0), kernel(50*us, 10*us, 0)}, span{10 * us, 50 * us},
			"was not recorded", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			tr := &Trace{Events: c.events}
			tr.sort()
			g := tr.Summary().Devices[0].LongestGap
			if g == nil || g.Start != c.gap.start || g.End != c.gap.end {
				t.Fatalf("%+v, want %v", g, c.gap)
			}
			if !strings.Contains(g.Cause(), c.cause) || len(g.Host) != c.host {
				t.Errorf("got %q and %v, want %q", g.Cause(), g.Host, c.cause)
			}
		})
	}
}

func TestSummaryWithoutAGPU(t *testing.T) {
	tr := &Trace{Events: []Event{
		{Kind: Operator, Name: "aten::matmul", Start: 0, Duration: 10 * us, Device: Host, Lane: 1},
		{Kind: Operator, Name: "aten::mm", Start: 1 * us, Duration: 8 * us, Device: Host, Lane: 1},
		{Kind: Operator, Name: "aten::add", Start: 5 * us, Duration: 10 * us, Device: Host, Lane: 2},
	}}
	if got, want := tr.Summary().String(), "no work on a GPU was recorded; 2 operators on 2 threads, "+
		"15.0 µs of 15.0 µs\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
