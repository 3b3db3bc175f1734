package trace

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"
)

// threeRanks returns recordings of four collectives. Rank 1 starts each 5 ms late, except the last.
// Rank 2 started recording after the first collective, and rank 0 recorded an earlier one.
func threeRanks(kind Kind, name string) Ranks {
	device, lane := 0, int64(7)
	if kind != Kernel {
		device, lane = Host, 4711
	}
	var all Ranks
	for rank := range 3 {
		begin := time.Duration(rank) * 3 * ms // of the recording
		t := &Trace{Begin: time.Unix(1, 0).Add(begin), Duration: 100 * ms, Streams: map[Stream]string{{0, 7}: "main"}}
		at := func(start, end time.Duration) {
			t.Events = append(t.Events,
				Event{Kind: kind, Name: name, Start: start - begin, Duration: end - start, Device: device, Lane: lane})
		}
		if rank == 0 {
			at(1*ms, 3*ms) // not recorded by the others
		}
		for n := range 4 {
			start := 20*ms + time.Duration(n)*20*ms
			end := start + 6*ms
			switch {
			case n == 3 && rank == 0, n < 3 && rank == 1:
				start += 5 * ms
			}
			if n > 0 || rank != 2 {
				at(start, end)
			}
		}
		t.Events = append(t.Events, Event{Kind: Operator, Name: "aten::mm", Start: 90 * ms, Duration: ms,
			Device: Host, Lane: 4711})
		t.sort()
		all = append(all, t)
	}
	return all
}

func TestRanksWaitForTheLastOne(t *testing.T) {
	for _, c := range []struct {
		kind Kind
		name string
	}{{Kernel, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"},
		{Range, "gloo:all_reduce"}} {
		r := threeRanks(c.kind, c.name)
		all := r.Collectives()
		var got []string
		for _, each := range all {
			got = append(got, fmt.Sprintf("rank %d at %v", each.Last, each.Starts[each.Last]))
		}
		if want := []string{"rank 1 at 45ms", "rank 1 at 65ms", "rank 0 at 85ms"}; !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %q, want %q", c.name, got, want)
		}
		want := []RankWaits{{0, 1, 10 * ms, 10 * ms}, {1, 2, 20 * ms, 5 * ms}, {2, 0, 0, 15 * ms}}
		if got := r.Waits(); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, want %+v", c.name, got, want)
		}
		if rank, _ := r.Straggler(); rank != -1 { // two thirds is exactly twice its share, not more
			t.Errorf("%s: rank %d is a straggler, want -1", c.name, rank)
		}
		if rank, share := r[:2].Straggler(); rank != -1 {
			t.Errorf("%s: of two, rank %d is a straggler with %v, want -1", c.name, rank, share)
		}
	}
	if all := threeRanks(Kernel,
		"ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)").Collectives(); len(all) != 0 {
		t.Errorf("sends as collectives: %v, want none", all)
	}
	collectives, waits := (Ranks{}).Collectives(), (Ranks{}).Waits()
	if collectives != nil || len(waits) != 0 {
		t.Errorf("no ranks have the collectives %v and the waits %v, want none", collectives, waits)
	}
}

// laggard is a job whose rank 2 is late each time.
func laggard() Ranks {
	r := threeRanks(Range, "gloo:all_reduce")
	for i := range r[2].Events {
		if e := &r[2].Events[i]; e.Kind == Range {
			e.Start, e.Duration = e.Start+5500*us, e.Duration-5500*us
		}
	}
	return r
}

func TestPictureOfRanksNamesTheStraggler(t *testing.T) {
	r := laggard()
	if rank, share := r.Straggler(); rank != 2 || share != 1 {
		t.Errorf("rank %d, %v, want 2, 1", rank, share)
	}
	var svg, png bytes.Buffer
	if err := r.WriteSVG(&svg, PictureOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"timeline of 3 ranks", "straggler: rank 2, for 100 %",
		"rank 2 came last to 3 of 3 collectives", "rank 0 thread 4711 ranges", "rank 1 waits",
		"waiting for the last rank", "waits for rank 2: gloo:all_reduce"} {
		if !strings.Contains(svg.String(), want) {
			t.Errorf("%q is not in the picture", want)
		}
	}
	if err := r.WritePNG(&png, PictureOptions{From: 40 * ms, To: 60 * ms, Title: "a part"}); err != nil ||
		!bytes.HasPrefix(png.Bytes(), []byte("\x89PNG")) {
		t.Error(err)
	}
	svg.Reset()
	if err := r.WriteSVG(&svg, PictureOptions{From: 40 * ms, To: 50 * ms, Title: "a part"}); err != nil ||
		!strings.Contains(svg.String(), "came last to 1 of 1 collectives") {
		t.Error(err)
	}
}

// The file for Perfetto separates the ranks. Times are relative to the earliest recording.
func TestChromeOfRanks(t *testing.T) {
	r := laggard()
	r[0].Events = append(r[0].Events,
		Event{Kind: Runtime, Name: "cudaLaunchKernel", Start: ms, Device: Host, Lane: 1, Correlation: 9},
		Event{Kind: Kernel, Name: "k", Start: 2 * ms, Duration: ms, Lane: 7, Correlation: 9})
	var out bytes.Buffer
	if err := r.WriteChrome(&out); err != nil {
		t.Fatal(err)
	}
	var file struct {
		TraceEvents []chromeEvent
	}
	if err := json.Unmarshal(out.Bytes(), &file); err != nil {
		t.Fatal(err)
	}
	names := map[string]int{}
	first := map[int]float64{}
	for _, e := range file.TraceEvents {
		if e.Phase == "M" && e.Name == "process_name" {
			names[e.Args["name"].(string)] = e.Process
		}
		if at, ok := first[e.Process]; e.Phase == "X" && e.Name == "gloo:all_reduce" && (!ok || e.Time < at) {
			first[e.Process] = e.Time
		}
	}
	for _, name := range []string{"rank 0 host", "rank 0 cuda:0", "rank 1 host", "rank 2 host"} {
		if _, ok := names[name]; !ok {
			t.Errorf("no process %q in %v", name, names)
		}
	}
	if got := first[names["rank 1 host"]]; got != 25_000 {
		t.Errorf("rank 1 begins at %v us, want 25000", got)
	}
}

// A recording survives the JSON round trip to another rank.
func TestTraceAsJSON(t *testing.T) {
	want := threeRanks(Kernel, "k")[1]
	text, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	var got *Trace
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatal(err)
	}
	if !got.Begin.Equal(want.Begin) || !reflect.DeepEqual(got.Events, want.Events) ||
		!reflect.DeepEqual(got.Streams, want.Streams) {
		t.Errorf("%+v, want %+v", got, want)
	}
	for _, bad := range []string{"", "0", "0/", "/7", "0/7/8", "a/7", "0/7 x"} {
		var s Stream
		if s.UnmarshalText([]byte(bad)) == nil {
			t.Errorf("%q is a stream", bad)
		}
	}
}
