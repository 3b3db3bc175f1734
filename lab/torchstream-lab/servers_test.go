package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"image/jpeg"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/torchstream/torchstream/internal/clitest"
)

const testServer = "TORCHSTREAM_LAB_TEST_SERVER"

// serveTest is a server for tests. Its arguments contain its port, and select a fault:
// -label N answers with class N, and -changing with class 9 after 100 answers; -leak keeps
// descriptors; -broken ends at once, and -dying after 100 answers. New weights add 1 to the class:
// with -damaged the second ones are refused, and with -late they are reported before they are used.
// After SIGTERM it ends with status 0, and with -failing with 3.
func serveTest(args []string) error {
	port, label := "", "0"
	var leaked sync.Map
	leak, changing := slices.Contains(args, "-leak"), slices.Contains(args, "-changing")
	var answers atomic.Int64
	for i, arg := range args {
		switch arg {
		case "-address":
			_, port, _ = strings.Cut(args[i+1], ":")
		case "--port":
			port = args[i+1]
		case "-label":
			label = args[i+1]
		case "-broken":
			return errors.New("the server is broken")
		}
	}
	var added atomic.Int64
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR1, syscall.SIGTERM)
	go func() {
		for swaps := 1; ; swaps++ {
			switch s := <-signals; {
			case s == syscall.SIGTERM && slices.Contains(args, "-failing"):
				os.Exit(3)
			case s == syscall.SIGTERM:
				os.Exit(0)
			case swaps > 3 && slices.Contains(args, "-damaged"):
				fmt.Println("ERROR the weights are not replaced error=damaged")
			case swaps > 3 && slices.Contains(args, "-late"):
				fmt.Println("new weights from a file")
			default:
				added.Store(1 - added.Load())
				fmt.Println("new weights from a file")
			}
		}
	}()
	listener, err := net.Listen("tcp", "127.0.0.1:"+port)
	if err != nil {
		return err
	}
	return http.Serve(listener, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength > 10<<20 {
			http.Error(w, "too large", http.StatusRequestEntityTooLarge)
			return
		}
		_, err := jpeg.Decode(r.Body)
		if leak {
			f, _ := os.Open(os.DevNull)
			leaked.Store(f, true)
		}
		if err != nil {
			http.Error(w, "no image", http.StatusUnsupportedMediaType)
			return
		}
		number, _ := strconv.Atoi(label)
		now := strconv.FormatInt(int64(number)+added.Load(), 10)
		if answers.Add(1) > 100 && changing {
			now = "9"
		}
		if answers.Load() > 100 && slices.Contains(args, "-dying") {
			fmt.Println("it dies")
			os.Exit(1)
		}
		fmt.Fprintf(w, `{"classes":[{"label":%s}]}`, now)
	}))
}

// testProgram writes a program that acts as serveTest, and returns its path.
func testProgram(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "program")
	text := fmt.Sprintf("#!/bin/sh\nexport %s=1\nexec '%s' \"$@\"\n", testServer, os.Args[0])
	if err := os.WriteFile(path, []byte(text), 0o777); err != nil {
		t.Fatal(err)
	}
	return path
}

// serversCommand returns the command line of servers for the test server.
func serversCommand(t *testing.T, more ...string) []string {
	t.Helper()
	program := testProgram(t)
	return append([]string{"servers", "-models", t.TempDir(), "-package", "none", "-archive", photos, "-images", "3",
		"-torchstream", program, "-python", program, "-time", "50ms", "-runs", "2", "-json"}, more...)
}

func TestServersAreCompared(t *testing.T) {
	status, stdout, stderr := command(t, serversCommand(t, "-servers", "torchstream,eager,litserve-onnx", "-rounds", "2",
		"-server-cpus", "0")...)
	var report serversReport
	if err := json.Unmarshal([]byte(stdout), &report); err != nil || status != 0 || len(report.Rows) != 3 {
		t.Fatalf("got status %d, %v, %s%s, want 0 and three rows", status, err, stdout, stderr)
	}
	for i, name := range []string{"torchstream", "eager", "litserve-onnx"} {
		row := report.Rows[i]
		if row.Server != name || row.Full.PerSecond <= 0 || row.Bound.Rate <= 0 || row.Bound.P50 <= 0 || row.Tenth.P50 <= 0 ||
			row.Tenth.P99 < row.Tenth.P50 || row.MemoryMB <= 0 || row.Failed != 0 || row.Differ != 0 {
			t.Errorf("got %+v, want measurements of %s", row, name)
		}
		if row.Tenth.Rate != report.Rows[0].Tenth.Rate {
			t.Errorf("%s: got %v requests/s, want the first server's %v", name, row.Tenth.Rate, report.Rows[0].Tenth.Rate)
		}
	}
}

func TestServersWithOtherClassesAreAnError(t *testing.T) {
	status, stdout, stderr := command(t, serversCommand(t, "-servers", "torchstream,eager", "-peer-options", "-label 5")...)
	if status != 1 || !strings.Contains(stderr, "eager has another class than torchstream for 3 photographs") ||
		!strings.Contains(stdout, `"differ":3`) {
		t.Errorf("got status %d, %s%s, want 1 and the difference", status, stdout, stderr)
	}
}

func TestServerThatEndsIsNotMeasured(t *testing.T) {
	status, stdout, stderr := command(t, serversCommand(t, "-servers", "torchstream,onnx", "-peer-options", "-broken")...)
	if status != 1 || !strings.Contains(stderr, "onnx is not measured: the server has ended (exit status 1): the server is broken") ||
		!strings.Contains(stdout, `"answers_per_second"`) {
		t.Errorf("got status %d, %s%s, want 1 and the reason", status, stdout, stderr)
	}
}

// The other servers are measured in all rounds.
func TestServerThatEndsUnderLoadIsNotMeasured(t *testing.T) {
	status, stdout, stderr := command(t, serversCommand(t, "-servers", "torchstream,onnx", "-peer-options", "-dying",
		"-rounds", "2")...)
	var report serversReport
	if err := json.Unmarshal([]byte(stdout), &report); err != nil || status != 1 || len(report.Rows) != 2 {
		t.Fatalf("got status %d, %v, %s%s, want 1 and two rows", status, err, stdout, stderr)
	}
	if row := report.Rows[0]; row.WhyNot != "" || row.Full.PerSecond <= 0 || row.Tenth.Rate <= 0 {
		t.Errorf("got %+v, want the measurements of torchstream", row)
	}
	if row := report.Rows[1]; !strings.HasSuffix(row.WhyNot, "it printed: it dies") {
		t.Errorf("got %+v, want what the server printed last", row)
	}
}

func TestServersArguments(t *testing.T) {
	for words, args := range map[string][]string{
		"needs -archive": {"-archive", ""}, `no server "flask"`: {"-servers", "torchstream,flask"},
		"-clients is from 1": {"-clients", "0"}, "-bound and -time": {"-bound", "0"},
	} {
		if status, _, stderr := command(t, serversCommand(t, args...)...); status != 2 || !strings.Contains(stderr, words) {
			t.Errorf("%q: got status %d, %s, want 2, %q", args, status, stderr, words)
		}
	}
}

func TestLoadFindsTheLargestRate(t *testing.T) {
	var requests atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		_, _ = io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, `{"classes":[{"label":1}]}`)
	}))
	defer server.Close()
	run := func(more ...string) (rows []loadRow, sent int) {
		before := requests.Load()
		status, stdout, stderr := command(t, append([]string{"load", "-url", server.URL, "-archive", photos, "-images", "4",
			"-time", "50ms", "-json"}, more...)...)
		decoder := json.NewDecoder(strings.NewReader(stdout))
		for {
			var row loadRow
			if err := decoder.Decode(&row); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			rows = append(rows, row)
			sent += row.Sent
		}
		if status != 0 || sent != int(requests.Load()-before) {
			t.Errorf("%q: got status %d, %d requests in %+v, %s, want 0 and %d requests", more, status, sent, rows, stderr,
				requests.Load()-before)
		}
		return rows, sent
	}
	if rows, _ := run("-clients", "2"); len(rows) != 1 || rows[0].Loop != "closed" || rows[0].PerSecond <= 0 || rows[0].P999MS == nil {
		t.Errorf("got %+v, want one closed loop", rows)
	}
	if rows, _ := run("-rate", "200"); len(rows) != 1 || rows[0].Loop != "open" || rows[0].Rate != 200 {
		t.Errorf("got %+v, want one open loop of 200 requests/s", rows)
	}
	if rows, _ := run("-rate", "200", "-bound", "1m", "-runs", "3"); len(rows) != 4 || rows[1].Rate != 200 || rows[3].Rate != 450 {
		t.Errorf("got %+v, want a closed loop, and rates of 200, 300 and 450 requests/s", rows)
	}
	status, _, stderr := command(t, "load", "-url", server.URL, "-archive", photos, "-time", "50ms", "-bound", "1ns", "-runs", "2")
	if status != 1 || !strings.Contains(stderr, "no rate had a 99th percentile of at most 1ns") {
		t.Errorf("got status %d, %s, want 1 and no rate", status, stderr)
	}
}

func TestLoadUploadsPhotographsOfASize(t *testing.T) {
	jpeg := func(n int) string { return "\xff\xd8\xff" + strings.Repeat("x", n-3) }
	path := clitest.WriteTar(t, map[string]string{"a/1.jpg": jpeg(10), "a/2.jpg": jpeg(40), "a/3.jpg": jpeg(33), "a/4.jpg": jpeg(90)})
	images, err := (&photographs{archive: path, count: 2, bytes: 35}).read(t.Context())
	if err != nil || len(images) != 2 || len(images[0]) != 33 || len(images[1]) != 40 {
		t.Errorf("got %q, %v, want the ones of 33 and 40 bytes", images, err)
	}
}
