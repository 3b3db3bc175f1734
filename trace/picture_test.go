package trace

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"image/png"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "write the golden files anew")

const ms = time.Millisecond

// overlapping is a made-up recording: kernels on the default stream of two devices, copies beside
// them, a late launch, and what the host did.
func overlapping() *Trace {
	t := &Trace{Begin: time.Unix(1, 0), Duration: 60 * ms}
	add := func(kind Kind, name string, start, duration time.Duration, device int, lane, bytes, correlation int64) {
		t.Events = append(t.Events, Event{kind, name, start, duration, device, lane, bytes, correlation})
	}
	var id int64
	for i := range 10 {
		at := 2*ms + time.Duration(i)*5*ms
		if i >= 6 {
			at += 4 * ms // the gap
		}
		launch := 300*time.Microsecond + time.Duration(i)*40*time.Microsecond
		if i >= 6 {
			launch = at - 300*time.Microsecond
		}
		id++
		add(Operator, "aten::mm", launch-20*time.Microsecond, 60*time.Microsecond, Host, 4711, 0, 0)
		add(Runtime, "cudaLaunchKernel", launch, 20*time.Microsecond, Host, 4711, 0, id)
		add(Kernel, "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(cutlass_80_simt_sgemm::Params)", at, 5*ms-20*time.Microsecond, 0, 7, 0, id)
		id++
		add(Runtime, "cudaMemcpyAsync", launch+20*time.Microsecond, 15*time.Microsecond, Host, 4711, 0, id)
		add(Copy, "Memcpy HtoD (Pinned -> Device)", 2*ms+time.Duration(i)*1250*time.Microsecond, 1218*time.Microsecond, 0, 13, 64<<20, id)
	}
	add(Copy, "Memcpy HtoD (Pageable -> Device)", 33*ms, 2*ms, 0, 13, 20<<20, 0)
	add(Set, "Memset (Device)", 56*ms+100*time.Microsecond, 3*time.Microsecond, 0, 7, 4096, 0)
	for i := range 200 {
		add(Kernel, "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int)",
			10*ms+time.Duration(i)*12*time.Microsecond, 9*time.Microsecond, 1, 7, 0, 0)
	}
	add(Copy, "Memcpy PtoP (Device -> Device)", 12*ms, 8*ms, 1, 19, 3<<30, 0)
	add(Kernel, "zero & <length>", 20*ms, 0, 1, 7, 0, 0)
	add(Range, "epoch 1", 0, 58*ms, Host, 4711, 0, 0)
	add(Range, "step", 200*time.Microsecond, 30*ms, Host, 4711, 0, 0)
	add(Runtime, "cudaStreamSynchronize", 32*ms, 3*ms, Host, 4711, 0, 0)
	add(Operator, "aten::item", 32*ms-5*time.Microsecond, 3100*time.Microsecond, Host, 4711, 0, 0)
	for thread := range int64(6) {
		add(Operator, "aten::copy_", 40*ms, ms, Host, 5000+thread, 0, 0)
	}
	t.sort()
	return t
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.MkdirAll("testdata", 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, got, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("not what is in %s; look at the difference, then run go test ./trace -update", path)
	}
}

func TestSummaryGolden(t *testing.T) {
	golden(t, "overlapping.txt", []byte(overlapping().Summary().String()))
}

func TestSVGGolden(t *testing.T) {
	var b bytes.Buffer
	if err := overlapping().WriteSVG(&b, PictureOptions{Title: "two devices, <one> gap"}); err != nil {
		t.Fatal(err)
	}
	golden(t, "overlapping.svg", b.Bytes())
	decoder := xml.NewDecoder(&b)
	for {
		if _, err := decoder.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

func TestChromeGolden(t *testing.T) {
	var b bytes.Buffer
	if err := overlapping().WriteChrome(&b); err != nil {
		t.Fatal(err)
	}
	var any struct {
		TraceEvents []map[string]any `json:"traceEvents"`
	}
	if err := json.Unmarshal(b.Bytes(), &any); err != nil || len(any.TraceEvents) < 200 {
		t.Errorf("%d events, %v", len(any.TraceEvents), err)
	}
	golden(t, "overlapping.json", b.Bytes())
}

// The PNG is drawn from the same shapes; its pixels are looked at here and there, since compressors
// change.
func TestPNG(t *testing.T) {
	name := filepath.Join(t.TempDir(), "timeline.PNG")
	tr := overlapping()
	if err := tr.WriteFile(name, PictureOptions{Title: "a title"}); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	picture, err := png.Decode(f)
	if err != nil {
		t.Fatal(err)
	}
	p := tr.draw(PictureOptions{Title: "a title"})
	if size := picture.Bounds().Size(); float64(size.X) != 2*p.width || float64(size.Y) != 2*p.height {
		t.Errorf("%v for a picture of %g × %g", size, p.width, p.height)
	}
	checked := 0
	for i, s := range p.shapes {
		if r := s.rect; r != nil && r.w > 20 && r.h > 10 && i > 0 && r.tip != "" {
			red, green, blue, _ := picture.At(int(2*(r.x+3)), int(2*(r.y+2))).RGBA()
			if uint8(red>>8) != r.fill.R || uint8(green>>8) != r.fill.G || uint8(blue>>8) != r.fill.B {
				t.Errorf("at %g, %g there is not %v", r.x, r.y, r.fill)
			}
			checked++
		}
	}
	if checked < 20 {
		t.Errorf("only %d rectangles were looked at", checked)
	}
}

// A picture of very many events has no more shapes than its pixels can show.
func TestPictureStaysSmall(t *testing.T) {
	tr := &Trace{}
	for i := range 300_000 {
		at := time.Duration(i) * 3 * time.Microsecond
		tr.Events = append(tr.Events, Event{Kind: Kind(1 + i%3), Name: "k", Start: at, Duration: 2 * time.Microsecond, Lane: int64(7 + i%3), Bytes: 8},
			Event{Kind: Runtime, Name: "cudaLaunchKernel", Start: at, Duration: time.Microsecond, Device: Host, Lane: 1})
	}
	if shapes := len(tr.draw(PictureOptions{}).shapes); shapes > 5000 {
		t.Errorf("%d shapes", shapes)
	}
}

func TestPictureOfAPart(t *testing.T) {
	p := overlapping().draw(PictureOptions{From: 30 * ms, To: 40 * ms, Width: 700})
	for _, s := range p.shapes {
		if r := s.rect; r != nil && (r.x < 0 || r.x+r.w > 700.01 || r.tip != "" && r.x < margin+gutter-0.01) {
			t.Errorf("a rectangle is outside of the picture: %+v", r)
		}
	}
	part := overlapping().cut(34*ms, 40*ms).Summary()
	if len(part.Copies) != 1 || part.Copies[0].Bytes != 10<<20 {
		t.Errorf("half of a copy: %+v", part.Copies)
	}
}

// Nothing, and events without length, are drawn without dividing by zero.
func TestPictureOfNothing(t *testing.T) {
	for _, tr := range []*Trace{{}, {Events: []Event{{Kind: Kernel, Name: "k", Start: 5, Lane: 7}}}} {
		var b bytes.Buffer
		if err := tr.WriteSVG(&b, PictureOptions{}); err != nil || strings.Contains(b.String(), "NaN") || strings.Contains(b.String(), "Inf") {
			t.Errorf("%v: %s", err, b.String())
		}
		if err := tr.WritePNG(io.Discard, PictureOptions{}); err != nil {
			t.Error(err)
		}
	}
}

func TestTicks(t *testing.T) {
	for _, c := range []struct {
		span  time.Duration
		count int
		step  time.Duration
		label string
	}{
		{55 * ms, 12, 5 * ms, "5 ms"}, {1, 10, 1, "1 ns"}, {0, 0, 1, "1 ns"}, {9 * time.Second, 10, time.Second, "1 s"}, {1500 * time.Microsecond, 10, 200 * time.Microsecond, "200 µs"},
		{2500 * time.Microsecond, 10, 500 * time.Microsecond, "0.5 ms"}, {700, 10, 100, "100 ns"},
	} {
		step, unit := tick(c.span, c.count)
		if step != c.step || unit.label(step) != c.label {
			t.Errorf("tick(%v, %d): %v, %q, want %v, %q", c.span, c.count, step, unit.label(step), c.step, c.label)
		}
	}
}

func TestShortNames(t *testing.T) {
	for name, want := range map[string]string{
		"void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int)": "vectorized_elementwise_kernel",
		"void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(cutlass_80_simt_sgemm::Params)":                   "cutlass_80_simt_sgemm_256x128_8x4_nn_align1",
		"void (anonymous namespace)::softmax<float>(float*)":                                                                  "softmax",
		"Memcpy HtoD (Pinned -> Device)": "Memcpy HtoD (Pinned -> Device)",
		"aten::add":                      "aten::add",
		"sm90_xmma_gemm_f32f32_tf32f32":  "sm90_xmma_gemm_f32f32_tf32f32",
		"":                               "",
		"<>":                             "<>",
	} {
		if got := ShortName(name); got != want {
			t.Errorf("%q: %q, want %q", name, got, want)
		}
	}
}

func TestFileNamesSayTheFormat(t *testing.T) {
	if err := overlapping().WriteFile(filepath.Join(t.TempDir(), "timeline.pdf"), PictureOptions{}); err == nil || !strings.Contains(err.Error(), ".svg, .png or .json") {
		t.Error(err)
	}
	if err := overlapping().WriteFile(filepath.Join(t.TempDir(), "no", "timeline.svg"), PictureOptions{}); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// TestWriteFileReplacesOnlyItsOwnKind: what an earlier run drew, but no other file.
func TestWriteFileReplacesOnlyItsOwnKind(t *testing.T) {
	for _, name := range []string{"a.svg", "a.png", "a.json"} {
		path := filepath.Join(t.TempDir(), name)
		for range 2 {
			if err := overlapping().WriteFile(path, PictureOptions{}); err != nil {
				t.Error(err)
			}
		}
		const text = "{\"mine\": 1}"
		if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
		checked := Window{File: path}.Check()
		written := overlapping().WriteFile(path, PictureOptions{})
		for _, err := range []error{checked, written} {
			if err == nil || !strings.Contains(err.Error(), path) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if now, err := os.ReadFile(path); err != nil || string(now) != text {
			t.Errorf("%s holds %q, %v", name, now, err)
		}
	}
}
