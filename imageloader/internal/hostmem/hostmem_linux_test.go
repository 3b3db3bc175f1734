package hostmem

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// childVariable makes the test program a child that shares the memory with this name.
const childVariable = "TORCHSTREAM_TEST_HOSTMEM"

const (
	testFlags = 130
	testBytes = 1 << 20
)

func TestMain(m *testing.M) {
	if name := os.Getenv(childVariable); name != "" {
		run := child
		if role := os.Getenv(uncheckedVariable); role != "" {
			run = func(name string) error { return unchecked(name, role) }
		}
		if err := run(name); err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// uncheckedVariable makes the test program a child that has the memory's socket, or connects to it,
// without a check of the process at the other end. Its value is "hold" or "fetch".
const uncheckedVariable = "TORCHSTREAM_TEST_HOSTMEM_UNCHECKED"

// unchecked obeys uncheckedVariable.
func unchecked(name, role string) error {
	address := &net.UnixAddr{Name: fmt.Sprintf("@torchstream-%d-%s", os.Geteuid(), name), Net: "unix"}
	if role == "fetch" {
		c, err := net.DialUnix("unix", nil, address)
		if err != nil {
			return err
		}
		control := make([]byte, unix.CmsgSpace(4))
		text := make([]byte, 1000)
		size, n, _, _, err := c.ReadMsgUnix(text, control)
		fmt.Println(n, "bytes of descriptors,", string(text[:size]))
		if errors.Is(err, io.EOF) {
			return nil
		}
		return err
	}
	l, err := net.ListenUnix("unix", address)
	if err != nil {
		return err
	}
	file, err := newFile(int64(os.Getpagesize()) + testBytes)
	if err != nil {
		return err
	}
	fmt.Println("holds")
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			return err
		}
		if err := (&shared{file: file}).send(c); err != nil {
			return err
		}
	}
}

// child joins, and then obeys lines: "set I" writes and publishes item I, "has I" reads it.
func child(name string) error {
	m, err := Join(context.Background(), Config{Name: name, Flags: testFlags, Bytes: testBytes})
	if err != nil {
		return err
	}
	defer m.Close()
	fmt.Println("joined")
	var files []*os.File
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		var verb string
		var i int
		if _, err := fmt.Sscan(lines.Text(), &verb, &i); err != nil {
			return err
		}
		switch verb {
		case "set":
			if err := set(m, i); err != nil {
				return err
			}
			fmt.Println("set")
		case "has":
			fmt.Println(has(m, i))
		case "lock":
			if _, err := m.Lock(context.Background()); err != nil {
				return err
			}
			fmt.Println("locked")
		case "full":
			if err := useAllDescriptors(&files); err != nil {
				return err
			}
			fmt.Println("full")
		case "free":
			for _, f := range files {
				_ = f.Close() // nothing was written
			}
			files = nil
			fmt.Println("free")
		}
	}
	return nil
}

// useAllDescriptors opens files until the process has no descriptors left.
func useAllDescriptors(files *[]*os.File) error {
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 64, Max: 64}); err != nil {
		return err
	}
	for {
		f, err := os.Open(os.DevNull)
		if errors.Is(err, unix.EMFILE) {
			return nil
		}
		if err != nil {
			return err
		}
		*files = append(*files, f)
	}
}

func item(i int) []byte { return bytes.Repeat([]byte{byte(i + 1)}, 5000) }

func set(m *Memory, i int) error {
	if err := m.Write(int64(5000*i), item(i)); err != nil {
		return err
	}
	m.SetFlag(i)
	return nil
}

// has reports whether item i is published. It panics if the item then has wrong bytes.
func has(m *Memory, i int) bool {
	if !m.Flag(i) {
		return false
	}
	if !bytes.Equal(m.Data()[5000*i:][:5000], item(i)) {
		panic(fmt.Sprintf("item %d is published with other bytes", i))
	}
	return true
}

type process struct {
	t   *testing.T
	c   *exec.Cmd
	in  io.Writer
	out *bufio.Scanner
}

func start(t *testing.T, name string) *process {
	t.Helper()
	p := &process{t: t, c: exec.CommandContext(t.Context(), os.Args[0])}
	p.c.Env = append(os.Environ(), childVariable+"="+name)
	p.c.Stderr = os.Stderr
	var err error
	if p.in, err = p.c.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := p.c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewScanner(out)
	if err := p.c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.kill)
	p.read("joined")
	return p
}

func (p *process) read(want string) {
	p.t.Helper()
	if !p.out.Scan() || p.out.Text() != want {
		p.t.Fatalf("the process printed %q, want %q", p.out.Text(), want)
	}
}

func (p *process) ask(line, want string) {
	p.t.Helper()
	if _, err := fmt.Fprintln(p.in, line); err != nil {
		p.t.Fatal(err)
	}
	p.read(want)
}

func (p *process) kill() {
	if p.c.ProcessState == nil {
		_ = p.c.Process.Kill() // it may have ended
		_ = p.c.Wait()         // its error is the kill
	}
}

// sockets returns the lines of the system's list of sockets with this name.
func sockets(t *testing.T, name string) (n int) {
	t.Helper()
	text, err := os.ReadFile("/proc/net/unix")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(text), "-"+name+"\n")
}

func testName(t *testing.T) string {
	return fmt.Sprintf("%s-%d-%d", t.Name(), os.Getpid(), time.Now().UnixNano())
}

func open(t *testing.T, name string) *Memory {
	t.Helper()
	m, err := Join(t.Context(), Config{Name: name, Flags: testFlags, Bytes: testBytes})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m
}

// What one process publishes, all processes read. After the holder of the socket is killed, another
// process passes the memory on. Nothing is left of the last one.
func TestMemoryOutlivesItsMaker(t *testing.T) {
	name := testName(t)
	first := start(t, name)
	first.ask("set 0", "set")
	second, third := start(t, name), start(t, name)
	second.ask("has 0", "true")
	second.ask("has 129", "false")
	second.ask("set 129", "set")
	for range 5 { // each time the holder of the socket is killed
		third.ask("has 129", "true")
		first.kill()
		first, second, third = second, third, joins(t, name, second)
	}
	third.ask("has 0", "true")
	for _, p := range []*process{first, second, third} {
		p.kill()
	}
	if n := sockets(t, name); n != 0 {
		t.Errorf("after the last process: %d sockets, want none", n)
	}
	if m := open(t, name); m.Flag(0) {
		t.Error("memory after the last process has flag 0 of the former memory, want new memory")
	}
}

// joins starts a process when one of the others holds the socket again. A process that starts
// earlier makes separate memory, which is right but not wanted here.
func joins(t *testing.T, name string, other *process) *process {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); sockets(t, name) == 0; {
		if time.Now().After(deadline) {
			t.Fatal("no process has taken the socket over in 20 s")
		}
		runtime.Gosched()
	}
	other.ask("has 0", "true")
	return start(t, name)
}

// A process that starts while nobody holds the socket makes separate memory, and the others keep
// theirs.
func TestOtherMemoryUnderTheNameIsNotMixed(t *testing.T) {
	name := testName(t)
	a := open(t, name)
	b := open(t, name)
	if err := set(a, 1); err != nil || !has(b, 1) {
		t.Fatalf("set: %v, shared: %v, want nil, true", err, has(b, 1))
	}
	a.mu.Lock()
	for c := range a.open { // as if the process had no descriptors left
		_ = c.Close()
	}
	a.mu.Unlock()
	c := open(t, name) // b's memory, or new memory
	if err := set(b, 2); err != nil || !has(a, 2) {
		t.Errorf("set: %v, shared: %v, want nil, true", err, has(a, 2))
	}
	if got := c.Flag(1) == c.Flag(2); !got {
		t.Error("new memory has some of the flags, want all or none")
	}
}

// A process without free descriptors keeps the socket, and sends the memory when it has descriptors
// again.
func TestHolderWithoutDescriptorsKeepsTheSocket(t *testing.T) {
	name := testName(t)
	holder := start(t, name)
	holder.ask("set 0", "set")
	holder.ask("full 0", "full")
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: fmt.Sprintf("@torchstream-%d-%s", os.Geteuid(), name), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	text := make([]byte, len(greeting))
	if err := c.SetReadDeadline(time.Now().Add(3 * acceptPause)); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(text); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("without descriptors: read %q, %v, want nothing until the deadline", text[:n], err)
	}
	holder.ask("free 0", "free")
	if m := open(t, name); !has(m, 0) {
		t.Error("the memory lacks item 0, want the memory of the process that had no descriptors")
	}
}

// The lock excludes others until its holder unlocks it, or is killed.
func TestLockEndsWithItsHolder(t *testing.T) {
	name := testName(t)
	p := start(t, name)
	p.ask("lock 0", "locked")
	m := open(t, name)
	ctx, cancel := context.WithTimeoutCause(t.Context(), 50*time.Millisecond, errors.New("enough"))
	defer cancel()
	if _, err := m.Lock(ctx); err == nil || err.Error() != "enough" {
		t.Errorf("Lock while another process has it: got %v, want the cause of ctx", err)
	}
	p.kill()
	unlock, err := m.Lock(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	unlock()
	if unlock, err = m.Lock(t.Context()); err != nil {
		t.Fatal(err)
	}
	unlock()
}

// Other sizes under the same name are an error, and so is a socket that is not of this package.
func TestJoinRefusesWhatIsNotItsMemory(t *testing.T) {
	name := testName(t)
	open(t, name)
	if m, err := Join(t.Context(), Config{Name: name, Flags: testFlags, Bytes: testBytes + 1}); err == nil ||
		!strings.Contains(err.Error(), "runs another version") {
		t.Errorf("other size: got %v, %v, want an error about another version", m, err)
	}
	foreign := testName(t) + "-foreign"
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: fmt.Sprintf("@torchstream-%d-%s", os.Geteuid(), foreign), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte("hello"))
			_ = c.Close()
		}
	}()
	if m, err := Join(t.Context(), Config{Name: foreign, Flags: 1, Bytes: 1}); err == nil ||
		!strings.Contains(err.Error(), `sent "hello" without the memory`) {
		t.Errorf("foreign socket: got %v, %v, want an error that names what was sent", m, err)
	}
}

// inNewPIDNamespace returns a command that runs this test program as a child in a PID namespace
// that this process sees, but not the other way round.
func inNewPIDNamespace(t *testing.T, name, role string) *exec.Cmd {
	c := exec.CommandContext(t.Context(), os.Args[0])
	c.Env = append(os.Environ(), childVariable+"="+name, uncheckedVariable+"="+role)
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	return c
}

// The end of the context ends the wait for a process that holds the socket and does not answer.
func TestContextEndsJoin(t *testing.T) {
	name := testName(t)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: fmt.Sprintf("@torchstream-%d-%s", os.Geteuid(), name), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	enough := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	go func() {
		if c, err := l.Accept(); err == nil { // Join has connected
			cancel(enough)
			defer c.Close()
			_, _ = c.Read(make([]byte, 1)) // until Join closes it
		}
	}()
	began := time.Now()
	if m, err := Join(ctx, Config{Name: name, Flags: 1, Bytes: 1}); !errors.Is(err, enough) || time.Since(began) >= answerTime {
		t.Errorf("Join: got %v, %v after %v, want the cause of ctx within %v", m, err, time.Since(began), answerTime)
	}
}

// A process does not use the memory of a process in a PID namespace that it does not see.
func TestProcessesOfOtherContainersAreRefused(t *testing.T) {
	name := testName(t)
	open(t, name)
	out, err := inNewPIDNamespace(t, name, "").Output()
	if errors.Is(err, fs.ErrPermission) {
		t.Skip("this process may not make a PID namespace")
	}
	if err == nil || !strings.Contains(string(out), "a process of another container has the socket") {
		t.Errorf("got %q, %v, want the error that another container has the socket", out, err)
	}
}

// A process neither sends its memory to a process in a PID namespace below its own, nor takes that
// process's memory, although it sees the process.
func TestProcessesOfContainersBelowAreRefused(t *testing.T) {
	name := testName(t)
	open(t, name)
	out, err := inNewPIDNamespace(t, name, "fetch").Output()
	if errors.Is(err, fs.ErrPermission) {
		t.Skip("this process may not make a PID namespace")
	}
	if err != nil || !strings.HasPrefix(string(out), "0 bytes of descriptors, refused: ") {
		t.Errorf("a process that fetches got %q, error %v, want no descriptors and the refusal, nil", out, err)
	}

	name = testName(t)
	holder := inNewPIDNamespace(t, name, "hold")
	text, err := holder.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	p := &process{t: t, c: holder, out: bufio.NewScanner(text)}
	t.Cleanup(p.kill)
	p.read("holds")
	if m, err := Join(t.Context(), Config{Name: name, Flags: testFlags, Bytes: testBytes}); !errors.Is(err, errOtherContainer) {
		t.Errorf("a process that holds: got %v, %v, want nil, %v", m, err, errOtherContainer)
	}
}

// Close, and the garbage collection of a Memory, end its goroutines and give back its descriptors.
func TestCloseLeavesNothing(t *testing.T) {
	count := func() (files, goroutines int) {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if link, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil &&
				(strings.Contains(link, "memfd:torchstream") || strings.HasPrefix(link, "socket:")) {
				files++
			}
		}
		return files, runtime.NumGoroutine()
	}
	name := testName(t)
	files, goroutines := count()
	for range 20 {
		a, b := open(t, name), open(t, name)
		a.Close()
		b.Close()
		b.Close()
	}
	for deadline := time.Now().Add(20 * time.Second); ; runtime.Gosched() { // a goroutine ends after its last statement
		f, g := count()
		if f == files && g <= goroutines {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("after Close: %d files and %d goroutines, want %d and %d", f, g, files, goroutines)
		}
	}
	func() {
		if _, err := Join(t.Context(), Config{Name: name, Flags: testFlags, Bytes: testBytes}); err != nil {
			t.Fatal(err)
		}
	}()
	for deadline := time.Now().Add(20 * time.Second); ; runtime.GC() {
		f, _ := count()
		if f == files {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("after the garbage collection: %d files, want %d", f, files)
		}
	}
}

// The file cannot shrink, since a process that reads beyond the end of a mapped file is killed.
func TestFileKeepsItsSize(t *testing.T) {
	m := open(t, testName(t))
	if err := m.file.Truncate(0); !errors.Is(err, unix.EPERM) || !errors.Is(err, fs.ErrPermission) {
		t.Errorf("truncate: got %v, want EPERM", err)
	}
	if err := m.Write(testBytes-10, make([]byte, 11)); !errors.Is(err, unix.EPERM) {
		t.Errorf("a write beyond the end: got %v, want EPERM", err)
	}
}

// The flags have memory from the start, since a process that first writes a page of a mapping is
// killed if there is no memory. The data has memory when it is written.
func TestFlagsHaveMemoryFromTheStart(t *testing.T) {
	m, err := Join(t.Context(), Config{Name: testName(t), Flags: 100_000, Bytes: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	info, err := m.file.Stat()
	if err != nil {
		t.Fatal(err)
	}
	if got := info.Sys().(*syscall.Stat_t).Blocks * 512; got < m.at || got > 32<<20 {
		t.Errorf("new memory takes %d bytes, want at least %d for the flags and none for the data", got, m.at)
	}
}
