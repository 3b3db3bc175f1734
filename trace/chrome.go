package trace

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"time"
)

// chromeEvent is one entry of the trace-event format
// (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMCN-uvg). Times are in
// microseconds.
type chromeEvent struct {
	Phase    string         `json:"ph"`
	Name     string         `json:"name"`
	Category string         `json:"cat,omitempty"`
	Process  int            `json:"pid"`
	Thread   int64          `json:"tid"`
	Time     float64        `json:"ts"`
	Duration *float64       `json:"dur,omitempty"`
	ID       int64          `json:"id,omitempty"`
	Binding  string         `json:"bp,omitempty"`
	Args     map[string]any `json:"args,omitempty"`
}

func micro(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

// WriteChrome writes the trace-event format of https://ui.perfetto.dev and chrome://tracing. The
// file has a process for the host and one per device, a thread for each OS thread and each stream,
// and an arrow from each CUDA call to the work that the call enqueued.
func (t *Trace) WriteChrome(w io.Writer) error {
	named, out := t.chrome(-1)
	return encodeChrome(w, append(named, out...))
}

func encodeChrome(w io.Writer, events []chromeEvent) error {
	return json.NewEncoder(w).Encode(map[string]any{"displayTimeUnit": "ms", "traceEvents": events})
}

// chrome returns the names of the rows, and the events. rank is -1 outside a distributed job.
func (t *Trace) chrome(rank int) (named, out []chromeEvent) {
	prefix, process, id := "", func(device int) int { return device + 1 }, func(
		correlation int64) int64 {
		return correlation
	}
	if rank >= 0 {
		prefix = fmt.Sprintf("rank %d ", rank)
		process = func(device int) int { return rank<<8 + device + 1 }
		id = func(correlation int64) int64 { return int64(rank)<<40 + correlation }
	}
	type row struct {
		device int
		lane   int64
	}
	rows := map[row]bool{}
	calls := map[int64]Event{}
	for _, e := range t.Events {
		rows[row{e.Device, e.Lane}] = true
		dur := micro(e.Duration)
		c := chromeEvent{Phase: "X", Name: e.Name, Category: e.Kind.String(), Process: process(e.Device),
			Thread: e.Lane, Time: micro(e.Start), Duration: &dur}
		if e.OnDevice() {
			c.Args = map[string]any{"stream": e.Lane}
			if e.Bytes > 0 {
				c.Args["bytes"] = e.Bytes
				if e.Duration > 0 {
					c.Args["GB/s"] = float64(e.Bytes) / float64(e.Duration.Nanoseconds())
				}
			}
		}
		out = append(out, c)
		if e.Kind == Runtime && e.Correlation != 0 {
			calls[e.Correlation] = e
		}
	}
	for _, e := range t.Events {
		if call, ok := calls[e.Correlation]; ok && e.OnDevice() {
			out = append(out,
				chromeEvent{Phase: "s", Name: "enqueues", Category: "flow", Process: process(call.Device),
					Thread: call.Lane, Time: micro(call.Start), ID: id(e.Correlation)},
				chromeEvent{Phase: "f", Name: "enqueues", Category: "flow", Process: process(e.Device),
					Thread: e.Lane, Time: micro(e.Start), ID: id(e.Correlation), Binding: "e"})
		}
	}
	processes := map[int]bool{}
	for r := range rows {
		if !processes[r.device] {
			processes[r.device] = true
			name := "host"
			if r.device != Host {
				name = fmt.Sprintf("cuda:%d", r.device)
			}
			named = append(named, chromeEvent{Phase: "M", Name: "process_name", Process: process(r.device),
				Args: map[string]any{"name": prefix + name}})
		}
		name := fmt.Sprintf("thread %d", r.lane)
		if r.device != Host {
			name = t.name(Stream{r.device, r.lane})
		}
		named = append(named, chromeEvent{Phase: "M", Name: "thread_name", Process: process(r.device),
			Thread: r.lane, Args: map[string]any{"name": name}})
	}
	slices.SortFunc(named, cmpEvents)
	return named, out
}

func cmpEvents(a, b chromeEvent) int {
	for _, d := range []int64{int64(a.Process - b.Process), a.Thread - b.Thread} {
		if d != 0 {
			return int(d)
		}
	}
	return slices.Compare([]byte(a.Name), []byte(b.Name))
}
