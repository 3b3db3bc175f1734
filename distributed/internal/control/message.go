// Package control connects the ranks of a job beside their collectives, over TCP: rank 0 runs the
// [Hub], and every rank, rank 0 too, has a [Member] that is connected with it. They exchange beats,
// so that a rank which has died, stopped or lost its network is known by name within a stated time,
// whatever a collective does meanwhile. They also count ranks in for barriers, and compare what the
// ranks are about to do.
//
// The package knows neither LibTorch nor CUDA.
package control

import (
	"fmt"
	"time"
)

// Call is what a rank does in a group.
type Call struct {
	Seq  uint64        // counts the group's collectives from 1 on
	Name string        // "AllReduce"
	What string        // operands, which must be equal on all ranks: "float32 [2 3], sum"
	Line string        // of the program: "train.go:88"
	Done bool          // the rank has left the call
	Age  time.Duration // since the rank entered it
}

func (c Call) String() string {
	if c.Seq == 0 {
		return "nothing yet"
	}
	return fmt.Sprintf("%s #%d at %s", c.Name, c.Seq, c.Line)
}

// Kind says why a job ends.
type Kind string

const (
	Lost     Kind = "lost"     // a connection closed
	Silent   Kind = "silent"   // a rank gave no sign of life for Options.Silence
	Timeout  Kind = "timeout"  // a collective did not end in time
	Mismatch Kind = "mismatch" // ranks did different things
	Left     Kind = "left"     // a rank closed its group while others went on
	Aborted  Kind = "aborted"  // the program ended it: its context was cancelled
)

// Verdict is the reason for which every rank of a job stops.
type Verdict struct {
	Kind Kind
	Rank int    // the rank at fault, or -1
	Text string // begins with the rank's name
}

func (v *Verdict) Error() string { return v.Text }

// message is one line of JSON.
type message struct {
	Kind    string          `json:"k"`
	Rank    int             `json:"r,omitempty"`
	Token   string          `json:"t,omitempty"`
	Name    string          `json:"n,omitempty"` // of a rank, or of a group
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
	kindBeat    = "beat"    // both ways; a member's has Calls, by group
	kindArrive  = "arrive"  // a member is at a barrier: Name, Members, Call, Compare, Timeout
	kindDone    = "done"    // all members are: Name, Call
	kindReport  = "report"  // a collective failed at a member: Name, Members, Call, Text
	kindAbort   = "abort"   // a member ends the job: Text
	kindLeave   = "leave"   // a member closes its group: Text, Timeout; from the hub: all have left
	kindVerdict = "verdict" // the hub ends the job
	kindRefused = "refused" // the hub does not admit a member: Verdict
)

// maxHello is the maximum size of a first message, which may come from anywhere.
const maxHello = 4 << 10

// Options are the times of both sides, equal on all ranks.
type Options struct {
	Interval time.Duration // between beats
	Silence  time.Duration // after which a rank without a sign of life is given up
}
