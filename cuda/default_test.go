package cuda

import "testing"

func TestDefaultIsTheFirstGPUOrTheCPU(t *testing.T) {
	want := CPU
	if DeviceCount() > 0 {
		want = 0
	}
	if got := Default(); got != want {
		t.Errorf("got %v, want %v", got, want)
	}
}
