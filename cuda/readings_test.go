//go:build linux

package cuda

import (
	"errors"
	"regexp"
	"testing"
)

func TestUUIDForm(t *testing.T) {
	u := [16]byte{0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef, 0xfe, 0xdc, 0xba, 0x98, 0x76, 0x54, 0x32, 0x10}
	if got, want := uuidString(u), "GPU-01234567-89ab-cdef-fedc-ba9876543210"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestEveryGPUHasAnIdentity(t *testing.T) {
	onGPU(t, 1)
	seen := map[string]bool{}
	for i := range DeviceCount() {
		d := Device(i)
		uuid, bus := must[string](t)(d.UUID()), must[string](t)(d.PCIBusID())
		if !regexp.MustCompile(`^GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`).MatchString(uuid) || seen[uuid] {
			t.Errorf("%v: the UUID is %q", d, uuid)
		}
		if !regexp.MustCompile(`^[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.0$`).MatchString(bus) || seen[bus] {
			t.Errorf("%v: the bus id is %q", d, bus)
		}
		seen[uuid], seen[bus] = true, true
	}
}

func TestReadingsOfEveryGPU(t *testing.T) {
	onGPU(t, 1)
	for i := range DeviceCount() {
		r, err := Device(i).Readings()
		if errors.Is(err, ErrUnsupported) {
			t.Skipf("the driver's library is not here: %v", err)
		}
		check(t, err)
		t.Logf("%v: %v", Device(i), r)
		if r.Temperature != -1 && (r.Temperature < 5 || r.Temperature > 120) || r.Power != -1 &&
			(r.Power < 1 || r.Power > 5000) ||
			r.Utilization < -1 || r.Utilization > 100 || r.SMClock > 10000 {
			t.Errorf("%v: got %+v", Device(i), r)
		}
	}
}
