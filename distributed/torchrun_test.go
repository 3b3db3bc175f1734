//go:build linux

package distributed

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/control"
)

// launcherStore serves a store in the way torchrun does.
func launcherStore(t *testing.T) (store *capi.Store, port int) {
	t.Helper()
	port = freePort(t)
	store, err := capi.ConnectStore("127.0.0.1", port, true, storePrefix, patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { capi.FreeStore(store) })
	return store, port
}

// takePart makes the calling goroutine a rank of a job on the CPU and runs collectives.
func takePart(ctx context.Context, o Options, e Environment) error {
	o.CPU, o.Environment = true, &e
	g, err := Init(ctx, o)
	if err != nil {
		return err
	}
	return errors.Join(exercise(g, cuda.CPU), g.Close())
}

// torchrun keeps the store when it restarts the ranks.
func TestStoreOfALauncher(t *testing.T) {
	_, port := launcherStore(t)
	for range 3 {
		startOfTwo(t, port)
	}
}

// startOfTwo runs two ranks that meet in a launcher's store.
func startOfTwo(t *testing.T, port int) {
	t.Helper()
	errs := make([]error, 2)
	var all sync.WaitGroup
	for rank := range errs {
		all.Go(func() {
			errs[rank] = takePart(t.Context(), quick,
				Environment{Launcher: "torchrun", Rank: rank, Size: 2, LocalRank: rank, LocalSize: 2,
					Address: "127.0.0.1",
					Port:    port, AgentStore: true})
		})
	}
	all.Wait()
	requireNone(t, errs)
}

// Each start has a unique name, which is part of the keys of its groups in the store. The store
// outlives the ranks. With the same keys, NCCL would read the ID that the rank 0 of an earlier
// start has stored.
func TestStartsHaveKeysOfTheirOwn(t *testing.T) {
	store, port := launcherStore(t)
	var starts []string
	for range 2 {
		startOfTwo(t, port)
		text, err := capi.GetStore(store, controlKey)
		if err != nil {
			t.Fatal(err)
		}
		var m meeting
		if err := json.Unmarshal(text, &m); err != nil {
			t.Fatal(err)
		}
		if address, err := capi.GetStore(store, m.Start+"/world/gloo/0/1"); err != nil || len(address) == 0 {
			t.Errorf("the address of rank 1 is not behind the name of its start: %v, len(address) %v, "+
				"want no error, len(address) at least 1", err, len(address))
		}
		starts = append(starts, m.Start)
	}
	if starts[0] == starts[1] {
		t.Errorf("the starts are %q, want two different", starts)
	}
}

// torchrun counts restarts for each host separately. Ranks connect even if their hosts have
// different counts. The counts differ, for example, if a host joins later, or restarts its ranks
// because of another host.
func TestRanksMeetDespiteDifferentRestartCounts(t *testing.T) {
	for name, agentStore := range map[string]string{"the launcher's store": "True", "rank 0's store": "False"} {
		t.Run(name, func(t *testing.T) {
			port := freePort(t)
			if agentStore == "True" {
				_, port = launcherStore(t)
			}
			errs := make([]error, 2)
			var all sync.WaitGroup
			for rank := range errs {
				variables := map[string]string{"RANK": strconv.Itoa(rank), "WORLD_SIZE": "2",
					"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
					"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": strconv.Itoa(port),
					"TORCHELASTIC_USE_AGENT_STORE": agentStore,
					"TORCHELASTIC_RESTART_COUNT":   strconv.Itoa(1 - rank)}
				all.Go(func() {
					e, err := ReadEnvironment(func(name string) string { return variables[name] })
					if err == nil {
						err = takePart(t.Context(), quick, e)
					}
					errs[rank] = err
				})
			}
			all.Wait()
			requireNone(t, errs)
		})
	}
}

// A new rank does not disturb processes of an earlier start that still run. When the rank 0 of its
// own start appears, the rank connects to it. Both ranks may exist at once, because a launcher on
// each host starts its ranks without waiting for the other hosts.
func TestRankIgnoresEarlierStart(t *testing.T) {
	times := control.Options{Interval: 20 * time.Millisecond, Silence: time.Minute}
	const token = "secret"
	for _, c := range []struct {
		name  string
		size  int  // size of the earlier start
		here  int  // number of the earlier start's ranks that have connected
		dies  bool // rank 1 of the earlier start is lost
		token string
	}{
		{"that goes on", 2, 2, false, token},
		{"that has failed", 2, 2, true, token},
		{"of other ranks", 3, 1, false, token},
		{"whose port another one has", 2, 2, false, "another"},
	} {
		t.Run(c.name, func(t *testing.T) {
			store, port := launcherStore(t)
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			h := control.NewHub(l, c.size, token, times)
			t.Cleanup(h.Close)
			earlier := make([]*control.Member, c.size)
			connect := func(rank int) {
				if earlier[rank], err = control.Dial(t.Context(), []string{l.Addr().String()}, token, rank,
					times); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(earlier[rank].Close)
			}
			requireTogether := func(seq uint64) {
				t.Helper()
				var all sync.WaitGroup
				for _, m := range earlier {
					all.Go(func() {
						if err := m.Arrive("job", []int{0, 1, 2}[:c.size],
							control.Call{Seq: seq, Name: "Barrier"}, false, patience); err != nil {
							t.Errorf("the earlier start: %v, want no error", err)
						}
					})
				}
				all.Wait()
			}
			for rank := range c.here {
				connect(rank)
			}
			if c.here == c.size {
				requireTogether(1)
			}
			if c.dies {
				earlier[1].Close()
				<-earlier[0].Failed()
			}
			announce(t, store, meeting{Addresses: []string{l.Addr().String()}, Token: c.token, Start: "1",
				Size: c.size})
			log := lockedBuffer{wake: make(chan struct{}, 1)}
			errs := make([]error, 2)
			var ranks sync.WaitGroup
			begin := func(rank int, o Options) {
				ranks.Go(func() {
					errs[rank] = takePart(t.Context(), o,
						Environment{Launcher: "torchrun", Rank: rank, Size: 2, LocalRank: rank, LocalSize: 2,
							Address: "127.0.0.1", Port: port, AgentStore: true})
				})
			}
			logged := quick
			logged.Log = slog.New(slog.NewTextHandler(&log, nil))
			begin(1, logged)
			select {
			case <-log.wake:
			case <-time.After(patience):
				t.Fatalf("after %v the new rank has logged nothing, want it to skip the earlier start",
					patience)
			}
			for rank := c.here; rank < c.size; rank++ {
				connect(rank)
			}
			if !c.dies {
				requireTogether(2)
			}
			begin(0, quick)
			ranks.Wait()
			requireNone(t, errs)
			if !c.dies {
				requireTogether(3)
			}
		})
	}
}

// announce writes the announcement of a rank 0 to the store.
func announce(t *testing.T, store *capi.Store, m meeting) {
	t.Helper()
	text, err := json.Marshal(m)
	if err == nil {
		err = capi.SetStore(store, controlKey, text)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// If a rank finds only the announcement of an earlier start, because its own rank 0 has not
// started, the error names that earlier start.
func TestEarlierStartIsNamed(t *testing.T) {
	store, port := launcherStore(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	announce(t, store, meeting{Addresses: []string{l.Addr().String()}, Start: "1", Size: 2})
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	go func() {
		if conn, err := l.Accept(); err == nil {
			conn.Close()
		}
		cancel(errors.New("the launcher ends"))
	}()
	o := quick
	o.CPU = true
	o.Environment = &Environment{Launcher: "torchrun", Rank: 1, Size: 2, LocalRank: 1, LocalSize: 2,
		Address: "127.0.0.1", Port: port, AgentStore: true}
	_, err = Init(ctx, o)
	if err == nil || !strings.Contains(err.Error(), "the launcher ends (the last announcement: ") {
		t.Error(err)
	}
}

func init() {
	workers["torchrun"] = func(ctx context.Context) error {
		g, err := Init(ctx, patient)
		if err != nil {
			return err
		}
		if err := exercise(g, cuda.CPU); err != nil {
			return err
		}
		return g.Close()
	}
}

// The test needs a Python with torch. LibTorch's own wheels do not help: they are for a Python
// version that most machines lack.
func TestTorchrunLaunches(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("needs python3")
	}
	if out, err := exec.Command(python, "-c", "import torch.distributed.run").CombinedOutput(); err != nil {
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		t.Skipf("needs a python3 with torch: %s", lines[len(lines)-1])
	}
	ctx, stop := context.WithTimeout(t.Context(), patience)
	defer stop()
	run := exec.CommandContext(ctx, python, "-m", "torch.distributed.run", "--standalone",
		"--local-addr=127.0.0.1", "--nproc-per-node=2", "--no-python", os.Args[0])
	run.Env = append(os.Environ(), workerVariable+"=torchrun")
	if out, err := run.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s\nwant no error", err, out)
	}
}
