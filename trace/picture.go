package trace

import (
	"cmp"
	"fmt"
	"image/color"
	"maps"
	"math"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/torchstream/torchstream/internal/picture"
)

// PictureOptions are the options of the pictures. The zero value suits most pictures.
type PictureOptions struct {
	Title string
	// From and To bound the drawn time, on the clock of Event.Start. If both are 0, the picture
	// covers all work on devices and the calls that enqueued it. The figures in the header cover
	// the same time. If an event extends beyond a bound, only its part inside counts.
	From, To time.Duration
	// Width is in pixels; 0 means 1200. A PNG has twice as many pixels, for sharp text.
	Width int
}

// Readers who do not distinguish red from green can tell the colours apart, also in greyscale.
var (
	white    = picture.RGB(0xffffff)
	ink      = picture.RGB(0x1f2933)
	faint    = picture.RGB(0x6b7785)
	gridLine = picture.RGB(0xe4e8ed)
	rowBack  = picture.RGB(0xf6f8fa)
)

// class groups events by colour and by line of the legend.
type class int

const (
	classKernel class = iota
	classH2D
	classD2H
	classP2P
	classD2D
	classMemset
	classRange
	classRuntime
	classWait
	classOperator
	classHidden
	classExposed
	classLate
	classes
)

func (c class) style() (name string, fill, text color.RGBA) {
	switch c {
	case classKernel:
		return "compute", picture.RGB(0x3566a8), white
	case classH2D:
		return "copy to the device", picture.RGB(0xf0902c), ink
	case classD2H:
		return "copy to the host", picture.RGB(0xb0479b), white
	case classP2P:
		return "copy between devices", picture.RGB(0x15988f), white
	case classD2D:
		return "copy within a device", picture.RGB(0x8fb8d8), ink
	case classMemset:
		return "memset", picture.RGB(0xa5adb6), ink
	case classRange:
		return "named range", picture.RGB(0xcfe3b4), ink
	case classRuntime:
		return "CUDA call", picture.RGB(0xc9bfe4), ink
	case classWait:
		return "CUDA call that waits", picture.RGB(0x7a62b3), white
	case classOperator:
		return "operator", picture.RGB(0xdde3ea), ink
	case classHidden:
		return "copying, hidden under compute", picture.RGB(0x3a9d5d), white
	case classLate:
		return "waiting for the last rank", picture.RGB(0xd64545), white
	default:
		return "copying, nothing computes", picture.RGB(0xd64545), white
	}
}

func classOf(e Event) class {
	switch e.Kind {
	case Kernel:
		return classKernel
	case Copy:
		switch kind, _ := e.CopyKind(); kind {
		case HostToDevice:
			return classH2D
		case DeviceToHost:
			return classD2H
		case PeerToPeer:
			return classP2P
		}
		return classD2D
	case Set:
		return classMemset
	case Range:
		return classRange
	case Runtime:
		// Other calls return after some microseconds. A longer call is worth showing as a wait.
		if strings.Contains(e.Name, "Synchronize") || e.Duration >= 200*time.Microsecond {
			return classWait
		}
		return classRuntime
	case hidden:
		return classHidden
	case exposed:
		return classExposed
	case late:
		return classLate
	}
	return classOperator
}

// Sizes of the layout in pixels.
const (
	margin      = 20.0
	gutter      = 176.0
	streamRow   = 26.0
	stripRow    = 7.0
	hostRow     = 15.0
	rowGap      = 4.0
	groupGap    = 12.0
	textSize    = 11.0
	smallSize   = 9.5
	maxThreads  = 4
	maxDepth    = 3 // rows of nested ranges or operators of a thread
	minLabelled = 26.0
)

type painter struct {
	picture.Picture
	from, to   time.Duration
	left, wide float64
}

func (p *painter) at(t time.Duration) float64 {
	t = min(max(t, p.from), p.to)
	return p.left + p.wide*float64(t-p.from)/float64(p.to-p.from)
}

// draw lays out the picture.
func (t *Trace) draw(o PictureOptions) picture.Picture {
	part := t.cut(o.From, o.To)
	s := part.Summary()
	from, to := o.From, o.To
	if from == 0 && to == 0 {
		from, to = part.window(s)
	}
	p := newPainter(o, from, to)
	y := p.header(margin, o.Title, s)
	y = p.legend(y, part)
	return p.finish(p.body(y, part, s))
}

// newPainter returns a painter for the events between two times.
func newPainter(o PictureOptions, from, to time.Duration) *painter {
	width := float64(o.Width)
	if o.Width <= 0 {
		width = 1200
	}
	width = max(width, 480)
	return &painter{Picture: picture.Picture{Width: width, Measure: measure}, from: from,
		to: max(to, from+1), left: margin + gutter, wide: width - 2*margin - gutter}
}

// finish ends the picture at a height and adds the background.
func (p *painter) finish(y float64) picture.Picture {
	p.Height = math.Ceil(y + margin/2)
	back := picture.Shape{Rect: &picture.Rectangle{W: p.Width, H: p.Height, Fill: white}}
	p.Shapes = slices.Insert(p.Shapes, 0, back)
	return p.Picture
}

// cut returns the part of the trace between two times. It shortens events that extend beyond them.
// If both times are 0, it returns the whole trace.
func (t *Trace) cut(from, to time.Duration) *Trace {
	if from == 0 && to == 0 {
		return t
	}
	part := &Trace{Begin: t.Begin, Duration: t.Duration, Streams: t.Streams}
	for _, e := range t.Events {
		start, end := max(e.Start, from), min(e.End(), to)
		if start > end || start == end && e.Duration > 0 {
			continue
		}
		if e.Kind == Copy && e.Duration > 0 {
			e.Bytes = int64(float64(e.Bytes) * float64(end-start) / float64(e.Duration))
		}
		e.Start, e.Duration = start, end-start
		part.Events = append(part.Events, e)
	}
	part.sort()
	return part
}

// window returns the time from the first call that enqueued work on a device to the end of that
// work.
func (t *Trace) window(s Summary) (from, to time.Duration) {
	from, to = s.Start, s.End
	calls := t.calls()
	for _, e := range t.Events {
		if call := calls[e.Correlation]; e.OnDevice() && call.Name != "" {
			from = min(from, call.Start)
		}
	}
	return from, to
}

func (p *painter) header(y float64, title string, s Summary) float64 {
	if title == "" {
		title = "timeline"
	}
	y += 16
	p.Text(margin, y, -1, 17, true, ink, clip(title, 17, true, p.Width-2*margin))
	y += 8
	line := func(x float64, fill color.RGBA, text string) {
		y += 16
		p.Text(margin+x, y, -1, 12, false, fill, clip(text, 12, false, p.Width-2*margin-x))
	}
	for _, d := range s.Devices {
		parts := []string{fmt.Sprintf("cuda:%d", d.Device), formatTime(d.Total)}
		if d.Copy > 0 {
			parts = append(parts, percent(d.HiddenShare())+" of the copies under compute")
		}
		parts = append(parts, "idle "+percent(d.IdleShare()))
		for _, c := range s.Copies {
			if c.Device == d.Device {
				parts = append(parts, fmt.Sprintf("%s %s at %.1f GB/s", c.Name(), formatBytes(c.Bytes), c.GBs()))
			}
		}
		line(0, ink, strings.Join(parts, "   ·   "))
		// Shorter gaps are the time that starting a kernel takes.
		if g := d.LongestGap; g != nil && g.Duration() > d.Total/1000 {
			line(0, faint, fmt.Sprintf("longest gap %s: %s", formatTime(g.Duration()), g.Cause()))
		}
	}
	if len(s.Devices) == 0 {
		line(0, ink, strings.TrimSpace(s.String()))
	}
	return y
}

func (p *painter) legend(y float64, t *Trace) float64 {
	var used [classes]bool
	copying := false
	for _, e := range t.Events {
		used[classOf(e)] = true
		copying = copying || e.transfer()
	}
	y += 22
	x := margin
	entry := func(name string, fill color.RGBA) {
		w := 10 + 6 + measure(name, textSize, false) + 18
		if x+w > p.Width-margin && x > margin {
			x = margin
			y += 17
		}
		p.Rect(x, y-9, 10, 10, fill, "")
		p.Text(x+16, y, -1, textSize, false, ink, name)
		x += w
	}
	used[classHidden], used[classExposed] = copying, copying
	for c := range classes {
		if used[c] {
			name, fill, _ := c.style()
			entry(name, fill)
		}
	}
	return y + 12
}

// row is one line of the picture.
type row struct {
	name, note string
	height     float64
	events     []Event
	gap        float64 // before the row
}

func (p *painter) body(y float64, t *Trace, s Summary) float64 {
	return p.rows(y, append(deviceRows(t, s), hostRows(t)...))
}

// rows draws the rows below a ruler.
func (p *painter) rows(y float64, rows []row) float64 {
	top := y + 18
	bottom := top
	for _, r := range rows {
		bottom += r.gap + r.height + rowGap
	}
	p.ruler(y+11, top, bottom)
	y = top
	for _, r := range rows {
		y += r.gap
		p.Rect(p.left, y, p.wide, r.height, rowBack, "")
		middle := y + r.height/2
		switch {
		case r.note == "":
			p.Text(p.left-10, middle+3.8, 1, textSize, false, ink, clip(r.name, textSize, false, gutter-12))
		default:
			p.Text(p.left-10, middle-1, 1, textSize, false, ink, clip(r.name, textSize, false, gutter-12))
			p.Text(p.left-10, middle+10, 1, smallSize, false, faint, clip(r.note, smallSize, false, gutter-12))
		}
		p.events(r.events, y, r.height)
		y += r.height + rowGap
	}
	return y
}

// events draws the events of a row, which are sorted by start. It merges events that are too close
// to distinguish into one rectangle, so that the picture stays small for any number of events.
func (p *painter) events(events []Event, y, h float64) {
	const minWidth, apart = 1.0, 0.4 // pixels
	type run struct {
		x0, x1 float64
		class  class
		first  Event
		count  int
	}
	var open *run
	flush := func() {
		if open == nil {
			return
		}
		_, fill, ink := open.class.style()
		w := open.x1 - open.x0
		tip := fmt.Sprintf("%d events", open.count)
		if open.count == 1 {
			tip = tooltip(open.first)
			if w > 4 {
				w -= 0.6 // a gap between neighbours
			}
		}
		p.Rect(open.x0, y, w, h, fill, tip)
		if open.count == 1 && w > minLabelled && h > smallSize {
			size := min(textSize, h-4)
			if text := fit(labels(open.first), size, w-6); text != "" {
				p.Text(open.x0+w/2, y+h/2+size*0.35, 0, size, false, ink, text)
			}
		}
		open = nil
	}
	for _, e := range events {
		if e.End() < p.from || e.Start > p.to {
			continue
		}
		x0, x1 := p.at(e.Start), p.at(e.End())
		small := x1-x0 < 2*minWidth
		x1 = max(x1, x0+minWidth)
		c := classOf(e)
		if open != nil && small && open.class == c && x0 < open.x1+apart &&
			(open.count > 1 || open.x1-open.x0 < 2*minWidth) {
			open.x1 = max(open.x1, x1)
			open.count++
			continue
		}
		flush()
		open = &run{x0, x1, c, e, 1}
	}
	flush()
}

func tooltip(e Event) string {
	tip := fmt.Sprintf("%s\n%s from %s", e.Name, formatTime(e.Duration), formatTime(e.Start))
	if e.Bytes > 0 {
		tip += "\n" + formatBytes(e.Bytes)
		if e.Duration > 0 {
			tip += fmt.Sprintf(", %.1f GB/s", float64(e.Bytes)/float64(e.Duration.Nanoseconds()))
		}
	}
	return tip
}

// labels returns the candidate labels of an event, best first.
func labels(e Event) []string {
	if e.Kind != Copy {
		return []string{ShortName(e.Name)}
	}
	kind, pageable := e.CopyKind()
	name := copyName(kind, pageable)
	return []string{fmt.Sprintf("%s %s", name, formatBytes(e.Bytes)), name, string(kind)}
}

// fit returns the first text that fits into room. If none does, it returns a clipped version of the
// last text.
func fit(texts []string, size, room float64) string {
	for _, text := range texts {
		if measure(text, size, false) <= room {
			return text
		}
	}
	return clip(texts[len(texts)-1], size, false, room)
}

// clip shortens text to room with an ellipsis. It returns "" if fewer than three characters would
// remain.
func clip(text string, size float64, bold bool, room float64) string {
	if measure(text, size, bold) <= room {
		return text
	}
	for utf8.RuneCountInString(text) > 3 {
		_, n := utf8.DecodeLastRuneInString(text)
		text = text[:len(text)-n]
		if cut := strings.TrimRight(text, " ·,") + "…"; measure(cut, size, bold) <= room {
			return cut
		}
	}
	return ""
}

func (p *painter) ruler(y, top, bottom float64) {
	step, unit := tick(p.to-p.from, int(p.wide/80))
	for t := time.Duration(0); t <= p.to-p.from; t += step {
		x := p.at(p.from + t)
		p.Rect(x-0.5, top-3, 1, bottom-top+3, gridLine, "")
		p.Text(x, y, 0, smallSize, false, faint, unit.label(t))
	}
}

type timeUnit struct {
	name string
	of   time.Duration
}

func (u timeUnit) label(t time.Duration) string {
	text := fmt.Sprintf("%g", math.Round(float64(t)/float64(u.of)*1e6)/1e6)
	return text + " " + u.name
}

// tick returns the distance between the marks of the ruler: 1, 2 or 5 times a power of ten, such
// that there are at most count marks.
func tick(span time.Duration, count int) (time.Duration, timeUnit) {
	shortest := max(1, (span+time.Duration(max(1, count))-1)/time.Duration(max(1, count)))
	step := time.Duration(1)
	for step < shortest {
		for _, by := range []time.Duration{1, 2, 5, 10} {
			if step*by >= shortest || by == 10 {
				step *= by
				break
			}
		}
	}
	for _, u := range []timeUnit{{"s", time.Second}, {"ms", time.Millisecond}, {"µs", time.Microsecond}} {
		if step >= u.of || span >= 2*u.of && step*1000 >= u.of {
			return step, u
		}
	}
	return step, timeUnit{"ns", 1}
}

func deviceRows(t *Trace, s Summary) []row {
	var rows []row
	for i, d := range s.Devices {
		byStream := map[int64][]Event{}
		var compute, copying []span
		for _, e := range t.Events {
			if e.Device != d.Device || !e.OnDevice() {
				continue
			}
			byStream[e.Lane] = append(byStream[e.Lane], e)
			if e.transfer() {
				copying = append(copying, span{e.Start, e.End()})
			} else {
				compute = append(compute, span{e.Start, e.End()})
			}
		}
		for n, stream := range slices.Sorted(maps.Keys(byStream)) {
			r := row{
				name:   fmt.Sprintf("cuda:%d %s", d.Device, t.name(Stream{d.Device, stream})),
				height: streamRow, events: byStream[stream],
				note: "busy " + percent(share(union(timesOf(byStream[stream])).total(), d.Total)),
			}
			if n == 0 && i > 0 {
				r.gap = groupGap
			}
			rows = append(rows, r)
		}
		if len(copying) > 0 {
			computes, copied := union(compute), union(copying)
			var strip Trace
			for _, at := range copied.and(computes) {
				strip.Events = append(strip.Events,
					Event{Kind: hidden, Name: "copying while computing", Start: at.start, Duration: at.duration()})
			}
			for _, at := range copied.without(computes) {
				strip.Events = append(strip.Events,
					Event{Kind: exposed, Name: "copying, nothing computes", Start: at.start, Duration: at.duration()})
			}
			strip.sort()
			rows = append(rows, row{name: "copies hidden", height: stripRow, events: strip.Events})
		}
	}
	return rows
}

// Kinds of the strips below a device's streams and a rank's rows. The picture draws strips like
// events.
const (
	hidden Kind = -1 - iota
	exposed
	late
)

// hostRows returns the rows of the threads that made the most calls. Without calls, it returns the
// rows of the threads that ran the most operators.
func hostRows(t *Trace) []row {
	byThread := map[int64]map[Kind][]Event{}
	calls := map[int64]int{}
	for _, e := range t.Events {
		if e.OnDevice() {
			continue
		}
		if byThread[e.Lane] == nil {
			byThread[e.Lane] = map[Kind][]Event{}
		}
		byThread[e.Lane][e.Kind] = append(byThread[e.Lane][e.Kind], e)
		if e.Kind != Operator {
			calls[e.Lane]++
		}
	}
	threads := slices.Collect(maps.Keys(byThread))
	slices.SortFunc(threads, func(a, b int64) int {
		return cmp.Or(cmp.Compare(calls[b], calls[a]),
			cmp.Compare(len(byThread[b][Operator]), len(byThread[a][Operator])), cmp.Compare(a, b))
	})
	var rows []row
	for i, thread := range threads[:min(len(threads), maxThreads)] {
		first := len(rows)
		for _, k := range []struct {
			kind Kind
			name string
		}{{Range, "ranges"}, {Operator, "operators"}, {Runtime, "CUDA calls"}} {
			for depth, events := range stack(byThread[thread][k.kind]) {
				r := row{height: hostRow, events: events}
				if depth == 0 {
					r.name = fmt.Sprintf("thread %d %s", thread, k.name)
					if k.kind == Range {
						r.name = fmt.Sprintf("thread %d ranges", thread)
					}
				}
				rows = append(rows, r)
			}
		}
		if i == 0 {
			rows[first].gap = groupGap
		} else {
			rows[first].gap = rowGap
		}
	}
	if more := len(threads) - maxThreads; more > 0 {
		rows = append(rows, row{name: fmt.Sprintf("and %d more threads", more), height: hostRow})
	}
	return rows
}

// stack distributes events over rows so that events of a row do not overlap: each event goes into
// the first free row. Events without a free row are omitted.
func stack(events []Event) [][]Event {
	var rows [][]Event
	var ends []time.Duration
next:
	for _, e := range events {
		for i, end := range ends {
			if e.Start >= end {
				rows[i] = append(rows[i], e)
				ends[i] = e.End()
				continue next
			}
		}
		if len(rows) < maxDepth {
			rows = append(rows, []Event{e})
			ends = append(ends, e.End())
		}
	}
	return rows
}
