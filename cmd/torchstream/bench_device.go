package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/prefetcher"
)

// pickTarget reads -device, -decode and -decode-sms of a benchmark. No device is no target.
func pickTarget(name, decode string, sms int) (target, error) {
	if name == "" {
		return nil, nil
	}
	where, err := parseDecode(decode)
	if err != nil {
		return nil, err
	}
	d, err := parseDevice(name)
	if err != nil {
		return nil, err
	}
	if err := checkSMs(sms, where); err != nil {
		return nil, err
	}
	return device{d, where, sms}, nil
}

// parseDecode reads -decode.
func parseDecode(name string) (prefetcher.Decode, error) {
	where, known := map[string]prefetcher.Decode{"host": prefetcher.Host, "auto": prefetcher.Auto, "device": prefetcher.Device}[name]
	if !known {
		return 0, usageError{fmt.Sprintf("-decode %q: want host, auto or device", name)}
	}
	return where, nil
}

const decodeSMsHelp = "with -decode device or auto: the maximum `NUMBER` of the GPU's multiprocessors that decode (0: all)"

// checkSMs checks -decode-sms.
func checkSMs(sms int, decode prefetcher.Decode) error {
	if sms < 0 || sms > 0 && decode == prefetcher.Host {
		return usageError{fmt.Sprintf("-decode-sms %d: want a number of multiprocessors of at least 0, with -decode device or auto", sms)}
	}
	return nil
}

// parseDevice reads -device.
func parseDevice(name string) (cuda.Device, error) {
	if name == "cpu" {
		return cuda.CPU, nil
	}
	if name == "cuda" {
		name = "cuda:0"
	}
	number, found := strings.CutPrefix(name, "cuda:")
	n, err := strconv.Atoi(number)
	if !found || err != nil || n < 0 {
		return 0, usageError{fmt.Sprintf("-device %q: want cpu, cuda, or cuda:0, cuda:1, ...", name)}
	}
	if err := capi.Check(); err != nil {
		return 0, err
	}
	if count := cuda.DeviceCount(); n >= count {
		return 0, fmt.Errorf("-device %s: this machine has no such GPU (%d are usable): see torchstream doctor", name, count)
	}
	return cuda.Device(n), nil
}

// pickDevice is parseDevice, where "" selects the first GPU, or the CPU without one. It returns an
// error without LibTorch, which the CPU needs too.
func pickDevice(name string) (cuda.Device, error) {
	device := cuda.CPU
	if name != "" {
		var err error
		if device, err = parseDevice(name); err != nil {
			return 0, err
		}
	} else if cuda.DeviceCount() > 0 {
		device = cuda.Device(0)
	}
	return device, capi.Check()
}

// deviceName returns the name of a GPU's model, or "cpu".
func deviceName(d cuda.Device) (string, error) {
	if d == cuda.CPU {
		return d.String(), nil
	}
	properties, err := d.Properties()
	return properties.Name, err
}

// device is a target that a prefetcher feeds.
type device struct {
	cuda.Device
	decode prefetcher.Decode
	sms    int
}

func (d device) feed(loader *imageloader.Loader) (feeder, error) {
	p, err := prefetcher.New(loader, prefetcher.Options{Device: d.Device, Decode: d.decode, DecodeMultiprocessors: d.sms})
	if err != nil {
		return nil, err
	}
	return prefetched{p}, nil
}

type prefetched struct{ *prefetcher.Prefetcher }

func (p prefetched) epoch(ctx context.Context, epoch int, count func(n int) (more bool, err error)) error {
	for batch, err := range p.Epoch(ctx, epoch) {
		if err != nil {
			return err
		}
		if more, err := count(batch.N); !more || err != nil {
			return err
		}
	}
	return nil
}

func (p prefetched) stats() deviceStats {
	s := p.Stats()
	return deviceStats{s.FinishTime, s.Bytes, s.Decoded, s.DecodedAgain, s.Inflated, s.DecoderBytes, s.DecodeMultiprocessors}
}
