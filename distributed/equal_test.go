//go:build linux

package distributed

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"testing"

	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

func init() { workers["equal ranks on GPUs"] = onOwnGPU(ranksStayEqual) }

// The ranks start with different weights and have different samples. Gradients and weights must
// have the same bits on all ranks after NewDataParallel and after every step.
func TestRanksStayEqual(t *testing.T)    { requireNone(t, inProcess(t, 2, quick, ranksStayEqual)) }
func TestGPURanksStayEqual(t *testing.T) { onGPUs(t, "equal ranks on GPUs") }

func ranksStayEqual(g *Group) error {
	for _, bucketBytes := range []int64{0, smallBuckets} { // one bucket, and several
		for _, flagged := range []bool{false, true} {
			if err := stayEqual(g, bucketBytes, flagged); err != nil {
				return fmt.Errorf("BucketBytes %d, with a flag: %v: %w", bucketBytes, flagged, err)
			}
		}
	}
	return nil
}

// stayEqual trains a network, and compares the ranks' gradients and weights of all steps.
func stayEqual(g *Group, bucketBytes int64, flagged bool) (err error) {
	net, err := convNet(uint64(1 + g.Rank()))
	if err != nil {
		return err
	}
	defer nn.Close(net)
	if err := nn.To(net, g.Device()); err != nil {
		return err
	}
	parallel, err := NewDataParallel(g, net, DataParallelOptions{BucketBytes: bucketBytes})
	if err != nil {
		return err
	}
	defer parallel.Close()
	opt, err := optim.NewSGD(nn.Parameters(net), optim.SGDOptions{LR: 0.05, Momentum: 0.9})
	if err != nil {
		return err
	}
	defer opt.Close()
	var flag *Flag
	if flagged {
		flag = NewFlag(g)
		defer func() { err = errors.Join(err, flag.Close()) }()
	}
	// The copies stay on the device until the end. Reading them in each step would make the host
	// wait for the device. That wait would hide a missing synchronisation.
	copies := torch.NewScope("copies")
	defer copies.Close()
	var kept []torch.Named
	keep := func(name string, of *torch.Tensor) {
		kept = append(kept, torch.Named{Name: name, Tensor: copies.Own(of.NoGrad().Clone())})
	}
	for _, n := range nn.NamedParameters(net) {
		keep("the first "+n.Name, n.Tensor)
	}
	for step := range 50 {
		if err := equalStep(g, net, parallel, opt, step, keep); err != nil {
			return err
		}
		if flag != nil {
			if _, err := flag.Sync(); err != nil {
				return err
			}
		}
	}
	return requireEqualTensors(g, kept, len(nn.Parameters(net)))
}

// equalStep trains on the rank's samples of a step.
func equalStep(g *Group, net nn.Module, parallel *DataParallel, opt *optim.SGD, step int,
	keep func(string, *torch.Tensor)) error {
	scope := torch.NewScope("step")
	defer scope.Close()
	const images, channels, side = 4, 3, 16
	pixels := make([]float32, images*channels*side*side)
	for i := range pixels {
		pixels[i] = float32((i*(7+2*g.Rank())+31*step)%255)/128 - 1
	}
	x, err := torch.FromSlice(pixels, images, channels, side, side)
	if err != nil {
		return err
	}
	labels, err := torch.FromInt64s([]int64{0, 1, 2, int64(step % 3)}, images)
	if err != nil {
		return errors.Join(err, x.Close())
	}
	x, labels = scope.Own(scope.Own(x).To(g.Device())), scope.Own(scope.Own(labels).To(g.Device()))
	if err := parallel.Backward(net.Forward(x).CrossEntropy(labels)); err != nil {
		return err
	}
	for _, n := range nn.NamedParameters(net) {
		grad := n.Tensor.Grad()
		if grad == nil {
			return fmt.Errorf("%s has no gradient", n.Name)
		}
		keep(fmt.Sprintf("the gradient of %s in step %d", n.Name, step), grad)
		if err := grad.Close(); err != nil {
			return err
		}
	}
	if err := opt.Step(); err != nil {
		return err
	}
	for _, n := range nn.NamedParameters(net) {
		keep(fmt.Sprintf("%s after step %d", n.Name, step), n.Tensor)
	}
	return nil
}

// convNet returns a float32 network that normalises each image separately.
func convNet(seed uint64) (nn.Module, error) {
	seeding.Lock()
	defer seeding.Unlock()
	if err := torch.ManualSeed(seed); err != nil {
		return nil, err
	}
	block := func(in, out int) nn.Module {
		return nn.NewSequential(nn.NewConv2d(in, out, 3, nn.Conv2dOptions{Stride: 2, Padding: 1, NoBias: true}),
			nn.NewGroupNorm(4, out, nn.GroupNormOptions{}), nn.NewReLU())
	}
	return nn.NewSequential(block(3, 16), block(16, 32), nn.NewAdaptiveAvgPool2d(1), nn.NewFlatten(),
		nn.NewLinear(32, 3, nn.LinearOptions{})), nil
}

// requireEqualTensors returns an error that names the first tensor whose bits differ between ranks.
// It also requires that all values are finite, and that training has changed the parameters: the
// last parameters must differ from the first ones.
func requireEqualTensors(g *Group, kept []torch.Named, parameters int) error {
	digests := make([]string, len(kept))
	for i, n := range kept {
		values, err := n.Tensor.Float32s()
		if err != nil {
			return fmt.Errorf("%s: %w", n.Name, err)
		}
		for _, v := range values {
			if v-v != 0 {
				return fmt.Errorf("%s has the value %v", n.Name, v)
			}
		}
		bytes := make([]byte, 4*len(values))
		if err := n.Tensor.ReadBytes(bytes); err != nil {
			return fmt.Errorf("%s: %w", n.Name, err)
		}
		digests[i] = fmt.Sprintf("%x", sha256.Sum256(bytes))
	}
	if digests[0] == digests[len(digests)-parameters] {
		return errors.New("training has changed nothing")
	}
	all, err := AllGatherObject(g, digests)
	if err != nil {
		return err
	}
	for i, n := range kept {
		for r := range all {
			if all[r][i] != all[0][i] {
				return fmt.Errorf("rank %d and rank 0 part at %s", r, n.Name)
			}
		}
	}
	return nil
}
