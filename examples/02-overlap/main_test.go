package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/examples/internal/lesson"
)

func made() *figures {
	f := &figures{Device: "a GPU", Compute: 53.5,
		Copies: map[string]float64{"pinned": 12.2, "pageable": 37.3},
		H2D:    map[string]float64{"pinned": 55.1, "pageable": 18}, PeakH2D: 55.4}
	for _, memory := range []string{"pinned", "pageable"} {
		for streams := 1; streams <= 2; streams++ {
			for _, first := range []string{"compute", "copies"} {
				f.Both = append(f.Both, both{Memory: memory, Streams: streams, First: first,
					Time: 50 + float64(len(f.Both)), Held: 1})
			}
		}
	}
	return f
}

func TestTableHasEveryCombination(t *testing.T) {
	var out bytes.Buffer
	if err := made().print(&lesson.Lesson{Out: &out}, lesson.ErrNoPeer); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"2           copies  57.0", "no PyTorch to compare with", "products",
		"cost 0.0 ms", "On one stream a copy and a product never run at the same time: 51.0 ms"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in\n%s", want, out.String())
		}
	}
}

// peer.py and main.go use the same names for the combinations.
func TestPeerNamesTheCombinations(t *testing.T) {
	for _, b := range made().Both {
		t.Run(b.key(), func(t *testing.T) {
			for part := range strings.SplitSeq(b.key(), ", ") {
				if !strings.Contains(peer, part) {
					t.Errorf("%q is not in peer.py", part)
				}
			}
		})
	}
	if want := "STEPS, GEMMS, N = 10, 2, 4096"; !strings.Contains(peer, want) {
		t.Errorf("peer.py measures another experiment, want one with %q", want)
	}
}

func TestResultIsOneJSONObject(t *testing.T) {
	var out bytes.Buffer
	l := &lesson.Lesson{Out: &out, JSON: true}
	if err := l.Result(made(), nil); err != nil {
		t.Fatal(err)
	}
	var back figures
	if err := json.Unmarshal(out.Bytes(), &back); err != nil || len(back.Both) != 8 {
		t.Errorf("got %v, %s, want nil and 8 combinations", err, out.String())
	}
}
