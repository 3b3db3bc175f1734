package cuda_test

import (
	"errors"
	"fmt"

	"github.com/torchstream/torchstream/cuda"
)

// Run the same work on a side stream if there is a GPU.
func ExampleWithStream() {
	steps := 0
	work := func() error {
		steps++ // operators called here are queued on the stream
		return nil
	}
	run := func() error {
		if cuda.DeviceCount() == 0 {
			return work()
		}
		side, err := cuda.NewStream(0, cuda.StreamOptions{})
		if err != nil {
			return err
		}
		return cuda.WithStream(side, work)
	}
	err := run()
	fmt.Println(steps, err)
	// Output: 1 <nil>
}

// A program selects a GPU, or continues without one.
func ExampleDeviceCount() {
	device := cuda.CPU
	if cuda.DeviceCount() > 0 {
		device = 0
	}
	fmt.Println(device == cuda.CPU || device == cuda.Device(0))
	// Output: true
}

func ExampleNewStream_noDevice() {
	_, err := cuda.NewStream(1000, cuda.StreamOptions{})
	fmt.Println(errors.Is(err, cuda.ErrNoDevice))
	// Output: true
}

func ExampleDevice_String() {
	fmt.Println(cuda.Device(1), cuda.CPU)
	// Output: cuda:1 cpu
}

// Streams are values: they serve as map keys, and the zero Stream is the default stream.
func ExampleStream() {
	uses := map[cuda.Stream]int{}
	uses[cuda.DefaultStream(0)]++
	uses[cuda.Stream{}]++
	fmt.Println(uses[cuda.DefaultStream(0)], cuda.DefaultStream(1))
	// Output: 2 cuda:1 default stream
}

// SetCUDAStream and its restore are the two halves of WithStream, for code that cannot be a
// function.
func ExampleSetCUDAStream() {
	run := func(side cuda.Stream) (err error) {
		restore, err := cuda.SetCUDAStream(side)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, restore()) }()
		current, err := cuda.GetCurrentCUDAStream(side.Device())
		if err == nil && current != side {
			err = errors.New("this cannot happen: the goroutine is locked to its thread")
		}
		return err
	}
	err := run(cuda.DefaultStream(0))
	fmt.Println(err == nil || errors.Is(err, cuda.ErrNoDevice))
	// Output: true
}

// A fork and a join: a side stream reads results of the default stream, and the default stream
// continues when the side stream is done. The host waits for neither.
func ExampleStream_Wait() {
	forkAndJoin := func(work func() error) error {
		side, err := cuda.NewStream(0, cuda.StreamOptions{})
		if err != nil {
			return err
		}
		main := cuda.DefaultStream(0)
		if err := side.Wait(main); err != nil {
			return err
		}
		if err := cuda.WithStream(side, work); err != nil {
			return err
		}
		return main.Wait(side)
	}
	err := forkAndJoin(func() error { return nil })
	fmt.Println(err == nil || errors.Is(err, cuda.ErrNoDevice))
	// Output: true
}

// An event orders less than Wait: only the work that was queued before Record.
func ExampleEvent() {
	order := func(producer, consumer cuda.Stream) error {
		ready, err := cuda.NewEvent(cuda.EventOptions{})
		if err != nil {
			return err
		}
		defer ready.Close()
		// ... queue the consumer's input on producer ...
		if err := ready.Record(producer); err != nil {
			return err
		}
		// ... queue other work on producer ...
		return consumer.WaitEvent(ready)
	}
	err := order(cuda.DefaultStream(0), cuda.DefaultStream(0))
	fmt.Println(err == nil || errors.Is(err, cuda.ErrNoDevice))
	// Output: true
}
