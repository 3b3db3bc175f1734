//go:build linux

package imageloader

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"expvar"
	"fmt"
	"image/gif"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/imageloader/transform"
)

// TestBottleneckNamesTheSlowStage: Bottleneck names the stage that the other stages wait for.
func TestBottleneckNamesTheSlowStage(t *testing.T) {
	for name, c := range map[string]struct {
		s    Stats
		want Stage
		says string
	}{
		"nothing": {Stats{Workers: 2}, "", "too few"},
		"decode": {Stats{Workers: 4, Batches: 9, Elapsed: time.Second, Decode: 3900 * time.Millisecond,
			WaitSlot: 300 * time.Millisecond}, Decoding, "more CPUs"},
		"read": {Stats{Workers: 4, Batches: 9, Elapsed: time.Second, Decode: time.Second,
			WaitData: 3 * time.Second, Read: time.Second}, Reading, "wait for samples 75 %"},
		"nobody": {Stats{Workers: 2, Batches: 9, Elapsed: time.Second, Decode: time.Second,
			WaitData: 400 * time.Millisecond, Read: 20 * time.Millisecond}, "", "no stage"},
		"inflate": {Stats{Workers: 4, Batches: 9, Elapsed: time.Second, Decode: time.Second,
			WaitData: 3 * time.Second, Read: time.Second, Inflate: 2 * time.Second}, Inflating, "make an index"},
		"plan": {Stats{Workers: 3, Batches: 9, Elapsed: time.Second, Plan: 3900 * time.Millisecond,
			WaitSlot: 300 * time.Millisecond}, Decoding, "4 goroutines are busy 98 %"},
		"consumer": {Stats{Workers: 4, Batches: 9, Elapsed: time.Second, Decode: time.Second,
			WaitData: 3 * time.Second, WaitSlot: 700 * time.Millisecond}, Consuming, "70 %"},
	} {
		stage, advice := c.s.Bottleneck()
		if stage != c.want || !strings.Contains(advice, c.says) {
			t.Errorf("%s: %q, %q, want stage = %v, advice with %q", name, stage, advice, c.want, c.says)
		}
	}
}

// TestStatsForms: Since, slog, JSON and expvar have the same values.
func TestStatsForms(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 60, func(i int) bool { return i == 3 }))
	l := openFake(t, path, Options{BatchSize: 8, Transform: Eval(4, 4), BadSamples: Skip, Workers: 2})
	if _, err := collect(t, l, 0, 2); err != nil {
		t.Fatal(err)
	}
	first := l.Stats()
	if _, err := collect(t, l, 1, 2); err != nil {
		t.Fatal(err)
	}
	both := l.Stats()
	d := both.Since(first)
	if d.Samples != 59 || d.Batches != 8 || d.Bad != 1 || d.BadBy[Damaged] != 1 || d.Bytes != first.Bytes ||
		d.Bytes == 0 || first.BadBy[Damaged] != 1 || both.BadBy[Damaged] != 2 {
		t.Errorf("%+v\n%+v\n%+v", first, both, d)
	}
	if both.Decode <= 0 || both.Elapsed <= 0 || both.Read <= 0 || both.ConsumerWait <= 0 ||
		both.Queue != 0 || both.QueueBytes != 0 {
		t.Errorf("%+v", both)
	}
	var v expvar.Var = l.Var()
	var fields map[string]any
	if err := json.Unmarshal([]byte(v.String()), &fields); err != nil {
		t.Fatalf("%v in %s, want no error", err, v)
	}
	if fields["samples"] != 118. || fields["bad"] != 2. || !strings.Contains(v.String(), "0003.png") ||
		fields["decode_seconds"] != both.Decode.Seconds() {
		t.Errorf("%s", v)
	}
	var log bytes.Buffer
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "stats", both)
	var line struct{ Stats map[string]any }
	if err := json.Unmarshal(log.Bytes(), &line); err != nil || line.Stats["samples"] != 118. ||
		line.Stats["bad damaged"] != 2. || line.Stats["advice"] == "" {
		t.Errorf("%v in %s", err, &log)
	}
}

// TestStatsFieldsAreComplete: Since, LogValue and MarshalJSON have every field of Stats. The test
// sets one field at a time, and requires that exactly this field changes in each of them.
func TestStatsFieldsAreComplete(t *testing.T) {
	gauges := []string{"BadNamed", "WarnedNamed", "Ignored", "Orphans", "Workers", "Queue", "QueueBytes",
		"TranscodedBytes"}
	inJSON := map[string]string{"Decoded": "decodedby"}
	inLog := map[string]string{"BadNamed": "", "WarnedNamed": "", "BadBy": "bad damaged", "Decoded": "decoded png"}
	// with returns a Stats whose field of the given number is n, and whose other fields are zero.
	with := func(field, n int) (s Stats) {
		switch v := reflect.ValueOf(&s).Elem().Field(field); v.Interface().(type) {
		case time.Duration:
			v.SetInt(int64(time.Duration(n) * time.Second))
		case int, int64:
			v.SetInt(int64(n))
		case map[Reason]int64:
			v.Set(reflect.ValueOf(map[Reason]int64{Damaged: int64(n)}))
		case map[DecodePath]int64:
			v.Set(reflect.ValueOf(map[DecodePath]int64{ByPNG: int64(n)}))
		case []*SampleError:
			v.Set(reflect.ValueOf(slices.Repeat([]*SampleError{{}}, n)))
		default:
			t.Fatalf("a field of type %s: add a case to this test", v.Type())
		}
		return s
	}
	asJSON := func(s Stats) map[string]string {
		data, err := s.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		var fields map[string]json.RawMessage
		if err := json.Unmarshal(data, &fields); err != nil {
			t.Fatal(err)
		}
		texts := map[string]string{}
		for key, value := range fields {
			texts[key] = string(value)
		}
		return texts
	}
	asLog := func(s Stats) map[string]string {
		texts := map[string]string{}
		for _, attr := range s.LogValue().Group() {
			texts[attr.Key] = attr.Value.String()
		}
		return texts
	}
	// changed returns the keys whose values differ, without underscores and unit.
	changed := func(zero, set map[string]string) (keys []string) {
		for key, value := range set {
			if zero[key] != value {
				keys = append(keys, strings.ReplaceAll(strings.TrimSuffix(key, "_seconds"), "_", ""))
			}
		}
		return keys
	}
	for i := range reflect.TypeFor[Stats]().NumField() {
		name := reflect.TypeFor[Stats]().Field(i).Name
		t.Run(name, func(t *testing.T) {
			want := 3
			if slices.Contains(gauges, name) {
				want = 5
			}
			if got := with(i, 5).Since(with(i, 2)); !reflect.DeepEqual(got, with(i, want)) {
				t.Errorf("Since: %+v, want %+v", got, with(i, want))
			}
			key := cmp.Or(inJSON[name], strings.ToLower(name))
			if got := changed(asJSON(Stats{}), asJSON(with(i, 5))); !slices.Equal(got, []string{key}) {
				t.Errorf("MarshalJSON: the field changes %q, want %q", got, key)
			}
			key, special := inLog[name]
			if !special {
				key = strings.ToLower(name)
			}
			got := changed(asLog(Stats{}), asLog(with(i, 5)))
			if key == "" && len(got) > 0 || key != "" && !slices.Equal(got, []string{key}) {
				t.Errorf("LogValue: the field changes %q, want %q", got, key)
			}
		})
	}
}

// TestDecodedCountsTheDecodePaths: images are counted by the way they were decoded. JPEGs go
// through our own Huffman decoder, through entry points from the second epoch on, or through
// libjpeg-turbo.
func TestDecodedCountsTheDecodePaths(t *testing.T) {
	cmyk, err := os.ReadFile("testdata/cmyk.jpg")
	if err != nil {
		t.Fatal(err)
	}
	var frame bytes.Buffer
	if err := gif.Encode(&frame, archivetest.Gradient(40, 30), nil); err != nil {
		t.Fatal(err)
	}
	damaged := archivetest.Photo(t, 3)
	for i := range 300 {
		damaged[len(damaged)/2+i] = 0xfe
	}
	path := archivetest.WriteFile(t, "a.tgz",
		archivetest.Gzip(t, archivetest.Tar(t,
			archivetest.Member{Name: "c/1.jpg", Data: string(archivetest.Photo(t, 1))},
			archivetest.Member{Name: "c/2.jpg", Data: string(archivetest.Photo(t, 2))},
			archivetest.Member{Name: "c/3.jpg", Data: string(cmyk)},
			archivetest.Member{Name: "c/4.png", Data: archivetest.PNG(t, archivetest.Gradient(40, 40))},
			archivetest.Member{Name: "c/5.gif", Data: frame.String()},
			archivetest.Member{Name: "c/6.jpg", Data: string(damaged)})))
	l, err := Open(path, Options{BatchSize: 2, Transform: Train(32), BadSamples: Skip, Workers: 2, ShuffleBytes: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	before := Stats{}
	for epoch, want := range []Stats{
		{Decoded: map[DecodePath]int64{ByHuffman: 2, ByLibJPEG: 2, ByPNG: 1, ByGo: 1}, GaveUp: 1, EntriesMade: 2},
		{Decoded: map[DecodePath]int64{ByEntryPoints: 2, ByLibJPEG: 2, ByPNG: 1, ByGo: 1}, GaveUp: 1},
	} {
		if _, err := collect(t, l, epoch, 2); err != nil {
			t.Fatal(err)
		}
		now := l.Stats()
		got := now.Since(before)
		before = now
		if !maps.Equal(got.Decoded, want.Decoded) || got.GaveUp != want.GaveUp ||
			got.EntriesMade != want.EntriesMade || got.EntriesRefused != 0 || got.Cropped < 1 || got.Cropped > 6 {
			t.Errorf("epoch %d: %+v", epoch, got)
		}
		if got.Read <= 0 || got.Inflate <= 0 {
			t.Errorf("epoch %d: reading %v, inflating %v, want got.Read above 0, got.Inflate above 0",
				epoch, got.Read, got.Inflate)
		}
	}
}

// onePhotograph returns a tar with n copies of a photograph.
func onePhotograph(t *testing.T, n int) []byte {
	t.Helper()
	members := make([]archivetest.Member, n)
	for i := range members {
		members[i] = archivetest.Member{Name: fmt.Sprintf("c/%d.jpg", i), Data: string(archivetest.Photo(t, 1))}
	}
	return archivetest.Tar(t, members...)
}

// plannedStats returns the Stats of an epoch that c receives, after one in which the workers have
// found the entry points.
func plannedStats(t *testing.T, l *Loader, c planned) Stats {
	t.Helper()
	if _, err := collect(t, l, 0, 8); err != nil {
		t.Fatal(err)
	}
	before := l.Stats()
	if _, err := c.epoch(t, l, 1); err != nil {
		t.Fatal(err)
	}
	return l.Stats().Since(before)
}

// TestWaitingForWorkersIsNoDecoding: planning goroutines that wait until a worker takes an image
// that they cannot plan do not decode.
func TestWaitingForWorkersIsNoDecoding(t *testing.T) {
	const n, each = 300, 500 * time.Microsecond
	path := archivetest.WriteFile(t, "a.tar", onePhotograph(t, n))
	slow := transform.Func(func(*rand.Rand, *transform.Pixels) error {
		for began := time.Now(); time.Since(began) < each; {
		}
		return nil
	})
	l, err := Open(path, Options{BatchSize: 8, Workers: 1, Transform: Transform{Size: 32, Ops: []transform.Op{slow}}})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s := plannedStats(t, l, planned{slots: 3, capacity: 1 << 20})
	if s.Samples != n || s.Decode < n*each || s.Decode > 2*s.Elapsed {
		t.Errorf("one worker decoded %d images for %v in %v, want %d for at least %v and at most twice the time",
			s.Samples, s.Decode, s.Elapsed, n, n*each)
	}
	if stage, advice := s.Bottleneck(); stage != Decoding || s.Workers != 1 {
		t.Errorf("the bottleneck is %q (%s) with %d workers, want decoding with 1", stage, advice, s.Workers)
	}
	if s.Plan <= 0 || s.Plan > s.Decode {
		t.Errorf("planning takes %v, want more than 0 and less than the %v of decoding", s.Plan, s.Decode)
	}
}

// slowFile is a file whose reads take a time.
type slowFile struct{ *os.File }

func (f slowFile) ReadAt(p []byte, at int64) (int, error) {
	for began := time.Now(); time.Since(began) < 200*time.Microsecond; {
	}
	return f.File.ReadAt(p, at)
}

// TestWaitingForFilesIsNoInflating: the file's time of a sample that workers decode counts once, as
// reading.
func TestWaitingForFilesIsNoInflating(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, onePhotograph(t, 60)))
	file := func(path string) (archive.File, error) {
		f, err := os.Open(path)
		return slowFile{f}, err
	}
	l, err := open(t.Context(), path, Options{BatchSize: 8, Transform: Train(32), ShuffleBytes: 1}, file, sample.Library{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s := plannedStats(t, l, planned{slots: 3, capacity: 1 << 20, hostRows: 64})
	if s.Inflate <= 0 || s.Read <= 0 {
		t.Errorf("reading takes %v and inflating %v, want both above 0", s.Read, s.Inflate)
	}
}

// lines is a log handler that sends the lines with statistics to a channel. It drops lines for
// which the channel has no room.
type lines struct {
	slog.Handler
	got chan string
}

func (h lines) Enabled(context.Context, slog.Level) bool { return true }
func (h lines) Handle(_ context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "stats" {
			select {
			case h.got <- r.Message + " " + a.Value.Resolve().String():
			default:
			}
		}
		return true
	})
	return nil
}

// TestStatsEveryLogsWithoutBatches: a running epoch logs, even while no batch is delivered.
func TestStatsEveryLogsWithoutBatches(t *testing.T) {
	archivetest.Within(t)
	archivetest.NoLeaks(t)
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 20, nil))
	log := lines{slog.DiscardHandler, make(chan string, 1)}
	block := make(chan struct{})
	l, err := open(t.Context(), path, Options{BatchSize: 4, Transform: Eval(4, 4), Logger: slog.New(log),
		StatsEvery: time.Millisecond, NoIndex: true}, openFile, fakeCodec{block: block})
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		<-log.got
		<-log.got
		close(block)
	}()
	if _, err := collect(t, l, 0, 2); err != nil {
		t.Error(err)
	}
}

// TestRefusedBatchIsNotCounted: the loader does not count a batch that the consumer refused.
func TestRefusedBatchIsNotCounted(t *testing.T) {
	l := openFake(t, archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 40, nil)),
		Options{BatchSize: 8, Transform: Eval(4, 4)})
	n := 0
	err := l.Fill(t.Context(), 0,
		func(context.Context) ([][]byte, error) {
			return [][]byte{make([]byte, 8*48), make([]byte, 64)},
				nil
		}, func(int, any) error {
			if n++; n == 3 {
				return errors.New("broken")
			}
			return nil
		})
	if s := l.Stats(); err == nil || s.Batches != 2 || s.Samples != 16 || s.QueueBytes != 0 {
		t.Errorf("%+v, error %v, want an error, s.Batches = 2, s.Samples = 16, s.QueueBytes = 0", s, err)
	}
}

// TestWorkersDefaultToTheCPUs: the default number of workers is the number of CPUs for the process.
// Since Go 1.25, GOMAXPROCS follows the CPU quota of the cgroup.
func TestWorkersDefaultToTheCPUs(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 4, nil))
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(3))
	if l := openFake(t, path, Options{}); l.Stats().Workers != 3 {
		t.Errorf("%d workers, GOMAXPROCS is 3, want 3", l.Stats().Workers)
	}
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		t.Fatal(err)
	}
	if l := openFake(t, path, Options{WorkerCPUs: cpus(&set)[:1]}); l.Stats().Workers != 1 {
		t.Errorf("%d workers for one CPU, want 1", l.Stats().Workers)
	}
	// Go follows the quota unless the go line of the main module names an older Go.
	mod, err := os.ReadFile("../go.mod")
	if err != nil {
		t.Skip("the sources are not here: ", err)
	}
	for line := range strings.Lines(string(mod)) {
		if v, found := strings.CutPrefix(line, "go 1."); found {
			if minor, _ := strconv.Atoi(strings.Split(strings.TrimSpace(v), ".")[0]); minor < 25 {
				t.Errorf("go.mod says %s: GOMAXPROCS follows the cgroup from go 1.25 on, minor %v, want "+
					"at least 25", line, minor)
			}
		}
	}
}

func cpus(set *unix.CPUSet) (list []int) {
	for c := range 1024 {
		if set.IsSet(c) {
			list = append(list, c)
		}
	}
	return list
}

// threadCodec records the CPUs and the niceness of the threads that decode.
type threadCodec struct {
	fakeCodec
	mu   *sync.Mutex
	seen map[string]int
}

func (c threadCodec) NewDecoder(int64) (sample.Decoder, error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return nil, err
	}
	priority, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seen[threadLooks(20-priority, &set)]++
	return &fakeDecoder{c.fakeCodec}, err
}

func threadLooks(nice int, set *unix.CPUSet) string {
	var b strings.Builder
	b.WriteString(strconv.Itoa(nice))
	for _, c := range cpus(set) {
		b.WriteString(" " + strconv.Itoa(c))
	}
	return b.String()
}

// threads counts the process's threads by niceness and CPUs, in the form of threadLooks.
func threads(t *testing.T) map[string]int {
	t.Helper()
	tasks, err := filepath.Glob("/proc/self/task/*")
	if err != nil || len(tasks) == 0 {
		t.Skip("no /proc")
	}
	looks := map[string]int{}
	for _, task := range tasks {
		tid, err := strconv.Atoi(filepath.Base(task))
		if err != nil {
			t.Fatal(err)
		}
		var set unix.CPUSet
		priority, err := unix.Getpriority(unix.PRIO_PROCESS, tid)
		if err != nil || unix.SchedGetaffinity(tid, &set) != nil {
			continue // the thread has ended
		}
		looks[threadLooks(20-priority, &set)]++
	}
	return looks
}

// TestWorkerThreadsFollowTheOptions: workers run on the CPUs and with the niceness of Options, and
// no thread keeps either after the epoch.
func TestWorkerThreadsFollowTheOptions(t *testing.T) {
	archivetest.Within(t)
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 40, nil))
	var set, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		t.Fatal(err)
	}
	all := cpus(&set)
	last := all[len(all)-1]
	one.Set(last)
	priority, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
	if err != nil {
		t.Fatal(err)
	}
	nice := 20 - priority
	if nice > 10 {
		t.Skip("the tests themselves run niced")
	}
	for name, c := range map[string]struct {
		o    Options
		want string
	}{
		"neither": {Options{}, threadLooks(nice, &set)},
		"nice":    {Options{WorkerNice: 7}, threadLooks(nice+7, &set)},
		"cpus":    {Options{WorkerCPUs: []int{last}}, threadLooks(nice, &one)},
		"both":    {Options{WorkerNice: 5, WorkerCPUs: []int{last}}, threadLooks(nice+5, &one)},
	} {
		codec := threadCodec{mu: new(sync.Mutex), seen: map[string]int{}}
		c.o.BatchSize, c.o.Transform, c.o.Workers = 4, Eval(4, 4), 3
		l, err := open(t.Context(), path, c.o, openFile, codec)
		if err != nil {
			t.Fatal(err)
		}
		for epoch := range 2 {
			if _, err := collect(t, l, epoch, 2); err != nil {
				t.Fatal(err)
			}
		}
		if codec.seen[c.want] != 6 {
			t.Errorf("%s: workers saw %v, want 6 of %q", name, codec.seen, c.want)
		}
		plain := threadLooks(nice, &set)
		if c.want == plain {
			continue
		}
		for tries := 0; threads(t)[c.want] > 0; tries++ { // threads end a moment later
			if tries > 1_000_000 {
				t.Fatalf("%s: threads remain: %v, tries %v, want at most 1_000_000",
					name, threads(t), tries)
			}
			runtime.Gosched()
		}
	}
	for _, o := range []Options{{WorkerNice: -1}, {WorkerNice: 20}, {WorkerCPUs: []int{-1}},
		{WorkerCPUs: []int{1023}}} {
		if slices.Contains(all, 1023) {
			break
		}
		if _, err := Open(path, o); err == nil || !strings.Contains(err.Error(), "Options.Worker") {
			t.Errorf("%+v: error %v, want an error with %q", o, err, "Options.Worker")
		}
	}
}
