package trace

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "rewrite the golden files")

const ms = time.Millisecond

// overlapping returns a constructed recording: kernels on the default streams of two devices,
// concurrent copies, a late launch, and host events.
func overlapping() *Trace {
	t := &Trace{Begin: time.Unix(1, 0), Duration: 60 * ms}
	add := func(kind Kind, name string, start, duration time.Duration, device int, lane, bytes, correlation int64) {
		t.Events = append(t.Events, Event{
			Kind: kind, Name: name, Start: start, Duration: duration, Device: device, Lane: lane,
			Bytes: bytes, Correlation: correlation,
		})
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
		add(Kernel, "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(cutlass_80_simt_sgemm::Params)", at,
			5*ms-20*time.Microsecond, 0, 7, 0, id)
		id++
		add(Runtime, "cudaMemcpyAsync", launch+20*time.Microsecond, 15*time.Microsecond, Host, 4711, 0, id)
		add(Copy, "Memcpy HtoD (Pinned -> Device)", 2*ms+time.Duration(i)*1250*time.Microsecond,
			1218*time.Microsecond, 0, 13, 64<<20, id)
	}
	add(Copy, "Memcpy HtoD (Pageable -> Device)", 33*ms, 2*ms, 0, 13, 20<<20, 0)
	add(Set, "Memset (Device)", 56*ms+100*time.Microsecond, 3*time.Microsecond, 0, 7, 4096, 0)
	for i := range 200 {
		add(Kernel, "void at::native::vectorized_elementwise_kernel<4, "+
			"at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int)",
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
		t.Errorf("the output differs from %s; check the difference, then run go test ./trace -update", path)
	}
}

const us = time.Microsecond
