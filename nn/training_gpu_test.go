package nn_test

import (
	"fmt"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

// Training on the GPU, with an optimizer that was made before the network moved there, gives the
// same results as on the CPU.
func TestTrainingOnTheGPU(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	for _, format := range []torch.MemoryFormat{torch.Contiguous, torch.ChannelsLast} {
		t.Run(fmt.Sprint(format), func(t *testing.T) {
			p, net := openPeer(t), parityNet(t)
			opt, err := optim.NewSGD(nn.Parameters(net), optim.SGDOptions{LR: 0.05, Momentum: 0.9, WeightDecay: 5e-4})
			if err != nil {
				t.Fatal(err)
			}
			defer opt.Close()
			live := torch.LiveTensors()
			if err := nn.To(net, cuda.Device(0)); err != nil {
				t.Fatal(err)
			}
			if n := torch.LiveTensors(); n > live {
				t.Errorf("To left %d references for the garbage collector, want none", n-live)
			}
			scope := torch.NewScope("data")
			defer scope.Close()
			x, y := p.tensor("input").In(scope).To(cuda.Device(0)).Contiguous(format), p.tensor(
				"labels").In(scope).To(cuda.Device(0))
			for range 5 {
				turn := torch.NewScope("turn")
				if err := net.Forward(x.In(turn)).CrossEntropy(y).Backward(); err != nil {
					t.Fatal(err)
				}
				if err := opt.Step(); err != nil {
					t.Fatal(err)
				}
				turn.Close()
			}
			for _, n := range nn.State(net) {
				if n.Tensor.Device() != cuda.Device(0) {
					t.Errorf("%s is on %v, want %v", n.Name, n.Tensor.Device(), cuda.Device(0))
				}
				p.near("momentum/"+n.Name, n.Tensor, 5e-3) // TF32 convolutions have 10 bits
			}
			path := t.TempDir() + "/gpu.safetensors"
			if err := nn.Save(path, net, nil); err != nil {
				t.Fatal(err)
			}
			if _, err := nn.Load(path, net); err != nil {
				t.Fatal(err)
			}
		})
	}
}
