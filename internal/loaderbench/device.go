package loaderbench

import (
	"context"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/prefetcher"
)

// pickTarget parses -device, -decode and -decode-sms of a benchmark. Without a device it returns
// nil.
func pickTarget(name, decode string, sms int) (target, error) {
	if name == "" {
		return nil, nil
	}
	where, err := cli.ParseDecode(decode)
	if err != nil {
		return nil, err
	}
	d, err := cli.ParseDevice(name)
	if err != nil {
		return nil, err
	}
	if err := cli.CheckSMs(sms, where); err != nil {
		return nil, err
	}
	return device{d, where, sms}, nil
}

// device is a target fed by a prefetcher.
type device struct {
	cuda.Device
	decode prefetcher.Decode
	sms    int
}

func (d device) feed(loader *imageloader.Loader) (feeder, error) {
	p, err := prefetcher.New(loader,
		prefetcher.Options{Device: d.Device, Decode: d.decode, DecodeMultiprocessors: d.sms})
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
	return deviceStats{s.FinishTime, s.Bytes, s.Decoded, s.DecodedAgain, s.Inflated, s.Mapped, s.DecoderBytes,
		s.DecodeMultiprocessors}
}

// Device returns the device that the batches are copied to, or the CPU if they stay in host memory.
func (m *Measurement) Device() cuda.Device {
	if d, ok := m.target.(device); ok {
		return d.Device
	}
	return cuda.CPU
}
