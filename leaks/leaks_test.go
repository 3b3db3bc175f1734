package leaks

import (
	"strings"
	"testing"

	"github.com/torchstream/torchstream/internal/origin"
)

func of(kind string, sites Sites) (out Sites) {
	for _, s := range sites {
		if s.Kind == kind {
			out = append(out, s)
		}
	}
	return out
}

func TestSitesAreGroupedAndSorted(t *testing.T) {
	const kind = "grouped"
	var made []origin.Origin
	for range 3 {
		made = append(made, origin.New(kind))
	}
	made = append(made, origin.New(kind))
	made[0].Leaked()
	made[0].Closed()
	open, caught := of(kind, Open()), of(kind, Caught())
	if !Enabled {
		if len(open)+len(caught) > 0 {
			t.Errorf("without the tag: %v, %v, want none", open, caught)
		}
		return
	}
	if len(open) != 2 || open[0].Count != 2 || open[1].Count != 1 || len(caught) != 1 || caught[0].Count != 1 {
		t.Fatalf("open:\n%v\ncaught:\n%v\nwant two open sites with counts 2 and 1, and one caught",
			open, caught)
	}
	text := open.String()
	for _, want := range []string{"2 x grouped", "1 x grouped", "leaks_test.go:", "testing.tRunner"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in\n%s", want, text)
		}
	}
	for _, o := range made[1:] {
		o.Closed()
	}
	if open := of(kind, Open()); len(open) > 0 {
		t.Errorf("all are closed, but open are\n%s\nwant none", open)
	}
}

func TestStacksBeginWhereProgramsCall(t *testing.T) {
	for function, want := range map[string]bool{
		"github.com/torchstream/torchstream/torch.newOwned":                            true,
		"github.com/torchstream/torchstream/torch.provenance.tensor":                   true,
		"github.com/torchstream/torchstream/prefetcher/internal/ring.(*Ring[...]).Run": true,
		"github.com/torchstream/torchstream/internal/origin.New":                       true,
		"github.com/torchstream/torchstream/torch.(*Tensor).Add":                       false,
		"github.com/torchstream/torchstream/cuda.NewEvent":                             false,
		"main.main":            false,
		"example.com/net.step": false,
	} {
		t.Run(function, func(t *testing.T) {
			if got := inner(function); got != want {
				t.Errorf("inner(%q) is %v, want %v", function, got, want)
			}
		})
	}
}
