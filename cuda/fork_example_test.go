package cuda_test

import (
	"errors"
	"fmt"
	"log"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// Two branches read x at the same time, one on the default stream and one on a side stream. The
// default stream then adds their results. The host waits only in Float64.
func ExampleJoin() {
	branches := func(device cuda.Device) (sum float64, err error) {
		caller := cuda.DefaultStream(device)
		side, err := cuda.NewStream(device, cuda.StreamOptions{})
		if err != nil {
			return 0, err
		}
		scope := torch.NewScope("branches")
		defer scope.Close() // after Join: side no longer reads x
		ones, err := torch.Ones(device, torch.Float32, 1000)
		if err != nil {
			return 0, err
		}
		x := scope.Own(ones) // made on the default stream
		if err := cuda.Fork(caller, side); err != nil {
			return 0, err
		}
		var doubled *torch.Tensor
		err = cuda.WithStream(side, func() error {
			doubled = x.MulScalar(2).Sum() // on side
			return doubled.Err()
		})
		tripled := x.MulScalar(3).Sum() // on the default stream
		if err := errors.Join(err, cuda.Join(caller, side)); err != nil {
			return 0, err
		}
		return doubled.Add(tripled).Float64()
	}
	sum, err := branches(0)
	if err != nil && !errors.Is(err, cuda.ErrNoDevice) {
		log.Fatal(err)
	}
	fmt.Println(sum == 5000 || err != nil)
	// Output: true
}
