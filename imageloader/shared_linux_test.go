package imageloader

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

var sharedKills = flag.Int("shared-kills", 25, "how many processes TestKillsOfProcessesThatShare kills")

// sharedVariable makes TestKillsOfProcessesThatShare and TestProcessesShareTheirMemory a process
// that loads. Its value is RANK:WORLD:SHARE:EPOCHS:ARCHIVE.
const sharedVariable = "TORCHSTREAM_TEST_SHARED"

func sharedOptions(path string, rank, world int, share bool) Options {
	return Options{BatchSize: 16, Transform: Train(16), Shuffle: true, Seed: 7, Workers: 2, ShuffleBytes: 1 << 30,
		Rank: rank, World: world, ShareOnHost: share, IndexFile: path + ".tsidx"}
}

// makeSharedIndex makes the index that sharedOptions names.
func makeSharedIndex(t *testing.T, path string) {
	t.Helper()
	l := openFake(t, path, Options{IndexFile: path + ".tsidx", ShuffleBytes: 1})
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

// recompressed writes the tar of a .tar.gz of stored blocks as .tar.zst.
func recompressed(t *testing.T, path string) string {
	t.Helper()
	data, err := exec.CommandContext(t.Context(), "gzip", "-dc", path).Output()
	if err != nil {
		t.Fatal(err)
	}
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(t.TempDir(), "a.tar.zst")
	if err := os.WriteFile(out, w.EncodeAll(data, nil), 0o600); err != nil {
		t.Fatal(err)
	}
	return out
}

// TestSharedMemoryChangesNoBatch: loaders that share their samples give the batches of loaders that
// do not, however the samples get into memory.
func TestSharedMemoryChangesNoBatch(t *testing.T) {
	gz := heldArchive(t, 300, 3000)
	zst := recompressed(t, gz)
	classes := []string{"class0", "class1", "class2", "class3", "class4"}
	for _, c := range []struct {
		name, path string
		index      bool
		classes    []string
	}{
		{"gz with an index", gz, true, nil}, {"gz, read by Open", gz, false, nil}, {"gz, read by an epoch", gz, false, classes},
		{"zst with an index", zst, true, nil}, {"zst, read by Open", zst, false, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, world := range []int{1, 2, 4} {
				var digests [2][]string // without and with sharing, of each epoch and rank
				for k := range digests {
					var loaders []*Loader
					for rank := range world {
						o := sharedOptions(c.path, rank, world, k == 1)
						o.Classes, o.IndexFile = c.classes, ""
						if c.index {
							o.IndexFile = filepath.Join(t.TempDir(), "index")
						}
						loaders = append(loaders, openFake(t, c.path, o))
					}
					for epoch := range 2 {
						for _, l := range loaders {
							batches, err := collect(t, l, epoch, 3)
							if err != nil {
								t.Fatal(err)
							}
							digests[k] = append(digests[k], digest(batches))
						}
					}
					for _, l := range loaders {
						if err := l.Close(); err != nil {
							t.Fatal(err)
						}
					}
				}
				if !slices.Equal(digests[0], digests[1]) {
					t.Errorf("%d ranks: shared %v, want %v", world, digests[1], digests[0])
				}
			}
		})
	}
}

// countedFile counts the bytes that are read.
type countedFile struct {
	archive.File
	read *atomic.Int64
}

func (f countedFile) Read(p []byte) (int, error) {
	n, err := f.File.Read(p)
	f.read.Add(int64(n))
	return n, err
}

func (f countedFile) ReadAt(p []byte, at int64) (int, error) {
	n, err := f.File.ReadAt(p, at)
	f.read.Add(int64(n))
	return n, err
}

// TestRanksReadSharedSamplesOnce: four ranks that share read as much of the archive together as one
// process that loads all samples. Without sharing, each of them reads most of it.
func TestRanksReadSharedSamplesOnce(t *testing.T) {
	path := heldArchive(t, 1000, 10_000)
	makeSharedIndex(t, path)
	read := func(world int, share bool) int64 {
		var read atomic.Int64
		file := func(path string) (archive.File, error) {
			f, err := openFile(path)
			return countedFile{f, &read}, err
		}
		var loaders []*Loader
		for rank := range world {
			l, err := open(t.Context(), path, sharedOptions(path, rank, world, share), file, fakeCodec{})
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			loaders = append(loaders, l)
		}
		read.Store(0)
		for _, l := range loaders {
			if _, err := collect(t, l, 0, 3); err != nil {
				t.Fatal(err)
			}
		}
		return read.Load()
	}
	alone, separate, shared := read(1, false), read(4, false), read(4, true)
	if separate < 3*alone || shared > alone+alone/4 {
		t.Errorf("one process reads %d bytes, four %d without sharing and %d with, want at least %d and at most %d",
			alone, separate, shared, 3*alone, alone+alone/4)
	}
	t.Logf("one process reads %d bytes, four %d without sharing and %d with", alone, separate, shared)
}

// loadShared runs in a child process. It prints a digest for each epoch. When a line arrives, it
// prints its share of resident memory.
func loadShared(t *testing.T, value string) {
	f := strings.SplitN(value, ":", 5)
	var n [4]int
	for i := range n {
		var err error
		if n[i], err = strconv.Atoi(f[i]); err != nil {
			t.Fatal(err)
		}
	}
	l := openFake(t, f[4], sharedOptions(f[4], n[0], n[1], n[2] == 1))
	for epoch := range n[3] {
		batches, err := collect(t, l, epoch, 3)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Println("epoch", epoch, digest(batches))
	}
	fmt.Println("done")
	in := bufio.NewScanner(os.Stdin)
	if in.Scan() {
		text, err := os.ReadFile("/proc/self/smaps_rollup")
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if rest, ok := strings.CutPrefix(line, "Pss:"); ok {
				fmt.Println("pss", strings.Fields(rest)[0])
			}
		}
		in.Scan() // the other processes measure
	}
}

// sharedProcess is a process of loadShared.
type sharedProcess struct {
	c   *exec.Cmd
	out *bufio.Scanner
}

func startShared(ctx context.Context, test, path string, rank, world, epochs int, share bool) (*sharedProcess, func(string) error, error) {
	p := &sharedProcess{c: exec.CommandContext(ctx, os.Args[0], "-test.run=^"+test+"$", "-test.count=1")}
	sharing := 0
	if share {
		sharing = 1
	}
	p.c.Env = append(os.Environ(), fmt.Sprintf("%s=%d:%d:%d:%d:%s", sharedVariable, rank, world, sharing, epochs, path))
	in, err := p.c.StdinPipe()
	if err != nil {
		return nil, nil, err
	}
	out, err := p.c.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	p.c.Stderr = os.Stderr
	p.out = bufio.NewScanner(out)
	say := func(line string) error {
		_, err := fmt.Fprintln(in, line)
		return err
	}
	return p, say, p.c.Start()
}

// line returns the next line that starts with the word, without it.
func (p *sharedProcess) line(word string) (string, error) {
	for p.out.Scan() {
		if rest, ok := strings.CutPrefix(p.out.Text(), word); ok {
			return strings.TrimSpace(rest), nil
		}
	}
	return "", errors.Join(fmt.Errorf("the process ended without a line %q", word), p.out.Err())
}

// TestProcessesShareTheirMemory: four processes that share hold at most 0.4 of the resident memory
// of four that do not. After ten epochs nearly every rank has had nearly every sample.
func TestProcessesShareTheirMemory(t *testing.T) {
	if underRace {
		t.Skip("the race detector's memory is larger than the archive")
	}
	if value := os.Getenv(sharedVariable); value != "" {
		loadShared(t, value)
		return
	}
	const world = 4
	path := heldArchive(t, 1500, 100_000)
	makeSharedIndex(t, path)
	var total [2]int
	for k := range total {
		var says []func(string) error
		var all []*sharedProcess
		for rank := range world {
			p, say, err := startShared(t.Context(), t.Name(), path, rank, world, 10, k == 1)
			if err != nil {
				t.Fatal(err)
			}
			all, says = append(all, p), append(says, say)
		}
		for _, p := range all {
			if _, err := p.line("done"); err != nil {
				t.Fatal(err)
			}
		}
		for i, p := range all { // all processes have their memory
			if err := says[i]("measure"); err != nil {
				t.Fatal(err)
			}
			text, err := p.line("pss")
			if err != nil {
				t.Fatal(err)
			}
			kib, err := strconv.Atoi(text)
			if err != nil {
				t.Fatal(err)
			}
			total[k] += kib
		}
		for i, p := range all {
			if err := errors.Join(says[i]("end"), p.c.Wait()); err != nil {
				t.Error(err)
			}
		}
	}
	share := float64(total[1]) / float64(total[0])
	t.Logf("four processes hold %d MiB without sharing, %d with: %.2f", total[0]>>10, total[1]>>10, share)
	if share > 0.4 {
		t.Errorf("the processes hold %.2f of the memory without sharing, want at most 0.4", share)
	}
}

// TestKillsOfProcessesThatShare kills processes that share at any time. The others and new ones
// give the right batches, and nothing is left of the memory.
func TestKillsOfProcessesThatShare(t *testing.T) {
	if value := os.Getenv(sharedVariable); value != "" {
		loadShared(t, value)
		return
	}
	t.Parallel()
	const world, epochs = 4, 2
	kills := *sharedKills
	if testing.Short() {
		kills = min(kills, 8)
	}
	for name, path := range map[string]string{"gz": heldArchive(t, 200, 20_000), "zst": recompressed(t, heldArchive(t, 200, 20_000))} {
		t.Run(name, func(t *testing.T) {
			makeSharedIndex(t, path)
			want := map[string]string{}
			for rank := range world {
				l := openFake(t, path, sharedOptions(path, rank, world, false))
				for epoch := range epochs {
					batches, err := collect(t, l, epoch, 3)
					if err != nil {
						t.Fatal(err)
					}
					want[fmt.Sprint(rank, epoch)] = digest(batches)
				}
				if err := l.Close(); err != nil {
					t.Fatal(err)
				}
			}
			killShared(t, strings.Split(t.Name(), "/")[0], path, world, epochs, kills/2, want)
			if text, err := os.ReadFile("/proc/net/unix"); err != nil || strings.Contains(string(text), sharedSocket(t, path)) {
				t.Errorf("after the last process: error %v, socket left: %v, want nil, false", err,
					strings.Contains(string(text), sharedSocket(t, path)))
			}
		})
	}
}

// sharedSocket returns the end of the name of the socket of the archive's memory.
func sharedSocket(t *testing.T, path string) string {
	t.Helper()
	l := openFake(t, path, sharedOptions(path, 0, 1, false))
	defer l.Close()
	return "-" + l.index.Load().SharedName(l.o.MaxSampleBytes) + "\n"
}

// killer kills processes at any time, a number of times in all.
type killer struct {
	left, killed, compared atomic.Int64
	want                   map[string]string // digests by rank and epoch
}

// killShared keeps one process of each rank running, compares their digests, and kills as many as
// kills says.
func killShared(t *testing.T, test, path string, world, epochs, kills int, want map[string]string) {
	t.Helper()
	k := killer{want: want}
	k.left.Store(int64(kills))
	errs := make(chan error, world)
	for rank := range world {
		random := rand.New(rand.NewPCG(uint64(rank), uint64(kills)))
		go func() {
			var err error
			for err == nil && k.left.Load() > 0 {
				var p *sharedProcess
				var say func(string) error
				if p, say, err = startShared(t.Context(), test, path, rank, world, epochs, true); err == nil {
					err = k.run(p, say, rank, time.Duration(random.IntN(300))*time.Millisecond)
				}
			}
			errs <- err
		}()
	}
	for range world {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	t.Logf("%d kills, %d epochs compared", k.killed.Load(), k.compared.Load())
	if k.compared.Load() == 0 {
		t.Error("no epoch was compared")
	}
}

// run compares what a process prints until it ends or is killed, which happens after the delay.
func (k *killer) run(p *sharedProcess, say func(string) error, rank int, delay time.Duration) error {
	var shot atomic.Bool
	timer := time.AfterFunc(delay, func() {
		if k.left.Add(-1) >= 0 {
			k.killed.Add(1)
			shot.Store(true)
			_ = p.c.Process.Kill() // it may have ended
		}
	})
	defer timer.Stop()
	for p.out.Scan() && p.out.Text() != "done" {
		var epoch int
		var got string
		if n, _ := fmt.Sscanf(p.out.Text(), "epoch %d %s", &epoch, &got); n != 2 {
			continue
		}
		if want := k.want[fmt.Sprint(rank, epoch)]; got != want {
			return fmt.Errorf("rank %d, epoch %d: digest %s, want %s", rank, epoch, got, want)
		}
		k.compared.Add(1)
	}
	for range 2 {
		_ = say("end") // it may have been killed
	}
	if err := p.c.Wait(); err != nil && !shot.Load() {
		return fmt.Errorf("rank %d was not killed: %w", rank, err)
	}
	return nil
}
