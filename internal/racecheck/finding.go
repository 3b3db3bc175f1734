package racecheck

import (
	"bufio"
	"fmt"
	"os"
	"regexp"
	"runtime"
	"strings"
)

// Kind is the kind of a finding.
type Kind string

const (
	// KindRace is an access that no edge orders after an earlier one to the same bytes.
	KindRace Kind = "race"
	// KindFreed is memory that was freed while a stream may still use it, although its owner's
	// stream does not wait for that use.
	KindFreed Kind = "freed"
	// KindNotRecorded is a wait for an event that has no record. It is a note, because the call
	// returns an error.
	KindNotRecorded Kind = "not-recorded"
	// KindEventNotAwaited is a recorded event that nothing waited for. It is a note.
	KindEventNotAwaited Kind = "event-not-awaited"
	// KindSharedStream is a pool stream that was handed out before. It is a note.
	KindSharedStream Kind = "shared-stream"
	// KindPageable is a copy requested as asynchronous that blocks because its host memory is not
	// pinned. It is a note.
	KindPageable Kind = "pageable-copy"
)

// Note reports whether findings of the kind are not errors: the program is well-defined, but
// probably not as intended.
func (k Kind) Note() bool {
	return k != KindRace && k != KindFreed
}

// Use is one side of a finding.
type Use struct {
	What   string `json:"what"`             // the operator or call, such as "aten::add.Tensor"
	Within string `json:"within,omitempty"` // the operator in the captured graph, for a replay
	Write  bool   `json:"write"`
	Stream string `json:"stream"`
	// Variable is the Go expression for the stream, if the sources show it.
	Variable string  `json:"variable"`
	Made     string  `json:"stream_made_at,omitempty"`
	At       Frame   `json:"at"` // the program's line
	Stack    []Frame `json:"stack,omitempty"`
}

// Finding is one defect, at one pair of places.
type Finding struct {
	Kind   Kind `json:"kind"`
	First  Use  `json:"first"`  // the one that the program made first
	Second Use  `json:"second"` // the use that is not ordered after First
	// Tensor describes the memory: "float32[2 3] on cuda:0", or "" if no memory is involved.
	Tensor string `json:"tensor,omitempty"`
	Bytes  int64  `json:"bytes,omitempty"`
	MadeBy string `json:"made_by,omitempty"` // the operator that made the memory
	MadeAt Frame  `json:"made_at"`
	// Missing is the Go line to add, and Where is the place to add it: before that line.
	Missing string `json:"missing,omitempty"`
	Where   Frame  `json:"where"`
	Advice  string `json:"advice,omitempty"`
	Count   int    `json:"count"` // number of times found so far
}

type findingKey struct {
	kind          Kind
	first, second Frame
	whatA, whatB  string
	write         bool
}

// add reports a finding, once for each pair of places. The Checker is locked.
func (c *Checker) add(f *Finding) {
	key := findingKey{f.Kind, f.First.At, f.Second.At, f.First.What, f.Second.What, f.Second.Write}
	if old := c.found[key]; old != nil {
		old.Count++
		return
	}
	if c.o.Ignore != nil && (f.First.matches(c.o.Ignore) || f.Second.matches(c.o.Ignore)) {
		return
	}
	c.stats.Findings++
	if len(c.findings) >= c.o.MaxFindings {
		return
	}
	f.Count = 1
	c.found[key] = f
	c.findings = append(c.findings, f)
	if c.o.Report != nil {
		c.o.Report(f)
	}
}

func (u Use) matches(r *regexp.Regexp) bool {
	for _, f := range u.Stack {
		if r.MatchString(f.Function) || r.MatchString(f.String()) {
			return true
		}
	}
	return false
}

// Findings returns the findings so far, in the order in which they were found.
func (c *Checker) Findings() []Finding {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := make([]Finding, len(c.findings))
	for i, f := range c.findings {
		all[i] = *f
	}
	return all
}

func (c *Checker) use(q Queue, p *Place, write bool, made *Place) Use {
	if of := c.queues[q].of; of != Host {
		q = of // reports name the stream, not a graph's lane
	}
	u := Use{Write: write, Stream: c.queues[q].name, Variable: c.variable(q)}
	if at := c.queues[q].made; at != nil {
		u.Made = at.Line().String()
	}
	if p == nil {
		u.What = "the allocation"
		p = made
	} else {
		u.What, u.Within = p.What, p.within
	}
	if p != nil {
		u.At, u.Stack = p.Line(), p.Frames()
	}
	return u
}

func (c *Checker) memory(f *Finding, b *block, shape Shape, bytes uintptr) {
	f.Tensor, f.Bytes = fmt.Sprintf("%v on %s", shape, deviceName(b.device)), int64(bytes)
	if b.made != nil {
		f.MadeBy, f.MadeAt = b.made.What, b.made.Line()
	}
}

func deviceName(d int32) string {
	if d == hostDevice {
		return "the host"
	}
	return fmt.Sprintf("cuda:%d", d)
}

// changed reports pinned memory that the program changed through a slice after a copy from it was
// queued and before the host waited for the copy.
func (c *Checker) changed(w *watched) {
	f := &Finding{Kind: KindRace, First: c.use(w.queue, w.at, false, nil)}
	var k placeKey
	n := runtime.Callers(3, k.pcs[:])
	k.what = "a write through Go memory, before this wait"
	f.Second = c.use(Host, c.place(k, n), true, nil)
	c.memory(f, w.block, w.shape, w.region.End()-w.region.Begin)
	f.Missing, f.Where = f.First.Variable+".Synchronize()", f.Second.At
	f.Advice = "the memory is not what it was when the copy was queued: wait for the copy before the " +
		"memory is written (Slab refuses slots that are in flight)"
	c.add(f)
}

const adviceRace = "or record an event behind the first use, and let the second stream wait for it"

func (c *Checker) race(b *block, old *access, a *Access, at *Place) {
	f := &Finding{Kind: KindRace, First: c.use(old.queue, old.place, old.write, b.made),
		Second: c.use(a.Queue, at, a.Write, nil)}
	shape := a.Shape
	if shape.NDim == 0 && old.shape.NDim > 0 {
		shape = old.shape
	}
	c.memory(f, b, shape, a.Region.End()-a.Region.Begin)
	f.Where = f.Second.At
	switch {
	case old.place.byPrefetcher() && !at.byPrefetcher():
		f.Missing = fmt.Sprintf("batch.Use(%s)", f.Second.Variable)
		f.Advice = "the batch is ready only on streams that it was told: tell it each other stream that " +
			"uses it, before the use"
	case at.byPrefetcher() && !old.place.byPrefetcher():
		f.Missing, f.Where = fmt.Sprintf("batch.Use(%s)", f.First.Variable), f.First.At
		f.Advice = "the prefetcher refills the slot: a stream that the batch was not told, or work that " +
			"is queued after the batch's turn, may still use it (Retain keeps the batch)"
	case a.Queue == Host:
		f.Missing = f.First.Variable + ".Synchronize()"
		f.Advice = "the host does not wait for the stream: wait, or wait for an event that is recorded " +
			"behind the first use"
	default:
		f.Missing = fmt.Sprintf("%s.Wait(%s)", f.Second.Variable, f.First.Variable)
		f.Advice = adviceRace
	}
	c.add(f)
}

func (c *Checker) freed(b *block, a *access, at *Place) {
	f := &Finding{Kind: KindFreed, First: c.use(a.queue, a.place, a.write, b.made),
		Second: c.use(b.owner, at, true, nil)}
	shape := a.shape
	if b.shape.NDim > 0 {
		shape = b.shape
	}
	c.memory(f, b, shape, b.end-b.begin)
	f.Where = f.Second.At
	f.Missing = fmt.Sprintf("tensor.RecordStream(%s)", f.First.Variable)
	f.Advice = fmt.Sprintf("the memory returns to %s at once: record the stream that uses it, or call "+
		"%s.Wait(%s) before it is freed", f.Second.Stream, f.Second.Variable, f.First.Variable)
	c.add(f)
}

// note adds a finding that involves no memory.
func (c *Checker) note(k Kind, first, second *Place) {
	f := &Finding{Kind: k}
	if first != nil {
		f.First = Use{What: first.What, At: first.Line(), Stack: first.Frames()}
	}
	if second != nil {
		f.Second = Use{What: second.What, At: second.Line(), Stack: second.Frames()}
	}
	f.Where = f.First.At
	switch k {
	case KindEventNotAwaited:
		f.Missing, f.Advice = "stream.WaitEvent(event)", "nothing waited for the event before it was "+
			"closed: if it was to order something, the wait is missing"
	case KindNotRecorded:
		f.Where = f.Second.At
		f.Missing, f.Advice = "event.Record(stream)", "an event that was never recorded orders nothing"
	case KindSharedStream:
		f.Where = f.Second.At
		f.Missing, f.Advice = "cuda.NewOwnedStream(device, cuda.StreamOptions{})", "the pool handed this "+
			"stream out before, at the first place: the work of both runs in one queue. Take streams "+
			"once and keep them, or take exclusive ones"
	case KindPageable:
		f.Where = f.Second.At
		f.Missing, f.Advice = "cuda.NewPinned", "the copy waits, because the host memory is not pinned"
	}
	c.add(f)
}

// Note reports a defect that involves no memory. first may be nil.
func (c *Checker) Note(k Kind, first, second *Place) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.note(k, first, second)
}

// Made returns the place where the queue was made, or nil.
func (c *Checker) Made(q Queue) *Place {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.queues[q].made
}

var assigned = regexp.MustCompile(
	`^\s*(?:var\s+)?([\w.\[\]]+)(?:\s*,\s*\w+)?\s*:?=\s*(?:[\w.]*\.)?New(?:Owned)?Stream\(`)

// variable returns a Go expression for the stream. It is the stream's variable if the source line
// of its construction can be read and assigns one, and otherwise a name with its number.
func (c *Checker) variable(q Queue) string {
	if q == Host {
		return "host"
	}
	made := c.queues[q].made
	name := c.queues[q].name
	if made != nil {
		if line := made.Line(); line.File != "" {
			if found := assigned.FindStringSubmatch(sourceLine(line)); found != nil {
				return found[1]
			}
		}
	}
	if d, ok := strings.CutSuffix(name, " default stream"); ok {
		return fmt.Sprintf("cuda.DefaultStream(%s)", strings.TrimPrefix(d, "cuda:"))
	}
	if i := strings.LastIndexByte(name, ' '); i >= 0 {
		name = name[i+1:]
	}
	if name != "" && name[0] >= '0' && name[0] <= '9' {
		name = "stream" + name
	}
	return name
}

func sourceLine(at Frame) string {
	f, err := os.Open(at.File)
	if err != nil {
		return ""
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for n := 1; lines.Scan(); n++ {
		if n == at.Line {
			return lines.Text()
		}
	}
	return ""
}

var dtypes = [...]string{"uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
	"complex32", "complex64", "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16"}

// String returns the dtype and the sizes: "float32[2 3]".
func (s Shape) String() string {
	name := fmt.Sprintf("dtype %d", s.DType)
	if s.DType >= 0 && int(s.DType) < len(dtypes) {
		name = dtypes[s.DType]
	}
	n := min(max(int(s.NDim), 0), len(s.Sizes))
	sizes := fmt.Sprint(s.Sizes[:n])
	if int(s.NDim) > n {
		sizes = strings.TrimSuffix(sizes, "]") + " ...]"
	}
	return name + sizes
}

func verb(write bool) string {
	if write {
		return "writes"
	}
	return "reads"
}

func (u Use) text(b *strings.Builder, order string, access bool) {
	fmt.Fprintf(b, "  %-7s %s", order, u.What)
	if access {
		fmt.Fprintf(b, " %s on %s", verb(u.Write), u.Stream)
		if u.Variable != "" && u.Variable != "host" && !strings.HasPrefix(u.Variable, "cuda.DefaultStream") {
			fmt.Fprintf(b, " (%s", u.Variable)
			if u.Made != "" {
				fmt.Fprintf(b, ", made at %s", u.Made)
			}
			b.WriteString(")")
		}
	}
	if u.Within != "" {
		fmt.Fprintf(b, "\n          in %s", u.Within)
	}
	fmt.Fprintf(b, "\n          at %v", u.At)
	if u.At.Function != "" {
		fmt.Fprintf(b, " in %s", u.At.Function)
	}
	b.WriteString("\n")
}

// String returns the finding as text on several lines.
func (f *Finding) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "stream sanitizer: %s\n", f.title())
	memory := f.Tensor != ""
	if f.First.What != "" {
		f.First.text(&b, "first", memory)
	}
	if f.Second.What != "" {
		f.Second.text(&b, "then", memory && f.Kind == KindRace)
	}
	if memory {
		fmt.Fprintf(&b, "  memory  %s, %d bytes", f.Tensor, f.Bytes)
		if f.MadeBy != "" {
			fmt.Fprintf(&b, ", made by %s at %v", f.MadeBy, f.MadeAt)
		}
		b.WriteString("\n")
	}
	if f.Missing != "" {
		fmt.Fprintf(&b, "  missing %s\n          before %v\n", f.Missing, f.Where)
	}
	if f.Advice != "" {
		fmt.Fprintf(&b, "  (%s)\n", f.Advice)
	}
	return b.String()
}

func (f *Finding) title() string {
	switch f.Kind {
	case KindRace:
		return fmt.Sprintf("race: no edge orders %s on %s after %s on %s", noun(f.Second.Write),
			f.Second.Stream, noun(f.First.Write), f.First.Stream)
	case KindFreed:
		return fmt.Sprintf("freed while in use: memory of %s that %s may still use", f.Second.Stream, f.First.Stream)
	case KindNotRecorded:
		return "note: a wait for an event that was never recorded"
	case KindEventNotAwaited:
		return "note: an event was recorded, and nothing waited for it"
	case KindSharedStream:
		return "note: a stream of the pool was handed out twice"
	case KindPageable:
		return "note: a non-blocking copy waits for its end"
	}
	return string(f.Kind)
}

func noun(write bool) string {
	if write {
		return "a write"
	}
	return "a read"
}
