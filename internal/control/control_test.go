package control

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// times is for all tests. Silence is longer than the pauses of a busy machine.
var times = Options{Interval: 20 * time.Millisecond, Silence: time.Minute}

// patience limits a test that hangs.
const patience = 2 * time.Minute

const token = "secret"

// job starts a hub and connects n members.
func job(t *testing.T, n int) (*Hub, []*Member) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := NewHub(l, n, token, times)
	t.Cleanup(h.Close)
	members := make([]*Member, n)
	for r := range members {
		if members[r], err = Dial(t.Context(), []string{l.Addr().String()}, token, r, times); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(members[r].Close)
	}
	each(t, members, func(m *Member) error {
		return m.Arrive("job", []int{0, 1, 2}[:n], Call{Seq: 1, Name: "Init"}, true, patience)
	})
	return h, members
}

func each(t *testing.T, members []*Member, do func(m *Member) error) {
	t.Helper()
	var all sync.WaitGroup
	for _, m := range members {
		all.Go(func() {
			if err := do(m); err != nil {
				t.Errorf("rank %d: %v, want no error", m.rank, err)
			}
		})
	}
	all.Wait()
}

// requireVerdict checks the verdict of every member.
func requireVerdict(t *testing.T, members []*Member, kind Kind, rank int, says ...string) {
	t.Helper()
	for _, m := range members {
		select {
		case <-m.Failed():
		case <-time.After(patience):
			t.Fatalf("rank %d has no verdict", m.rank)
		}
		v := m.Verdict()
		if v.Kind != kind || v.Rank != rank {
			t.Errorf("rank %d: %+v, want %v of rank %d", m.rank, v, kind, rank)
		}
		for _, want := range says {
			if !strings.Contains(v.Text, want) {
				t.Errorf("rank %d: %q does not say %q", m.rank, v.Text, want)
			}
		}
	}
}

func TestOrderlyEnd(t *testing.T) {
	_, members := job(t, 3)
	for seq := range uint64(3) {
		each(t, members, func(m *Member) error {
			return m.Arrive("g#b", []int{0, 1, 2}, Call{Seq: seq + 1, Name: "Barrier"}, false, patience)
		})
	}
	each(t, members, func(m *Member) error { return m.Part(t.Context(), "here", patience) })
	for _, m := range members {
		m.Close()
		m.Close()
		if v := m.Verdict(); v != nil {
			t.Error(v)
		}
	}
}

// After all ranks have left, a rank may take long to free its collectives. The hub may close
// meanwhile, so its silence is no failure.
func TestRankThatHasLeftSendsNoBeats(t *testing.T) {
	m := &Member{o: Options{Interval: time.Hour, Silence: time.Hour}, stop: make(chan struct{}), left: make(chan struct{})}
	m.running.Add(1)
	go m.beat()
	close(m.left)
	ended := make(chan struct{})
	go func() {
		m.running.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(patience):
		t.Fatal("the rank still waits for its next beat, want an end of the beats")
	}
}

func TestLostMemberIsNamed(t *testing.T) {
	_, members := job(t, 3)
	members[1].Enter("g", Call{Seq: 7, Name: "AllReduce", Line: "train.go:1"})
	members[1].beatNow()
	members[1].Close() // without Part
	requireVerdict(t, []*Member{members[0], members[2]}, Lost, 1, "rank 1 (pid ", "AllReduce #7 at train.go:1")
}

// beatNow sends a beat before the next one is due.
func (m *Member) beatNow() { m.send(message{Kind: kindBeat}) }

// tell waits until the hub has received the calls of all members.
func tell(t *testing.T, members []*Member) {
	t.Helper()
	all := make([]int, len(members))
	for r := range all {
		all[r] = r
	}
	each(t, members, func(m *Member) error {
		m.beatNow()
		return m.Arrive("tell#b", all, Call{Seq: 1}, false, patience) // sent after the beat
	})
}

func TestLostHubIsNamed(t *testing.T) {
	h, members := job(t, 2)
	h.Close()
	requireVerdict(t, members, Lost, 0, "rank 0, which serves the job, is lost")
	for _, m := range members {
		if m.Refused() {
			t.Errorf("rank %d, which the hub had admitted, counts as refused", m.rank)
		}
	}
}

// requireJoined waits until the hub has read a rank's hello.
func requireJoined(t *testing.T, h *Hub, rank int) {
	t.Helper()
	waitForHub(t, h, fmt.Sprintf("the hello of rank %d", rank), func() bool { return h.ranks[rank].out != nil })
}

// Refused returns true on a rank that was not admitted. Either the job has ended, or the rank's
// address has no hub of this job.
func TestRefusedRankGetsAnError(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := NewHub(l, 3, token, times)
	t.Cleanup(h.Close)
	dial := func(rank int, token string) *Member {
		m, err := Dial(t.Context(), []string{l.Addr().String()}, token, rank, times)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(m.Close)
		return m
	}
	first := dial(0, token)
	requireJoined(t, h, 0) // after the loss of rank 1 the hub admits nobody
	lost := dial(1, token)
	lost.beatNow()
	lost.Close()
	requireVerdict(t, []*Member{first}, Lost, 1)
	late, stranger := dial(2, token), dial(2, "another hub's")
	requireVerdict(t, []*Member{late}, Lost, 1, "rank 1 (pid ")
	requireVerdict(t, []*Member{stranger}, Lost, 0, "rank 0, which serves the job, is lost")
	if first.Refused() || !late.Refused() || !stranger.Refused() {
		t.Errorf("refused: %v, %v, %v, want the last two", first.Refused(), late.Refused(), stranger.Refused())
	}
}

// A member is connected but silent. The test sets the time of the member's last message to the
// past.
func TestSilentMemberIsNamed(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := NewHub(l, 2, token, times)
	defer h.Close()
	m, err := Dial(t.Context(), []string{l.Addr().String()}, token, 0, times)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	silent, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	fmt.Fprintf(silent, `{"k":"hello","r":1,"t":%q,"n":"rank 1 (pid 5 on b)"}`+"\n"+
		`{"k":"arrive","n":"job","m":[0,1],"c":{"Seq":1},"d":%d}`+"\n",
		token, patience)
	if err := m.Arrive("job", []int{0, 1}, Call{Seq: 1}, false, patience); err != nil {
		t.Fatal(err)
	}
	h.mu.Lock()
	h.ranks[1].heard = h.ranks[1].heard.Add(-times.Silence)
	h.mu.Unlock()
	requireVerdict(t, []*Member{m}, Silent, 1, "rank 1 (pid 5 on b) has given no sign of life for 1m0s",
		"it has called no collective")
}

func TestSilentHubIsNamed(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	m, err := Dial(t.Context(), []string{l.Addr().String()}, token, 1,
		Options{Interval: 10 * time.Millisecond, Silence: 200 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	requireVerdict(t, []*Member{m}, Silent, 0, "rank 0, which serves the job, has given no sign of life for 200ms")
}

func TestRankMissingAtBarrierIsNamed(t *testing.T) {
	_, members := job(t, 3)
	err := members[2].Arrive("g#b", []int{0, 1, 2}, Call{Seq: 4, Name: "Barrier", Line: "b.go:2"}, false,
		50*time.Millisecond)
	var v *Verdict
	if !errors.As(err, &v) {
		t.Fatal(err)
	}
	requireVerdict(t, members, Timeout, 0, "rank 0 (pid ", "rank 1 (pid ",
		"did not reach Barrier #4 at b.go:2 within 50ms")
}

func TestMismatch(t *testing.T) {
	_, members := job(t, 2)
	var all sync.WaitGroup
	for r, what := range []string{"float32[3]", "float32[4]"} {
		all.Go(func() {
			members[r].Arrive("g#d", []int{0, 1},
				Call{Seq: 2, Name: "AllReduce", What: what, Line: fmt.Sprintf("f.go:%d", r)}, true, patience)
		})
	}
	all.Wait()
	requireVerdict(t, members, Mismatch, 1, "AllReduce(float32[4]) #2 at f.go:1", "AllReduce(float32[3]) at f.go:0")
}

func TestReportBlamesTheRankThatIsBehind(t *testing.T) {
	_, members := job(t, 3)
	for r, m := range members {
		m.Enter("g", Call{Seq: uint64(3 + r%2), Name: "AllReduce", Line: fmt.Sprintf("f.go:%d", r)})
	}
	tell(t, members)
	members[1].Report("g", []int{1, 2}, Call{Seq: 4, Name: "AllReduce", Line: "f.go:1"}, "connection reset")
	requireVerdict(t, members, Timeout, 2, "rank 2 (pid ", "has not entered it", "AllReduce #3 at f.go:2",
		"connection reset")
}

func TestAbortReachesAllRanks(t *testing.T) {
	_, members := job(t, 2)
	members[1].Abort("enough")
	requireVerdict(t, members, Aborted, 1, "enough")
}

// A member that aborts the job closes at once, and then the hub.
func TestLastWordsAreRead(t *testing.T) {
	for range 50 {
		h, members := job(t, 2)
		members[0].Abort("enough")
		members[0].Close()
		h.Close()
		requireVerdict(t, members[1:], Aborted, 0, "enough")
	}
}

// A rank sends beats, and reads the verdict late. The hub, which is closed meanwhile, keeps the
// connection: if it closed the connection, the beats would cause a reset.
func TestCloseWaitsForALateReader(t *testing.T) {
	h, address := hub(t, 2)
	first := member(t, 0, address)
	requireJoined(t, h, 0)
	late, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer late.Close()
	fmt.Fprintf(late, `{"k":"hello","r":1,"t":%q}`+"\n", token)
	requireJoined(t, h, 1)
	first.Abort("enough")
	first.Close()
	closed := make(chan struct{})
	go func() {
		h.Close()
		close(closed)
	}()
	for end := time.Now().Add(5 * times.Interval); time.Now().Before(end); runtime.Gosched() {
		if _, err := io.WriteString(late, `{"k":"beat"}`+"\n"); err != nil {
			t.Fatalf("a beat before the verdict is read: %v, want no error", err)
		}
	}
	text, err := io.ReadAll(late)
	if err != nil || !strings.Contains(string(text), "enough") {
		t.Errorf("the rank reads %s (%v), want the verdict", text, err)
	}
	late.Close()
	<-closed
}

// A rank has given up before it leaves.
func TestPartAfterAFailureIsNoOrderlyEnd(t *testing.T) {
	for range 20 { // Part may choose between sending and failing
		_, members := job(t, 2)
		gaveUp := &Verdict{Silent, 0, "rank 0 is silent"}
		members[1].fail(gaveUp)
		if err := members[1].Part(t.Context(), "here", patience); err != gaveUp {
			t.Fatalf("got %v, want %v", err, gaveUp)
		}
		members[1].Close()
		var v *Verdict
		if err := members[0].Part(t.Context(), "here", patience); !errors.As(err, &v) || v.Kind != Lost || v.Rank != 1 {
			t.Fatalf("the other rank leaves with %v, want rank 1 lost", err)
		}
	}
}

// A rank leaves while another waits for it in a collective.
func TestClosingWhileAnotherRankWaitsIsAnError(t *testing.T) {
	_, members := job(t, 2)
	members[0].Enter("g", Call{Seq: 1, Name: "AllReduce", Line: "a.go:1"})
	members[1].Enter("g", Call{Done: true})
	if err := members[1].Part(t.Context(), "b.go:9", patience); err == nil {
		t.Error("Part() while a rank waits = nil, want an error")
	}
	requireVerdict(t, members, Left, 1, "closed its group at b.go:9", "AllReduce #1 at a.go:1")
}

// A message about an impossible group ends the job, but does not crash rank 0.
func TestImpossibleGroupEndsTheJob(t *testing.T) {
	for name, members := range map[string][]int{
		"no rank":           nil,
		"a rank beyond all": {0, 1, 2},
		"a negative rank":   {-1, 1},
		"a rank twice":      {0, 1, 1},
		"not its own rank":  {0},
	} {
		t.Run(name+" arrives", func(t *testing.T) {
			_, all := job(t, 2)
			all[1].Arrive("g#b", members, Call{Seq: 1, Name: "Barrier"}, false, time.Millisecond)
			requireVerdict(t, all, Mismatch, 1, "rank 1 (pid ", `a group "g#b" of the ranks `+fmt.Sprint(members))
		})
		t.Run(name+" reports", func(t *testing.T) {
			_, all := job(t, 2)
			all[1].Report("g", members, Call{Seq: 1, Name: "AllReduce"}, "connection reset")
			requireVerdict(t, all, Mismatch, 1, "rank 1 (pid ", `a group "g" of the ranks `+fmt.Sprint(members))
		})
	}
}

// Connections that do not identify as a rank are closed, and the job continues.
func TestStrangersAreRefused(t *testing.T) {
	h, members := job(t, 2)
	for name, sent := range map[string]string{
		"a wrong token":      `{"k":"hello","r":1,"t":"guess"}` + "\n",
		"no hello":           `{"k":"beat","t":"secret"}` + "\n",
		"no JSON":            "GET / HTTP/1.1\r\n\r\n",
		"a line without end": strings.Repeat("x", 3*maxHello),
	} {
		conn, err := net.Dial("tcp", h.listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(conn, sent) // may fail, because the hub may close the connection early
		conn.SetReadDeadline(time.Now().Add(patience))
		if n, err := conn.Read(make([]byte, 1)); n != 0 || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %d bytes, %v: want the end of the connection", name, n, err)
		} else if e, ok := err.(net.Error); ok && e.Timeout() {
			t.Errorf("%s: the connection stays open", name)
		}
		conn.Close()
	}
	each(t, members, func(m *Member) error { return m.Part(t.Context(), "here", patience) })
}

// If two processes have the same rank before all ranks have connected, the job ends.
func TestTwoProcessesOfOneRankEndTheJob(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := NewHub(l, 3, token, times)
	t.Cleanup(h.Close)
	var members []*Member
	for _, rank := range []int{0, 1, 1} {
		m, err := Dial(t.Context(), []string{l.Addr().String()}, token, rank, times)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(m.Close)
		members = append(members, m)
	}
	requireVerdict(t, members, Mismatch, 1, "have the same rank")
}

// The hub refuses a process of another job, even with the right token. The error names the process,
// and the job continues.
func TestRankOfAnotherJobIsRefused(t *testing.T) {
	h, members := job(t, 2)
	for rank, says := range map[int]string{0: "have the same rank", 1: "have the same rank",
		2: "is no rank of the job of 2 ranks", -1: "is no rank of"} {
		stranger, err := Dial(t.Context(), []string{h.listener.Addr().String()}, token, rank, times)
		if err != nil {
			t.Fatal(err)
		}
		defer stranger.Close()
		err = stranger.Arrive("job", []int{0, 1, 2}, Call{Seq: 1, Name: "Init"}, true, patience)
		if err == nil {
			t.Errorf("Arrive() of a stranger as rank %d = nil, want an error", rank)
		}
		requireVerdict(t, []*Member{stranger}, Mismatch, rank, says, "set MASTER_PORT",
			fmt.Sprintf("rank %d (pid ", rank))
		if !stranger.Refused() {
			t.Errorf("rank %d does not know that the hub has refused it", rank)
		}
	}
	each(t, members, func(m *Member) error { return m.Part(t.Context(), "here", patience) })
}

// If a rank keeps running and never leaves, the ranks that wait for it get a verdict that names it.
func TestRankThatNeverLeavesIsNamed(t *testing.T) {
	h, members := job(t, 3)
	members[2].Enter("g", Call{Seq: 5, Name: "AllReduce", Line: "a.go:1", Done: true})
	tell(t, members)
	go members[0].Part(t.Context(), "b.go:9", patience)
	// Rank 1 leaves after rank 0. Otherwise the hub might name rank 0 as late too.
	waitForHub(t, h, "that rank 0 has left", func() bool { return h.ranks[0].left != "" })
	go members[1].Part(t.Context(), "b.go:9", 100*time.Millisecond)
	requireVerdict(t, members, Timeout, 2, "rank 2 (pid ", "did not close its group in time",
		"closed it at b.go:9", "AllReduce #5 at a.go:1")
}

// lateConn is a connection that delays a deadline in the future: it first gives another goroutine
// time to set a deadline in the past.
type lateConn struct {
	net.Conn
	past chan struct{}
	once sync.Once
}

func (c *lateConn) SetReadDeadline(at time.Time) error {
	if !at.After(time.Now()) {
		err := c.Conn.SetReadDeadline(at)
		c.once.Do(func() { close(c.past) })
		return err
	}
	for range 1000 {
		select {
		case <-c.past:
			return c.Conn.SetReadDeadline(at)
		default:
			runtime.Gosched()
		}
	}
	return c.Conn.SetReadDeadline(at)
}

// A connection that has sent nothing does not delay Close until the hello's deadline.
func TestCloseEndsAConnectionWithoutHello(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := NewHub(l, 2, token, Options{Interval: 10 * time.Millisecond, Silence: time.Hour})
	h.Close()
	here, there := net.Pipe()
	defer there.Close()
	h.running.Add(1)
	done := make(chan struct{})
	go func() {
		h.serve(&lateConn{Conn: here, past: make(chan struct{})})
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Error("after 20 s the closed hub still serves the connection, want serve to return")
	}
}
