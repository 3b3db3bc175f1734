package trace

import (
	"cmp"
	"encoding"
	"fmt"
	"image/color"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/torchstream/torchstream/internal/picture"
)

// Ranks holds the recordings of a job, indexed by rank. Adjust their start times to one clock
// first. Ranks draws them as one picture, which names the ranks that delay the others.
//
//	offset, _, err := distributed.ClockOffset(world)
//	...
//	tr, err := rec.Stop() // on every rank
//	...
//	tr.Begin = tr.Begin.Add(offset)
//	all, err := distributed.AllGatherObject(world, tr)
//	...
//	if world.Rank() == 0 {
//		err = trace.Ranks(all).WriteFile("ranks.svg", trace.PictureOptions{})
//	}
type Ranks []*Trace

// Collective is a collective operation in the recordings of all ranks: NCCL kernels or Gloo ranges.
type Collective struct {
	Name string
	// Starts holds each rank's start time, relative to the start of the first recording.
	Starts []time.Duration
	Last   int // the rank that started last
}

// Waited returns the time that a rank waited for the last one.
func (c Collective) Waited(rank int) time.Duration { return c.Starts[c.Last] - c.Starts[rank] }

// RankWaits summarises one rank's waiting.
type RankWaits struct {
	Rank   int
	Last   int           // collectives that the rank started last
	Caused time.Duration // total time that other ranks waited for this one
	Waited time.Duration // total time that this rank waited for others
}

// clockError is the maximum difference between the clocks of two ranks.
const clockError = 100 * time.Microsecond

// begin returns the earliest start of a recording.
func (r Ranks) begin() time.Time {
	return slices.MinFunc(r, func(a, b *Trace) int { return a.Begin.Round(0).Compare(b.Begin.Round(0)) }).Begin.Round(0)
}

// aligned returns copies of the recordings with event times relative to the start of the first one.
func (r Ranks) aligned() Ranks {
	if len(r) == 0 {
		return nil
	}
	begin := r.begin()
	out := make(Ranks, len(r))
	for rank, t := range r {
		later := t.Begin.Round(0).Sub(begin)
		c := &Trace{Begin: begin, Duration: t.Duration + later, Streams: t.Streams, Events: slices.Clone(t.Events)}
		for i := range c.Events {
			c.Events[i].Start += later
		}
		out[rank] = c
	}
	return out
}

// collective returns the event's collective operation, or "" if it is none.
func collective(e Event) string {
	switch {
	case e.Kind == Kernel && (strings.HasPrefix(e.Name, "ncclDevKernel_") || strings.HasPrefix(e.Name, "ncclKernel_")):
		if strings.Contains(e.Name, "SendRecv") {
			return ""
		}
		name, _, _ := strings.Cut(e.Name, "(")
		return name
	case !e.OnDevice() && strings.HasPrefix(e.Name, "gloo:") && e.Name != "gloo:send" && e.Name != "gloo:recv":
		return e.Name
	}
	return ""
}

// Collectives returns the collectives that all ranks recorded, sorted by the start of the last
// rank. Events of the same name belong to one collective if they overlap and their ends are
// closest: a collective ends on no rank before it has started on all ranks, and it ends on all at
// about the same time. A collective that some ranks did not record is omitted. An example is a Gloo
// collective just before Stop, whose range has not ended on some ranks.
func (r Ranks) Collectives() []Collective { return r.aligned().collectives() }

func (r Ranks) collectives() []Collective {
	byName := map[string][][]Event{}
	for rank, t := range r {
		for _, e := range t.Events {
			if name := collective(e); name != "" {
				if byName[name] == nil {
					byName[name] = make([][]Event, len(r))
				}
				byName[name][rank] = append(byName[name][rank], e)
			}
		}
	}
	var out []Collective
	for name, queues := range byName {
		for _, q := range queues {
			slices.SortStableFunc(q, func(a, b Event) int { return cmp.Compare(a.End(), b.End()) })
		}
		for !slices.ContainsFunc(queues, func(q []Event) bool { return len(q) == 0 }) {
			if c, ok := takeCollective(queues); ok {
				c.Name = name
				out = append(out, c)
			}
		}
	}
	slices.SortFunc(out, func(a, b Collective) int {
		return cmp.Or(cmp.Compare(a.Starts[a.Last], b.Starts[b.Last]), cmp.Compare(a.Name, b.Name))
	})
	return out
}

// concurrent is the maximum number of collectives of one name that run at the same time.
const concurrent = 4

// takeCollective removes the event that ends first from the ranks' queues, and the matching events
// of the other ranks. The queues must be non-empty and sorted by end. ok is false if a rank has no
// matching event.
func takeCollective(queues [][]Event) (c Collective, ok bool) {
	first := 0
	for rank, q := range queues {
		if q[0].End() < queues[first][0].End() {
			first = rank
		}
	}
	e := queues[first][0]
	at := make([]int, len(queues))
	for rank, q := range queues {
		at[rank] = slices.IndexFunc(q[:min(len(q), concurrent)],
			func(other Event) bool { return other.Start <= e.End()+clockError })
		if rank == first {
			at[rank] = 0
		}
		if at[rank] < 0 {
			queues[first] = queues[first][1:]
			return c, false
		}
	}
	for rank, q := range queues {
		start := q[at[rank]].Start
		c.Starts = append(c.Starts, start)
		if start > c.Starts[c.Last] {
			c.Last = rank
		}
		queues[rank] = slices.Delete(q, at[rank], at[rank]+1)
	}
	return c, true
}

// Waits returns each rank's waiting, indexed by rank.
func (r Ranks) Waits() []RankWaits { return waits(len(r), r.Collectives()) }

func waits(ranks int, all []Collective) []RankWaits {
	out := make([]RankWaits, ranks)
	for rank := range out {
		out[rank].Rank = rank
	}
	for _, c := range all {
		out[c.Last].Last++
		for rank := range c.Starts {
			out[rank].Waited += c.Waited(rank)
			out[c.Last].Caused += c.Waited(rank)
		}
	}
	return out
}

// Straggler returns the rank that caused most of the waiting, and its share of the total. The rank
// is -1 in two cases: no rank caused more than twice its equal share (with two ranks: four fifths),
// or the waiting is less than a hundredth of the ranks' time.
func (r Ranks) Straggler() (rank int, share float64) {
	if len(r) < 2 {
		return -1, 0
	}
	a := r.aligned()
	from, to := a.span()
	return straggler(waits(len(r), a.collectives()), from, to)
}

// span returns the time from the first event to the last.
func (r Ranks) span() (from, to time.Duration) {
	first := true
	for _, t := range r {
		for _, e := range t.Events {
			if first || e.Start < from {
				from = e.Start
			}
			if first || e.End() > to {
				to = e.End()
			}
			first = false
		}
	}
	return from, to
}

func straggler(all []RankWaits, from, to time.Duration) (rank int, share float64) {
	var total time.Duration
	for _, w := range all {
		total += w.Caused
	}
	most := slices.MaxFunc(all, func(a, b RankWaits) int { return cmp.Compare(a.Caused, b.Caused) })
	if total == 0 || total < (to-from)*time.Duration(len(all))/100 {
		return -1, 0
	}
	share = float64(most.Caused) / float64(total)
	if share <= min(0.8, 2/float64(len(all))) {
		return -1, 0
	}
	return most.Rank, share
}

// WriteFile writes a picture or a file for Perfetto, like [Trace.WriteFile].
func (r Ranks) WriteFile(name string, o PictureOptions) error { return writeFile(name, r, o) }

// WriteChrome writes the trace-event format, like [Trace.WriteChrome], with the processes of all
// ranks. Each rank has an additional row with its waits for the last rank.
func (r Ranks) WriteChrome(w io.Writer) error {
	a := r.aligned()
	all := a.collectives()
	var named, out []chromeEvent
	for rank, t := range a {
		with := *t
		with.Events = slices.Concat(t.Events, lateEvents(all, rank))
		n, o := with.chrome(rank)
		named, out = append(named, n...), append(out, o...)
	}
	return encodeChrome(w, append(named, out...))
}

// lateEvents returns a rank's waits for the last rank as events.
func lateEvents(all []Collective, rank int) (events []Event) {
	for _, c := range all {
		if d := c.Waited(rank); d > 0 {
			events = append(events, Event{Kind: late,
				Name: fmt.Sprintf("waits for rank %d: %s", c.Last, c.Name), Start: c.Starts[rank],
				Duration: d, Device: Host})
		}
	}
	return events
}

// WriteSVG draws the timelines of all ranks below each other, on one clock. Each rank has rows for
// its GPU's streams, its host threads, and its waits for the last rank of a collective. The header
// lists each rank's total wait and names a straggler.
func (r Ranks) WriteSVG(w io.Writer, o PictureOptions) error {
	p := r.draw(o)
	return p.WriteSVG(w)
}

// WritePNG draws the same picture as [Ranks.WriteSVG].
func (r Ranks) WritePNG(w io.Writer, o PictureOptions) error { return writePNG(w, r.draw(o)) }

func (r Ranks) draw(o PictureOptions) picture.Picture {
	a := r.aligned()
	all := a.collectives()
	for i, t := range a {
		a[i] = t.cut(o.From, o.To)
	}
	from, to := o.From, o.To
	if from == 0 && to == 0 {
		from, to = a.span()
	}
	all = slices.DeleteFunc(all, func(c Collective) bool { return c.Starts[c.Last] < from || c.Starts[c.Last] > to })
	p := newPainter(o, from, to)
	title := cmp.Or(o.Title, fmt.Sprintf("timeline of %d ranks", len(r)))
	y := margin + 16
	p.Text(margin, y, -1, 17, true, ink, clip(title, 17, true, p.Width-2*margin))
	y += 8
	line := func(fill color.RGBA, text string) {
		y += 16
		p.Text(margin, y, -1, 12, false, fill, clip(text, 12, false, p.Width-2*margin))
	}
	w := waits(len(a), all)
	for _, each := range w {
		line(ink, fmt.Sprintf("rank %d came last to %d of %d collectives: the others waited %s for it, "+
			"and it waited %s",
			each.Rank, each.Last, len(all), formatTime(each.Caused), formatTime(each.Waited)))
	}
	if len(w) > 1 {
		if rank, share := straggler(w, from, to); rank >= 0 {
			line(picture.RGB(0xd64545), fmt.Sprintf("straggler: rank %d, for %s of the waiting", rank, percent(share)))
		}
	}
	together := &Trace{}
	var rows []row
	for rank, t := range a {
		lates := lateEvents(all, rank)
		together.Events = append(append(together.Events, t.Events...), lates...)
		rows = append(rows, rankRows(t, rank, lates)...)
	}
	y = p.legend(y, together)
	return p.finish(p.rows(y, rows))
}

// maxHostRows is the maximum number of rows of a rank's threads.
const maxHostRows = 4

// rankRows returns the rows of a rank.
func rankRows(t *Trace, rank int, lates []Event) []row {
	rows := deviceRows(t, t.Summary())
	host := hostRows(t)
	if len(rows) > 0 { // the streams show the rank's work
		host = host[:min(len(host), 1)]
	}
	rows = append(rows, host[:min(len(host), maxHostRows)]...)
	rows = append(rows, row{name: "waits", height: stripRow, events: lates})
	for i := range rows {
		rows[i].gap = 0
		if rows[i].name != "" {
			rows[i].name = fmt.Sprintf("rank %d %s", rank, rows[i].name)
		}
	}
	if rank > 0 {
		rows[0].gap = groupGap
	}
	return rows
}

// A Stream can be a key of a JSON object, so recordings can be sent as JSON.
var (
	_ encoding.TextMarshaler   = Stream{}
	_ encoding.TextUnmarshaler = (*Stream)(nil)
)

// MarshalText writes the stream as a key of a JSON object.
func (s Stream) MarshalText() ([]byte, error) {
	return fmt.Appendf(nil, "%d/%d", s.Device, s.Lane), nil
}

// UnmarshalText parses the text of MarshalText.
func (s *Stream) UnmarshalText(text []byte) error {
	var read Stream
	var rest string
	if n, err := fmt.Sscanf(string(text)+" .", "%d/%d %s", &read.Device, &read.Lane, &rest); n != 3 ||
		err != nil || rest != "." {
		return fmt.Errorf("trace: %q is no stream: want a device and a lane, such as 0/7", text)
	}
	*s = read
	return nil
}
