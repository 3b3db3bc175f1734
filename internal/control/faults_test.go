package control

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"
)

// hub starts a hub for n ranks, without members.
func hub(t *testing.T, n int) (h *Hub, address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h = NewHub(l, n, token, times)
	t.Cleanup(h.Close)
	return h, l.Addr().String()
}

// member connects a rank.
func member(t *testing.T, rank int, addresses ...string) *Member {
	t.Helper()
	m, err := Dial(t.Context(), addresses, token, rank, times)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m
}

// waitForHub waits until a condition on the hub's state holds.
func waitForHub(t *testing.T, h *Hub, what string, holds func() bool) {
	t.Helper()
	for limit := time.Now().Add(patience); ; runtime.Gosched() {
		h.mu.Lock()
		now := holds()
		h.mu.Unlock()
		if now {
			return
		}
		if time.Now().After(limit) {
			t.Fatalf("after %v the hub has not seen: %s", patience, what)
		}
	}
}

// Dial skips addresses that do not answer, such as an address in a network that this host cannot
// reach. If no address answers, the error names all of them.
func TestDialTriesAllAddresses(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := l.Addr().String()
	l.Close()
	_, address := hub(t, 1)
	m := member(t, 0, nobody, address)
	if err := m.Arrive("job", []int{0}, Call{Seq: 1}, true, patience); err != nil {
		t.Errorf("Arrive at the second address: got error %v, want none", err)
	}
	if m, err := Dial(t.Context(), []string{nobody, nobody}, token, 0, times); m != nil || err == nil ||
		!strings.Contains(err.Error(), "rank 0 cannot be reached") || strings.Count(err.Error(), nobody) != 2 {
		t.Errorf("Dial of two addresses without a hub: got %v, error %v, want one that names both", m, err)
	}
}

// If two ranks have groups with the same name but different members, they would wait forever. The
// hub ends the job instead.
func TestGroupsOfOneNameAndOtherRanksEndTheJob(t *testing.T) {
	h, members := job(t, 3)
	go members[0].Arrive("g#b", []int{0, 1}, Call{Seq: 1, Name: "Barrier"}, false, patience)
	waitForHub(t, h, "rank 0's arrival", func() bool { return h.arrivals[arrivalKey{"g#b", 1}] != nil })
	go members[1].Arrive("g#b", []int{1, 2}, Call{Seq: 1, Name: "Barrier"}, false, patience)
	requireVerdict(t, members, Mismatch, 1, "rank 1 (pid ", `a group "g#b" of the ranks [1 2], and others one of [0 1]`)
}

// The verdict on a barrier says whether each missing rank has ever connected, and where it has
// left.
func TestMissingRanksAreDescribed(t *testing.T) {
	h, address := hub(t, 3)
	first, left := member(t, 0, address), member(t, 1, address)
	go left.Part(t.Context(), "b.go:9", patience)
	waitForHub(t, h, "that rank 1 has left", func() bool { return h.ranks[1].left != "" })
	if err := first.Arrive("g#b", []int{0, 1, 2}, Call{Seq: 1, Name: "Barrier", Line: "a.go:1"}, false,
		time.Millisecond); !errors.As(err, new(*Verdict)) {
		t.Errorf("Arrive: got error %v, want a verdict", err)
	}
	requireVerdict(t, []*Member{first, left}, Timeout, 1, "rank 1 (pid ", "(it closed its group at b.go:9), "+
		"rank 2 (it never connected) did not reach Barrier #1 at a.go:1 within 1ms")
}

// If all ranks have entered the collective that failed, the verdict names the rank that reports the
// failure.
func TestReportOfACollectiveThatAllHaveEnteredNamesItsRank(t *testing.T) {
	_, members := job(t, 2)
	call := Call{Seq: 3, Name: "AllReduce", Line: "a.go:1"}
	for _, m := range members {
		m.Enter("g", call)
	}
	tell(t, members)
	members[1].Report("g", []int{0, 1}, call, "connection reset")
	requireVerdict(t, members, Timeout, 1, "rank 1 (pid ", "failed at AllReduce #3 at a.go:1: connection reset")
}

// Close ends the waits of its member. The end of a context ends the wait for other ranks.
func TestWaitsEndWithTheirMemberAndContext(t *testing.T) {
	h, members := job(t, 2)
	ctx, cancel := context.WithCancelCause(t.Context())
	stop := errors.New("interrupted")
	cancel(stop)
	if err := members[0].Part(ctx, "b.go:9", patience); !errors.Is(err, stop) {
		t.Errorf("Part: got error %v, want the cause of the context's end", err)
	}
	arrive := func() error {
		return members[1].Arrive("g#b", []int{0, 1}, Call{Seq: 1, Name: "Barrier"}, false, patience)
	}
	waits := make(chan error, 1)
	go func() { waits <- arrive() }()
	waitForHub(t, h, "rank 1's arrival", func() bool { return h.arrivals[arrivalKey{"g#b", 1}] != nil })
	members[1].Close()
	for name, err := range map[string]error{"a call that waits": <-waits, "a later call": arrive()} {
		if !errors.Is(err, net.ErrClosed) {
			t.Errorf("Arrive, %s: got error %v, want net.ErrClosed", name, err)
		}
	}
}

// A rank that reads none of its messages, such as a stopped process, is lost once its queue is
// full. The hub never waits for it.
func TestRankThatReadsNothingIsLost(t *testing.T) {
	h, address := hub(t, 2)
	first := member(t, 0, address)
	requireJoined(t, h, 0)
	here, there := net.Pipe() // without the buffers of a socket
	defer there.Close()
	h.running.Add(1)
	go h.serve(here)
	if _, err := fmt.Fprintf(there, `{"k":"hello","r":1,"t":%q,"n":"rank 1 (pid 5 on b)"}`+"\n", token); err != nil {
		t.Fatal(err)
	}
	requireJoined(t, h, 1)
	h.mu.Lock()
	for range queueLength + 2 { // the writer has taken at most one message
		h.send(1, message{Kind: kindBeat})
	}
	h.mu.Unlock()
	requireVerdict(t, []*Member{first}, Lost, 1, "rank 1 (pid 5 on b) is lost")
}
