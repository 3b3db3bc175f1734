package cuda

import (
	"fmt"
	"strings"

	"github.com/torchstream/torchstream/internal/capi"
)

// UUID returns the GPU's UUID in the form of nvidia-smi -L for a whole GPU: "GPU-" and 32
// hexadecimal digits in five groups. It identifies the GPU in every process, for any value of
// CUDA_VISIBLE_DEVICES.
func (d Device) UUID() (string, error) {
	if err := d.gpu("Device.UUID"); err != nil {
		return "", err
	}
	id, err := capi.IdentifyDevice(int32(d))
	if err != nil {
		return "", checked(err)
	}
	return uuidString(id.UUID), nil
}

func uuidString(u [16]byte) string {
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}

// PCIBusID returns the GPU's address on the PCI bus, such as "0000:1B:00.0".
func (d Device) PCIBusID() (string, error) {
	if err := d.gpu("Device.PCIBusID"); err != nil {
		return "", err
	}
	id, err := capi.IdentifyDevice(int32(d))
	return id.PCIBusID, checked(err)
}

// Readings are the driver's measurements of a GPU. A value that the GPU does not report is -1.
type Readings struct {
	Power      float64 // watts; the GPU averages over a second or less
	PowerLimit float64 // watts
	Energy     float64 // joules since the driver was loaded
	// Temperature of the GPU's die, in degrees Celsius.
	Temperature                int
	SMClock, MemoryClock       int // MHz, now
	MaxSMClock, MaxMemoryClock int // MHz
	// Utilization is the percentage of the driver's last sample period (a second or less) in which
	// a kernel of any size ran. MemoryUtilization is the percentage in which device memory was read
	// or written.
	Utilization, MemoryUtilization int
	// Throttle says why the clocks are below their maximum.
	Throttle ThrottleReasons
}

// ThrottleReasons is a set of reasons why a GPU lowers its clocks.
type ThrottleReasons uint64

// The reasons of a [ThrottleReasons], as NVML defines them.
const (
	ThrottleIdle          ThrottleReasons = 0x1   // there is no work
	ThrottleUserClocks    ThrottleReasons = 0x2   // the clocks that an administrator set
	ThrottlePowerCap      ThrottleReasons = 0x4   // the power limit
	ThrottleHardware      ThrottleReasons = 0x8   // heat, a power brake or too much current: the clocks are halved
	ThrottleSyncBoost     ThrottleReasons = 0x10  // the slowest GPU of a group
	ThrottleHeat          ThrottleReasons = 0x20  // the driver's temperature limit
	ThrottleHardwareHeat  ThrottleReasons = 0x40  // the hardware's temperature limit
	ThrottlePowerBrake    ThrottleReasons = 0x80  // the server's power supply
	ThrottleDisplayClocks ThrottleReasons = 0x100 // the clocks that a display needs
	ThrottleNotReported   ThrottleReasons = 1 << 63
)

var throttleNames = [...]struct {
	reason ThrottleReasons
	name   string
}{
	{ThrottleIdle, "idle"}, {ThrottleUserClocks, "user clocks"}, {ThrottlePowerCap, "power cap"},
	{ThrottleHardware, "hardware slowdown"}, {ThrottleSyncBoost, "sync boost"}, {ThrottleHeat, "heat"},
	{ThrottleHardwareHeat, "hardware heat"}, {ThrottlePowerBrake, "power brake"},
	{ThrottleDisplayClocks, "display clocks"}, {ThrottleNotReported, "not reported"},
}

// String returns the reasons, such as "power cap, heat"; "none" for an empty set.
func (r ThrottleReasons) String() string {
	if r == 0 {
		return "none"
	}
	var names []string
	for _, n := range throttleNames {
		if r&n.reason != 0 {
			names = append(names, n.name)
			r &^= n.reason
		}
	}
	if r != 0 {
		names = append(names, fmt.Sprintf("%#x", uint64(r)))
	}
	return strings.Join(names, ", ")
}

// Readings reads the GPU's sensors. It makes driver calls that take up to some milliseconds but do
// not wait for the device, so a monitor may call it every second during training. For a slice of a
// GPU (MIG) it reads the whole GPU.
//
// The first call loads the driver's library libnvidia-ml.so.1. Without it the error matches
// [ErrUnsupported] and names the package to install.
func (d Device) Readings() (Readings, error) {
	id, err := d.PCIBusID()
	if err != nil {
		return Readings{}, err
	}
	r, err := capi.ReadDevice(id)
	if err != nil {
		return Readings{}, checked(err)
	}
	return readings(r), nil
}

func readings(r capi.Readings) Readings {
	thousandth := func(v int64) float64 {
		if v < 0 {
			return -1
		}
		return float64(v) / 1000
	}
	throttle := ThrottleNotReported
	if r.ThrottleReasons >= 0 {
		throttle = ThrottleReasons(r.ThrottleReasons)
	}
	return Readings{
		Power: thousandth(r.PowerMilliwatts), PowerLimit: thousandth(r.PowerLimitMilliwatts),
		Energy:      thousandth(r.EnergyMillijoules),
		Temperature: int(r.Temperature), SMClock: int(r.SMClock), MemoryClock: int(r.MemoryClock),
		MaxSMClock: int(r.MaxSMClock), MaxMemoryClock: int(r.MaxMemoryClock),
		Utilization: int(r.Busy), MemoryUtilization: int(r.MemoryBusy), Throttle: throttle,
	}
}

// String returns the readings in one line, without those that the GPU does not report: "412 W of
// 700 W, 61 °C, SM 1755 MHz of 1980 MHz, memory 2619 MHz of 2619 MHz, 98 % busy, throttled by power
// cap".
func (r Readings) String() string {
	var parts []string
	of := func(name string, value, limit float64, unit string) {
		if value < 0 {
			return
		}
		s := fmt.Sprintf("%s%.0f %s", name, value, unit)
		if limit >= 0 {
			s += fmt.Sprintf(" of %.0f %s", limit, unit)
		}
		parts = append(parts, s)
	}
	of("", r.Power, r.PowerLimit, "W")
	of("", float64(r.Temperature), -1, "°C")
	of("SM ", float64(r.SMClock), float64(r.MaxSMClock), "MHz")
	of("memory ", float64(r.MemoryClock), float64(r.MaxMemoryClock), "MHz")
	of("", float64(r.Utilization), -1, "% busy")
	if r.Throttle&^(ThrottleIdle|ThrottleNotReported) != 0 {
		parts = append(parts, "throttled by "+r.Throttle.String())
	}
	if len(parts) == 0 {
		return "no readings"
	}
	return strings.Join(parts, ", ")
}
