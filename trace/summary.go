package trace

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// CopyKind names the two memories of a copy.
type CopyKind string

const (
	HostToDevice   CopyKind = "H2D"
	DeviceToHost   CopyKind = "D2H"
	DeviceToDevice CopyKind = "D2D" // within the memory of one device, not over a bus
	PeerToPeer     CopyKind = "P2P" // from one device to another
	OtherCopy      CopyKind = "copy"
)

// CopyKind returns the kind of a Copy event, and whether its host memory is pageable. The driver
// stages copies of pageable memory, and blocks the caller while it does.
func (e Event) CopyKind() (kind CopyKind, pageable bool) {
	pageable = strings.Contains(e.Name, "Pageable")
	switch { // CUPTI's terms: "Memcpy HtoD (Pinned -> Device)"
	case strings.Contains(e.Name, "HtoD"):
		return HostToDevice, pageable
	case strings.Contains(e.Name, "DtoH"):
		return DeviceToHost, pageable
	case strings.Contains(e.Name, "PtoP"):
		return PeerToPeer, false
	case strings.Contains(e.Name, "DtoD"):
		return DeviceToDevice, false
	}
	return OtherCopy, pageable
}

// transfer reports whether the event is a copy over a bus, which compute should hide.
func (e Event) transfer() bool {
	if e.Kind != Copy {
		return false
	}
	kind, _ := e.CopyKind()
	return kind != DeviceToDevice
}

// Summary holds the key figures of a timeline.
type Summary struct {
	// Start is the start of the first work on any device, and End the end of the last. Without work
	// on a device, they bound the host events. All shares refer to the time between them.
	Start, End time.Duration
	Devices    []DeviceSummary // devices with work, by index
	Copies     []CopySummary   // by device, then by kind
	Operators  int             // LibTorch's operators that no other operator called
	// OperatorTime is the time during which at least one thread was in an operator. On a machine
	// without a GPU this is the compute time.
	OperatorTime time.Duration
	Threads      int // OS threads with recorded events
}

// DeviceSummary divides the time of one device.
type DeviceSummary struct {
	Device  int
	Streams int           // streams with work
	Compute time.Duration // kernels, memsets, and copies within the device
	Copy    time.Duration // at least one copy between host and device or between devices
	Hidden  time.Duration // such a copy and compute at the same time
	Idle    time.Duration // neither such a copy nor compute
	Total   time.Duration // from the summary's Start to its End

	// LongestGap is the longest time between two pieces of work of the device; nil if there is
	// none.
	LongestGap *Gap
}

// HiddenShare returns the fraction of the copy time, 0 to 1, that overlaps with compute. Without
// copies it returns 0.
func (d DeviceSummary) HiddenShare() float64 { return share(d.Hidden, d.Copy) }

// IdleShare returns the fraction of the total time, 0 to 1, in which the device was idle.
func (d DeviceSummary) IdleShare() float64 { return share(d.Idle, d.Total) }

func share(part, whole time.Duration) float64 {
	if whole <= 0 {
		return 0
	}
	return float64(part) / float64(whole)
}

// CopySummary aggregates all copies of a kind on a device.
type CopySummary struct {
	Device   int
	Kind     CopyKind
	Pageable bool // the host memory is not pinned
	Count    int
	Bytes    int64
	Time     time.Duration // during which at least one of the copies ran
}

// GBs returns the achieved rate in 10^9 bytes per second.
func (c CopySummary) GBs() float64 {
	if c.Time <= 0 {
		return 0
	}
	return float64(c.Bytes) / float64(c.Time.Nanoseconds())
}

// Name returns the kind in words, such as "H2D pinned".
func (c CopySummary) Name() string { return copyName(c.Kind, c.Pageable) }

func copyName(kind CopyKind, pageable bool) string {
	switch {
	case kind != HostToDevice && kind != DeviceToHost:
		return string(kind)
	case pageable:
		return string(kind) + " pageable"
	}
	return string(kind) + " pinned"
}

// Gap is a time during which a device was idle between two pieces of work.
type Gap struct {
	Device     int
	Start, End time.Duration
	// Before is the device work that ended at Start.
	Before Event
	// After is the device work that started at End.
	After Event
	// Call is the CUDA call that enqueued After. Its Name is "" if the call was not recorded.
	Call Event
	// Stream is the name of After's stream.
	Stream string
	// Host lists the events of the calling thread between Start and Call, longest first, without
	// nested events. If After was queued before the gap, Host is nil: After then waited for other
	// work on a device.
	Host []HostShare
}

// HostShare is the time that a thread spent in events with the same name.
type HostShare struct {
	Kind Kind // Runtime, Operator or Range
	Name string
	Time time.Duration
}

// Duration returns the length of the gap.
func (g Gap) Duration() time.Duration { return g.End - g.Start }

// Cause describes in words why the device was idle.
func (g Gap) Cause() string {
	after := fmt.Sprintf("%s on %s", ShortName(g.After.Name), g.Stream)
	switch {
	case g.Call.Name == "":
		return fmt.Sprintf("%s came late; the call that enqueued it was not recorded", after)
	case g.Call.Start < g.Start:
		return fmt.Sprintf("%s was queued %s before the gap began: it waited for another stream, for an "+
			"event or for the host", after, formatTime(g.Start-g.Call.Start))
	case len(g.Host) == 0:
		return fmt.Sprintf("the host enqueued %s only after %s, and was in no recorded call until then",
			after, formatTime(g.Call.Start-g.Start))
	}
	var parts []string
	for _, h := range g.Host[:min(3, len(g.Host))] {
		name := ShortName(h.Name)
		if h.Kind == Range {
			name = strconv.Quote(h.Name)
		}
		parts = append(parts, fmt.Sprintf("%s %s", name, formatTime(h.Time)))
	}
	return fmt.Sprintf("the host enqueued %s only after %s; until then it was in %s", after,
		formatTime(g.Call.Start-g.Start), strings.Join(parts, ", "))
}

// Summary computes the figures of the recording.
func (t *Trace) Summary() Summary {
	var s Summary
	var device, host []span
	perDevice := map[int][]Event{}
	threads := map[int64]bool{}
	for _, e := range t.Events {
		if e.OnDevice() {
			device = append(device, span{e.Start, e.End()})
			perDevice[e.Device] = append(perDevice[e.Device], e)
			continue
		}
		host = append(host, span{e.Start, e.End()})
		threads[e.Lane] = true
	}
	s.Threads = len(threads)
	outer := topLevel(t.Events, Operator)
	s.Operators = len(outer)
	s.OperatorTime = union(timesOf(outer)).total()
	if len(device) == 0 {
		device = host
	}
	if len(device) > 0 {
		s.Start = slices.MinFunc(device, func(a, b span) int { return cmp.Compare(a.start, b.start) }).start
		s.End = slices.MaxFunc(device, func(a, b span) int { return cmp.Compare(a.end, b.end) }).end
	}
	calls := t.calls()
	for _, d := range slices.Sorted(maps.Keys(perDevice)) {
		s.Devices = append(s.Devices, t.device(d, perDevice[d], span{s.Start, s.End}, calls))
		s.Copies = append(s.Copies, copies(d, perDevice[d])...)
	}
	return s
}

// Span returns the time to which the shares refer.
func (s Summary) Span() time.Duration { return s.End - s.Start }

func timesOf(events []Event) []span {
	times := make([]span, len(events))
	for i, e := range events {
		times[i] = span{e.Start, e.End()}
	}
	return times
}

// calls returns the CUDA calls that enqueued work, by correlation.
func (t *Trace) calls() map[int64]Event {
	calls := map[int64]Event{}
	for _, e := range t.Events {
		if e.Kind == Runtime && e.Correlation != 0 {
			calls[e.Correlation] = e
		}
	}
	return calls
}

// topLevel returns the events of the kind that are not nested in another event of the same kind and
// thread. Events must be sorted.
func topLevel(events []Event, kind Kind) []Event {
	var out []Event
	end := map[int64]time.Duration{}
	for _, e := range events {
		if until, ok := end[e.Lane]; e.Kind != kind || ok && e.Start < until {
			continue
		}
		end[e.Lane] = e.End()
		out = append(out, e)
	}
	return out
}

func (t *Trace) device(device int, events []Event, window span, calls map[int64]Event) DeviceSummary {
	var compute, copying []span
	streams := map[int64]bool{}
	for _, e := range events {
		streams[e.Lane] = true
		if e.transfer() {
			copying = append(copying, span{e.Start, e.End()})
		} else {
			compute = append(compute, span{e.Start, e.End()})
		}
	}
	computes, copied := union(compute), union(copying)
	busy := union(slices.Concat(computes, copied))
	idle := union([]span{window}).without(busy)
	d := DeviceSummary{
		Device: device, Streams: len(streams), Compute: computes.total(), Copy: copied.total(),
		Hidden: copied.and(computes).total(), Idle: idle.total(),
		Total: window.duration(),
	}
	// A gap is between two pieces of work of the device. The recording has no cause for idle time
	// before the first and after the last one.
	var longest span
	for i := 1; i < len(busy); i++ {
		if gap := (span{busy[i-1].end, busy[i].start}); gap.duration() > longest.duration() {
			longest = gap
		}
	}
	if longest.duration() > 0 {
		d.LongestGap = t.gap(device, events, longest, calls)
	}
	return d
}

func (t *Trace) gap(device int, events []Event, at span, calls map[int64]Event) *Gap {
	g := &Gap{Device: device, Start: at.start, End: at.end}
	for _, e := range events {
		switch {
		case e.Duration <= 0:
		case e.End() == at.start:
			g.Before = e
		case e.Start == at.end && g.After.Duration == 0:
			g.After = e
		}
	}
	g.Stream = t.name(Stream{device, g.After.Lane})
	g.Call = calls[g.After.Correlation]
	if g.Call.Name != "" && g.Call.Start >= at.start {
		g.Host = t.hostShares(g.Call.Lane, span{at.start, g.Call.Start})
	}
	return g
}

// hostShares returns the time that a thread spent in each of its events during in. Of nested events
// it counts the outermost one. CUDA calls take precedence over the operators around them, because a
// blocking call is the likely cause of a gap.
func (t *Trace) hostShares(thread int64, in span) []HostShare {
	type key struct {
		kind Kind
		name string
	}
	shares := map[key]time.Duration{}
	window := union([]span{in})
	for _, kind := range []Kind{Runtime, Operator, Range} {
		var list []Event
		for _, e := range t.Events {
			if e.Kind == kind && e.Lane == thread && !e.OnDevice() {
				list = append(list, e)
			}
		}
		var counted spans
		for _, e := range topLevel(list, kind) {
			here := window.and(spans{{e.Start, e.End()}})
			if e.Duration <= 0 || len(here) == 0 {
				continue
			}
			shares[key{kind, e.Name}] += here.total()
			counted = append(counted, here...)
		}
		window = window.without(union(counted))
	}
	var out []HostShare
	for k, d := range shares {
		out = append(out, HostShare{k.kind, k.name, d})
	}
	slices.SortFunc(out, func(a, b HostShare) int {
		return cmp.Or(cmp.Compare(b.Time, a.Time),
			cmp.Compare(a.Name, b.Name))
	})
	return out
}

func copies(device int, events []Event) []CopySummary {
	type key struct {
		kind     CopyKind
		pageable bool
	}
	byKind := map[key]*CopySummary{}
	times := map[key][]span{}
	for _, e := range events {
		if e.Kind != Copy {
			continue
		}
		var k key
		k.kind, k.pageable = e.CopyKind()
		if byKind[k] == nil {
			byKind[k] = &CopySummary{Device: device, Kind: k.kind, Pageable: k.pageable}
		}
		byKind[k].Count++
		byKind[k].Bytes += e.Bytes
		times[k] = append(times[k], span{e.Start, e.End()})
	}
	var out []CopySummary
	for k, c := range byKind {
		c.Time = union(times[k]).total()
		out = append(out, *c)
	}
	slices.SortFunc(out, func(a, b CopySummary) int { return strings.Compare(a.Name(), b.Name()) })
	return out
}

// String formats the figures in a few lines.
func (s Summary) String() string {
	var b strings.Builder
	if len(s.Devices) == 0 {
		fmt.Fprintf(&b, "no work on a GPU was recorded; %d operators on %d threads, %s of %s\n",
			s.Operators, s.Threads, formatTime(s.OperatorTime), formatTime(s.Span()))
		return b.String()
	}
	for _, d := range s.Devices {
		fmt.Fprintf(&b, "cuda:%d  %s, %d streams: compute %s, copies %s", d.Device, formatTime(d.Total),
			d.Streams, formatTime(d.Compute), formatTime(d.Copy))
		if d.Copy > 0 {
			fmt.Fprintf(&b, ", %s of the copies under compute", percent(d.HiddenShare()))
		}
		fmt.Fprintf(&b, ", idle %s\n", percent(d.IdleShare()))
		for _, c := range s.Copies {
			if c.Device == d.Device {
				fmt.Fprintf(&b, "        %s: %s in %d copies, %.1f GB/s\n", c.Name(), formatBytes(c.Bytes),
					c.Count, c.GBs())
			}
		}
		if g := d.LongestGap; g != nil {
			fmt.Fprintf(&b, "        longest gap: %s after %s: %s\n", formatTime(g.Duration()),
				ShortName(g.Before.Name), g.Cause())
		}
	}
	return b.String()
}

// ShortName shortens the name of an event: it removes the return type, namespaces, template
// arguments and parameters, which make names of kernels long.
func ShortName(name string) string {
	if strings.HasPrefix(name, "Memcpy") || strings.HasPrefix(name, "Memset") {
		return name
	}
	short := strings.TrimPrefix(name, "void ")
	short = strings.ReplaceAll(short, "(anonymous namespace)::", "")
	if rest, ok := strings.CutPrefix(short, "cutlass::Kernel"); ok { // the template argument names the kernel
		if _, of, ok := strings.Cut(rest, "<"); ok {
			short = of
		}
	}
	if at := strings.IndexAny(short, "<(>"); at > 0 {
		short = short[:at]
	}
	if strings.HasPrefix(short, "aten::") {
		return short
	}
	if at := strings.LastIndex(short, "::"); at >= 0 && at+2 < len(short) {
		short = short[at+2:]
	}
	return short
}

// formatTime formats a time with three digits and its unit.
func formatTime(d time.Duration) string {
	ns := float64(d.Nanoseconds())
	for _, unit := range []struct {
		name string
		ns   float64
	}{{"s", 1e9}, {"ms", 1e6}, {"µs", 1e3}} {
		if ns >= unit.ns || ns <= -unit.ns {
			return digits(ns/unit.ns) + " " + unit.name
		}
	}
	return fmt.Sprintf("%d ns", d.Nanoseconds())
}

// digits formats x with three significant digits. If the integer part has more digits, it formats
// all of them.
func digits(x float64) string {
	switch {
	case x >= 99.95 || x <= -99.95:
		return fmt.Sprintf("%.0f", x)
	case x >= 9.995 || x <= -9.995:
		return fmt.Sprintf("%.1f", x)
	}
	return fmt.Sprintf("%.2f", x)
}

func formatBytes(n int64) string {
	switch x := float64(n); {
	case x >= 1e9:
		return digits(x/1e9) + " GB"
	case x >= 1e6:
		return digits(x/1e6) + " MB"
	case x >= 1e3:
		return digits(x/1e3) + " kB"
	}
	return fmt.Sprintf("%d B", n)
}

// percent formats a fraction. Only 1 becomes 100 %, and only 0 becomes 0 %.
func percent(x float64) string {
	text := fmt.Sprintf("%.1f %%", 100*x)
	switch {
	case x < 1 && text == "100.0 %":
		return "> 99.9 %"
	case x > 0 && text == "0.0 %":
		return "< 0.1 %"
	case x >= 1:
		return "100 %"
	case x <= 0:
		return "0 %"
	}
	return text
}
