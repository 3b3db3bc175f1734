package control

import (
	"bytes"
	"crypto/subtle"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"time"
)

// Hub is rank 0's server. It does not take part in collectives.
type Hub struct {
	o Options
	served
	listener net.Listener
	stop     chan struct{}
	running  sync.WaitGroup

	mu       sync.Mutex
	ranks    []peer
	arrivals map[arrivalKey]*arrival
	beaten   time.Time // when check last ran
	formed   bool      // all ranks have connected and arrived at the first barrier
	reports  []report
	verdict  *Verdict
}

// served identifies the job.
type served struct {
	size  int
	token string
}

// peer is the hub's state of one rank.
type peer struct {
	conn  net.Conn // nil before the hello and after the end of the connection
	out   chan message
	name  string // "rank 2 (pid 41 on node7)"
	heard time.Time
	calls map[string]Call
	left  string    // source line that closed the group ("train.go:88"), or ""
	until time.Time // if left is set: the deadline for the other ranks to leave
}

type arrivalKey struct {
	group string
	seq   uint64
}

type arrival struct {
	members  []int
	calls    map[int]Call
	compare  bool
	timeout  time.Duration
	deadline time.Time
}

// report is a failed collective on which the hub will give a verdict.
type report struct {
	rank    int
	group   string
	members []int
	call    Call
	text    string
	due     time.Time
}

// queueLength is the maximum number of queued messages of a connection. If a rank has more messages
// queued, it is not reading them, and the hub closes its connection.
const queueLength = 256

// NewHub serves the ranks 0 to size - 1 on the listener, and takes ownership of it. token is a
// secret of the job; connections without it are closed.
func NewHub(listener net.Listener, size int, token string, o Options) *Hub {
	h := &Hub{
		o: o, served: served{size, token}, listener: listener, stop: make(chan struct{}),
		ranks: make([]peer, size), arrivals: map[arrivalKey]*arrival{}, beaten: time.Now(),
	}
	for r := range h.ranks {
		h.ranks[r].name = fmt.Sprintf("rank %d", r)
	}
	h.running.Add(2)
	go h.accept()
	go h.watch()
	return h
}

// Close closes all connections and waits for the hub's goroutines. Queued messages are still sent.
// Close waits for each rank to read its last message, until the rank has been silent for
// Options.Silence, or for Options.Interval if that is longer; it returns as soon as all have read
// it. Close the member of rank 0 first: its last message may end the job.
func (h *Hub) Close() {
	h.mu.Lock()
	select {
	case <-h.stop:
	default:
		close(h.stop)
	}
	h.listener.Close()
	h.mu.Unlock()
	h.running.Wait()
}

func (h *Hub) accept() {
	defer h.running.Done()
	for {
		conn, err := h.listener.Accept()
		if err != nil {
			return // the listener is closed
		}
		h.running.Add(1)
		go h.serve(conn)
	}
}

// serve reads one connection until it ends.
func (h *Hub) serve(conn net.Conn) {
	defer h.running.Done()
	conn.SetReadDeadline(time.Now().Add(h.o.Silence)) // set the deadline before the goroutine below can change it
	stopped := make(chan struct{})
	defer close(stopped)
	h.running.Add(1)
	go func() {
		defer h.running.Done()
		select {
		case <-h.stop: // stop the reader; the queue is then sent and closed
			conn.SetReadDeadline(time.Now())
		case <-stopped:
		}
	}()
	hello, rest, err := readHello(conn)
	if err != nil || hello.Kind != kindHello || subtle.ConstantTimeCompare([]byte(hello.Token), []byte(h.token)) != 1 {
		conn.Close()
		return
	}
	if refused := h.join(conn, hello); refused != "" {
		h.refuse(conn, hello.Rank, refused)
		return
	}
	conn.SetReadDeadline(time.Time{})
	decoder := json.NewDecoder(io.MultiReader(rest, conn))
	select {
	case <-h.stop:
		conn.SetReadDeadline(time.Now())
	default:
	}
	for {
		var m message
		if err = decoder.Decode(&m); err != nil {
			break
		}
		h.receive(hello.Rank, m)
	}
	h.gone(hello.Rank, err)
}

// readHello reads the first message, at most maxHello bytes. rest returns the bytes read after the
// message.
func readHello(conn net.Conn) (m message, rest io.Reader, err error) {
	var line []byte
	for {
		var chunk [512]byte
		n, err := conn.Read(chunk[:])
		line = append(line, chunk[:n]...)
		if at := bytes.IndexByte(line, '\n'); at >= 0 {
			return m, bytes.NewReader(line[at+1:]), json.Unmarshal(line[:at], &m)
		}
		switch {
		case err != nil:
			return m, nil, err
		case len(line) > maxHello:
			return m, nil, fmt.Errorf("no message in %d bytes", len(line))
		}
	}
}

// refuse tells the process why it cannot be a rank, waits until the process has closed its side of
// the connection, and closes the connection. If refuse closed a connection with unread data, the
// process would see a reset before it reads the message.
func (h *Hub) refuse(conn net.Conn, rank int, why string) {
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(h.o.Silence))
	select {
	case <-h.stop:
		return
	default:
	}
	if json.NewEncoder(conn).Encode(message{Kind: kindRefused, Verdict: &Verdict{Mismatch, rank, why}}) == nil {
		io.Copy(io.Discard, conn)
	}
}

// join assigns the connection to its rank, or returns the reason why it cannot. If the rank already
// has a process, the result depends on h.formed. Before the group has formed, either process may be
// the intended one, so join ends the job. Afterwards the second process belongs to another job with
// the same address, and join refuses that process.
func (h *Hub) join(conn net.Conn, hello message) (refused string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	const another = "another job uses this address: set MASTER_PORT to a free port for each job"
	if hello.Rank < 0 || hello.Rank >= h.size {
		return fmt.Sprintf("%s is no rank of the job of %d ranks that %s serves: %s", hello.Name, h.size,
			h.ranks[0].name, another)
	}
	p := &h.ranks[hello.Rank]
	if p.out != nil {
		text := fmt.Sprintf("%s and %s have the same rank", p.name, hello.Name)
		if !h.formed {
			h.judge(&Verdict{Mismatch, hello.Rank, text})
		}
		return text + ": " + another
	}
	p.conn, p.out, p.name, p.heard = conn, make(chan message, queueLength), hello.Name, time.Now()
	h.running.Add(1)
	go h.write(hello.Rank, p.conn, p.out)
	if h.verdict != nil {
		h.send(hello.Rank, message{Kind: kindRefused, Verdict: h.verdict})
	}
	return ""
}

// write sends queued messages until the queue is closed, and then closes the connection. If the
// connection were closed while bytes of the rank are unread or on their way, TCP could reset it
// before the rank has the last message, which may be the verdict.
func (h *Hub) write(rank int, conn net.Conn, out <-chan message) {
	defer h.running.Done()
	defer conn.Close()
	encoder := json.NewEncoder(conn)
	for m := range out {
		conn.SetWriteDeadline(time.Now().Add(h.o.Silence))
		if encoder.Encode(m) != nil {
			conn.Close() // the reader reports the failure
			for range out {
			}
			return
		}
	}
	if half, ok := conn.(interface{ CloseWrite() error }); ok && half.CloseWrite() == nil {
		conn.SetReadDeadline(h.patience(rank))
		io.Copy(io.Discard, conn) // until the rank has closed its side
	}
}

// patience returns the time until which the hub waits for a rank to read its last message: a rank
// that is silent for longer may never do so. A rank that was silent for longer may have just been
// continued.
func (h *Hub) patience(rank int) time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	silent, soon := h.ranks[rank].heard.Add(h.o.Silence), time.Now().Add(h.o.Interval)
	if silent.After(soon) {
		return silent
	}
	return soon
}

// send queues a message for the rank. The caller holds h.mu.
func (h *Hub) send(rank int, m message) {
	p := &h.ranks[rank]
	if p.conn == nil {
		return
	}
	select {
	case p.out <- m:
	default:
		p.conn.Close()
	}
}

func (h *Hub) gone(rank int, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := &h.ranks[rank]
	close(p.out)
	p.conn = nil
	select {
	case <-h.stop:
		return
	default:
	}
	if p.left == "" {
		reason := "its process has ended"
		if err != io.EOF {
			reason = err.Error()
		}
		h.judge(&Verdict{Lost, rank, fmt.Sprintf("%s is lost: %s; %s", p.name, reason, h.last(rank, ""))})
	}
}

// last describes the latest calls of a rank, or, if group is set, only the rank's call in that
// group. The caller holds h.mu.
func (h *Hub) last(rank int, group string) string {
	p := &h.ranks[rank]
	if group != "" {
		c := p.calls[group]
		return fmt.Sprintf("its last call in the group is %v", c)
	}
	var calls []string
	for _, name := range slices.Sorted(keys(p.calls)) {
		calls = append(calls, p.calls[name].String())
	}
	if calls == nil {
		return "it has called no collective"
	}
	return "its last call is " + strings.Join(calls, ", ")
}

func keys(m map[string]Call) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

// judge ends the job unless it has already ended. The caller holds h.mu.
func (h *Hub) judge(v *Verdict) {
	if h.verdict != nil {
		return
	}
	if time.Since(h.beaten) > h.o.Silence { // the other ranks have given this process up
		v = h.o.silentHub()
	}
	h.verdict = v
	for r := range h.ranks {
		h.send(r, message{Kind: kindVerdict, Verdict: v})
	}
}

func (h *Hub) receive(rank int, m message) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := &h.ranks[rank]
	p.heard = time.Now()
	if m.Call != nil && !h.isGroup(rank, m.Members) {
		h.judge(&Verdict{Mismatch, rank,
			fmt.Sprintf("%s has a group %q of the ranks %v: want distinct ranks of %d, and its own", p.name,
				m.Name, m.Members, h.size)})
		return
	}
	switch m.Kind {
	case kindBeat:
		p.calls = m.Calls
	case kindArrive:
		if m.Call != nil {
			h.arrive(rank, m)
		}
	case kindReport:
		if m.Call != nil {
			// Another rank's end or next beat may explain the failure, so wait for two intervals
			// before the verdict.
			h.reports = append(h.reports,
				report{rank, m.Name, m.Members, *m.Call, m.Text, p.heard.Add(2 * h.o.Interval)})
		}
	case kindAbort:
		h.judge(&Verdict{Aborted, rank, fmt.Sprintf("%s has ended the job: %s", p.name, m.Text)})
	case kindLeave:
		p.calls, p.left, p.until = m.Calls, m.Text, p.heard.Add(m.Timeout)
		if h.allLeft() {
			for r := range h.ranks {
				h.send(r, message{Kind: kindLeave})
			}
		}
	}
}

// isGroup reports whether members is a valid group that includes the rank.
func (h *Hub) isGroup(rank int, members []int) bool {
	seen := make([]bool, h.size)
	for _, r := range members {
		if r < 0 || r >= h.size || seen[r] {
			return false
		}
		seen[r] = true
	}
	return seen[rank]
}

func (h *Hub) allLeft() bool {
	return !slices.ContainsFunc(h.ranks, func(p peer) bool { return p.left == "" })
}

// arrive records the arrival of a rank. When all members have arrived, it releases them. The caller
// holds h.mu.
func (h *Hub) arrive(rank int, m message) {
	key := arrivalKey{m.Name, m.Call.Seq}
	a := h.arrivals[key]
	if a == nil {
		a = &arrival{members: m.Members, calls: map[int]Call{}, timeout: m.Timeout, deadline: time.Now().Add(m.Timeout)}
		h.arrivals[key] = a
	}
	a.calls[rank] = *m.Call
	a.compare = a.compare || m.Compare
	if !slices.Equal(a.members, m.Members) {
		h.judge(&Verdict{Mismatch, rank,
			fmt.Sprintf("%s has a group %q of the ranks %v, and others one of %v", h.ranks[rank].name,
				m.Name, m.Members, a.members)})
		return
	}
	if len(a.calls) < len(a.members) {
		return
	}
	delete(h.arrivals, key)
	h.formed = h.formed || len(a.members) == h.size
	first := a.members[0]
	for _, r := range a.members {
		if other, one := a.calls[r], a.calls[first]; a.compare && (other.Name != one.Name || other.What != one.What) {
			h.judge(&Verdict{Mismatch, r, fmt.Sprintf("%s calls %s(%s) #%d at %s where %s calls %s(%s) at %s",
				h.ranks[r].name, other.Name, other.What, other.Seq, other.Line, h.ranks[first].name,
				one.Name, one.What, one.Line)})
			return
		}
	}
	for _, r := range a.members {
		h.send(r, message{Kind: kindDone, Name: m.Name, Call: &Call{Seq: m.Call.Seq}})
	}
}

// watch sends beats and checks deadlines.
func (h *Hub) watch() {
	defer h.running.Done()
	ticker := time.NewTicker(h.o.Interval)
	defer ticker.Stop()
	for {
		select {
		case <-h.stop:
			return
		case now := <-ticker.C:
			h.mu.Lock()
			h.check(now)
			h.mu.Unlock()
		}
	}
}

func (h *Hub) check(now time.Time) {
	for r := range h.ranks {
		h.send(r, message{Kind: kindBeat})
	}
	if h.verdict != nil {
		return
	}
	between := now.Sub(h.beaten)
	if between > h.o.Silence {
		h.judge(h.o.silentHub())
		return
	}
	h.beaten = now
	for r := range h.ranks {
		if h.o.stopped(between) { // what the ranks have sent meanwhile is unread
			h.ranks[r].heard = now
		}
		if p := &h.ranks[r]; p.conn != nil && p.left == "" && now.Sub(p.heard) > h.o.Silence {
			h.judge(&Verdict{Silent, r,
				fmt.Sprintf("%s has given no sign of life for %v: it is stopped, or its host or network is gone; %s",
					p.name, h.o.Silence, h.last(r, ""))})
			return
		}
	}
	for key, a := range h.arrivals {
		if now.After(a.deadline) {
			h.judge(h.missing(key, a))
			return
		}
	}
	for _, rep := range h.reports {
		if now.After(rep.due) {
			h.judge(h.explain(rep))
			return
		}
	}
	h.checkLeft()
	h.checkParting(now)
}

// missing returns the verdict on a barrier that some ranks have not reached.
func (h *Hub) missing(key arrivalKey, a *arrival) *Verdict {
	var names []string
	var call Call
	rank := -1
	for _, r := range a.members {
		if c, ok := a.calls[r]; ok {
			call = c
			continue
		}
		if rank < 0 {
			rank = r
		}
		group, _, _ := strings.Cut(key.group, "#")
		names = append(names, fmt.Sprintf("%s (%s)", h.ranks[r].name, h.state(r, group)))
	}
	return &Verdict{Timeout, rank, fmt.Sprintf("%s did not reach %v within %v", strings.Join(names, ", "),
		call, a.timeout)}
}

// state describes a rank that others wait for. The caller holds h.mu.
func (h *Hub) state(rank int, group string) string {
	p := &h.ranks[rank]
	switch {
	case p.out == nil:
		return "it never connected"
	case p.left != "":
		return "it closed its group at " + p.left
	}
	return h.last(rank, group)
}

// explain returns the verdict on a failed collective. The ranks that have not entered it are at
// fault.
func (h *Hub) explain(rep report) *Verdict {
	var names []string
	rank := -1
	for _, r := range rep.members {
		if c := h.ranks[r].calls[rep.group]; r != rep.rank && c.Seq < rep.call.Seq {
			if rank < 0 {
				rank = r
			}
			names = append(names, fmt.Sprintf("%s has not entered it (%s)", h.ranks[r].name, h.state(r, rep.group)))
		}
	}
	text := fmt.Sprintf("%s failed at %v: %s", h.ranks[rep.rank].name, rep.call, rep.text)
	if names == nil {
		return &Verdict{Timeout, rep.rank, text}
	}
	return &Verdict{Timeout, rank, strings.Join(names, ", ") + "; " + text}
}

// checkLeft ends the job if a rank waits in a collective for a rank that has left. The caller holds
// h.mu.
func (h *Hub) checkLeft() {
	for r := range h.ranks {
		if h.ranks[r].left == "" {
			continue
		}
		for other := range h.ranks {
			for group, c := range h.ranks[other].calls {
				if mine, ok := h.ranks[r].calls[group]; ok && mine.Seq < c.Seq && !c.Done {
					h.judge(&Verdict{Left, r,
						fmt.Sprintf("%s closed its group at %s, and %s is in %v", h.ranks[r].name,
							h.ranks[r].left, h.ranks[other].name, c)})
					return
				}
			}
		}
	}
}

// checkParting ends the job if some ranks have not left in time after the first one. The caller
// holds h.mu.
func (h *Hub) checkParting(now time.Time) {
	first := slices.IndexFunc(h.ranks, func(p peer) bool { return p.left != "" && now.After(p.until) })
	if first < 0 || h.allLeft() {
		return
	}
	var names []string
	rank := -1
	for r := range h.ranks {
		if h.ranks[r].left != "" {
			continue
		}
		if rank < 0 {
			rank = r
		}
		names = append(names, fmt.Sprintf("%s (%s)", h.ranks[r].name, h.last(r, "")))
	}
	h.judge(&Verdict{Timeout, rank, fmt.Sprintf("%s did not close its group in time after %s, which closed it at %s",
		strings.Join(names, ", "), h.ranks[first].name, h.ranks[first].left)})
}
