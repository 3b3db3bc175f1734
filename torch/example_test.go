package torch_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// A chain of operators reads like a formula; its error surfaces at its end.
func Example() {
	scope := torch.NewScope("example")
	defer scope.Close()
	data, err := torch.FromFloat32s([]float32{1, 2, 3, 4, 5, 6}, 2, 3)
	if err != nil {
		fmt.Println(err)
		return
	}
	x := scope.Own(data) // x and all results computed from x belong to the scope

	fmt.Println(x.T().MatMul(x))
	mean, err := x.Mul(x).Mean().Float64()
	fmt.Printf("%.4f %v\n", mean, err)

	_, err = x.MatMul(x).ReLU().Sum().Float64()
	var failure *torch.Error
	if errors.As(err, &failure) {
		fmt.Println(failure.Op, failure.Operands)
	}
	// Output:
	// float32[3 3] cpu:
	// [[17., 22., 27.],
	//  [22., 29., 36.],
	//  [27., 36., 45.]]
	// 15.1667 <nil>
	// MatMul [float32[2 3] cpu float32[2 3] cpu]
}

// A loop without a Close: the end of the data's scope frees all tensors computed from the data.
func ExampleScope() {
	w, err := torch.Full(cuda.CPU, torch.Float32, 0.5, 2, 1)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer w.Close()
	data, err := torch.FromFloat32s([]float32{1, 2, 3, 4}, 2, 2)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer data.Close()

	var best *torch.Tensor
	before := torch.LiveTensors()
	for turn := range 3 {
		batch := torch.NewScope(fmt.Sprint("batch ", turn))
		loss := data.In(batch).MatMul(w).Square().Mean()
		if turn == 1 {
			best = loss.Keep()
		}
		batch.Close()
		if _, err := loss.Float64(); errors.Is(err, torch.ErrClosed) {
			fmt.Println("turn", turn, "is over")
		}
	}
	fmt.Println(torch.LiveTensors()-before, best)
	best.Close()
	// Output:
	// turn 0 is over
	// turn 1 is over
	// turn 2 is over
	// 1 float32[] cpu: 7.2500
}

// Gradient descent by hand finds w with w*3 = 6.
func ExampleTensor_Backward() {
	w, err := torch.Zeros(cuda.CPU, torch.Float32, 1)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer w.Close()
	if err := w.SetRequiresGrad(true); err != nil {
		fmt.Println(err)
		return
	}
	for range 50 {
		turn := torch.NewScope("turn")
		loss := w.In(turn).MulScalar(3).SubScalar(6).Square().Sum()
		if err := loss.Backward(); err != nil {
			fmt.Println(err)
			return
		}
		// NoGrad allows the change of a leaf in place.
		step := w.NoGrad().AddScaled_(w.In(turn).Grad(), -0.05)
		if err := errors.Join(step.Err(), torch.ClearGrads(w), turn.Close()); err != nil {
			fmt.Println(err)
			return
		}
	}
	fmt.Println(w)
	// Output:
	// float32[1] cpu: [2.]
}

// The mark travels with the data: operators record nothing for the marked input, although the
// parameter requires gradients.
func ExampleTensor_NoGrad() {
	scope := torch.NewScope("example")
	defer scope.Close()
	w, err := torch.Ones(cuda.CPU, torch.Float32, 2, 2)
	if err != nil {
		fmt.Println(err)
		return
	}
	w = scope.Own(w)
	if err := w.SetRequiresGrad(true); err != nil {
		fmt.Println(err)
		return
	}
	x, err := torch.Ones(cuda.CPU, torch.Float32, 1, 2)
	if err != nil {
		fmt.Println(err)
		return
	}
	x = scope.Own(x)
	fmt.Println(x.MatMul(w).RequiresGrad(), x.NoGrad().MatMul(w).RequiresGrad())
	// Output:
	// true false
}

// A hook clips the gradient of one tensor, and a callback runs at the end of the pass.
func ExampleTensor_RegisterHook() {
	w, err := torch.FromFloat32s([]float32{1, 10}, 2)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer w.Close()
	if err := w.SetRequiresGrad(true); err != nil {
		fmt.Println(err)
		return
	}
	hook, err := w.RegisterHook(func(g *torch.Tensor) (*torch.Tensor, error) {
		return g.Clamp(-5, 5), torch.QueueCallback(func() error { fmt.Println("done"); return nil })
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer hook.Remove()
	step := torch.NewScope("step")
	defer step.Close()
	if err := w.In(step).Square().Sum().Backward(); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(w.In(step).Grad())
	// Output:
	// done
	// float32[2] cpu: [2., 5.]
}

// An operator with a custom gradient: it rounds, and has the gradient of the identity.
func ExampleFunction() {
	round := torch.Function{
		Name: "round",
		Forward: func(c *torch.FunctionContext, in []*torch.Tensor) ([]*torch.Tensor, error) {
			return []*torch.Tensor{in[0].Round()}, nil
		},
		Backward: func(c *torch.FunctionContext, g []*torch.Tensor) ([]*torch.Tensor, error) {
			return g, nil
		},
	}
	w, err := torch.FromFloat32s([]float32{0.4, 2.6}, 2)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer w.Close()
	if err := w.SetRequiresGrad(true); err != nil {
		fmt.Println(err)
		return
	}
	step := torch.NewScope("step")
	defer step.Close()
	y := round.Apply1(w.In(step))
	if err := y.Square().Sum().Backward(); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(y, w.In(step).Grad())
	// Output:
	// float32[2] cpu: [0., 3.] float32[2] cpu: [0., 6.]
}

// One process shares a tensor, and another opens it by the bytes of its handle. Here one process
// does both.
func ExampleShare() {
	x, err := torch.FromFloat32s([]float32{1, 2, 3})
	if err != nil {
		log.Fatal(err)
	}
	defer x.Close()
	s, err := torch.Share(x)
	if err != nil {
		log.Fatal(err)
	}
	message, err := s.Handle().MarshalBinary() // goes through a pipe, a socket or a file
	if err != nil {
		log.Fatal(err)
	}

	var h torch.SharedHandle // in the other process
	if err := h.UnmarshalBinary(message); err != nil {
		log.Fatal(err)
	}
	y, err := torch.OpenShared(h)
	if err != nil {
		log.Fatal(err)
	}
	y.AddScalar_(10)
	y.Close()

	fmt.Println(s.Tensor())
	if err := s.Wait(context.Background()); err != nil { // until no process has it open
		log.Fatal(err)
	}
	// Output:
	// float32[3] cpu: [11., 12., 13.]
}
