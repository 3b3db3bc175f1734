package loaderbench

import (
	"cmp"
	"context"
	"errors"
	"io"
	"math"
	"time"
)

// Beside runs the loader again in the background while it runs body. It returns the loader's images
// per second during that time.
func (m *Measurement) Beside(ctx context.Context, body func()) (float64, error) {
	again := Measurement{archive: m.archive, length: math.MaxInt64, warm: m.warm, o: m.o, target: m.target,
		started: make(chan struct{})}
	ended := make(chan error, 1)
	go func() { ended <- again.Run(ctx, io.Discard) }()
	select {
	case <-again.started:
	case err := <-ended:
		return 0, cmp.Or(err, errors.New("the loader ended before its second batch"))
	}
	begin := time.Now()
	body()
	rate := float64(again.seen.Load()) / time.Since(begin).Seconds()
	again.stopped.Store(true)
	return rate, <-ended
}
