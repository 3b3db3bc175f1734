package prefetcher

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// tableFields are the fields of the tests' samples: three copies of the sample's number, and a
// random number that depends on the epoch.
var tableFields = []torch.Spec{{Name: "numbers", DType: torch.Float32, Shape: []int64{3}},
	{Name: "drawn", DType: torch.Int64}}

func writeRow(i int, s *Sample) error {
	for k := range s.Float32("numbers") {
		s.Float32("numbers")[k] = float32(i)
	}
	s.Int64("drawn")[0] = s.Rand().Int64()
	return nil
}

// table returns a source of n samples.
func table(t testing.TB, n int, o SamplesOptions, write func(int, *Sample) error) *SampleSource {
	t.Helper()
	if write == nil {
		write = writeRow
	}
	s, err := Samples(n, tableFields, write, o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// tableBatch is a copy of a delivered batch.
type tableBatch struct {
	Indices []int
	Bytes   string // of all rows of all fields
	State   SampleState
}

// epochOf runs an epoch without a prefetcher, in slots that it allocates.
func epochOf(ctx context.Context, s *SampleSource, epoch, slots int) (batches []tableBatch, err error) {
	free, lent := make(chan [][]byte, slots), make(chan [][]byte, slots)
	for range slots {
		fields := make([][]byte, len(s.fields))
		for i, f := range s.fields {
			fields[i] = make([]byte, s.BatchSize()*int(f.Bytes()))
			for k := range fields[i] {
				fields[i][k] = 0xaa // must not be seen
			}
		}
		free <- fields
	}
	err = s.Fill(ctx, epoch, func(ctx context.Context) ([][]byte, error) {
		select {
		case f := <-free:
			lent <- f
			return f, nil
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}, func(n int, info any) error {
		f, b := <-lent, tableBatch{Indices: info.(SampleInfo).Indices, State: info.(SampleInfo).State}
		for i, spec := range s.fields {
			b.Bytes += string(f[i][:n*int(spec.Bytes())])
		}
		batches = append(batches, b)
		free <- f
		return nil
	})
	return batches, err
}

// rowsOf returns the indices of batches, and fails unless the memory has the same samples.
func rowsOf(t *testing.T, batches []tableBatch) (rows [][]int) {
	t.Helper()
	for _, b := range batches {
		rows = append(rows, b.Indices)
		for row, i := range b.Indices {
			for k := range 3 {
				got := math.Float32frombits(binary.NativeEndian.Uint32([]byte(b.Bytes[4*(3*row+k):])))
				if got != float32(i) {
					t.Fatalf("row %d has %v, want sample %d", row, got, i)
				}
			}
		}
	}
	return rows
}

func mustEpoch(t *testing.T, s *SampleSource, epoch int) []tableBatch {
	t.Helper()
	batches, err := epochOf(context.Background(), s, epoch, 3)
	if err != nil {
		t.Fatal(err)
	}
	rowsOf(t, batches)
	return batches
}

// bytesOf returns the content of batches without their states.
func bytesOf(batches []tableBatch) (s []string) {
	for _, b := range batches {
		s = append(s, fmt.Sprint(b.Indices, []byte(b.Bytes)))
	}
	return s
}

func TestSamplesAreInOrderWithoutShuffle(t *testing.T) {
	got := rowsOf(t, mustEpoch(t, table(t, 7, SamplesOptions{BatchSize: 3}, nil), 0))
	if want := [][]int{{0, 1, 2}, {3, 4, 5}, {6}}; !slices.EqualFunc(got, want, slices.Equal) {
		t.Errorf("got %v, want %v", got, want)
	}
	got = rowsOf(t, mustEpoch(t, table(t, 7, SamplesOptions{BatchSize: 3, DropLast: true}, nil), 0))
	if want := [][]int{{0, 1, 2}, {3, 4, 5}}; !slices.EqualFunc(got, want, slices.Equal) {
		t.Errorf("DropLast: got %v, want %v", got, want)
	}
	got = rowsOf(t, mustEpoch(t, table(t, 7, SamplesOptions{BatchSize: 3, PadLast: true}, nil), 0))
	if want := [][]int{{0, 1, 2}, {3, 4, 5}, {6, 0, 1}}; !slices.EqualFunc(got, want, slices.Equal) {
		t.Errorf("PadLast: got %v, want %v", got, want)
	}
}

// Elements that the function does not write are 0, even in a slot that an earlier batch has used.
func TestRowsStartAtZero(t *testing.T) {
	for _, b := range mustEpoch(t, table(t, 9, SamplesOptions{BatchSize: 4}, func(i int, s *Sample) error {
		copy(s.Float32("numbers"), []float32{float32(i), float32(i), float32(i)})
		return nil
	}), 0) {
		if got := b.Bytes[12*len(b.Indices):]; strings.Trim(got, "\x00") != "" {
			t.Errorf("the field that was not written has %q, want zeros", got)
		}
	}
}

// A shuffled epoch has every sample once. Its bytes depend on the seed and the epoch, not on the
// number of workers, the slots or the time that samples take.
func TestShuffledSamplesDependOnSeedAndEpochAlone(t *testing.T) {
	const n = 1000
	slow := func(i int, s *Sample) error {
		for range i * 7919 % 5 {
			runtime.Gosched()
		}
		return writeRow(i, s)
	}
	seen := map[string]bool{}
	for seed := range uint64(2) {
		for epoch := range 2 {
			var first []string
			for _, workers := range []int{1, 2, 16} {
				for _, slots := range []int{1, 4} {
					s := table(t, n, SamplesOptions{BatchSize: 32, Shuffle: true, Seed: seed, Workers: workers}, slow)
					batches, err := epochOf(context.Background(), s, epoch, slots)
					if err != nil {
						t.Fatal(err)
					}
					all := slices.Concat(rowsOf(t, batches)...)
					slices.Sort(all)
					for i, v := range all {
						if i != v || len(all) != n {
							t.Fatalf("%d samples, the %dth is %d, want each of %d once", len(all), i, v, n)
						}
					}
					if first == nil {
						first = bytesOf(batches)
					} else if got := bytesOf(batches); !slices.Equal(got, first) {
						t.Errorf("%d workers and %d slots gave other batches than 1 and 1", workers, slots)
					}
				}
			}
			if order := strings.Join(first, ""); seen[order] {
				t.Errorf("seed %d, epoch %d has the order of another", seed, epoch)
			} else {
				seen[order] = true
			}
		}
	}
}

// Weighted draws follow the weights: sample 2 has three quarters of them, and sample 0 none.
func TestSamplesAreDrawnByWeight(t *testing.T) {
	const n = 4000
	weights := []float64{0, 1, 3}
	s := table(t, n, SamplesOptions{BatchSize: 100, Weights: func(i int) float64 { return weights[i%3] }}, nil)
	var counts [3]int
	random := map[string]bool{}
	for _, b := range mustEpoch(t, s, 0) {
		for row, i := range b.Indices {
			counts[i%3]++
			random[b.Bytes[12*100+8*row:][:8]] = true
		}
	}
	if share := float64(counts[2]) / n; counts[0] != 0 || share < 0.72 || share > 0.78 {
		t.Errorf("draws %v, want none of the first and three quarters of the last", counts)
	}
	if len(random) != n {
		t.Errorf("%d different random numbers in %d draws, want another in each", len(random), n)
	}
}

// Ranks share an epoch: rank r of w takes positions r, r+w, ... of the sequence that one process
// has, and all ranks have equally many batches of the same sizes.
func TestRanksShareTheSamplesOfAnEpoch(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 60 {
		n, world, size := 1+rng.IntN(50), 1+rng.IntN(4), 1+rng.IntN(6)
		o := SamplesOptions{BatchSize: size, Shuffle: true, Seed: 5, World: world}
		switch rng.IntN(3) {
		case 1:
			o.DropLast = true
		case 2:
			o.PadLast = true
		}
		one := slices.Concat(rowsOf(t, mustEpoch(t, table(t, n, SamplesOptions{Shuffle: true, Seed: 5}, nil), 2))...)
		each := (n + world - 1) / world
		switch {
		case o.DropLast && world == 1:
			each = n / size * size
		case o.DropLast:
			each = n / world / size * size
		case o.PadLast:
			each = (each + size - 1) / size * size
		}
		for rank := range world {
			o.Rank = rank
			s := table(t, n, o, nil)
			batches, err := epochOf(context.Background(), s, 2, 3)
			if each == 0 {
				if !errors.Is(err, ErrNoSamples) {
					t.Fatalf("%d samples for %+v: got %v, want ErrNoSamples", n, o, err)
				}
				continue
			}
			if err != nil {
				t.Fatalf("%d samples for %+v: %v", n, o, err)
			}
			var want []int
			for turn := range each {
				want = append(want, one[(rank+turn*world)%n])
			}
			got := slices.Concat(rowsOf(t, batches)...)
			if !slices.Equal(got, want) {
				t.Fatalf("%d samples, rank %d of %+v:\n got %v\nwant %v", n, rank, o, got, want)
			}
			if b := (each + size - 1) / size; len(batches) != b || s.Batches() != b {
				t.Fatalf("%d samples, %+v: %d batches and Batches() = %d, want %d", n, o, len(batches), s.Batches(), b)
			}
		}
	}
}

var errBad = errors.New("no good")

// badTable makes some samples bad.
func badTable(isBad func(int) bool) func(int, *Sample) error {
	return func(i int, s *Sample) error {
		if isBad(i) {
			s.Float32("numbers")[0] = -1
			if i%2 == 0 {
				panic(errBad)
			}
			return fmt.Errorf("row %d: %w", i, errBad)
		}
		return writeRow(i, s)
	}
}

// modelOf returns the batches of n samples in order, as the policies define them.
func modelOf(n, size int, policy BadSamplePolicy, isBad func(int) bool) (rows [][]int, fails bool) {
	var row []int
	for i := range n {
		switch {
		case isBad(i) && policy == Skip:
			continue
		case isBad(i) && policy == Fail:
			if len(row) > 0 {
				rows = append(rows, row)
			}
			return rows, true
		}
		if row = append(row, i); len(row) == size || i == n-1 {
			rows, row = append(rows, row), nil
		}
	}
	if len(row) > 0 {
		rows = append(rows, row)
	}
	for _, row := range rows { // Substitute
		good := slices.IndexFunc(row, func(i int) bool { return !isBad(i) })
		for k, i := range row {
			if !isBad(i) {
				good = k
				continue
			}
			row[k] = row[good]
		}
	}
	return rows, false
}

func TestBadSamplesFollowThePolicy(t *testing.T) {
	const n, size = 100, 8
	for _, policy := range []BadSamplePolicy{Fail, Skip, Substitute} {
		for name, isBad := range map[string]func(int) bool{
			"none":  func(int) bool { return false },
			"first": func(i int) bool { return i == 0 },
			"last":  func(i int) bool { return i == n-1 },
			"some":  func(i int) bool { return i%13 == 5 },
			"most":  func(i int) bool { return i%8 != 3 && i < 96 || i == 97 },
		} {
			want, fails := modelOf(n, size, policy, isBad)
			for _, workers := range []int{1, 8} {
				for _, slots := range []int{1, 3} {
					s := table(t, n, SamplesOptions{BatchSize: size, Workers: workers, BadSamples: policy}, badTable(isBad))
					got, err := epochOf(context.Background(), s, 0, slots)
					var bad *SampleError
					if fails != (err != nil) || fails && (!errors.As(err, &bad) || !errors.Is(err, errBad) || !isBad(bad.Index)) {
						t.Fatalf("%v, %s bad: error %v, want one that names a bad sample: %v", policy, name, err, fails)
					}
					if rows := rowsOf(t, got); !slices.EqualFunc(rows, want, slices.Equal) {
						t.Fatalf("%v, %s bad:\n got %v\nwant %v", policy, name, rows, want)
					}
				}
			}
		}
	}
}

// Under Skip every rank has as many batches as the others, also if all bad samples are one rank's.
func TestRanksWithBadSamplesHaveEquallyManyBatches(t *testing.T) {
	const n, world = 40, 2
	for rank := range world {
		s := table(t, n, SamplesOptions{BatchSize: 4, World: world, Rank: rank, BadSamples: Skip},
			badTable(func(i int) bool { return i%2 == 0 && i < 20 }))
		got := mustEpoch(t, s, 0)
		if len(got) != 5 || len(got[4].Indices) != 4 {
			t.Errorf("rank %d: %d batches, want 5 of 4 samples", rank, len(got))
		}
		if rank == 0 && s.BadSamples() < 10 {
			t.Errorf("BadSamples() = %d, want at least 10", s.BadSamples())
		}
	}
	_, err := epochOf(context.Background(), table(t, n, SamplesOptions{BadSamples: Skip},
		badTable(func(int) bool { return true })), 0, 2)
	if !errors.Is(err, ErrNoSamples) || !errors.Is(err, errBad) {
		t.Errorf("only bad samples: got %v, want ErrNoSamples with the last error", err)
	}
}

// saved returns a state as another process reads it.
func saved(t *testing.T, s SampleState) (back SampleState) {
	t.Helper()
	text, err := json.Marshal(s)
	if err == nil {
		err = json.Unmarshal(text, &back)
	}
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return back
}

// An epoch that continues after any of its batches has the bytes of the undisturbed one.
func TestResumedSamplesEqualTheUndisturbedRun(t *testing.T) {
	for name, o := range map[string]SamplesOptions{
		"in order":   {BatchSize: 5},
		"shuffled":   {BatchSize: 5, Shuffle: true, Seed: 3, Data: "rows.csv"},
		"weighted":   {BatchSize: 5, Weights: func(i int) float64 { return float64(i) }},
		"skip":       {BatchSize: 5, Shuffle: true, BadSamples: Skip},
		"substitute": {BatchSize: 5, Shuffle: true, BadSamples: Substitute},
		"rank":       {BatchSize: 5, Shuffle: true, World: 3, Rank: 1, BadSamples: Skip},
		"padded":     {BatchSize: 5, Shuffle: true, World: 2, PadLast: true},
	} {
		var isBad func(int) bool = func(i int) bool { return i%11 == 4 }
		if o.BadSamples == Fail {
			isBad = func(int) bool { return false }
		}
		whole := mustEpoch(t, table(t, 48, o, badTable(isBad)), 4)
		want := bytesOf(whole)
		for done := range whole {
			o := o
			o.Workers = 1 + done%3
			s := table(t, 48, o, badTable(isBad))
			state := saved(t, whole[done].State)
			if state.Epoch() != 4 || state.Batches() != done+1 {
				t.Errorf("%s: state of epoch %d after %d batches, want 4 and %d", name, state.Epoch(), state.Batches(), done+1)
			}
			if err := s.Restore(state); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			rest, err := epochOf(context.Background(), s, 4, 2)
			if err != nil {
				t.Fatalf("%s after batch %d: %v", name, done, err)
			}
			if got := bytesOf(rest); !slices.Equal(got, want[done+1:]) {
				t.Errorf("%s after batch %d: the rest differs:\n got %v\nwant %v", name, done, got, want[done+1:])
			}
			for i, b := range rest { // a state after a resume continues as well
				if a, b := mark(b.State), mark(whole[done+1+i].State); a != b {
					t.Errorf("%s: state %s after a resume, want %s", name, a, b)
				}
			}
			if got, err := epochOf(context.Background(), s, 5, 2); err != nil || len(got) < len(whole) {
				t.Errorf("%s: the next epoch has %d batches, %v, want a whole one", name, len(got), err)
			}
			if err := s.Restore(); err != nil {
				t.Fatal(err)
			}
			if got := bytesOf(mustEpoch(t, s, 4)); !slices.Equal(got, want) {
				t.Errorf("%s: Restore() without a state does not undo it", name)
			}
		}
	}
}

func mark(s SampleState) string { return fmt.Sprint(s.mark()) }

// With another number of ranks the rest of the epoch is dealt again: each sample that was in no
// batch is in one.
func TestResumeWithOtherRanksDealsTheRestAgain(t *testing.T) {
	const n = 60
	for _, change := range [][2]int{{2, 1}, {1, 3}, {3, 2}} {
		was, is := change[0], change[1]
		var states []SampleState
		taken := map[int]int{}
		for rank := range was {
			s := table(t, n, SamplesOptions{BatchSize: 4, Shuffle: true, World: was, Rank: rank}, nil)
			batches := mustEpoch(t, s, 1)[:2]
			states = append(states, saved(t, batches[1].State))
			for _, i := range slices.Concat(rowsOf(t, batches)...) {
				taken[i]++
			}
		}
		for rank := range is {
			s := table(t, n, SamplesOptions{BatchSize: 6, Shuffle: true, World: is, Rank: rank}, nil)
			if err := s.Restore(states...); err != nil {
				t.Fatal(err)
			}
			for _, i := range slices.Concat(rowsOf(t, mustEpoch(t, s, 1))...) {
				taken[i]++
			}
		}
		total := 0
		for i := range n {
			if taken[i] == 0 {
				t.Errorf("%d ranks, then %d: sample %d is in no batch", was, is, i)
			}
			total += taken[i]
		}
		if total > n+is-1 { // padding alone repeats samples
			t.Errorf("%d ranks, then %d: %d rows, want %d and up to %d of padding", was, is, total, n, is-1)
		}
	}
}

func TestRestoreRefusesStatesOfOtherSamples(t *testing.T) {
	o := SamplesOptions{BatchSize: 4, Seed: 1, Data: "a"}
	state := mustEpoch(t, table(t, 20, o, nil), 0)[1].State
	with := func(change func(*SamplesOptions)) SamplesOptions { o := o; change(&o); return o }
	for want, s := range map[string]*SampleSource{
		"n is 21 here, and was 20":         table(t, 21, o, nil),
		"Seed is 2 here, and was 1":        table(t, 20, with(func(o *SamplesOptions) { o.Seed = 2 }), nil),
		`Data is "b" here, and was "a"`:    table(t, 20, with(func(o *SamplesOptions) { o.Data = "b" }), nil),
		"BatchSize is 5 here, and was 4":   table(t, 20, with(func(o *SamplesOptions) { o.BatchSize = 5 }), nil),
		"Shuffle is true here":             table(t, 20, with(func(o *SamplesOptions) { o.Shuffle = true }), nil),
		"BadSamples is skip here, and was": table(t, 20, with(func(o *SamplesOptions) { o.BadSamples = Skip }), nil),
		"Weights is ":                      table(t, 20, with(func(o *SamplesOptions) { o.Weights = func(int) float64 { return 1 } }), nil),
	} {
		if err := s.Restore(saved(t, state)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
	s := table(t, 20, o, nil)
	if err := s.Restore(SampleState{}); err == nil {
		t.Error("Restore of the zero state: got no error, want one")
	}
	if _, err := json.Marshal(SampleState{}); err == nil {
		t.Error("Marshal of the zero state: got no error, want one")
	}
	text, err := json.Marshal(state)
	if err != nil {
		t.Fatal(err)
	}
	for _, change := range [][2]string{{`"version":1`, `"version":9`}, {`"world":1`, `"world":0`}, {`"turns":8`, `"turns":-8`},
		{`"turns":8`, `"turns":88`}, {`"order":"archive"`, `"order":"?"`}, {`"epoch":0`, `"epoch":"x"`},
		{`"next":0`, `"next":21`}} {
		damaged := strings.Replace(string(text), change[0], change[1], 1)
		if damaged == string(text) {
			t.Fatalf("%s has no %s", text, change[0])
		}
		var back SampleState
		if err := json.Unmarshal([]byte(damaged), &back); err == nil && s.Restore(back) == nil {
			t.Errorf("%s for %s: got no error, want one", change[1], change[0])
		}
	}
}

func TestPanicNamesTheSample(t *testing.T) {
	s := table(t, 20, SamplesOptions{BatchSize: 4}, func(i int, s *Sample) error {
		if i == 13 {
			s.Float32("numbers")[i] = 1 // out of range
		}
		return writeRow(i, s)
	})
	got, err := epochOf(context.Background(), s, 0, 2)
	var bad *SampleError
	var runtimeError runtime.Error
	if !errors.As(err, &bad) || bad.Index != 13 || !errors.As(err, &runtimeError) ||
		!strings.Contains(err.Error(), "sample 13: the function panicked") || !strings.Contains(err.Error(), "samples_test.go") {
		t.Errorf("got %v, want an error of sample 13 with the panic and its stack", err)
	}
	if rows := rowsOf(t, got); len(rows) != 4 || len(rows[3]) != 1 {
		t.Errorf("batches %v before sample 13, want 3 of 4 and 1 of 1", rows)
	}
	s = table(t, 20, SamplesOptions{BatchSize: 4, BadSamples: Skip}, func(i int, s *Sample) error {
		if i == 3 {
			runtime.Goexit()
		}
		return writeRow(i, s)
	})
	if _, err := epochOf(context.Background(), s, 0, 2); err == nil || !strings.Contains(err.Error(), "sample 3: ") {
		t.Errorf("runtime.Goexit: got %v, want an error that names sample 3", err)
	}
}

// A wrong name or type of a field ends the epoch under every policy, before the panic that follows.
func TestWrongFieldEndsTheEpoch(t *testing.T) {
	for want, write := range map[string]func(int, *Sample) error{
		`sample 5: there is no field "number"`: func(_ int, s *Sample) error { s.Float32("number")[0] = 1; return nil },
		`sample 5: field "numbers" is float32, not float64`: func(_ int, s *Sample) error {
			copy(s.Float64("numbers"), []float64{1})
			return nil
		},
		`sample 5: there is no field "x"`: func(_ int, s *Sample) error { s.Bytes("x"); return errBad },
	} {
		s := table(t, 8, SamplesOptions{BatchSize: 4, BadSamples: Skip}, func(i int, s *Sample) error {
			if i < 5 {
				return writeRow(i, s)
			}
			return write(i, s)
		})
		if _, err := epochOf(context.Background(), s, 0, 2); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
}

// A cancelled context ends the epoch, also while functions wait and while no slot is free.
func TestCancelledContextEndsTheSamples(t *testing.T) {
	why := errors.New("enough")
	ctx, cancel := context.WithCancelCause(context.Background())
	var waiting atomic.Int32
	s := table(t, 100, SamplesOptions{BatchSize: 4, Workers: 3}, func(i int, s *Sample) error {
		if i >= 8 {
			if waiting.Add(1) == 3 {
				cancel(why)
			}
			<-s.Context().Done()
			return context.Cause(s.Context())
		}
		return writeRow(i, s)
	})
	if _, err := epochOf(ctx, s, 0, 8); !errors.Is(err, why) {
		t.Errorf("functions wait: got %v, want the cause %v", err, why)
	}
	ctx, cancel = context.WithCancelCause(context.Background())
	s = table(t, 100, SamplesOptions{BatchSize: 4}, nil)
	err := s.Fill(ctx, 0, func(ctx context.Context) ([][]byte, error) {
		cancel(why)
		<-ctx.Done()
		return nil, context.Cause(ctx)
	}, func(int, any) error { return nil })
	if !errors.Is(err, why) {
		t.Errorf("no slot: got %v, want the cause %v", err, why)
	}
	full := errors.New("full")
	err = s.Fill(context.Background(), 0, func(context.Context) ([][]byte, error) {
		return [][]byte{make([]byte, 48), make([]byte, 32)}, nil
	}, func(int, any) error { return full })
	if !errors.Is(err, full) {
		t.Errorf("deliver fails: got %v, want %v", err, full)
	}
	err = s.Fill(context.Background(), 0, func(context.Context) ([][]byte, error) {
		return [][]byte{make([]byte, 48), make([]byte, 31)}, nil
	}, func(int, any) error { return nil })
	if err == nil || !strings.Contains(err.Error(), `32 bytes for the field "drawn"`) {
		t.Errorf("short slot: got %v, want an error that names the field", err)
	}
}

// All rows start at 0, and each type has the memory that its name says.
func TestFieldsOfEachTypeReachTheTensors(t *testing.T) {
	fields := []torch.Spec{
		{Name: "u8", DType: torch.Uint8, Shape: []int64{3}}, {Name: "i8", DType: torch.Int8},
		{Name: "i16", DType: torch.Int16}, {Name: "i32", DType: torch.Int32}, {Name: "labels", DType: torch.Int64},
		{Name: "f32", DType: torch.Float32, Shape: []int64{2, 2}}, {Name: "f64", DType: torch.Float64},
		{Name: "ok", DType: torch.Bool}, {Name: "half", DType: torch.BFloat16},
	}
	s, err := Samples(5, fields, func(i int, s *Sample) error {
		copy(s.Uint8("u8"), []byte{byte(i), 2})
		s.Int8("i8")[0], s.Int16("i16")[0], s.Int32("i32")[0] = int8(-i), int16(-300*i), int32(-70000*i)
		s.Int64("labels")[0] = int64(i) << 40
		copy(s.Float32("f32"), []float32{0, 0.5, 1, float32(i)})
		s.Float64("f64")[0], s.Bool("ok")[0] = float64(i)+0.25, i%2 == 1
		binary.NativeEndian.PutUint16(s.Bytes("half"), uint16(math.Float32bits(float32(i))>>16))
		return nil
	}, SamplesOptions{BatchSize: 5})
	if err != nil {
		t.Fatal(err)
	}
	feed, err := New(s, Options{Device: cuda.CPU})
	if err != nil {
		t.Fatal(err)
	}
	defer feed.Close()
	want := []string{"[0 2 0 1 2 0 2 2 0 3 2 0 4 2 0]", "[0 -1 -2 -3 -4]", "[0 -300 -600 -900 -1200]",
		"[0 -70000 -140000 -210000 -280000]", "[0 1099511627776 2199023255552 3298534883328 4398046511104]",
		"[0 0.5 1 0 0 0.5 1 1 0 0.5 1 2 0 0.5 1 3 0 0.5 1 4]", "[0.25 1.25 2.25 3.25 4.25]", "[0 1 0 1 0]", "[0 1 2 3 4]"}
	for b, err := range feed.Epoch(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
		if b.Labels != b.Tensors()[4] || b.Images != nil {
			t.Error("Labels is not the field labels, or Images is not nil")
		}
		for i, tensor := range b.Tensors() {
			values, err := tensor.ToDType(torch.Float64).Flatten(0, -1).Float64s()
			if err != nil {
				t.Fatal(err)
			}
			got := fmt.Sprint(values)
			if i == 3 || i == 4 {
				whole, err := tensor.ToDType(torch.Int64).Int64s()
				if err != nil {
					t.Fatal(err)
				}
				got = fmt.Sprint(whole)
			}
			if got != want[i] {
				t.Errorf("%s: got %s, want %s", fields[i].Name, got, want[i])
			}
		}
	}
}

// A training loop resumes from the state in Batch.Info.
func TestBatchInfoHasTheStateOfSamples(t *testing.T) {
	o := SamplesOptions{BatchSize: 4, Shuffle: true}
	var state SampleState
	want := slices.Concat(rowsOf(t, mustEpoch(t, table(t, 30, o, nil), 0))...)
	var got []int
	read := func(s *SampleSource, batches int) {
		t.Helper()
		feed, err := New(s, Options{Device: cuda.CPU})
		if err != nil {
			t.Fatal(err)
		}
		defer feed.Close()
		for b, err := range feed.Epoch(t.Context(), 0) {
			if err != nil {
				t.Fatal(err)
			}
			info := b.Info.(SampleInfo)
			got, state = append(got, info.Indices...), info.State
			if batches--; batches == 0 {
				break
			}
		}
	}
	read(table(t, 30, o, nil), 3)
	s := table(t, 30, o, nil)
	if err := s.Restore(saved(t, state)); err != nil {
		t.Fatal(err)
	}
	read(s, -1)
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestSamplesChecksItsArguments(t *testing.T) {
	ok := func(int, *Sample) error { return nil }
	field := torch.Spec{Name: "x", DType: torch.Float32}
	for want, make := range map[string]func() (*SampleSource, error){
		"n is 0":       func() (*SampleSource, error) { return Samples(0, tableFields, ok, SamplesOptions{}) },
		"is nil":       func() (*SampleSource, error) { return Samples(1, tableFields, nil, SamplesOptions{}) },
		"no fields":    func() (*SampleSource, error) { return Samples(1, nil, ok, SamplesOptions{}) },
		`the name "x"`: func() (*SampleSource, error) { return Samples(1, []torch.Spec{field, field}, ok, SamplesOptions{}) },
		`the name ""`:  func() (*SampleSource, error) { return Samples(1, []torch.Spec{{}}, ok, SamplesOptions{}) },
		"has no elements": func() (*SampleSource, error) {
			return Samples(1, []torch.Spec{{Name: "x", DType: 99}}, ok, SamplesOptions{})
		},
		"BatchSize is -1": func() (*SampleSource, error) { return Samples(1, tableFields, ok, SamplesOptions{BatchSize: -1}) },
		"Workers is 9999": func() (*SampleSource, error) { return Samples(1, tableFields, ok, SamplesOptions{Workers: 9999}) },
		"Rank is 1":       func() (*SampleSource, error) { return Samples(1, tableFields, ok, SamplesOptions{Rank: 1}) },
		"exclude each other": func() (*SampleSource, error) {
			return Samples(1, tableFields, ok, SamplesOptions{DropLast: true, PadLast: true})
		},
		"not Fail, Skip": func() (*SampleSource, error) { return Samples(1, tableFields, ok, SamplesOptions{BadSamples: 7}) },
		"weight of sample 0": func() (*SampleSource, error) {
			return Samples(1, tableFields, ok, SamplesOptions{Weights: func(int) float64 { return -1 }})
		},
	} {
		if _, err := make(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
}

// Bad samples are logged with their policy.
func TestBadSamplesAreLogged(t *testing.T) {
	var b strings.Builder
	var mu sync.Mutex
	log := slog.New(slog.NewTextHandler(writerFunc(func(p []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		return b.Write(p)
	}), nil))
	s := table(t, 9, SamplesOptions{BatchSize: 3, BadSamples: Substitute, Logger: log}, badTable(func(i int) bool { return i == 7 }))
	mustEpoch(t, s, 0)
	if got := b.String(); strings.Count(got, "bad sample") != 1 || !strings.Contains(got, "policy=substitute") ||
		!strings.Contains(got, "sample 7: row 7: no good") {
		t.Errorf("the log is %q, want one line with the policy and sample 7", got)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// TestSamplesAreWrittenWithoutAllocations: an epoch allocates for each batch, not for each sample.
func TestSamplesAreWrittenWithoutAllocations(t *testing.T) {
	const n, size = 64 * 1024, 256
	s := table(t, n, SamplesOptions{BatchSize: size, Workers: 2}, nil)
	free, lent := make(chan [][]byte, 3), make(chan [][]byte, 3)
	for range 3 {
		free <- [][]byte{make([]byte, 12*size), make([]byte, 8*size)}
	}
	lend := func(context.Context) ([][]byte, error) { f := <-free; lent <- f; return f, nil }
	deliver := func(int, any) error { free <- <-lent; return nil }
	run := func() {
		if err := s.Fill(t.Context(), 0, lend, deliver); err != nil {
			t.Error(err)
		}
	}
	run()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	run()
	runtime.ReadMemStats(&after)
	if got, limit := after.Mallocs-before.Mallocs, uint64(20*n/size); got > limit {
		t.Errorf("%d allocations for %d samples in %d batches, want at most %d", got, n, n/size, limit)
	}
}

func BenchmarkSamples(b *testing.B) {
	s := table(b, b.N, SamplesOptions{BatchSize: 256, Shuffle: true}, func(i int, s *Sample) error {
		s.Float32("numbers")[0] = float32(i)
		s.Int64("drawn")[0] = int64(i)
		return nil
	})
	free, lent := make(chan [][]byte, 3), make(chan [][]byte, 3)
	for range 3 {
		free <- [][]byte{make([]byte, 12*256), make([]byte, 8*256)}
	}
	b.ReportAllocs()
	if err := s.Fill(b.Context(), 0, func(context.Context) ([][]byte, error) { f := <-free; lent <- f; return f, nil },
		func(int, any) error { free <- <-lent; return nil }); err != nil {
		b.Fatal(err)
	}
}
