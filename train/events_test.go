package train_test

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"github.com/torchstream/torchstream/train"
)

// field is the value of a protocol buffer field. number is the value if it is a varint or a
// fixed-size number; otherwise bytes is the value.
type field struct {
	number uint64
	bytes  []byte
}

// fields returns the last value of each field of a message.
func fields(t *testing.T, message []byte) map[uint64]field {
	t.Helper()
	all := map[uint64]field{}
	varint := func() uint64 {
		v, n := binary.Uvarint(message)
		if n <= 0 {
			t.Fatalf("no varint at %x, n %v, want above 0", message, n)
		}
		message = message[n:]
		return v
	}
	for len(message) > 0 {
		key := varint()
		var f field
		switch key & 7 {
		case 0:
			f.number = varint()
		case 1:
			message = message[8:]
		case 2:
			n := varint()
			f.bytes, message = message[:n], message[n:]
		case 5:
			message = message[4:]
		default:
			t.Fatalf("wire type %d", key&7)
		}
		all[key>>3] = f
	}
	return all
}

// drawnSteps returns the steps of the points that TensorBoard's EventAccumulator draws from the
// event files of a folder. A SessionLog START at a step discards the points at this and later steps
// that were written before it.
func drawnSteps(t *testing.T, dir string) (steps []uint64) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "events.out.tfevents.*"))
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(files)
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for len(data) > 0 {
			n := binary.LittleEndian.Uint64(data)
			event := fields(t, data[12:12+n])
			data = data[16+n:]
			step := event[2].number
			if log, ok := event[7]; ok && fields(t, log.bytes)[1].number == 1 {
				steps = slices.DeleteFunc(steps, func(s uint64) bool { return s >= step })
			}
			if _, ok := event[5]; ok {
				steps = append(steps, step)
			}
		}
	}
	return steps
}

// A run that resumes from an older checkpoint writes each point of TensorBoard's curves only once.
func TestResumeFromAnOlderCheckpointDrawsPointsOnce(t *testing.T) {
	o := job{path: archive(t), Config: train.Config{Epochs: 4, Dir: t.TempDir(), Resume: true, TensorBoard: true}}
	last := filepath.Join(o.Dir, "last.pt")
	var older []byte
	first := newJob(t, o)
	first.OnEpoch = func(e train.Epoch) (err error) {
		if e.Epoch == 2 {
			older, err = os.ReadFile(last)
		}
		return err
	}
	first.run(t)
	want := []uint64{perE, 2 * perE, 3 * perE, 4 * perE}
	if got := drawnSteps(t, o.Dir); !reflect.DeepEqual(got, want) {
		t.Errorf("the first run draws the steps %d, want %d", got, want)
	}
	if err := os.WriteFile(last, older, 0o666); err != nil {
		t.Fatal(err)
	}
	newJob(t, o).run(t)
	if got := drawnSteps(t, o.Dir); !reflect.DeepEqual(got, want) {
		t.Errorf("a run from the checkpoint of epoch 2 draws the steps %d, want %d", got, want)
	}
}
