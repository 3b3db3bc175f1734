package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"sync"
	"time"
)

// Member is one rank's connection to the hub. It is safe for concurrent use.
type Member struct {
	o       Options
	rank    int
	conn    net.Conn
	out     chan message
	stop    chan struct{} // closed by Close
	failed  chan struct{} // closed when verdict is set
	left    chan struct{} // closed when all ranks have left
	running sync.WaitGroup

	mu     sync.Mutex // guards the fields below
	closed bool
	hub    hubState
	memberCalls
}

// hubState records the messages of the hub.
type hubState struct {
	heard    time.Time // the time of the last message
	admitted bool      // some message has shown that the hub admits this rank
	verdict  *Verdict
}

// hear records a message.
func (h *hubState) hear(kind string) {
	h.heard = time.Now()
	h.admitted = h.admitted || kind != kindRefused
}

// memberCalls holds the rank's latest calls, and the barriers that the rank has entered.
type memberCalls struct {
	calls   map[string]Call              // the latest call of each group
	waiting map[arrivalKey]chan struct{} // closed when all ranks have arrived
}

func (c *memberCalls) enter(group string, call Call) {
	c.calls[group] = call
}

// leave marks the call with the number seq as done, unless the rank has entered a later call.
func (c *memberCalls) leave(group string, seq uint64) {
	if call := c.calls[group]; call.Seq == seq {
		call.Done = true
		c.calls[group] = call
	}
}

// arrived ends the wait of the Arrive with the key.
func (c *memberCalls) arrived(key arrivalKey) {
	if done := c.waiting[key]; done != nil {
		delete(c.waiting, key)
		close(done)
	}
}

// Dial connects the rank to the hub, at the first address that answers.
func Dial(ctx context.Context, addresses []string, token string, rank int, o Options) (*Member, error) {
	var conn net.Conn
	var errs []error
	for _, address := range addresses {
		dialer := net.Dialer{Timeout: o.Silence}
		c, err := dialer.DialContext(ctx, "tcp", address)
		if err == nil {
			conn = c
			break
		}
		errs = append(errs, err)
	}
	if conn == nil {
		return nil, fmt.Errorf("rank 0 cannot be reached: %w", errors.Join(errs...))
	}
	host, _ := os.Hostname()
	m := &Member{
		o: o, rank: rank, conn: conn, out: make(chan message, queueLength), stop: make(chan struct{}),
		failed: make(chan struct{}), left: make(chan struct{}), hub: hubState{heard: time.Now()},
		memberCalls: memberCalls{calls: map[string]Call{},
			waiting: map[arrivalKey]chan struct{}{}},
	}
	m.out <- message{Kind: kindHello, Token: token, Rank: rank,
		Name: fmt.Sprintf("rank %d (pid %d on %s)", rank, os.Getpid(), host)}
	m.running.Add(3)
	ended := make(chan struct{})
	go m.read(ended)
	go m.write(ended)
	go m.beat()
	return m, nil
}

// Failed returns a channel that is closed when the job has failed. Verdict then returns the reason.
func (m *Member) Failed() <-chan struct{} { return m.failed }

// Verdict returns the reason for the job's end, or nil.
func (m *Member) Verdict() *Verdict {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.hub.verdict
}

// Refused reports whether there is a verdict and the hub never admitted this rank. Either the hub
// serves another job, or the job had already ended, or the address no longer belongs to a hub.
func (m *Member) Refused() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.hub.verdict != nil && !m.hub.admitted
}

// Enter records that the rank has entered a call in the group. The next beat reports it to the hub.
func (m *Member) Enter(group string, c Call) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.enter(group, c)
}

// Leave records that the rank has left its call in the group, unless it has already entered another
// call.
func (m *Member) Leave(group string, seq uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.leave(group, seq)
}

// Arrive blocks until all members have called it with the same name and sequence number. The name
// consists of the name of a group, "#" and a purpose. If a member is missing, the verdict describes
// the member's latest call in that group. If compare is true, names and operands of the members'
// calls must be equal. If a member does not arrive within the timeout, the job ends. If the job
// ends, Arrive returns the verdict.
func (m *Member) Arrive(name string, members []int, c Call, compare bool, timeout time.Duration) error {
	key := arrivalKey{name, c.Seq}
	done := make(chan struct{})
	m.mu.Lock()
	m.waiting[key] = done
	m.mu.Unlock()
	m.send(message{Kind: kindArrive, Name: name, Members: members, Call: &c, Compare: compare, Timeout: timeout})
	select {
	case <-done:
		return nil
	case <-m.failed:
		return m.Verdict()
	case <-m.stop:
		return net.ErrClosed
	}
}

// Report tells the hub that a call failed on this rank. The hub determines the rank at fault and
// ends the job, which closes Failed.
func (m *Member) Report(group string, members []int, c Call, text string) {
	m.send(message{Kind: kindBeat})
	m.send(message{Kind: kindReport, Name: group, Members: members, Call: &c, Text: text})
}

// Abort ends the job on all ranks.
func (m *Member) Abort(text string) { m.send(message{Kind: kindAbort, Text: text}) }

// Part blocks until all ranks have called it, or until the job or the context ends. The argument at
// is the line of the program that closes the group. The job fails if another rank waits for this
// rank in a collective. It also fails if some rank does not call Part within the timeout of the
// first caller.
func (m *Member) Part(ctx context.Context, at string, timeout time.Duration) error {
	select {
	case <-m.failed: // the others must not take this rank's end for a good one
		return m.Verdict()
	default:
	}
	m.send(message{Kind: kindLeave, Text: at, Timeout: timeout})
	select {
	case <-m.left:
		return nil
	case <-m.failed:
		return m.Verdict()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Close sends the queued messages, closes the connection, and waits for the member's goroutines. If
// the hub does not close its side, Close waits for it for Options.Interval.
func (m *Member) Close() {
	m.mu.Lock()
	if !m.closed {
		m.closed = true
		close(m.stop)
	}
	m.mu.Unlock()
	m.running.Wait()
}

func (m *Member) send(msg message) {
	select {
	case m.out <- msg:
	case <-m.failed:
	case <-m.stop:
	}
}

// status adds the rank's calls to a beat or leave message. Only the writer calls it, so a message
// never has older calls than the message before it.
func (m *Member) status(msg message) message {
	if msg.Kind != kindBeat && msg.Kind != kindLeave {
		return msg
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	msg.Calls = maps.Clone(m.calls)
	return msg
}

func (m *Member) fail(v *Verdict) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.hub.verdict == nil && !m.closed {
		m.hub.verdict = v
		close(m.failed)
	}
}

// read reads the hub's messages. At the end of the connection it ends the other direction too, and
// closes ended.
func (m *Member) read(ended chan<- struct{}) {
	defer m.running.Done()
	defer close(ended)
	defer m.closeWrite()
	decoder := json.NewDecoder(m.conn)
	left := false
	for {
		var msg message
		if err := decoder.Decode(&msg); err != nil {
			if left {
				return
			}
			reason := "its process has ended"
			if !errors.Is(err, io.EOF) {
				reason = err.Error()
			}
			m.fail(&Verdict{Lost, 0, "rank 0, which serves the job, is lost: " + reason})
			return
		}
		m.mu.Lock()
		m.hub.hear(msg.Kind)
		m.mu.Unlock()
		switch msg.Kind {
		case kindVerdict, kindRefused:
			if msg.Verdict != nil {
				m.fail(msg.Verdict)
			}
		case kindLeave:
			if !left {
				left = true
				close(m.left)
			}
		case kindDone:
			if msg.Call != nil {
				m.done(arrivalKey{msg.Name, msg.Call.Seq})
			}
		}
	}
}

// closeWrite tells the hub that this rank sends nothing more, so that the hub does not wait for the
// rank's program. It returns false if the connection is broken.
func (m *Member) closeWrite() bool {
	half, ok := m.conn.(interface{ CloseWrite() error })
	return ok && half.CloseWrite() == nil
}

func (m *Member) done(key arrivalKey) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.arrived(key)
}

// write sends queued messages. On Close it sends the rest, waits until the hub has read it, and
// closes the connection, which stops read. If the connection were closed while messages of the hub
// are unread, TCP could reset it before the hub has the last message, which may end the job. After
// a send error write keeps the connection open, because the hub's last message may be unread.
func (m *Member) write(ended <-chan struct{}) {
	defer m.running.Done()
	defer m.conn.Close()
	encoder := json.NewEncoder(m.conn)
	broken := false
	put := func(msg message) {
		if !broken {
			m.conn.SetWriteDeadline(time.Now().Add(m.o.Silence))
			broken = encoder.Encode(m.status(msg)) != nil
		}
	}
	for {
		select {
		case msg := <-m.out:
			put(msg)
		case <-m.stop:
			for {
				select {
				case msg := <-m.out:
					put(msg)
				default:
					if m.closeWrite() {
						m.conn.SetReadDeadline(time.Now().Add(m.o.Interval))
						<-ended
					}
					return
				}
			}
		}
	}
}

func (m *Member) beat() {
	defer m.running.Done()
	ticker := time.NewTicker(m.o.Interval)
	defer ticker.Stop()
	for last := time.Now(); ; {
		select {
		case <-m.stop:
			return
		case <-m.left: // the hub may close now
			return
		case <-ticker.C:
		}
		now := time.Now()
		m.mu.Lock()
		if m.o.stopped(now.Sub(last)) { // what the hub has sent meanwhile is unread
			m.hub.heard = now
		}
		silence := now.Sub(m.hub.heard)
		m.mu.Unlock()
		last = now
		if silence > m.o.Silence {
			m.fail(m.o.silentHub())
			return // the hub will find this rank silent, whatever the program does
		}
		select {
		case m.out <- message{Kind: kindBeat}:
		default: // the connection is stuck; the hub will find this rank silent
		}
	}
}
