//go:build linux

package capi

/*
#include <stdlib.h>
#include "torchstream.h"
#cgo noescape ts_device_get_identity
#cgo nocallback ts_device_get_identity
#cgo noescape ts_readings_get
#cgo nocallback ts_readings_get
*/
import "C"

// DeviceIdentity identifies a GPU outside the process.
type DeviceIdentity struct {
	UUID     [C.TS_UUID_BYTES]byte
	PCIBusID string
}

func IdentifyDevice(device int32) (DeviceIdentity, error) {
	if err := Check(); err != nil {
		return DeviceIdentity{}, err
	}
	i := C.ts_device_identity{size: C.sizeof_ts_device_identity}
	if err := failure(C.ts_device_get_identity(C.int32_t(device), &i)); err != nil {
		return DeviceIdentity{}, err
	}
	id := DeviceIdentity{PCIBusID: C.GoString(&i.pci_bus_id[0])}
	for k := range id.UUID {
		id.UUID[k] = byte(i.uuid[k])
	}
	return id, nil
}

// Readings has the fields of ts_readings; -1 means that the GPU does not report the value.
type Readings struct {
	PowerMilliwatts, PowerLimitMilliwatts, EnergyMillijoules            int64
	Temperature, SMClock, MemoryClock, MaxSMClock, MaxMemoryClock, Busy int32
	MemoryBusy                                                          int32
	ThrottleReasons                                                     int64
}

// ReadDevice reads the sensors of a GPU. The first call loads NVML.
func ReadDevice(pciBusID string) (Readings, error) {
	if err := Check(); err != nil {
		return Readings{}, err
	}
	waiting.enter()
	defer waiting.leave()
	r := C.ts_readings{size: C.sizeof_ts_readings}
	err := withString(pciBusID, func(id *C.char) error { return failure(C.ts_readings_get(id, &r)) })
	if err != nil {
		return Readings{}, err
	}
	return Readings{
		PowerMilliwatts: int64(r.power_milliwatts), PowerLimitMilliwatts: int64(r.power_limit_milliwatts),
		EnergyMillijoules: int64(r.energy_millijoules), Temperature: int32(r.temperature),
		SMClock: int32(r.sm_clock), MemoryClock: int32(r.memory_clock),
		MaxSMClock: int32(r.max_sm_clock), MaxMemoryClock: int32(r.max_memory_clock),
		Busy: int32(r.busy_percent), MemoryBusy: int32(r.memory_busy_percent),
		ThrottleReasons: int64(r.throttle_reasons),
	}, nil
}
