package torch_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

// The variable makes a test the other process of TestShared... Its value selects the process's
// task.
const otherProcess = "TORCHSTREAM_SHARE_TEST"

// peer is another process that runs the same test, and talks in lines.
type peer struct {
	t     *testing.T
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *bufio.Scanner
	noise bytes.Buffer
}

func startPeer(t *testing.T, role string) *peer {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &peer{t: t, cmd: exec.Command(self, "-test.run", "^"+t.Name()+"$", "-test.timeout", "100s")}
	p.cmd.Env = append(os.Environ(), otherProcess+"="+role)
	p.cmd.Stderr = &p.noise
	out, err := p.cmd.StdoutPipe()
	if err == nil {
		p.in, err = p.cmd.StdinPipe()
	}
	if err == nil {
		err = p.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewScanner(out)
	p.out.Buffer(nil, 1<<20)
	t.Cleanup(func() { p.cmd.Process.Kill() })
	return p
}

// hear returns the rest of the other process's next line that starts with word.
func (p *peer) hear(word string) string {
	p.t.Helper()
	for p.out.Scan() {
		if rest, ok := strings.CutPrefix(p.out.Text(), word); ok {
			return strings.TrimSpace(rest)
		}
		if strings.Contains(p.out.Text(), "FAIL") {
			break
		}
	}
	p.cmd.Wait()
	p.t.Fatalf("the other process did not say %q: %s\n%s", word, p.out.Text(), &p.noise)
	return ""
}

func (p *peer) tell(line string) {
	p.t.Helper()
	if _, err := fmt.Fprintln(p.in, line); err != nil {
		p.t.Fatal(err)
	}
}

func (p *peer) end() {
	p.t.Helper()
	p.in.Close()
	for p.out.Scan() {
	}
	if err := p.cmd.Wait(); err != nil {
		p.t.Errorf("the other process: %v\n%s", err, &p.noise)
	}
}

func (p *peer) kill() {
	p.t.Helper()
	if err := p.cmd.Process.Kill(); err != nil {
		p.t.Fatal(err)
	}
	p.cmd.Wait()
}

// The side of the other process.
var lines = bufio.NewScanner(os.Stdin)

func say(format string, args ...any) { fmt.Printf(format+"\n", args...) }

func listen() string { lines.Scan(); return lines.Text() }

func handleText(t *testing.T, h torch.SharedHandle) string {
	t.Helper()
	b, err := h.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(b)
}

func handleOf(t *testing.T, text string) (h torch.SharedHandle) {
	t.Helper()
	b, err := hex.DecodeString(text)
	if err == nil {
		err = h.UnmarshalBinary(b)
	}
	if err != nil {
		t.Fatalf("%q: %v, want no error", text, err)
	}
	return h
}

func shareOf(t *testing.T, x *torch.Tensor) *torch.Shared {
	t.Helper()
	s, err := torch.Share(x)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func expectFloats(t *testing.T, x *torch.Tensor, want ...float32) {
	t.Helper()
	if got, err := x.Float32s(); err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
}

func soon(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// Two processes see each other's changes of a tensor on the CPU, and the owner waits for the user.
func TestSharedHostTensor(t *testing.T) {
	if os.Getenv(otherProcess) != "" {
		h := handleOf(t, listen())
		y, err := torch.OpenShared(h)
		if err != nil {
			t.Fatal(err)
		}
		expectFloats(t, y, 1, 4, 2, 5, 3, 6)
		if err := y.AddScalar_(10).Err(); err != nil {
			t.Fatal(err)
		}
		say("open")
		listen()
		view := y.Narrow(0, 0, 1)
		y.Close()
		say("view")
		listen()
		view.Close()
		say("closed")
		listen()
		return
	}
	x, err := torch.FromFloat32s([]float32{1, 2, 3, 4, 5, 6}, 2, 3)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	s := shareOf(t, x.Transpose(0, 1))
	p := startPeer(t, "user")
	p.tell(handleText(t, s.Handle()))
	p.hear("open")
	expectFloats(t, s.Tensor(), 11, 14, 12, 15, 13, 16)
	expectFloats(t, x, 1, 2, 3, 4, 5, 6) // Share has copied it
	busy := func() {
		t.Helper()
		if used, err := s.InUse(); err != nil || !used {
			t.Errorf("InUse is %t, %v", used, err)
		}
		if err := s.Close(); !errors.Is(err, cuda.ErrBusy) {
			t.Errorf("Close returns %v, want ErrBusy", err)
		}
	}
	busy()
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	if err := s.Wait(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("Wait returns %v, want the context's error", err)
	}
	p.tell("")
	p.hear("view")
	busy() // a view of the other process counts
	p.tell("")
	p.hear("closed")
	if err := s.Wait(soon(t)); err != nil {
		t.Errorf("Wait: %v, want no error", err)
	}
	p.end()
	if err := s.Close(); err != nil {
		t.Errorf("a second Close: %v, want no error", err)
	}
	if _, err := s.InUse(); !errors.Is(err, torch.ErrClosed) {
		t.Errorf("InUse returns %v, want ErrClosed", err)
	}
	for name, err := range map[string]error{"Check": s.Handle().Check(), "OpenShared": opened(s.Handle())} {
		if !errors.Is(err, torch.ErrClosed) {
			t.Errorf("%s after Close: got %v, want ErrClosed", name, err)
		}
	}
}

func opened(h torch.SharedHandle) error {
	y, err := torch.OpenShared(h)
	y.Close()
	return err
}

// Wait does not wait for a user that was killed.
func TestSharedUserIsKilled(t *testing.T) {
	if os.Getenv(otherProcess) != "" {
		if _, err := torch.OpenShared(handleOf(t, listen())); err != nil {
			t.Fatal(err)
		}
		say("open")
		listen()
		return
	}
	x, err := torch.Ones(cuda.CPU, torch.Float32, 4)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	s := shareOf(t, x)
	p := startPeer(t, "user")
	p.tell(handleText(t, s.Handle()))
	p.hear("open")
	if err := s.Close(); !errors.Is(err, cuda.ErrBusy) {
		t.Errorf("Close returns %v, want ErrBusy", err)
	}
	p.kill()
	if err := s.Wait(soon(t)); err != nil {
		t.Error(err)
	}
}

// If the owner is killed, processes that have opened its host memory can still use it, and Check
// tells them that the owner has ended.
func TestSharedOwnerIsKilled(t *testing.T) {
	if os.Getenv(otherProcess) != "" {
		x, err := torch.FromFloat32s([]float32{1, 2, 3})
		if err != nil {
			t.Fatal(err)
		}
		s := shareOf(t, x)
		say("handle %s", handleText(t, s.Handle()))
		listen()
		return
	}
	p := startPeer(t, "owner")
	h := handleOf(t, p.hear("handle"))
	if err := h.Check(); err != nil {
		t.Error(err)
	}
	y, err := torch.OpenShared(h)
	if err != nil {
		t.Fatal(err)
	}
	defer y.Close()
	p.kill()
	expectFloats(t, y, 1, 2, 3)
	if err := errors.Join(y.AddScalar_(1).Err(), y.Err()); err != nil {
		t.Error(err)
	}
	expectFloats(t, y, 2, 3, 4)
	for name, err := range map[string]error{"Check": h.Check(), "OpenShared": opened(h)} {
		if !errors.Is(err, torch.ErrClosed) || !strings.Contains(err.Error(), fmt.Sprint(p.cmd.Process.Pid)) {
			t.Errorf("%s after the owner's end: got %v, want ErrClosed with the process", name, err)
		}
	}
}

func TestShareRefuses(t *testing.T) {
	full := func(shape ...int64) *torch.Tensor {
		x, err := torch.Ones(cuda.CPU, torch.Float32, shape...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { x.Close() })
		return x
	}
	lent, closed := full(2), full(2)
	if err := errors.Join(lent.Lend(true), closed.Close()); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		x    *torch.Tensor
		want error
	}{
		{"slot", lent, cuda.ErrInvalidArgument},
		{"empty", full(0, 3), cuda.ErrInvalidArgument},
		{"closed", closed, torch.ErrClosed},
		{"nil", nil, cuda.ErrInvalidArgument},
	} {
		if s, err := torch.Share(c.x); !errors.Is(err, c.want) || s != nil {
			t.Errorf("%s: got %v, want %v", c.name, err, c.want)
		}
	}
	var none *torch.Shared
	if err := errors.Join(none.Close(), (&torch.Shared{}).Close()); err != nil {
		t.Error(err)
	}
	if tensor, ready, handle := none.Tensor().Err(), none.Ready(), none.Handle().Check(); tensor == nil ||
		ready == nil || handle == nil {
		t.Errorf("errors of a nil Shared's Tensor, Ready and Handle: %v, %v, %v, want one each",
			tensor, ready, handle)
	}
	if got := none.String(); got != "closed shared tensor" {
		t.Errorf("String() of a nil Shared = %q, want %q", got, "closed shared tensor")
	}
}

// Handles are untrusted bytes: a handle that is not from Share is refused before anything is
// opened.
func TestHostileSharedHandles(t *testing.T) {
	x, err := torch.Ones(cuda.CPU, torch.Float32, 2, 3)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	s := shareOf(t, x)
	defer s.Close()
	good, err := s.Handle().MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	if got, want := s.Handle().String(), fmt.Sprintf("handle of float32[2 3] in process %d", os.Getpid()); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	for name, b := range map[string][]byte{
		"nothing": nil, "cut": good[:len(good)-1], "longer": append(slices.Clone(good), 0),
		"other": bytes.Repeat([]byte{0xff}, len(good)),
	} {
		var h torch.SharedHandle
		if err := h.UnmarshalBinary(b); !errors.Is(err, cuda.ErrInvalidArgument) {
			t.Errorf("%s: got %v, want ErrInvalidArgument", name, err)
		}
		if err := opened(h); !errors.Is(err, cuda.ErrInvalidArgument) {
			t.Errorf("%s: a zero handle opens with %v, want ErrInvalidArgument", name, err)
		}
	}
	for i := range good {
		b := slices.Clone(good)
		b[i] ^= 1
		var h torch.SharedHandle
		if err := h.UnmarshalBinary(b); !errors.Is(err, cuda.ErrInvalidArgument) {
			t.Errorf("byte %d: got %v, want ErrInvalidArgument", i, err)
		}
	}
	if _, err := (torch.SharedHandle{}).MarshalBinary(); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("a zero handle: got %v, want ErrInvalidArgument", err)
	}
}

// Work on the user's stream runs after the owner's work, and the owner's Wait returns after the
// user's work.
func TestSharedGPUTensor(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	stream := cudatest.Stream(t, gpu)
	const n = 1 << 20
	if os.Getenv(otherProcess) != "" {
		warm, err := torch.Zeros(gpu, torch.Float32, n) // CUDA is there before the handle comes
		if err == nil {
			defer warm.Close()
			err = gpu.Synchronize()
		}
		if err != nil {
			t.Fatal(err)
		}
		say("ready")
		h := handleOf(t, listen())
		err = cuda.WithStream(stream, func() error {
			y, err := torch.OpenShared(h)
			if err != nil {
				return err
			}
			defer y.Close()
			say("open")
			sum, err := y.Sum().Float64()
			say("sum %v", sum)
			if err != nil {
				return err
			}
			listen()
			// Work that is queued at the tensor's end: the owner's Wait comes after it.
			cudatest.Delay(t, stream, 300*time.Millisecond)
			return y.Fill_(5).Err()
		})
		if err != nil {
			t.Fatal(err)
		}
		say("closed")
		listen()
		return
	}
	p := startPeer(t, "user")
	p.hear("ready")
	var s *torch.Shared
	var x *torch.Tensor
	err := cuda.WithStream(stream, func() (err error) {
		if x, err = torch.Full(gpu, torch.Float32, 1, 2*n); err != nil {
			return err
		}
		cudatest.Delay(t, stream, time.Second)
		part := x.Narrow(0, n, n) // not at the start of the allocation
		if err := part.Fill_(2).Err(); err != nil {
			return err
		}
		defer part.Close()
		s, err = torch.Share(part)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	p.tell(handleText(t, s.Handle()))
	p.hear("open")
	if got, want := p.hear("sum"), fmt.Sprint(float64(2*n)); got != want {
		t.Errorf("the other process reads the sum %s, want %s", got, want)
	}
	if err := s.Close(); !errors.Is(err, cuda.ErrBusy) {
		t.Errorf("Close returns %v, want ErrBusy", err)
	}
	if err := opened(s.Handle()); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("the owner opens its own tensor: %v, want ErrInvalidArgument", err)
	}
	p.tell("")
	p.hear("closed")
	if err := errors.Join(s.Wait(soon(t)), stream.Synchronize()); err != nil {
		t.Error(err)
	}
	sums := func(from int64) float64 {
		t.Helper()
		v, err := x.Narrow(0, from, n).Sum().Float64()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	if got := [2]float64{sums(0), sums(n)}; got != [2]float64{n, 5 * n} {
		t.Errorf("the halves have the sums %v, want %v", got, [2]float64{n, 5 * n})
	}
	p.end()
}
