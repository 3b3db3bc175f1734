package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/prefetcher"
)

// pickTarget reads -device of a benchmark.
func pickTarget(name string) (target, error) {
	d, err := parseDevice(name)
	if err != nil {
		return nil, err
	}
	return device{d}, nil
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

// device is a target that a prefetcher feeds.
type device struct{ cuda.Device }

func (d device) feed(loader *imageloader.Loader) (feeder, error) {
	p, err := prefetcher.New(loader, prefetcher.Options{Device: d.Device})
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

func (p prefetched) finishTime() time.Duration { return p.Stats().FinishTime }
