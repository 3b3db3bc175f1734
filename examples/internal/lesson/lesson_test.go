package lesson

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
)

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		values []int64
		want   int64
	}{{nil, 0}, {[]int64{3}, 3}, {[]int64{9, 1, 5}, 5}, {[]int64{4, 1, 3, 2}, 2}} {
		t.Run(fmt.Sprint(len(c.values)), func(t *testing.T) {
			if got := Median(c.values); got != c.want {
				t.Errorf("%v: %d, want %d", c.values, got, c.want)
			}
		})
	}
}

func TestTable(t *testing.T) {
	var out bytes.Buffer
	l := &Lesson{Out: &out}
	if err := l.Table([][]string{{"what", "µs"}, {"a", "1.5"}, {"longer name", "10.25"}}); err != nil {
		t.Fatal(err)
	}
	const want = "what            µs\na              1.5\nlonger name  10.25\n"
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
}

// -h explains the example before it lists the flags.
func TestUsage(t *testing.T) {
	var out bytes.Buffer
	flags := flag.NewFlagSet("99-test", flag.ContinueOnError)
	flags.SetOutput(&out)
	flags.Int("steps", 3, "steps of training")
	Usage(flags, "99-test [options]", "Shows nothing.")
	const want = "usage: 99-test [options]\nShows nothing.\n  -steps int\n"
	if err := flags.Parse([]string{"-h"}); !errors.Is(err, flag.ErrHelp) || !strings.HasPrefix(out.String(), want) {
		t.Errorf("got %v, %q, want flag.ErrHelp and a beginning with %q", err, out.String(), want)
	}
}

// An example without enough GPUs says how many it needs, and refers to torchstream doctor.
func TestNeeds(t *testing.T) {
	for _, gpus := range []int{1, 2} {
		l := &Lesson{Device: cuda.Device(max(cuda.DeviceCount(), 0))}
		if err := l.needs(gpus); err == nil || !strings.Contains(err.Error(), "torchstream doctor") {
			t.Errorf("%d GPUs: %v, want an error with \"torchstream doctor\"", gpus, err)
		}
	}
	if err := (&Lesson{}).needs(0); err != nil {
		t.Error(err)
	}
}

// After an interrupt an example says that it was interrupted, whatever its error, and has the
// matching status.
func TestStatus(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	failed := errors.New("failed")
	for _, c := range []struct {
		ctx    context.Context
		err    error
		status int
		says   string
	}{{t.Context(), nil, 0, ""}, {ended, nil, 0, ""}, {t.Context(), failed, 1, "99-test: failed\n"},
		{ended, context.Canceled, 130, "99-test: interrupted\n"}, {ended, failed, 130, "99-test: interrupted\n"}} {
		var out bytes.Buffer
		if status := Status(c.ctx, "99-test", c.err, &out); status != c.status || out.String() != c.says {
			t.Errorf("%v: status %d, %q; want %d, %q", c.err, status, &out, c.status, c.says)
		}
	}
}

// If an example's default archive is missing, the error says where to run the example.
func TestExplainMissing(t *testing.T) {
	for path, says := range map[string]string{
		TrainArchive: "from its root: run 99-test there, or name another with -archive FILE",
		TestArchive:  "run 99-test there", "mine.tgz": "file or directory: name another archive with -archive FILE",
	} {
		_, err := os.Open(path)
		got := ExplainMissing(err, "99-test", "-archive", path)
		if !errors.Is(got, fs.ErrNotExist) || !strings.Contains(got.Error(), says) {
			t.Error(got)
		}
	}
	if _, err := os.Stat("../../../" + TrainArchive); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat("../../../" + TestArchive); err != nil {
		t.Error(err)
	}
	failed := errors.New("failed")
	if got := ExplainMissing(failed, "99-test", "-archive", TrainArchive); got != failed {
		t.Errorf("ExplainMissing of another error = %v, want the error itself", got)
	}
}

func TestPeer(t *testing.T) {
	var figures struct{ MS float64 }
	for name, l := range map[string]*Lesson{"switched off": {}, "no such program": {Python: "no-such-python"}} {
		t.Run(name, func(t *testing.T) {
			if err := l.Peer(t.Context(), "", &figures); !errors.Is(err, ErrNoPeer) {
				t.Error(err)
			}
		})
	}
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("needs python3")
	}
	l := &Lesson{Python: python}
	if err := l.Peer(t.Context(), "import sys; print('warming up'); print('{\"ms\": %s}' % sys.argv[1])",
		&figures, "1.5"); err != nil || figures.MS != 1.5 {
		t.Errorf("%v, %v, want 1.5, nil", figures, err)
	}
	if err := l.Peer(t.Context(), "import no_such_module", &figures); !errors.Is(err, ErrNoPeer) {
		t.Errorf("a missing module: %v, want ErrNoPeer", err)
	}
	if err := l.Peer(t.Context(), "raise ValueError('boom')", &figures); err == nil ||
		errors.Is(err, ErrNoPeer) || !strings.Contains(err.Error(), "boom") {
		t.Errorf("a failing peer: %v", err)
	}
	if err := l.Peer(t.Context(), "print('no figures')", &figures); err == nil ||
		!strings.Contains(err.Error(), "no JSON object") {
		t.Errorf("a peer without figures: %v, want an error with \"no JSON object\"", err)
	}
}
