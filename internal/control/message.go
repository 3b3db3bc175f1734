// Package control connects the ranks of a job over TCP, independently of their collectives. Rank 0
// runs the [Hub], and every rank, including rank 0, connects to it with a [Member]. They exchange
// beats (heartbeat messages). If a rank dies, stops or loses its network, all ranks learn which
// rank it was within a fixed time, even while a collective hangs. The hub also implements barriers
// and compares the ranks' calls.
//
// The package imports neither LibTorch nor CUDA.
package control

import (
	"fmt"
	"time"
)

// Call is one call of a rank in a group.
type Call struct {
	Seq  uint64 // number of the collective in the group, from 1
	Name string // "AllReduce"
	What string // operands, which must be equal on all ranks: "float32 [2 3], sum"
	Line string // line of the program: "train.go:88"
	Done bool   // the rank has left the call
}

func (c Call) String() string {
	if c.Seq == 0 {
		return "nothing yet"
	}
	return fmt.Sprintf("%s #%d at %s", c.Name, c.Seq, c.Line)
}

// Kind classifies the reason why a job ends.
type Kind string

const (
	Lost     Kind = "lost"     // a connection closed
	Silent   Kind = "silent"   // a rank gave no sign of life for Options.Silence
	Timeout  Kind = "timeout"  // a collective did not end in time
	Mismatch Kind = "mismatch" // ranks called different collectives
	Left     Kind = "left"     // a rank closed its group while others still used it
	Aborted  Kind = "aborted"  // the program ended the job: its context was cancelled
)

// Verdict is the reason for the job's end. It is the same on every rank.
type Verdict struct {
	Kind Kind
	Rank int    // the rank at fault, or -1
	Text string // starts with the rank's name
}

func (v *Verdict) Error() string { return v.Text }

// message is sent as one line of JSON.
type message struct {
	Kind    string          `json:"k"`
	Rank    int             `json:"r,omitempty"`
	Token   string          `json:"t,omitempty"`
	Name    string          `json:"n,omitempty"` // name of a rank or a group
	Members []int           `json:"m,omitempty"`
	Call    *Call           `json:"c,omitempty"`
	Compare bool            `json:"x,omitempty"`
	Timeout time.Duration   `json:"d,omitempty"`
	Text    string          `json:"e,omitempty"`
	Calls   map[string]Call `json:"s,omitempty"`
	Verdict *Verdict        `json:"v,omitempty"`
}

const (
	kindHello   = "hello"   // the first message of a member: Token, Rank, Name
	kindBeat    = "beat"    // sent in both directions; a member's beat has Calls, by group
	kindArrive  = "arrive"  // a member has arrived at a barrier: Name, Members, Call, Compare, Timeout
	kindDone    = "done"    // all members have arrived: Name, Call
	kindReport  = "report"  // a collective failed at a member: Name, Members, Call, Text
	kindAbort   = "abort"   // a member ends the job: Text
	kindLeave   = "leave"   // a member closes its group: Text, Timeout; the hub sends it when all have left
	kindVerdict = "verdict" // the hub ends the job
	kindRefused = "refused" // the hub does not admit a member: Verdict
)

// maxHello is the maximum size of a connection's first message, which any sender can send: the hub
// checks the token only after reading the message.
const maxHello = 4 << 10

// Options are the time limits of hub and members, equal on all ranks.
type Options struct {
	Interval time.Duration // time between beats
	Silence  time.Duration // time without a sign of life after which a rank is lost
}

// stopped reports whether a process was stopped between two of its beats.
func (o Options) stopped(between time.Duration) bool { return between > o.Silence/2 }

// silentHub returns the verdict on a hub that gives no sign of life.
func (o Options) silentHub() *Verdict {
	return &Verdict{Silent, 0, fmt.Sprintf("rank 0, which serves the job, has given no sign of life for %v: it is "+
		"stopped, or its host or network is gone", o.Silence)}
}
