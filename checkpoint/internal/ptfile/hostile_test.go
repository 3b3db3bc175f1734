package ptfile_test

import (
	"archive/zip"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint/internal/ptfile"
)

// member describes a member of a zip archive to write.
type member struct {
	name, data string
	method     uint16
}

func pack(t testing.TB, members ...member) []byte {
	t.Helper()
	var out bytes.Buffer
	w := zip.NewWriter(&out)
	for _, m := range members {
		f, err := w.CreateHeader(&zip.FileHeader{Name: m.name, Method: m.method})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(f, m.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// withPickle returns a file with the pickle and a storage 0 of 24 bytes.
func withPickle(t testing.TB, pickle string) []byte {
	t.Helper()
	return pack(t, member{name: "x/data.pkl", data: pickle}, member{name: "x/data/0", data: strings.Repeat("\x01", 24)})
}

// Fragments of pickles.
const (
	storageID = "(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x06tQ"
	rebuild   = "ctorch._utils\n_rebuild_tensor_v2\n("
	noHooks   = "\x89ccollections\nOrderedDict\n)R"
)

func short(n int) string { return "X" + string(binary.LittleEndian.AppendUint32(nil, uint32(n))) }

// integer returns a LONG1 opcode.
func integer(n int64) string {
	return "\x8a\x08" + string(binary.LittleEndian.AppendUint64(nil, uint64(n)))
}

// view returns the pickle of a tensor over the storage of 6 float32 elements.
func view(offset int64, shape, strides []int64) string {
	s := "\x80\x02" + rebuild + storageID + integer(offset)
	for _, sizes := range [][]int64{shape, strides} {
		s += "("
		for _, n := range sizes {
			s += integer(n)
		}
		s += "t"
	}
	return s + noHooks + "tR."
}

var hostilePickles = []struct {
	name, pickle, text string
}{
	{"empty", "", "cut short"},
	{"no stop", "\x80\x02N", "cut short"},
	{"two values", "\x80\x02NN.", "ends with 2 values"},
	{"no value", "\x80\x02.", "ends with 0 values"},
	{"open mark", "\x80\x02(N.", "ends with"},
	{"protocol 0", "(lp0\n.", "refused: opcode LIST"},
	{"protocol 1", "\x80\x01N.", "protocol 1"},
	{"protocol 6", "\x80\x06N.", "protocol 6"},
	{"system", "\x80\x02cposix\nsystem\nX\x02\x00\x00\x00id\x85R.",
		"refused: all of the file is one object, posix.system"},
	{"os.system", "\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R.",
		"x/data.pkl: refused: all of the file is one object, os.system"},
	{"eval", "\x80\x04\x8c\x08builtins\x8c\x04eval\x93.", "all of the file is one object, builtins.eval"},
	{"getattr by a dot", "\x80\x04\x8c\x05torch\x8c\x0bSize.mro.__\x93.",
		"all of the file is one object, torch.Size.mro.__"},
	{"name of control characters", "\x80\x02ca\x1b[2J\nb\x00\n.", `all of the file is one object, a\x1b[2J.b\x00`},
	{"long name", "\x80\x02c" + strings.Repeat("a", 10_000) + "\nb\n.", "aaa...: in Python"},
	{"global without a newline", "\x80\x02cos", "cut short"},
	{"STACK_GLOBAL of numbers", "\x80\x04K\x01K\x02\x93.", "an int and an int"},
	{"inst", "\x80\x02(ios\nsystem\n.", "refused: opcode INST"},
	{"obj", "\x80\x02(o.", "refused: opcode OBJ"},
	{"object without a class", "\x80\x02)\x81.", "more values than there are"},
	{"object of a number", "\x80\x02K\x01)\x81.", "refused: an object of the class an int"},
	{"object of a number with keywords", "\x80\x04K\x01)}\x92.", "refused: an object of the class an int"},
	{"items added to a list", "\x80\x04](N\x90.", "refused: items are added to a list"},
	{"items added to nothing", "\x80\x04(N\x90.", "more values than there are"},
	{"frozenset without a mark", "\x80\x04N\x91.", "needs a mark"},
	{"bytearray past the end", "\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\xffa.", "cut short"},
	{"pop of nothing", "\x80\x020.", "more values than there are"},
	{"pop of a mark without one", "\x80\x02N1.", "needs a mark"},
	{"extension", "\x80\x02\x82\x01.", "refused: opcode EXT1"},
	{"unknown opcode", "\x80\x02\xff.", "refused: opcode 0xff"},
	{"a function as the value", "\x80\x02ctorch\nSize\n.", "all of the file is one object, torch.Size"},
	{"a storage as the value", "\x80\x02" + storageID + ".",
		"all of the file is one object, a storage without a tensor"},
	{"a call of a string", "\x80\x02X\x01\x00\x00\x00a)R.", "refused: a call of a string"},
	{"a call of a storage type", "\x80\x02ctorch\nFloatStorage\n)R.",
		"refused: a call of the storage type torch.FloatStorage"},
	{"a call with a list", "\x80\x02ctorch\nSize\n]R.", "is called with a list"},
	{"a call without arguments", "\x80\x02ctorch\nSize\n)R.", "torch.Size: unexpected arguments"},
	{"build of a dict", "\x80\x02}}b.", "refused: opcode BUILD of a dict"},
	{"build of a tensor", view(0, nil, nil)[:len(view(0, nil, nil))-1] + "}b.", "refused: opcode BUILD of a tensor"},
	{"append to a tuple", "\x80\x02)Na.", "refused: items are appended to a tuple"},
	{"append to nothing", "\x80\x02Na.", "more values than there are"},
	{"append below a mark", "\x80\x02](Na.", "more values than there are"},
	{"appends without a mark", "\x80\x02]e.", "needs a mark"},
	{"set in a list", "\x80\x02]NNs.", "refused: keys are set in a list"},
	{"odd items", "\x80\x02}(Nu.", "has no value"},
	{"tuple without a mark", "\x80\x02t.", "needs a mark"},
	{"tuple of too few", "\x80\x02N\x87.", "more values than there are"},
	{"memo is empty", "\x80\x02h\x05.", "memo 5 is empty"},
	{"memo of nothing", "\x80\x02q\x00.", "more values than there are"},
	{"string past the end", "\x80\x02X\xff\xff\xff\x7fa.", "cut short"},
	{"string of 2^63 bytes", "\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xffa.", "cut short"},
	{"bytes past the end", "\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fa.", "cut short"},
	{"not UTF-8", "\x80\x02X\x01\x00\x00\x00\xff.", "all of the file is one object, a string that is not UTF-8"},
	{"large integer", "\x80\x02\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x80\x00.",
		"all of the file is one object, the integer 9223372036854775808"},
	{"large integer past the end", "\x80\x02\x8a\x09\x00.", "cut short"},
	{"integer past the end", "\x80\x02\x8b\xff\xff\xff\x7f\x00.", "cut short"},
	{"list in itself", "\x80\x02]q\x00h\x00a.", "a list contains itself"},
	{"dict in itself", "\x80\x02}q\x00Nh\x00s.", "a dict contains itself"},
	{"list in itself through a tuple", "\x80\x02]q\x00h\x00\x85a.", "contains itself"},
	{"deep", "\x80\x02" + strings.Repeat("]", 1000) + strings.Repeat("a", 999) + ".", "nested more than 64 deep"},
	{"deep tuples", "\x80\x02)" + strings.Repeat("\x85", 100_000) + ".", "nested more than 64 deep"},
	{"deep through the memo", "\x80\x02(]q\x00" + strings.Repeat("]h\x00aq\x00", 40) + "t" +
		strings.Repeat("\x85", 40) + ".", "nested more than 64 deep"},
	{"persistent id of another kind", "\x80\x02X\x06\x00\x00\x00moduleQ.",
		"a persistent id that is no storage: a string"},
	{"persistent id of strings", "\x80\x02(X\x07\x00\x00\x00storageX\x01\x00\x00\x000NNNtQ.",
		"a persistent id that is no storage"},
	{"missing storage", "\x80\x02" + strings.Replace(storageID, "0X\x03", "7X\x03", 1) + ".",
		`storage "7" has no member data/7`},
	{"storage of another folder", "\x80\x02" + strings.Replace(storageID, "X\x01\x00\x00\x000",
		"X\x06\x00\x00\x00../../", 1) + ".", "has no member"},
	{"storage larger than its member", "\x80\x02" + strings.Replace(storageID, "K\x06", "K\x07", 1) + ".",
		"should have 7 elements of 4 bytes and has 24 bytes"},
	{"storage of negative size", "\x80\x02" + strings.Replace(storageID, "K\x06", integer(-1), 1) + ".",
		"should have -1 elements"},
	{"storage of 2^62 elements", "\x80\x02" + strings.Replace(storageID, "K\x06", integer(1<<62), 1) + ".",
		"should have"},
	{"tensor past its storage", view(0, []int64{7}, []int64{1}), "reaches past its storage of 6"},
	{"tensor from past its storage", view(6, []int64{1}, []int64{1}), "reaches past"},
	{"scalar past its storage", view(6, nil, nil), "reaches past"},
	{"negative offset", view(-1, []int64{1}, []int64{1}), "starts at element -1"},
	{"negative size", view(0, []int64{-1}, []int64{1}), "neither may be negative"},
	{"negative sizes", view(0, []int64{-1, -6}, []int64{1, 1}), "neither may be negative"},
	{"negative stride", view(5, []int64{6}, []int64{-1}), "neither may be negative"},
	{"product overflows", view(0, []int64{1 << 32, 1 << 32}, []int64{0, 0}), "too large"},
	{"bytes overflow", view(0, []int64{1 << 61}, []int64{0}), "too large"},
	{"last element overflows", view(0, []int64{3}, []int64{1 << 62}), "reaches past"},
	{"last element wraps to fit", view(0, []int64{5, 2}, []int64{1 << 62, 1}), "reaches past"},
	{"strides overflow together", view(1, []int64{2, 2, 2}, []int64{1 << 62, 1 << 62, 1 << 62}), "reaches past"},
	{"sizes without strides", view(0, []int64{6}, nil), "1 sizes and 0 strides"},
	{"65 dimensions", view(0, make([]int64, 65), make([]int64, 65)), "65 dimensions"},
	{"66 dimensions", view(0, make([]int64, 66), make([]int64, 66)), "unexpected arguments"},
	{"tensor of a string", "\x80\x02" + rebuild + "NNNNNNtR.", "unexpected arguments"},
	{"tensor of nothing", "\x80\x02" + rebuild + "tR.", "unexpected arguments"},
	{"parameter of a list", "\x80\x02ctorch._utils\n_rebuild_parameter\n]\x88\x86R.", "unexpected arguments"},
	{"untyped tensor", "\x80\x02" + rebuild + strings.Replace(storageID, "ctorch\nFloatStorage",
		"ctorch.storage\nUntypedStorage", 1) + "K\x00))" + noHooks + "tR.", "without a dtype"},
	{"bytes of a list", "\x80\x02c_codecs\nencode\n]N\x86R.", "_codecs.encode: unexpected arguments"},
	{"bytes in another code", "\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00hex\x86R.",
		"unexpected arguments"},
	{"bytes over 255", "\x80\x02c_codecs\nencode\nX\x02\x00\x00\x00\xc4\x80X\x06\x00\x00\x00latin1\x86R.",
		"not in latin1"},
	{"device of a list", "\x80\x02ctorch\ndevice\n]\x85R.", "unexpected arguments"},
	// Each call takes 5 bytes and copies much more.
	{"dict copied often", "\x80\x02}(" + manyItems(3000) +
		"uq\x00ccollections\nCounter\nq\x01h\x00\x85q\x02(" + strings.Repeat("h\x01h\x02R", 3000) + "t.",
		"bytes of work"},
	{"text copied often", "\x80\x02" + short(10_000) + strings.Repeat("a", 10_000) +
		"X\x06\x00\x00\x00latin1\x86q\x00c_codecs\nencode\nq\x01(" + strings.Repeat("h\x01h\x00R", 10_000) +
		"t.", "bytes of work"},
	{"arguments searched often", "\x80\x02ctorch\ndevice\nq\x00](" + strings.Repeat("N", 10_000) +
		"eca\nb\n\x86q\x01(" + strings.Repeat("h\x00h\x01R", 10_000) + "t.", "bytes of work"},
	{"long key hashed often", "\x80\x02}" + short(10_000) + strings.Repeat("a", 10_000) + "q\x00Ns" +
		strings.Repeat("h\x00Ns", 10_000) + ".", "bytes of work"},
}

func manyItems(n int) string {
	var s strings.Builder
	for i := range n {
		fmt.Fprintf(&s, "M%sN", binary.LittleEndian.AppendUint16(nil, uint16(i)))
	}
	return s.String()
}

// opaquePickles holds pickles of a list or a dict with a value that the reader does not build.
var opaquePickles = []struct {
	name, pickle, what string
}{
	{"a call", "\x80\x02]cposix\nsystem\nX\x02\x00\x00\x00id\x85Ra.", "posix.system"},
	{"a call of what a call returns",
		"\x80\x02]cbuiltins\ngetattr\ncos\n\nX\x06\x00\x00\x00system\x86RX\x02\x00\x00\x00id\x85Ra.",
		"builtins.getattr"},
	{"an object that is its own state", "\x80\x02]ca\nB\n)\x81q\x00}Nh\x00sba.", "a.B"},
	{"an object with keywords", "\x80\x04]ca\nB\n)}\x92a.", "a.B"},
	{"an object with items", "\x80\x04]ca\nB\n)\x81(NNeNNsNa(NNua.", "a.B"},
	{"an object of a known class", "\x80\x02]ccollections\nOrderedDict\n)\x81a.", "collections.OrderedDict"},
	{"a function", "\x80\x02]ctorch\nSize\na.", "torch.Size"},
	{"a storage type", "\x80\x02]ctorch\nFloatStorage\na.", "torch.FloatStorage"},
	{"a storage", "\x80\x02]" + storageID + "a.", "a storage without a tensor"},
	{"a storage of an unknown class", "\x80\x02]" + strings.Replace(storageID, "FloatStorage", "OddStorage",
		1) + "a.", "torch.OddStorage"},
	{"a tensor of such a storage", "\x80\x02]" + rebuild + strings.Replace(storageID, "FloatStorage",
		"OddStorage", 1) + "K\x00))" + noHooks + "tRa.", "torch.OddStorage"},
	{"a parameter of such a tensor",
		"\x80\x02]ctorch._utils\n_rebuild_parameter\n(" + rebuild + strings.Replace(storageID,
			"FloatStorage", "OddStorage", 1) +
			"K\x00))" + noHooks + "tR" + noHooks + "tRa.", "torch.OddStorage"},
	{"a storage type as a key", "\x80\x02}ctorch\nFloatStorage\nNs.", "the storage type torch.FloatStorage"},
	{"a list as a key", "\x80\x02}]Ns.", "a list"},
	{"an object as a key", "\x80\x02}ca\nB\nNs.", "a.B"},
	{"NaN as a key", "\x80\x02}G\x7f\xf8\x00\x00\x00\x00\x00\x00Ns.", "a float"},
	{"bytes as a key", "\x80\x04}C\x01aNs.", "bytes"},
	{"a large integer", "\x80\x02]\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\xffa.", "the integer -18446744073709551616"},
	{"a long integer", "\x80\x02]\x8b\x00\x01\x00\x00" + strings.Repeat("\x01", 256) + "a.", "an integer of 256 bytes"},
	{"sets", "\x80\x04]\x8f(NN\x90a.", "builtins.set"},
	{"a value that is dropped", "\x80\x04](N0(NN1(0N0(N\x91e.", "builtins.frozenset"},
}

func TestOpaquePickles(t *testing.T) {
	for _, c := range opaquePickles {
		t.Run(c.name, func(t *testing.T) {
			f, err := open(withPickle(t, c.pickle))
			if err != nil {
				t.Fatal(err)
			}
			got := ""
			visit(f.Root, func(v any) {
				if o, ok := v.(*ptfile.Opaque); ok {
					got += o.What
				}
			})
			if got != c.what {
				t.Errorf("the value has %q, want %q", got, c.what)
			}
		})
	}
}

func TestHostilePickles(t *testing.T) {
	for _, c := range hostilePickles {
		t.Run(c.name, func(t *testing.T) {
			_, err := open(withPickle(t, c.pickle))
			if err == nil || !strings.Contains(err.Error(), c.text) || !strings.Contains(err.Error(), "x/data.pkl") {
				t.Errorf("%.300v does not say %q", err, c.text)
			}
		})
	}
}

// TestSharedContainersDoNotExplode reads a list of 2^n references in n steps.
func TestSharedContainersDoNotExplode(t *testing.T) {
	for n, text := range map[int]string{4: "", 60: "expand to more than"} {
		pickle := "\x80\x02)q\x00"
		for range n {
			pickle = strings.TrimSuffix(pickle, ".") + "h\x00\x86q\x00."
		}
		if _, err := open(withPickle(t, pickle)); (err == nil) != (text == "") || err != nil &&
			!strings.Contains(err.Error(), text) {
			t.Errorf("%d levels: %v", n, err)
		}
	}
}

func TestHostileArchives(t *testing.T) {
	none := "\x80\x02N."
	good := member{name: "x/data.pkl", data: none}
	tensor := view(0, []int64{6}, []int64{1})
	file := withPickle(t, tensor)
	encrypted := bytes.Clone(withPickle(t, none))
	directory := bytes.Index(encrypted, []byte("PK\x01\x02"))
	encrypted[directory+8] |= 1
	sizes := bytes.Clone(file)
	last := bytes.LastIndex(sizes, []byte("PK\x01\x02"))
	binary.LittleEndian.PutUint32(sizes[last+20:], 1<<30)
	binary.LittleEndian.PutUint32(sizes[last+24:], 1<<30)
	unequal := bytes.Clone(file)
	binary.LittleEndian.PutUint32(unequal[last+24:], 1<<30)
	place := bytes.Clone(file)
	binary.LittleEndian.PutUint32(place[last+42:], 1<<30)
	for name, c := range map[string]struct {
		file []byte
		text string
	}{
		"empty":           {nil, "not a zip archive"},
		"short":           {[]byte("PK\x03\x04"), "that is cut short or damaged at its end: copy or save it again"},
		"cut":             {file[:len(file)-30], "that is cut short or damaged at its end: copy or save it again"},
		"safetensors":     {[]byte("\x02\x00\x00\x00\x00\x00\x00\x00{}"), "not a zip archive"},
		"another archive": {pack(t, member{name: "word/document.xml"}), "without a data.pkl"},
		"no folder":       {pack(t, member{name: "data.pkl", data: none}), "without a data.pkl"},
		"deep folder":     {pack(t, member{name: "a/b/data.pkl", data: none}), "without a data.pkl"},
		"two pickles":     {pack(t, good, member{name: "y/data.pkl"}), "two pickles: x/data.pkl and y/data.pkl"},
		"pickle twice":    {pack(t, good, good), "two pickles"},
		"member twice": {pack(t, good, member{name: "x/data/0"}, member{name: "x/data/0"}),
			"x/data/0 comes twice"},
		"byteorder": {pack(t, good, member{name: "x/byteorder", data: "middle"}), `x/byteorder is "middle"`},
		"long byteorder": {pack(t, good,
			member{name: "x/byteorder", data: strings.Repeat("little", 9)}), "at most 16"},
		"encrypted":          {encrypted, "x/data.pkl is encrypted"},
		"outside":            {sizes, "x/data/0: 1073741824 bytes at"},
		"unequal sizes":      {unequal, "x/data/0 is not compressed and has the sizes 24 and 1073741824"},
		"place":              {place, "x/data/0"},
		"compression method": {method(file, last), "x/data/0: compression method 99"},
		"bomb": {pack(t, good, member{"x/data/0", strings.Repeat("\x00", 4<<20), zip.Deflate},
			member{name: "pad"}), ""},
		"bomb in use": {pack(t, member{name: "x/data.pkl", data: tensor},
			member{"x/data/0", strings.Repeat("\x00", 4<<20), zip.Deflate}),
			"x/data/0 unpacks to 4194304 bytes, more than the whole file"},
		"bomb of a pickle": {pack(t, member{"x/data.pkl", strings.Repeat("N", 4<<20), zip.Deflate}),
			"x/data.pkl unpacks to"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := open(c.file)
			if (err == nil) != (c.text == "") || err != nil && !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v does not say %q", err, c.text)
			}
		})
	}
	if _, err := ptfile.Open(failing{}, 100); !errors.Is(err, os.ErrClosed) {
		t.Errorf("a reader that fails: %v, want os.ErrClosed", err)
	}
}

// method returns a file with an unknown compression method. last is the position of the entry in
// the directory.
func method(file []byte, last int) []byte {
	b := bytes.Clone(file)
	binary.LittleEndian.PutUint16(b[last+10:], 99)
	return b
}

type failing struct{}

func (failing) ReadAt([]byte, int64) (int, error) { return 0, os.ErrClosed }

// TestDamagedCompressedMember reads a member that is shorter, once decompressed, than the directory
// says.
func TestDamagedCompressedMember(t *testing.T) {
	file := pack(t, member{name: "x/data.pkl", data: view(0, []int64{6}, []int64{1})},
		member{"x/data/0", strings.Repeat("\x00", 24), zip.Deflate})
	last := bytes.LastIndex(file, []byte("PK\x01\x02"))
	for size, text := range map[uint32]string{24: "", 25: "", 28: "unexpected EOF"} {
		binary.LittleEndian.PutUint32(file[last+24:], size)
		f, err := open(file)
		if err != nil {
			t.Fatal(err)
		}
		x := *f.Root.(*ptfile.Tensor)
		if size == 28 {
			x.Offset = 1
		}
		if err := x.ReadBytes(make([]byte, 24)); (err == nil) != (text == "") || err != nil &&
			!strings.Contains(err.Error(), text) {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
}

// TestMemoryIsBounded opens hostile files and compares what they allocate with their sizes.
func TestMemoryIsBounded(t *testing.T) {
	const perByte = 300 // total allocations, mostly garbage at the end
	for name, pickle := range map[string]string{
		"dicts":         "\x80\x02(" + strings.Repeat("}", 300_000) + "t.",
		"memo":          "\x80\x04N" + strings.Repeat("\x94", 300_000) + ".",
		"marks":         "\x80\x02" + strings.Repeat("(", 300_000) + ".",
		"tuples":        "\x80\x02N" + strings.Repeat("\x85", 300_000) + ".",
		"tuples of one": "\x80\x02(" + strings.Repeat("N\x85", 200_000) + "t.",
		"lists of one":  "\x80\x02(" + strings.Repeat("]Na", 100_000) + "t.",
		"dicts of one":  "\x80\x02(" + strings.Repeat("}NNs", 100_000) + "t.",
		"strings":       "\x80\x04(" + strings.Repeat("\x8c\x00", 100_000) + "t.",
		"tensors":       tensors(100_000),
		"sets":          "\x80\x04(" + strings.Repeat("\x8f", 300_000) + "t.",
		"odd keys":      "\x80\x02}(" + strings.Repeat(")N", 200_000) + "u.",
		"few odd keys":  "\x80\x02}(" + strings.Repeat(")N", 1000) + "u" + strings.Repeat("Ns0", 100),
		"integers":      "\x80\x02(" + strings.Repeat("\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x7f", 100_000) + "t.",
		"globals":       "\x80\x02(" + globals(60_000) + "t.",
		"objects":       "\x80\x02(" + strings.Repeat("ca\n\n)\x81", 100_000) + "t.",
		"claims":        "\x80\x02\x8b\xff\xff\xff\x7f" + strings.Repeat("N", 1000),
	} {
		t.Run(name, func(t *testing.T) {
			file := withPickle(t, pickle)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := open(file)
			runtime.ReadMemStats(&after)
			took := after.TotalAlloc - before.TotalAlloc
			if limit := uint64(len(file))*perByte + 1<<20; took > limit {
				t.Errorf("a file of %d bytes takes %d, more than %d: %.200v", len(file), took, limit, err)
			}
		})
	}
}

// globals returns n opcodes, each with the name of a different global.
func globals(n int) string {
	var s strings.Builder
	for i := range n {
		fmt.Fprintf(&s, "c%c\n\n", i+0x100)
	}
	return s.String()
}

// tensors returns a pickle of n calls that share their arguments.
func tensors(n int) string {
	one := view(0, make([]int64, 64), make([]int64, 64))
	one = strings.TrimSuffix(strings.Replace(one, "v2\n", "v2\nq\x00", 1), "R.") + "q\x01R"
	return one + "(" + strings.Repeat("h\x00h\x01R", n) + "t\x86."
}

// FuzzReader opens any file, reads all its tensors and writes it again.
func FuzzReader(f *testing.F) {
	names, err := filepath.Glob("testdata/*.pt*")
	if err != nil || len(names) == 0 {
		f.Fatalf("no files: %v", err)
	}
	opaque, err := filepath.Glob("testdata/opaque/*.pt")
	if err != nil || len(opaque) == 0 {
		f.Fatalf("no files: %v", err)
	}
	names = append(names, opaque...)
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	for _, c := range hostilePickles {
		if len(c.pickle) < 1000 {
			f.Add(withPickle(f, c.pickle))
		}
	}
	for _, c := range opaquePickles {
		f.Add(withPickle(f, c.pickle))
	}
	f.Fuzz(func(t *testing.T, data []byte) { readAndWrite(t, data) })
}

// FuzzPickle is like FuzzReader, with a valid archive around the pickle.
func FuzzPickle(f *testing.F) {
	for _, c := range hostilePickles {
		if len(c.pickle) < 1000 {
			f.Add([]byte(c.pickle))
		}
	}
	for _, c := range opaquePickles {
		f.Add([]byte(c.pickle))
	}
	for _, name := range []string{"checkpoint.pt", "protocol4.pt", "parameters.pt"} {
		r, err := zip.OpenReader(filepath.Join("testdata", name))
		if err != nil {
			f.Fatal(err)
		}
		for _, m := range r.File {
			if strings.HasSuffix(m.Name, "/data.pkl") {
				pickle, err := m.Open()
				if err != nil {
					f.Fatal(err)
				}
				data, err := io.ReadAll(pickle)
				if err != nil {
					f.Fatal(err)
				}
				f.Add(data)
			}
		}
		r.Close()
	}
	members := []member{{name: "x/data.pkl"}}
	for i := range 12 {
		members = append(members, member{name: fmt.Sprint("x/data/", i), data: strings.Repeat("\x01", 8*i)})
	}
	f.Fuzz(func(t *testing.T, pickle []byte) {
		members := append([]member(nil), members...)
		members[0].data = string(pickle)
		readAndWrite(t, pack(t, members...))
	})
}

// readAndWrite checks that a file accepted by Open is consistent. Tensors that Check accepts can be
// read, unless the file is truncated or damaged inside. They are no larger than the file. Write
// makes a file with the same values.
func readAndWrite(t *testing.T, data []byte) {
	f, err := open(data)
	if err != nil {
		return
	}
	d := description{map[*ptfile.Storage]int{}}
	readable := true
	visit(f.Root, func(v any) {
		switch v := v.(type) {
		case *ptfile.Tensor:
			if v.Check() != nil {
				readable = false
				return
			}
			if v.Bytes() > max(int64(len(data)), 1<<20) {
				t.Fatalf("a tensor of %d bytes in a file of %d", v.Bytes(), len(data))
			}
			if err := v.ReadBytes(make([]byte, v.Bytes())); err != nil {
				readable = false
			}
		case ptfile.Name, *ptfile.Opaque:
			readable = false // Write does not accept it
		}
	})
	if !readable {
		return
	}
	var out bytes.Buffer
	if err := ptfile.Write(&out, f.Root, ""); err != nil {
		return // a damaged part of a storage that no tensor covers, or a dtype without a storage class
	}
	again, err := open(out.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	want := d.of(t, f.Root)
	d = description{map[*ptfile.Storage]int{}}
	compare(t, "", d.of(t, again.Root), want)
}

func visit(v any, f func(any)) {
	f(v)
	var items []any
	switch v := v.(type) {
	case *ptfile.List:
		items = v.Items
	case *ptfile.Tuple:
		items = v.Items
	case *ptfile.Dict:
		for k, x := range v.All() {
			items = append(items, k, x)
		}
	}
	for _, x := range items {
		visit(x, f)
	}
}
