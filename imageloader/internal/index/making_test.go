//go:build linux

package index

import (
	"bufio"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// makingVariable has the archive that a child process opens.
const makingVariable = "INDEX_MAKING_ARCHIVE"

// Lines of the log.
const (
	saysScanning = "scanning archive"
	saysWaiting  = "waiting for the index that another process makes"
	saysOver     = "another one takes over"
)

// gated is an archive that counts the bytes read from it. A read past the middle waits for a gate.
type gated struct {
	archive.File
	size int64
	read *atomic.Int64
	gate func()
}

func (g gated) Read(p []byte) (int, error) {
	n, err := g.File.Read(p)
	if g.read.Add(int64(n)) > g.size/2 {
		g.gate()
	}
	return n, err
}

func (g gated) ReadAt(p []byte, at int64) (int, error) {
	n, err := g.File.ReadAt(p, at)
	g.read.Add(int64(n))
	return n, err
}

// openGated opens an archive and its index as a loader does. It returns the number of bytes read.
func openGated(ctx context.Context, path string, c Config, gate func()) (x *Index, read int64, err error) {
	var all atomic.Int64
	a, err := archive.Open(ctx, path, archive.Config{OpenFile: func(path string) (archive.File, error) {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		info, err := f.Stat()
		return gated{f, info.Size(), &all, sync.OnceFunc(gate)}, err
	}})
	if err != nil {
		return nil, 0, err
	}
	defer func() { _ = a.Close() }()
	x, err = Load(a, c)
	if x == nil && err == nil {
		x, err = Build(a, c)
	}
	return x, all.Load(), err
}

// TestMakingProcess is the child process of the other tests. It logs to its standard output. A line
// of its standard input opens the gate.
func TestMakingProcess(t *testing.T) {
	path := os.Getenv(makingVariable)
	if path == "" {
		t.Skip("no process of another test")
	}
	c := testConfig()
	c.HoldBytes = 1 << 10
	c.Logger = slog.New(slog.NewTextHandler(os.Stdout, nil))
	in := bufio.NewReader(os.Stdin)
	x, read, err := openGated(t.Context(), path, c, func() { _, _ = in.ReadString('\n') })
	if err != nil {
		t.Fatal(err)
	}
	fmt.Printf("has %d samples, read %d bytes\n", x.Len(), read)
	closeIndex(t, x)
}

// process is a child process.
type process struct {
	*exec.Cmd
	in    io.WriteCloser
	lines *bufio.Scanner
}

func startProcess(t *testing.T, path string) *process {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // kills a child that hangs
	p := &process{Cmd: exec.CommandContext(ctx, os.Args[0], "-test.run=^TestMakingProcess$", "-test.count=1")}
	p.Env = append(os.Environ(), makingVariable+"="+path)
	in, err := p.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := p.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.in, p.lines = in, bufio.NewScanner(out)
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		_ = p.Wait() // it was killed, if it has not ended
	})
	return p
}

// until reads the process's lines up to the first that has one of the words. It returns the word
// and the line.
func (p *process) until(t *testing.T, words ...string) (word, line string) {
	t.Helper()
	for p.lines.Scan() {
		for _, word := range words {
			if strings.Contains(p.lines.Text(), word) {
				return word, p.lines.Text()
			}
		}
	}
	t.Fatalf("the process ends without one of %q", words)
	return "", ""
}

// opened returns the number of bytes that the process read.
func (p *process) opened(t *testing.T) (read int64) {
	t.Helper()
	_, line := p.until(t, "has ")
	var samples int
	if _, err := fmt.Sscanf(line, "has %d samples, read %d bytes", &samples, &read); err != nil || samples == 0 {
		t.Fatalf("%v in %q, samples %v, want no error, samples not 0", err, line, samples)
	}
	return read
}

// goOn opens the gate of a process. The process may have ended without reaching it.
func (p *process) goOn() { _, _ = io.WriteString(p.in, "\n") }

// unindexed writes an archive of some megabytes that must be read through for its index.
func unindexed(t *testing.T) (path string, size int64) {
	t.Helper()
	random := rand.NewChaCha8([32]byte{})
	var list []archivetest.Member
	for i := range 20 {
		b := make([]byte, 100_000)
		_, _ = random.Read(b) // never fails
		list = append(list, archivetest.Member{Name: fmt.Sprintf("a/%d.png", i), Data: archivetest.Image(string(b))})
	}
	data := archivetest.GzipSplit(t, archivetest.Tar(t, list...), 1<<30, gzip.NoCompression)
	return archivetest.WriteFile(t, "a.tgz", data), int64(len(data))
}

// only checks which files are in the archive's folder.
func only(t *testing.T, path string, suffixes ...string) {
	t.Helper()
	files, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	var got, want []string
	for _, f := range files {
		got = append(got, f.Name())
	}
	for _, s := range suffixes {
		want = append(want, filepath.Base(path)+s)
	}
	if !slices.Equal(got, want) {
		t.Errorf("the folder has %q, want %q", got, want)
	}
}

// TestOneProcessMakesTheIndex: if several processes open an archive without an index at the same
// time, one reads it. The others wait for the index.
func TestOneProcessMakesTheIndex(t *testing.T) {
	path, size := unindexed(t)
	var all []*process
	for range 4 {
		all = append(all, startProcess(t, path))
	}
	makers := 0
	for _, p := range all {
		if says, _ := p.until(t, saysScanning, saysWaiting); says == saysScanning {
			makers++
		}
	}
	only(t, path, "", sidecarSuffix+makingSuffix)
	readers := 0
	for _, p := range all {
		p.goOn()
	}
	for _, p := range all {
		read := p.opened(t)
		t.Logf("read %d of %d bytes", read, size)
		switch {
		case read >= size:
			readers++
		case read > size/4:
			t.Errorf("a process with an index read %d of %d bytes", read, size)
		}
	}
	if makers != 1 || readers != 1 {
		t.Errorf("%d processes scan and %d read the archive, want 1", makers, readers)
	}
	only(t, path, "", sidecarSuffix)
}

// TestAnotherProcessTakesOver: if a process is killed while it makes the index, a waiting process
// takes over.
func TestAnotherProcessTakesOver(t *testing.T) {
	path, size := unindexed(t)
	first := startProcess(t, path)
	first.until(t, saysScanning)
	waiting := []*process{startProcess(t, path), startProcess(t, path)}
	for _, p := range waiting {
		p.until(t, saysWaiting)
	}
	if err := first.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	readers := 0
	for _, p := range waiting {
		p.goOn()
	}
	for _, p := range waiting {
		if p.opened(t) >= size {
			readers++
		}
	}
	if readers != 1 {
		t.Errorf("%d processes read the archive, want 1", readers)
	}
	only(t, path, "", sidecarSuffix)
}

// TestKilledProcessLeavesNoLock: the lock file of a killed process does not delay the next process,
// which removes it.
func TestKilledProcessLeavesNoLock(t *testing.T) {
	path, _ := unindexed(t)
	first := startProcess(t, path)
	first.until(t, saysScanning)
	if err := first.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = first.Wait() // killed
	only(t, path, "", sidecarSuffix+makingSuffix)
	var log logged
	c := testConfig()
	c.Logger = slog.New(slog.NewTextHandler(&log, nil))
	closeIndex(t, open(t, path, c))
	if log.has(saysWaiting) || !log.has(saysScanning) {
		t.Errorf("after a killed process: %s", log.text.String())
	}
	only(t, path, "", sidecarSuffix)
}

// waiter opens an archive in this process, and waits for the process that makes its index.
type waiter struct {
	log     logged
	signs   chan bool      // receives signs of that process
	stall   chan time.Time // closed when the wait for another sign ends
	follows chan bool      // receives signs of a process that has taken over
	reached chan bool      // closed when the waiter starts to read the archive
	gate    chan bool      // the waiter reads on when this is closed
	done    chan error
	read    int64
}

// wait starts to open an archive, and returns when the opening waits.
func wait(t *testing.T, ctx context.Context, path string) *waiter {
	t.Helper()
	w := &waiter{signs: make(chan bool, 1), stall: make(chan time.Time), follows: make(chan bool, 1),
		reached: make(chan bool), gate: make(chan bool), done: make(chan error, 1)}
	made, err := os.Lstat(path + sidecarSuffix + makingSuffix)
	if err != nil {
		t.Fatal(err)
	}
	c := testConfig()
	c.HoldBytes = 1 << 10
	c.Logger = slog.New(slog.NewTextHandler(&w.log, nil))
	c.stall = func() <-chan time.Time {
		signs, stall := w.signs, w.stall
		if now, err := os.Lstat(path + sidecarSuffix + makingSuffix); err != nil || !os.SameFile(now, made) {
			signs, stall = w.follows, nil
		}
		select {
		case signs <- true:
		default: // nobody has taken the last one
		}
		return stall
	}
	go func() {
		x, read, err := openGated(ctx, path, c, func() {
			close(w.reached)
			<-w.gate
		})
		if err == nil {
			err = x.Close()
		}
		w.read = read
		w.done <- err
	}()
	w.sign(t)
	return w
}

// sign waits for a sign of the process that makes the index.
func (w *waiter) sign(t *testing.T) {
	t.Helper()
	select {
	case <-w.signs:
	case <-w.reached:
		t.Fatal("the process reads the archive, want it to wait for the other")
	case err := <-w.done:
		t.Fatalf("the process returned %v, want it to wait for the other", err)
	case <-time.After(time.Minute):
		t.Fatal("after a minute no sign of the other process, want one")
	}
}

// end waits until the waiter has returned, and returns its error.
func (w *waiter) end(t *testing.T) error {
	t.Helper()
	select {
	case err := <-w.done:
		return err
	case <-time.After(time.Minute):
		t.Fatal("after a minute the process still waits, want it to return")
		return nil
	}
}

// TestStoppedProcessIsLeftAlone: a running process gives signs again and again. When that process
// is stopped, one of the waiting processes takes over, even if all of them stop waiting at the same
// time. The stopped process does no harm when it resumes.
func TestStoppedProcessIsLeftAlone(t *testing.T) {
	path, size := unindexed(t)
	first := startProcess(t, path)
	first.until(t, saysScanning)
	var all []*waiter
	for range 3 {
		all = append(all, wait(t, t.Context(), path))
	}
	all[0].sign(t)
	all[0].sign(t)
	if err := first.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var status syscall.WaitStatus
	if _, err := syscall.Wait4(first.Process.Pid, &status, syscall.WUNTRACED, nil); err != nil || !status.Stopped() {
		t.Fatal(err, status)
	}
	close(all[0].stall)
	close(all[1].stall) // the third follows without giving up
	limit := time.After(time.Minute)
	makers := 0
	for i, w := range all {
		select {
		case <-w.reached:
			makers++
		case <-w.follows:
		case <-limit:
			t.Fatalf("waiter %d waits for ever", i)
		}
	}
	if makers != 1 {
		t.Errorf("%d take over, want 1", makers)
	}
	for _, w := range all {
		close(w.gate)
	}
	for i, w := range all {
		if err := w.end(t); err != nil || i < 2 && !w.log.has(saysOver) && w.read >= size {
			t.Errorf("waiter %d: %v after %d of %d bytes: %s", i, err, w.read, size, w.log.text.String())
		}
	}
	only(t, path, "", sidecarSuffix)
	if err := first.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	first.goOn()
	first.opened(t)
	only(t, path, "", sidecarSuffix)
	closeIndex(t, open(t, path, testConfig()))
}

// TestWaitingEndsWithTheContext: the context ends the wait for another process.
func TestWaitingEndsWithTheContext(t *testing.T) {
	path, size := unindexed(t)
	first := startProcess(t, path)
	first.until(t, saysScanning)
	ctx, cancel := context.WithCancel(t.Context())
	w := wait(t, ctx, path)
	cancel()
	if err := w.end(t); !errors.Is(err, archive.ErrStopped) {
		t.Errorf("a wait that was cancelled: %v, want the error %v", err, archive.ErrStopped)
	}
	first.goOn()
	if read := first.opened(t); read < size {
		t.Errorf("the process that makes the index read %d of %d bytes", read, size)
	}
	only(t, path, "", sidecarSuffix)
}

// TestStoppingLeavesTheIndexToAnother: a process that is told to stop leaves the index to a waiting
// process.
func TestStoppingLeavesTheIndexToAnother(t *testing.T) {
	path, size := unindexed(t)
	ctx, cancel := context.WithCancel(t.Context())
	reached, stopped := make(chan bool), make(chan error, 1)
	go func() {
		_, _, err := openGated(ctx, path, testConfig(), func() {
			close(reached)
			<-ctx.Done()
		})
		stopped <- err
	}()
	<-reached
	all := []*waiter{wait(t, t.Context(), path), wait(t, t.Context(), path)}
	for _, w := range all {
		close(w.gate)
	}
	cancel()
	if err := <-stopped; !errors.Is(err, archive.ErrStopped) {
		t.Errorf("stopped: %v, want the error %v", err, archive.ErrStopped)
	}
	readers := 0
	for _, w := range all {
		if err := w.end(t); err != nil {
			t.Error(err)
		}
		if w.read >= size {
			readers++
		}
	}
	if readers != 1 {
		t.Errorf("%d read the archive, want 1", readers)
	}
	only(t, path, "", sidecarSuffix)
}

// TestUnwritableIndexKeepsNobodyWaiting: if the index can't be written, the waiting processes read
// the archive at the same time, not one after another.
func TestUnwritableIndexKeepsNobodyWaiting(t *testing.T) {
	path, _ := unindexed(t)
	at := filepath.Join(t.TempDir(), "index")
	if err := os.Mkdir(at, 0o755); err != nil {
		t.Fatal(err)
	}
	// The gates of the waiters open when all of them read the archive.
	var arrived sync.WaitGroup
	const waiters = 3
	arrived.Add(waiters)
	done := make(chan error, waiters+1)
	signs := make(chan bool, waiters)
	start := func(gate func()) {
		c := testConfig()
		c.HoldBytes, c.File = 1<<10, at
		c.stall = func() <-chan time.Time {
			select {
			case signs <- true:
			default:
			}
			return nil
		}
		go func() {
			x, _, err := openGated(t.Context(), path, c, gate)
			if err == nil {
				err = x.Close()
			}
			done <- err
		}()
	}
	reached, all := make(chan bool), make(chan bool)
	start(func() { close(reached); <-all })
	<-reached
	for range waiters {
		start(func() { arrived.Done(); arrived.Wait() })
	}
	for range waiters {
		<-signs
	}
	close(all)
	for range waiters + 1 {
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(time.Minute):
			t.Fatal("after a minute some processes still wait, want all to read at once")
		}
	}
	if files, err := os.ReadDir(filepath.Dir(at)); err != nil || len(files) != 1 {
		t.Errorf("%v, %v, want no error, len(files) = 1", files, err)
	}
}

// TestOtherFilesAreNoLocks: a file, a link or a pipe with the name of the lock is neither written
// nor waited for.
func TestOtherFilesAreNoLocks(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	for name, plant := range map[string]func(path string) error{
		"file": func(path string) error { return os.WriteFile(path, []byte("a thesis"), 0o600) },
		"link": func(path string) error { return os.Symlink(path+".elsewhere", path) },
		"pipe": func(path string) error { return syscall.Mkfifo(path, 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			path, _ := unindexed(t)
			if err := plant(path + sidecarSuffix + makingSuffix); err != nil {
				t.Fatal(err)
			}
			closeIndex(t, open(t, path, testConfig()))
			only(t, path, "", sidecarSuffix, sidecarSuffix+makingSuffix)
			if name != "file" {
				return
			}
			if text, err := os.ReadFile(path + sidecarSuffix + makingSuffix); string(text) != "a thesis" {
				t.Errorf("%q, %v, want %q", text, err, "a thesis")
			}
		})
	}
}
