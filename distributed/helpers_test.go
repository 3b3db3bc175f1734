package distributed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/freeport"
	"github.com/torchstream/torchstream/torch"
)

// patience is the time limit of a test that hangs. It is shorter than Timeout and Silence in
// patient, so a test fails if its job notices the end of a rank only because of these limits.
const patience = 2 * time.Minute

func freePort(t testing.TB) int {
	t.Helper()
	port, err := freeport.Find()
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// inProcess runs n ranks on the CPU as goroutines of this process, and returns their errors.
func inProcess(t *testing.T, n int, o Options, run func(g *Group) error) []error {
	t.Helper()
	port := freePort(t)
	errs := make([]error, n)
	var all sync.WaitGroup
	for rank := range n {
		all.Go(func() {
			own := o
			own.CPU = true
			own.Environment = &Environment{Launcher: "test", Rank: rank, Size: n, LocalRank: rank,
				LocalSize: n, Address: "127.0.0.1", Port: port}
			g, err := Init(context.Background(), own)
			if err != nil {
				errs[rank] = err
				return
			}
			errs[rank] = errors.Join(run(g), g.Close())
		})
	}
	all.Wait()
	return errs
}

func requireNone(t *testing.T, errs []error) {
	t.Helper()
	for rank, err := range errs {
		if err != nil {
			t.Errorf("rank %d: %v, want no error", rank, err)
		}
	}
	if t.Failed() {
		t.FailNow()
	}
}

// workers are the programs of tests that need separate processes, by name.
var workers = map[string]func(ctx context.Context) error{}

const (
	workerVariable = "TORCHSTREAM_DIST_TEST_WORKER"
	// togetherVariable is set in processes that start together. Both files are pipes. A process
	// closes loadedFile when it has loaded LibTorch. It then reads beginFile, which reaches its end
	// when all processes have loaded LibTorch.
	togetherVariable = "TORCHSTREAM_DIST_TEST_TOGETHER"
	loadedFile       = 3
	beginFile        = 4
)

func TestMain(m *testing.M) {
	name := os.Getenv(workerVariable)
	if name == "" {
		os.Exit(cudatest.Main(m))
	}
	if err := errors.Join(beginTogether(), workers[name](context.Background())); err != nil {
		fmt.Println("error:", err)
		os.Exit(3)
	}
	os.Exit(0)
}

// beginTogether waits until all ranks of the job have loaded LibTorch, which takes seconds on a
// busy machine. The jobs' timeouts then need not include that time.
func beginTogether() error {
	if os.Getenv(togetherVariable) == "" {
		return nil
	}
	err := errors.Join(capi.Check(), os.NewFile(loadedFile, "loaded").Close())
	begin := os.NewFile(beginFile, "begin")
	_, failed := io.Copy(io.Discard, begin)
	return errors.Join(err, failed, begin.Close())
}

// process is a rank that runs in a separate process.
type process struct {
	*exec.Cmd
	rank   int
	output lockedBuffer
	done   chan struct{}
	err    error
}

type lockedBuffer struct {
	mu    sync.Mutex
	bytes bytes.Buffer
	wake  chan struct{}
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	n, err := b.bytes.Write(p)
	select {
	case b.wake <- struct{}{}:
	default:
	}
	return n, err
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.bytes.String()
}

// expect waits until the process has printed the text.
func (p *process) expect(t *testing.T, text string) {
	t.Helper()
	if !p.await(text, patience) {
		t.Fatalf("rank %d has not printed %q: %v\n%s", p.rank, text, p.err, p.output.String())
	}
}

// await waits until the process has printed the text, has ended, or the limit is over. It reports
// whether the text was printed.
func (p *process) await(text string, limit time.Duration) bool {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for !strings.Contains(p.output.String(), text) {
		select {
		case <-p.output.wake:
		case <-p.done:
			return strings.Contains(p.output.String(), text)
		case <-timer.C:
			return false
		}
	}
	return true
}

// wait waits for the end of the process.
func (p *process) wait(t *testing.T) {
	t.Helper()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-p.done:
	case <-timer.C:
		t.Fatalf("rank %d has not ended within %v:\n%s", p.rank, patience, p.output.String())
	}
}

// jobSizes returns sizes of jobs. A short test leaves out jobs of over three processes: the race
// detector sees one process at a time, and three have a first, a middle and a last rank.
func jobSizes(sizes ...int) []int {
	if testing.Short() {
		sizes = slices.DeleteFunc(sizes, func(n int) bool { return n > 3 })
	}
	return sizes
}

// launchJob starts n processes that run the worker as ranks of one job. It returns when all
// processes have loaded LibTorch.
func launchJob(t *testing.T, n int, worker string, environment ...string) []*process {
	t.Helper()
	port := strconv.Itoa(freePort(t))
	loaded, whenLoaded, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer loaded.Close()
	defer whenLoaded.Close()
	begin, toBegin, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer begin.Close()
	defer toBegin.Close()
	all := make([]*process, n)
	for rank := range n {
		r := strconv.Itoa(rank)
		p := &process{Cmd: exec.Command(os.Args[0]), rank: rank, done: make(chan struct{})}
		p.output.wake = make(chan struct{}, 1)
		p.Stdout, p.Stderr = &p.output, &p.output
		p.ExtraFiles = []*os.File{loadedFile - 3: whenLoaded, beginFile - 3: begin}
		p.Env = append(os.Environ(),
			append([]string{workerVariable + "=" + worker, togetherVariable + "=1", "RANK=" + r,
				"LOCAL_RANK=" + r, "WORLD_SIZE=" + strconv.Itoa(n),
				"LOCAL_WORLD_SIZE=" + strconv.Itoa(n), "MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + port,
				"OMP_NUM_THREADS=1"}, environment...)...)
		if os.Getenv("NCCL_NVLS_ENABLE") == "" { // multicast is a resource of the whole machine
			p.Env = append(p.Env, "NCCL_NVLS_ENABLE=0")
		}
		if err := p.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			p.Process.Kill()
			<-p.done
		})
		go func() {
			p.err = p.Wait()
			close(p.done)
		}()
		all[rank] = p
	}
	// The pipe reaches its end when every process has loaded LibTorch or has ended.
	if err := whenLoaded.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, loaded); err != nil {
		t.Fatal(err)
	}
	return all
}

// requireSuccess waits until all processes have ended without an error.
func requireSuccess(t *testing.T, all []*process) {
	t.Helper()
	for _, p := range all {
		p.wait(t)
		if p.err != nil {
			t.Errorf("rank %d: %v\n%s\nwant nil", p.rank, p.err, p.output.String())
		}
	}
}

func full(device cuda.Device, dtype torch.DType, v float64, shape ...int64) *torch.Tensor {
	x, err := torch.Full(device, dtype, v, shape...)
	if err != nil {
		return torch.Fail("Full", err)
	}
	return x
}
