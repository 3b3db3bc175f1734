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

// Member is one rank's connection with the hub. Any number of goroutines may use it.
type Member struct {
	o       Options
	rank    int
	conn    net.Conn
	out     chan message
	stop    chan struct{} // closed by Close
	failed  chan struct{} // closed with the verdict
	left    chan struct{} // closed when all ranks have left
	running sync.WaitGroup

	mu       sync.Mutex
	heard    time.Time
	begun    map[string]time.Time // when the calls were entered
	calls    map[string]Call
	waiting  map[arrivalKey]chan struct{}
	verdict  *Verdict
	admitted bool // a message from the hub says that it has admitted this rank
	closed   bool
}

// Dial connects the rank with the hub at the first of the addresses that answers.
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
		failed: make(chan struct{}), left: make(chan struct{}), heard: time.Now(),
		begun: map[string]time.Time{}, calls: map[string]Call{}, waiting: map[arrivalKey]chan struct{}{},
	}
	m.out <- message{Kind: kindHello, Token: token, Rank: rank, Name: fmt.Sprintf("rank %d (pid %d on %s)", rank, os.Getpid(), host)}
	m.running.Add(3)
	go m.read()
	go m.write()
	go m.beat()
	return m, nil
}

// Failed is closed when the job has ended for a reason, which Verdict has.
func (m *Member) Failed() <-chan struct{} { return m.failed }

// Verdict returns why the job has ended, or nil.
func (m *Member) Verdict() *Verdict {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.verdict
}

// Refused reports whether there is a verdict, and the hub has not admitted this rank before: it
// serves another job, or its own had ended, or what answered at its address is no hub any more.
func (m *Member) Refused() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.verdict != nil && !m.admitted
}

// Enter notes that the rank enters a call in the group; the next beat says so.
func (m *Member) Enter(group string, c Call) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.calls[group], m.begun[group] = c, time.Now()
}

// Leave notes that the rank has left its call in the group, unless it has entered another one.
func (m *Member) Leave(group string, seq uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if c := m.calls[group]; c.Seq == seq {
		c.Done = true
		m.calls[group] = c
	}
}

// Arrive waits until all members have called it with the same name and number. The name is that of
// a group, whose calls explain why a member does not come, with "#" and a purpose. With compare,
// names and operands of their calls must be equal. A member that does not call it within the
// timeout ends the job. It returns the verdict if the job ends.
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

// Report tells the hub that a call failed here. The hub ends the job, with the rank that it finds
// at fault: Failed will be closed.
func (m *Member) Report(group string, members []int, c Call, text string) {
	m.send(message{Kind: kindBeat})
	m.send(message{Kind: kindReport, Name: group, Members: members, Call: &c, Text: text})
}

// Abort ends the job on all ranks.
func (m *Member) Abort(text string) { m.send(message{Kind: kindAbort, Text: text}) }

// Part waits until all ranks have called it, or the job or the context ends. at is the program's
// line. Ranks that wait for this one in a collective end the job, and so do ranks that do not call
// Part within the timeout of the first one.
func (m *Member) Part(ctx context.Context, at string, timeout time.Duration) error {
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

// Close ends the connection, after what is queued has been sent, and waits for the member's
// goroutines.
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

// status adds the rank's calls to a message that has them. The writer calls it, so that no message
// has older calls than the one before it.
func (m *Member) status(msg message) message {
	if msg.Kind != kindBeat && msg.Kind != kindLeave {
		return msg
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	msg.Calls = maps.Clone(m.calls)
	for group, c := range msg.Calls {
		c.Age = time.Since(m.begun[group])
		msg.Calls[group] = c
	}
	return msg
}

func (m *Member) fail(v *Verdict) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.verdict == nil && !m.closed {
		m.verdict = v
		close(m.failed)
	}
}

func (m *Member) read() {
	defer m.running.Done()
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
		m.heard = time.Now()
		m.admitted = m.admitted || msg.Kind != kindRefused
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

func (m *Member) done(key arrivalKey) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if done := m.waiting[key]; done != nil {
		delete(m.waiting, key)
		close(done)
	}
}

// write sends what is queued. At Close it sends the rest and closes the connection, which ends
// read. When it cannot send it leaves the connection open: the hub's last message may still be in
// it.
func (m *Member) write() {
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
	for {
		select {
		case <-m.stop:
			return
		case <-ticker.C:
		}
		m.mu.Lock()
		silence := time.Since(m.heard)
		m.mu.Unlock()
		if silence > m.o.Silence {
			m.fail(&Verdict{Silent, 0, fmt.Sprintf("rank 0, which serves the job, has given no sign of life for %v: it is stopped, or its host or network is gone", m.o.Silence)})
		}
		select {
		case m.out <- message{Kind: kindBeat}:
		default: // the connection is stuck, and the hub finds this rank silent
		}
	}
}
