package distributed

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
)

// FullyShardedOptions are the options of [NewFullyShardedDataParallel].
type FullyShardedOptions struct {
	// KeepAfterForward keeps each block's parameters gathered between the block's forward pass and
	// its backward pass (ZeRO stage 2; PyTorch's reshard_after_forward=False). At the end of
	// forward a rank then holds all parameters, but the ranks send a third less data. By default
	// parameters are gathered again in backward (ZeRO stage 3). A rank then holds the parameters
	// outside of blocks, and the parameters of at most two blocks.
	KeepAfterForward bool
	// GatherDType, if not 0, is a floating-point dtype in which all floating-point parameters are
	// gathered, such as BFloat16 (param_dtype of PyTorch's MixedPrecisionPolicy). Blocks compute
	// with parameters of this dtype, and a gather in a 16-bit dtype transfers half the bytes of
	// float32. The shards, which the optimizer updates, keep the dtype of the parameters. Gradients
	// are averaged, and files are written, in the dtype of the shards. Inputs are not cast: use
	// autocast, or give the network inputs of GatherDType. Buffers keep their dtype. LibTorch's
	// BatchNorm may refuse buffers whose dtype differs from its parameters.
	GatherDType torch.DType
}

// FullyShardedStats are the bytes held by a rank.
type FullyShardedStats struct {
	ParameterBytes   int64 // this rank's shards of the parameters
	GradientBytes    int64 // averaged gradients of the shards; 0 between Step and Backward
	GatheredBytes    int64 // parameters gathered now, in blocks and outside of them
	MaxGatheredBytes int64 // maximum of GatheredBytes
}

// FullyShardedDataParallel trains one model on all ranks of a group. Each rank keeps 1/N of the
// parameters, gradients and optimizer state (PyTorch's fully_shard, ZeRO stages 2 and 3). The
// result is the model that one process would train on the batches of all ranks.
//
// The network determines which parameters are gathered together: the parameters of one
// [ShardedBlock], such as a layer of a transformer. Parameters outside of blocks, such as a
// transformer's embeddings and last normalisation, are gathered for the whole step, from Forward to
// the end of Backward.
//
//	var blocks []nn.Module
//	for range 24 {
//		layer := nn.NewTransformerEncoderLayer(1024, 16, nn.TransformerEncoderLayerOptions{})
//		blocks = append(blocks, distributed.NewShardedBlock(layer))
//	}
//	net := nn.NewSequential(blocks...)
//	sharded, err := distributed.NewFullyShardedDataParallel(world, net, distributed.FullyShardedOptions{})
//	...
//	opt, err := sharded.NewOptimizer(func(shard []*torch.Tensor) (optim.Optimizer, error) {
//		return optim.NewAdamW(shard, optim.AdamWOptions{LR: 1e-3})
//	})
//	...
//	loss := sharded.Forward(x).MSELoss(y)
//	err = sharded.Backward(loss)
//	...
//	norm, err := sharded.ClipGradNorm(1, optim.ClipOptions{})
//	...
//	err = opt.Step()
//
// A block's parameters are gathered while the previous block computes, and freed when the block has
// computed, in forward and again in backward. The block's gradients are averaged over the ranks
// while backward computes the next block. Each rank receives only the averages for its shard.
//
// All ranks make the same passes through the same blocks in the same order. Batch sizes may differ:
// a rank without samples makes the passes on a batch with zero rows. Blocks that no rank uses get
// no gradients. Options.Debug finds ranks whose calls differ.
//
// On a GPU, Forward and Backward enqueue their work and do not wait. Collectives have a separate
// stream, and the blocks run on the current stream of Forward. The whole step (Forward, Backward
// and the optimizer's Step) can be captured with torch.Graphed: the graph includes the collectives
// and has separate memory for gathered parameters. Close the graphs before the
// FullyShardedDataParallel. Only one goroutine at a time may use a FullyShardedDataParallel.
type FullyShardedDataParallel struct {
	shardedNet
	g      *Group
	o      FullyShardedOptions
	stream *cuda.OwnedStream             // for the collectives; nil on the CPU
	empty  map[torch.DType]*torch.Tensor // empty tensors that modules hold while their blocks are not gathered
	// link is an autograd leaf without elements. It is an input of every block, only to make the
	// blocks' outputs require gradients.
	link   *torch.Tensor
	stats  FullyShardedStats
	closed bool

	passes  blockPasses
	version parameterVersion
	whole   wholeTensors
}

// shardedNet is a network with its blocks.
type shardedNet struct {
	net    nn.Module
	blocks []*ShardedBlock   // in the order of the network, then root
	root   *ShardedBlock     // holds the parameters outside of blocks; nil if there are none
	params []*blockParameter // in the order of nn.Parameters(net), each once
}

// blockPasses follows the forward and backward passes through the blocks. The order of a forward
// pass predicts the order of the next one.
type blockPasses struct {
	on        cuda.Stream // the current stream in the latest Forward
	inForward bool
	visited   []*ShardedBlock // blocks of the current forward pass so far
	order     []*ShardedBlock // blocks of the previous forward pass
	backward  bool            // a backward pass is running
	at        int             // index in order of the block that backward has reached
}

func (p *blockPasses) beginForward()  { p.inForward, p.visited = true, nil }
func (p *blockPasses) beginBackward() { p.backward, p.at = true, len(p.order) }

// endForward saves the order of the blocks in this forward pass, as the prediction for the next
// one.
func (p *blockPasses) endForward() {
	p.inForward = false
	p.order, p.visited = p.visited, nil
	p.at = len(p.order)
}

// enter records that a forward pass has reached a block. It returns the block that is expected
// next, or nil.
func (p *blockPasses) enter(b *ShardedBlock) (next *ShardedBlock) {
	i := len(p.visited)
	p.visited = append(p.visited, b)
	if i+1 < len(p.order) && p.order[i] == b {
		return p.order[i+1]
	}
	return nil
}

// reach records that a backward pass has reached a block. It returns the block that is expected
// next, or nil.
func (p *blockPasses) reach(b *ShardedBlock) (next *ShardedBlock) {
	for i := min(p.at, len(p.order)) - 1; i >= 0; i-- {
		if p.order[i] != b {
			continue
		}
		p.at = i
		if i > 0 && p.order[i-1].used {
			return p.order[i-1]
		}
		break
	}
	return nil
}

// parameterVersion counts the changes of the parameters.
type parameterVersion struct {
	changes  int  // number of times the parameters have changed
	computed int  // value of changes at the latest Forward
	stepped  bool // Step or ZeroGrad has dropped the gradients, and no Backward has followed
}

// stale reports whether the parameters have changed since the latest Forward.
func (v *parameterVersion) stale() bool { return v.computed != v.changes }

// wholeTensors are the unsharded tensors that the FullyShardedDataParallel has returned and still
// owns.
type wholeTensors struct {
	state    []*torch.Tensor // returned by State
	averages []*torch.Tensor // returned by EMAState
}

func (w *wholeTensors) dropState() {
	for _, t := range w.state {
		t.Close()
	}
	w.state = nil
}

func (w *wholeTensors) dropAverages() {
	for _, t := range w.averages {
		t.Close()
	}
	w.averages = nil
}

// NewFullyShardedDataParallel shards the parameters of a network over the ranks. They get rank 0's
// values. The network must have the same blocks, parameters and buffers, by name, shape, strides
// and dtype, on all ranks. Otherwise all ranks get an error that names the first difference. The
// network may be on the CPU: blocks move to the group's device one after the other, so a network
// may be larger than one device. Buffers get rank 0's values too, but only once. After that, each
// rank updates its own buffers.
//
// From then on, nn.Parameters and nn.State of the FullyShardedDataParallel return this rank's
// shards of the parameters. A shard is a row of elements, and may be empty. nn.Parameters and
// nn.State of the network itself return the same, except that parameters outside of blocks have no
// elements while the network is not computing. Only the network's Forward sees whole parameters.
// Call ConvertSyncBatchNorm, nn.Freeze and nn.Load before NewFullyShardedDataParallel, and
// [FullyShardedDataParallel.State] after it. Hooks registered on shards are not called.
//
// A network is refused if a block contains another block or an nn.Graphed, if two blocks share a
// parameter, or if a block shares a parameter with a module outside of blocks. A parameter may
// occur twice within one block, or twice outside of blocks.
//
// Close the FullyShardedDataParallel before the group. The network cannot be used after Close. If
// NewFullyShardedDataParallel fails, the network may have lost its parameters.
func NewFullyShardedDataParallel(g *Group, net nn.Module, o FullyShardedOptions) (*FullyShardedDataParallel, error) {
	d := &FullyShardedDataParallel{shardedNet: shardedNet{net: net}, g: g, o: o,
		version: parameterVersion{stepped: true}, empty: map[torch.DType]*torch.Tensor{}}
	err := d.agree()
	if err == nil {
		if err = d.construct(); err != nil {
			d.Close()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("distributed.NewFullyShardedDataParallel: %w", err)
	}
	return d, nil
}

// agree finds the blocks and compares them with the blocks of the other ranks.
func (d *FullyShardedDataParallel) agree() error {
	mine := modelText{Options: fmt.Sprintf("%+v", d.o)}
	if d.net == nil {
		mine.Err = "the network is nil"
	} else if d.o.GatherDType != 0 && !floating(d.o.GatherDType) {
		mine.Err = fmt.Sprintf("GatherDType is %v: it must be one of floating-point numbers", d.o.GatherDType)
	} else if err := d.find("", d.net); err != nil {
		mine.Err = err.Error()
	} else if d.root != nil {
		d.blocks = append(d.blocks, d.root)
	}
	owner := map[*torch.Tensor]string{}
	for _, b := range d.blocks {
		for _, p := range b.params {
			full := b.prefix + p.names[0]
			t := p.param
			switch {
			case mine.Err != "":
			case t.Err() != nil:
				mine.Err = fmt.Sprintf("%s: %v", full, t.Err())
			case owner[t] != "":
				mine.Err = fmt.Sprintf("%s and %s are one parameter in two blocks, or in one and outside "+
					"of blocks, which are not gathered at the same time: put both modules into one "+
					"ShardedBlock, or both outside of blocks", owner[t], full)
			case !tensor.Dense(p.shape, p.strides):
				mine.Err = fmt.Sprintf("%s has the shape %v and the strides %v, with gaps in memory or "+
					"overlapping elements: use a Contiguous copy", full, p.shape, p.strides)
			}
			owner[t] = full
			mine.Tensors = append(mine.Tensors,
				fmt.Sprintf("%s %v%v of strides %v, trained: %v, in the block %s", full, t.DType(), p.shape,
					p.strides, t.RequiresGrad(), b.name))
		}
	}
	if mine.Err == "" && len(owner) == 0 {
		mine.Err = "the network has no parameter"
	}
	if mine.Err == "" {
		for _, n := range nn.NamedBuffers(d.net) {
			mine.Tensors = append(mine.Tensors, fmt.Sprintf("%s %v%v", n.Name, n.Tensor.DType(), n.Tensor.Shape()))
			if err := n.Tensor.Err(); err != nil {
				mine.Err = fmt.Sprintf("%s: %v", n.Name, err)
			}
		}
	}
	return mine.agree(d.g)
}

// find lists the blocks of a module, and its parameters outside of blocks.
func (d *FullyShardedDataParallel) find(prefix string, m nn.Module) error {
	switch m := m.(type) {
	case nil:
		return nil
	case *nn.Graphed:
		return fmt.Errorf("%s is an nn.Graphed, whose graphs need parameters that stay where they are: "+
			"leave it out", blockName(prefix))
	case *ShardedBlock:
		return d.add(prefix, m)
	}
	parts := m.Parts()
	for _, n := range parts.Parameters {
		if d.root == nil {
			d.root = &ShardedBlock{name: "the parameters outside of blocks"}
		}
		d.addParameter(d.root, torch.Named{Name: prefix + n.Name, Tensor: n.Tensor})
	}
	for _, c := range parts.Modules {
		if err := d.find(prefix+c.Name+".", c.Module); err != nil {
			return err
		}
	}
	return nil
}

// blockName returns the name of the module with the prefix.
func blockName(prefix string) string {
	if prefix == "" {
		return "the network"
	}
	return strings.TrimSuffix(prefix, ".")
}

// add lists a block.
func (d *FullyShardedDataParallel) add(prefix string, b *ShardedBlock) error {
	if slices.Contains(d.blocks, b) { // used twice
		return nil
	}
	switch {
	case b.module == nil:
		return fmt.Errorf("%s is a block without a module", blockName(prefix))
	case b.d != nil:
		return fmt.Errorf("%s is a block of another FullyShardedDataParallel", blockName(prefix))
	}
	if err := plain(prefix, b.module); err != nil {
		return err
	}
	b.name, b.prefix, b.params, b.flats, b.named = blockName(prefix), prefix, nil, nil, nil
	for _, n := range nn.NamedParameters(b.module) {
		d.addParameter(b, n)
	}
	d.blocks = append(d.blocks, b)
	return nil
}

// addParameter lists a parameter of a block. If the block already has the parameter, it adds the
// name.
func (d *FullyShardedDataParallel) addParameter(b *ShardedBlock, n torch.Named) {
	i := slices.IndexFunc(b.params, func(p *blockParameter) bool { return p.param == n.Tensor })
	if i < 0 {
		i = len(b.params)
		p := &blockParameter{shardedParameter: newShardedParameter(n.Tensor)}
		b.params, d.params = append(b.params, p), append(d.params, p)
	}
	b.params[i].names = append(b.params[i].names, n.Name)
}

// plain returns an error if a block's module contains another block or an nn.Graphed.
func plain(prefix string, m nn.Module) error {
	switch m.(type) {
	case nil:
		return nil
	case *ShardedBlock:
		return fmt.Errorf("%s is a block inside of another block: take one of them out", blockName(prefix))
	case *nn.Graphed:
		return fmt.Errorf("%s is an nn.Graphed, whose graphs need parameters that stay where they are: "+
			"leave it out", blockName(prefix))
	}
	for _, c := range m.Parts().Modules {
		if err := plain(prefix+c.Name+".", c.Module); err != nil {
			return err
		}
	}
	return nil
}

// construct shards the parameters.
func (d *FullyShardedDataParallel) construct() (err error) {
	if d.g.Device() != cuda.CPU {
		if d.stream, err = cuda.NewOwnedStream(d.g.Device(), cuda.StreamOptions{Priority: -1}); err != nil {
			return d.fail("NewFullyShardedDataParallel", err)
		}
	}
	for _, n := range nn.NamedBuffers(d.net) {
		if err := d.shareBuffer(n.Tensor); err != nil {
			return d.fail("NewFullyShardedDataParallel", fmt.Errorf("%s: %w", n.Name, err))
		}
	}
	if d.link, err = torch.Empty(d.g.Device(), torch.Float32, 0); err == nil {
		err = d.link.SetRequiresGrad(true)
	}
	if err != nil {
		return d.fail("NewFullyShardedDataParallel", err)
	}
	for _, b := range d.blocks {
		b.d = d
		for _, p := range b.params {
			if dtype := d.gatherDType(p.param.DType()); d.empty[dtype] == nil {
				if d.empty[dtype], err = torch.Empty(d.g.Device(), dtype, 0); err != nil {
					return d.fail("NewFullyShardedDataParallel", err)
				}
			}
		}
		if err := b.lay(); err != nil {
			return d.fail("NewFullyShardedDataParallel", fmt.Errorf("%s: %w", b.name, err))
		}
		b.list()
		if b != d.root {
			d.passes.order = append(d.passes.order, b)
		}
	}
	return nil
}

func floating(d torch.DType) bool {
	return d == torch.Float16 || d == torch.BFloat16 || d == torch.Float32 || d == torch.Float64
}

// gatherDType returns the dtype in which a parameter of the given dtype is gathered.
func (d *FullyShardedDataParallel) gatherDType(of torch.DType) torch.DType {
	if d.o.GatherDType != 0 && floating(of) {
		return d.o.GatherDType
	}
	return of
}

// shareBuffer moves a buffer to the device and gives it rank 0's values.
func (d *FullyShardedDataParallel) shareBuffer(t *torch.Tensor) error {
	if t.Device() != d.g.Device() {
		moved := t.NoGrad().To(d.g.Device())
		defer moved.Close()
		if err := moved.Err(); err != nil {
			return err
		}
		if d.stream != nil { // SetData frees the old memory, which may still be read
			if err := d.g.Device().Synchronize(); err != nil {
				return err
			}
		}
		if err := t.SetData(moved); err != nil {
			return err
		}
	}
	return d.share(t)
}

// fail ends the job after an error of this rank, unless the job has ended already.
func (d *FullyShardedDataParallel) fail(call string, err error) error {
	if known := new(Error); errors.As(err, &known) {
		return err
	}
	return d.g.abort(call, err)
}

// launch starts a collective: on a GPU on the current stream, on the CPU asynchronously. With a
// single rank, launch only copies in to out.
func (d *FullyShardedDataParallel) launch(name string, detail any, out, in *torch.Tensor, run launch) (*Work, error) {
	if d.g.Size() == 1 {
		return nil, out.CopyFrom(in, torch.CopyOptions{NonBlocking: true})
	}
	c, err := d.g.begin(name, detail, out, in)
	switch {
	case err != nil:
		return nil, err
	case d.stream == nil:
		return c.async([]*torch.Tensor{out, in}, run)
	}
	return nil, c.sync([]*torch.Tensor{out, in}, run)
}

// share overwrites a tensor with rank 0's values.
func (d *FullyShardedDataParallel) share(t *torch.Tensor) error {
	if d.g.Size() == 1 || t.Elements() == 0 {
		return nil
	}
	return d.g.Broadcast(t, 0)
}

// onStream calls fn with the collectives' stream as the current one.
func (d *FullyShardedDataParallel) onStream(fn func() error) error {
	if d.stream == nil {
		return fn()
	}
	return cuda.WithStream(d.stream.Stream, fn)
}

// current returns the current stream of the device.
func (d *FullyShardedDataParallel) current() (cuda.Stream, error) {
	if d.stream == nil {
		return cuda.Stream{}, nil
	}
	return cuda.GetCurrentCUDAStream(d.g.Device())
}

// rejoin is called at the end of a pass or a step. If the current stream is being captured, the
// collectives' stream is captured too. rejoin then makes the current stream wait for the
// collectives' stream, because all captured streams must join the first one before the capture
// ends.
func (d *FullyShardedDataParallel) rejoin() error {
	on, err := d.current()
	if err != nil || d.stream == nil {
		return err
	}
	if capturing, err := on.Capturing(); err != nil || !capturing {
		return err
	}
	return d.follow()
}

// follow makes the current stream wait for the collectives enqueued so far.
func (d *FullyShardedDataParallel) follow() error {
	on, err := d.current()
	if err != nil || d.stream == nil {
		return err
	}
	return on.Wait(d.stream.Stream)
}

// precede makes the collectives' stream wait for the work enqueued on the current stream so far.
// Memory that belongs to the collectives' stream may be reused after this wait.
func (d *FullyShardedDataParallel) precede() error {
	on, err := d.current()
	if err != nil || d.stream == nil {
		return err
	}
	return d.stream.Wait(on)
}

// gathered adds bytes to the count of gathered bytes.
func (d *FullyShardedDataParallel) gathered(bytes int64) {
	d.stats.GatheredBytes += bytes
	d.stats.MaxGatheredBytes = max(d.stats.MaxGatheredBytes, d.stats.GatheredBytes)
}

// Stats returns the number of bytes that this rank holds.
func (d *FullyShardedDataParallel) Stats() FullyShardedStats { return d.stats }

// Parts returns the parts of the network, with this rank's shards as the parameters.
func (d *FullyShardedDataParallel) Parts() nn.Parts {
	if d.root == nil || d.root.d == nil {
		return d.net.Parts()
	}
	pieces := map[*torch.Tensor]*torch.Tensor{}
	for _, p := range d.root.params {
		pieces[p.param] = p.piece
	}
	return dividedParts(d.net, pieces)
}

// String returns the tree of the network: see nn.Tree. The shapes are those of this rank's shards.
func (d *FullyShardedDataParallel) String() string { return nn.Tree(d) }

// dividedParts returns the parts of a module. Parameters in the map are replaced by their pieces,
// which are this rank's shards.
func dividedParts(m nn.Module, pieces map[*torch.Tensor]*torch.Tensor) nn.Parts {
	parts := m.Parts()
	parts.Parameters, parts.Modules = slices.Clone(parts.Parameters), slices.Clone(parts.Modules)
	for i, n := range parts.Parameters {
		if piece := pieces[n.Tensor]; piece != nil {
			parts.Parameters[i].Tensor = piece
		}
	}
	for i, c := range parts.Modules {
		if hasParameters(c.Module) {
			parts.Modules[i].Module = dividedModule{c.Module, pieces}
		}
	}
	return parts
}

// hasParameters reports whether a module, or a module in it, has parameters outside of blocks.
func hasParameters(m nn.Module) bool {
	if _, ok := m.(*ShardedBlock); ok || m == nil {
		return false
	}
	parts := m.Parts()
	return len(parts.Parameters) > 0 ||
		slices.ContainsFunc(parts.Modules, func(c nn.Child) bool { return hasParameters(c.Module) })
}

// dividedModule is a module that lists this rank's shards (pieces) instead of its parameters.
type dividedModule struct {
	nn.Module
	pieces map[*torch.Tensor]*torch.Tensor
}

func (m dividedModule) Parts() nn.Parts { return dividedParts(m.Module, m.pieces) }

// Unwrap returns the module, whose kind nn.Tree and nn.Summary print.
func (m dividedModule) Unwrap() nn.Module { return m.Module }

// SetTraining chooses the mode of the module.
func (m dividedModule) SetTraining(training bool) {
	if m, ok := m.Module.(nn.Moder); ok {
		m.SetTraining(training)
	}
}

// SetTraining sets the mode of the network itself. nn.Train also sets the mode of the network's
// parts.
func (d *FullyShardedDataParallel) SetTraining(training bool) {
	if m, ok := d.net.(nn.Moder); ok {
		m.SetTraining(training)
	}
}

// Parameters returns this rank's shards of the parameters, in the order of nn.Parameters(net),
// without duplicates. Shard i is a row of elements of parameter i, and may be empty.
func (d *FullyShardedDataParallel) Parameters() []*torch.Tensor {
	all := make([]*torch.Tensor, len(d.params))
	for i, p := range d.params {
		all[i] = p.piece
	}
	return all
}

// Forward computes the network's output. The network's blocks can compute only inside this call.
func (d *FullyShardedDataParallel) Forward(x *torch.Tensor) *torch.Tensor {
	if err := d.begin(); err != nil {
		return torch.Fail("distributed.FullyShardedDataParallel", err)
	}
	returned := false
	defer func() {
		if !returned { // The other ranks wait for this rank, but the program may recover from the panic.
			d.passes.inForward = false
			d.g.abort("FullyShardedDataParallel.Forward", errors.New("a panic"))
		}
	}()
	y := d.net.Forward(x)
	returned = true
	d.passes.endForward()
	y, err := d.ownOutput(y)
	if err = errors.Join(err, d.freeAll(d.stays), d.rejoin()); err != nil {
		return torch.Fail("distributed.FullyShardedDataParallel", d.fail("FullyShardedDataParallel.Forward", err))
	}
	return y
}

// ownOutput returns the network's output, or a copy if the output is a view of parameters outside
// of blocks. It also records whether these parameters stay gathered for a backward pass. A y with
// an error is returned unchanged.
func (d *FullyShardedDataParallel) ownOutput(y *torch.Tensor) (*torch.Tensor, error) {
	if d.root == nil || y.Err() != nil {
		return y, nil
	}
	d.root.used = y.RequiresGrad()
	return d.root.own(y)
}

// stays reports whether a block stays gathered after its forward pass until its backward pass.
func (d *FullyShardedDataParallel) stays(b *ShardedBlock) bool {
	return (d.o.KeepAfterForward || b == d.root) && b.used
}

var errClosedModel = fmt.Errorf("distributed: FullyShardedDataParallel: %w", torch.ErrClosed)

// ready returns an error if a pass cannot start.
func (d *FullyShardedDataParallel) ready(call string) error {
	switch {
	case d.closed:
		return errClosedModel
	case d.passes.inForward || d.passes.backward:
		return fmt.Errorf("distributed: FullyShardedDataParallel.%s inside of another pass: %w", call,
			cuda.ErrInvalidArgument)
	}
	return d.g.check("FullyShardedDataParallel."+call, nil)
}

// begin starts a forward pass.
func (d *FullyShardedDataParallel) begin() error {
	err := d.ready("Forward")
	if err != nil {
		return err
	}
	if d.passes.on, err = d.current(); err != nil {
		return err
	}
	if d.stream != nil && slices.ContainsFunc(d.blocks, func(b *ShardedBlock) bool { return b.whole }) {
		if capturing, err := d.passes.on.Capturing(); err != nil || capturing {
			return errors.Join(err, fmt.Errorf("distributed: FullyShardedDataParallel.Forward: a graph "+
				"cannot free the parameters that an earlier pass has gathered: call Backward after "+
				"Forward, or compute under NoGrad: %w", cuda.ErrCapture))
		}
	}
	if d.root != nil {
		for _, p := range d.root.params {
			if g := p.marked.Grad(); g != nil {
				return errors.Join(fmt.Errorf("distributed: FullyShardedDataParallel.Forward: %s has a "+
					"gradient that is not of FullyShardedDataParallel.Backward, or of Around: %w",
					p.names[0], cuda.ErrInvalidArgument), g.Close(), torch.ClearGrads(p.param))
			}
		}
	}
	// The optimizer's step has written the parameters on the current stream. The gathers wait for
	// that stream.
	err = errors.Join(d.freeAll(func(*ShardedBlock) bool { return false }), d.precede())
	if err != nil {
		return d.fail("FullyShardedDataParallel.Forward", err)
	}
	if d.root != nil {
		d.root.used = false
		if err := d.root.show(); err != nil {
			return d.fail("FullyShardedDataParallel.Forward", err)
		}
	}
	d.passes.beginForward()
	d.version.computed = d.version.changes
	return nil
}

// freeAll frees all gathered blocks for which stays is false.
func (d *FullyShardedDataParallel) freeAll(stays func(*ShardedBlock) bool) error {
	var errs []error
	for _, b := range d.blocks {
		if b.whole && !stays(b) {
			errs = append(errs, b.free())
		}
	}
	return errors.Join(errs...)
}

// enter prepares a block for its forward pass and starts to gather the block that is expected next.
func (d *FullyShardedDataParallel) enter(b *ShardedBlock) error {
	if !d.passes.inForward {
		return fmt.Errorf("the block computes outside of FullyShardedDataParallel.Forward, or again in "+
			"backward: call that, and make checkpoints inside of blocks: %w", cuda.ErrInvalidArgument)
	}
	on, err := d.current()
	if err == nil && on != d.passes.on {
		err = fmt.Errorf("the block computes on %v, and Forward was called on %v: an nn.Parallel belongs "+
			"inside of a block: %w", on, d.passes.on, cuda.ErrInvalidArgument)
	}
	if err == nil {
		// Free a block that was gathered ahead and not used.
		err = d.freeAll(func(other *ShardedBlock) bool { return other == b || other == d.root || d.stays(other) })
	}
	if err == nil {
		err = b.show()
	}
	if next := d.passes.enter(b); err == nil && next != nil {
		err = next.gather()
	}
	if err != nil {
		return d.fail("FullyShardedDataParallel.Forward", err)
	}
	return nil
}

// leave ends a block's forward pass. recorded says whether a backward pass may follow.
func (d *FullyShardedDataParallel) leave(b *ShardedBlock, recorded bool) error {
	if recorded && d.o.KeepAfterForward {
		return nil
	}
	if err := b.free(); err != nil {
		return d.fail("FullyShardedDataParallel.Forward", err)
	}
	return nil
}

// reach prepares a block for its backward pass and starts to gather the block that is expected
// next.
func (d *FullyShardedDataParallel) reach(b *ShardedBlock) error {
	if !d.passes.backward {
		return fmt.Errorf("distributed: %s: its backward pass is not one of "+
			"FullyShardedDataParallel.Backward, or of Around: %w", b.name, cuda.ErrInvalidArgument)
	}
	err := d.freeAll(func(other *ShardedBlock) bool { return other == b || other == d.root || d.stays(other) })
	if err == nil {
		err = b.show()
	}
	if err != nil {
		return err
	}
	if next := d.passes.reach(b); next != nil {
		return next.gather()
	}
	return nil
}

// Backward computes the gradients of the loss on this rank and averages them over all ranks. Each
// rank gets the averages for its shards. Backward adds them to the gradients of earlier passes.
// Several passes before a step thus accumulate gradients, without extra memory.
//
// All trained parameters outside of blocks, and all trained parameters of a block that backward
// reaches, must get a gradient from at least one use. Otherwise Backward returns an error that
// names the parameter: freeze unused parameters. The current stream must be the same as in Forward.
//
// The average is over ranks: use [FullyShardedDataParallel.Weigh] for the average over samples. If
// the loss has an error, Backward returns it and does nothing else. An error or a panic in backward
// ends the job, since the other ranks would wait for this rank's gradients.
func (d *FullyShardedDataParallel) Backward(loss *torch.Tensor) error {
	if err := loss.Err(); err != nil {
		return err
	}
	return d.Around(loss.Backward)
}

// Around calls a function that makes one backward pass, and averages the gradients as
// [FullyShardedDataParallel.Backward] does. Use it for passes that other code makes:
//
//	err := sharded.Around(func() error { return scaler.Backward(loss) })
func (d *FullyShardedDataParallel) Around(backward func() error) (err error) {
	if err := d.ready("Backward"); err != nil {
		return err
	}
	// This rank must not free blocks here: the same blocks must stay gathered on all ranks.
	on, err := d.current()
	if err == nil && on != d.passes.on {
		return fmt.Errorf("distributed: FullyShardedDataParallel.Backward: the current stream is %v, and "+
			"was %v in Forward: %w", on, d.passes.on, cuda.ErrInvalidArgument)
	}
	returned := false
	defer func() {
		d.passes.backward = false
		if !returned || err != nil {
			err = errors.Join(err, d.cancel())
		}
		if !returned {
			d.g.abort("FullyShardedDataParallel.Backward", errors.New("a panic"))
		}
	}()
	d.passes.beginBackward()
	if err == nil {
		err = d.reachRoot()
	}
	if err == nil {
		err = backward()
	}
	if err == nil {
		err = d.complete()
	}
	returned = true
	if err == nil {
		d.version.stepped = false
		return nil
	}
	if v := d.g.job.member.Verdict(); v != nil {
		if known := new(Error); !errors.As(err, &known) {
			err = &Error{Call: "FullyShardedDataParallel.Backward", Group: d.g.name, Rank: d.g.job.env.Rank,
				Culprit: culprit(verdict{v}), Err: verdict{v}}
		}
		return err
	}
	return d.fail("FullyShardedDataParallel.Backward", err)
}

// reachRoot gathers the parameters outside of blocks for the backward pass. Another forward pass
// may have freed them.
func (d *FullyShardedDataParallel) reachRoot() error {
	switch {
	case d.root == nil:
		return nil
	case d.version.stale():
		return d.root.changed()
	}
	return d.root.show()
}

// complete ends a backward pass: it waits for the reductions and sets the gradients of the shards.
func (d *FullyShardedDataParallel) complete() error {
	if d.root != nil {
		if err := d.root.finish(); err != nil {
			return err
		}
	}
	var missing []string
	for _, b := range d.blocks {
		missing = append(missing, b.missing()...)
	}
	if len(missing) > 0 {
		return fmt.Errorf("distributed: backward made no gradient for %s on rank %d: freeze the "+
			"parameters before NewFullyShardedDataParallel: %w",
			abbreviated(missing), d.g.rank, cuda.ErrInvalidArgument)
	}
	for _, b := range d.blocks {
		for _, f := range b.flats {
			if err := f.await(); err != nil {
				return err
			}
		}
	}
	if err := d.follow(); err != nil {
		return err
	}
	for _, b := range d.blocks {
		if err := b.deliver(); err != nil {
			return err
		}
	}
	return errors.Join(d.freeAll(d.stays), d.rejoin())
}

// cancel cleans up after a backward pass that failed.
func (d *FullyShardedDataParallel) cancel() error {
	var errs []error
	var params []*torch.Tensor
	for _, b := range d.blocks {
		b.used = false
		b.passed()
		for _, p := range b.params {
			params = append(params, p.param)
		}
	}
	errs = append(errs, torch.ClearGrads(params...))
	d.freeAll(func(*ShardedBlock) bool { return false }) // the caller already knows the first failure
	return errors.Join(errs...)
}

// release frees the averaged gradients. The collectives' stream may reuse their memory after the
// work enqueued on the current stream so far.
func (d *FullyShardedDataParallel) release() error {
	d.version.stepped = true
	if d.stats.GradientBytes == 0 {
		return nil
	}
	err := d.precede()
	for _, b := range d.blocks {
		b.release()
	}
	return errors.Join(err, d.rejoin())
}

// Weigh multiplies the loss, which is the mean over this rank's samples, by a weight for this
// rank's number of samples: see [DataParallel.Weigh]. A rank without samples passes the loss of a
// batch with zero rows.
func (d *FullyShardedDataParallel) Weigh(loss *torch.Tensor, samples int) *torch.Tensor {
	return weigh(d.g, loss, samples)
}

// ClipGradNorm scales the gradients of all shards on all ranks by one factor, so that the norm of
// the whole model's gradients is at most maxNorm. (optim.ClipGradNorm alone would see one rank's
// shards.) It returns the norm before scaling, on the group's device; the caller closes it.
// ClipGradNorm is a collective: all ranks call it.
func (d *FullyShardedDataParallel) ClipGradNorm(maxNorm float64, o optim.ClipOptions) (*torch.Tensor, error) {
	if err := d.ready("ClipGradNorm"); err != nil {
		return nil, err
	}
	o.Whole = d.wholeNorm
	return optim.ClipGradNorm(d.Parameters(), maxNorm, o)
}

// wholeNorm computes the norm of all gradients from each rank's norm.
func (d *FullyShardedDataParallel) wholeNorm(own *torch.Tensor, order float64) *torch.Tensor {
	scope := torch.NewScope("norms")
	defer scope.Close()
	mine := own.In(scope).ToDType(torch.Float64).To(d.g.Device()).Reshape(1)
	all, err := torch.Empty(d.g.Device(), torch.Float64, int64(d.g.Size()))
	if err = errors.Join(err, mine.Err()); err != nil {
		return torch.Fail("ClipGradNorm", d.fail("FullyShardedDataParallel.ClipGradNorm", err))
	}
	all = scope.Own(all)
	if err := d.g.AllGather(all, mine); err != nil {
		return torch.Fail("ClipGradNorm", err)
	}
	return all.NormOrd(order).ToDType(own.DType()).Keep()
}

// Close frees this rank's shards. The network cannot be used after Close.
func (d *FullyShardedDataParallel) Close() error {
	if d.closed {
		return nil
	}
	d.closed = true
	d.whole.dropState()
	d.whole.dropAverages()
	errs := []error{d.precede(), d.link.Close()}
	for _, b := range d.blocks {
		errs = append(errs, b.close())
	}
	for _, t := range d.empty {
		errs = append(errs, t.Close())
	}
	if d.stream != nil {
		errs = append(errs, d.stream.Close())
	}
	return errors.Join(errs...)
}
