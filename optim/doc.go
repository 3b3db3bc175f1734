// Package optim provides optimizers, which update parameters in place from their gradients,
// learning rate schedules, gradient clipping and averages of parameters.
//
// A training step is
//
//	loss := net.Forward(batch.Images).CrossEntropy(batch.Labels)
//	if err := loss.Backward(); err != nil {
//		return err
//	}
//	if err := opt.Step(); err != nil {
//		return err
//	}
//
// Step consumes the gradients: it drops them at the end, so that the next Backward starts from zero
// and no ZeroGrad is needed. To accumulate gradients over several batches, call Backward several
// times before one Step. With KeepGradients they stay until ZeroGrad, as in PyTorch. Step without
// any gradient is an error, [ErrNoGradients].
//
// # Optimizers
//
// [SGD], [Adam], [AdamW], [RMSprop], [Adagrad], [LAMB] and [Muon] have PyTorch's formulas and
// defaults: a zero option stands for PyTorch's default. All are an [Optimizer]. A step takes a few
// calls for all parameters together, by LibTorch's fused or foreach kernels; LAMB and Muon take a
// few more for each different shape. Parameters of several dtypes and devices may share an
// optimizer.
//
// # Groups and fine-tuning
//
// A [Group] has a learning rate and a weight decay of its own:
//
//	opt, err := optim.NewAdamW(nn.Parameters(trunk), optim.AdamWOptions{
//		LR:     1e-5,
//		Groups: []optim.Group{{Params: nn.Parameters(head), LR: 1e-3}},
//	})
//
// Step does not change parameters without a gradient. A frozen part of a network may therefore be
// in the optimizer, and takes part as soon as SetRequiresGrad(true) unfreezes it. Step uses a
// gradient that a parameter had before it was frozen, so freeze after Step, which drops gradients.
//
// # Schedules, clipping, averages
//
// A [Scheduler] applies a [Schedule], a pure function of the step: [StepLR], [MultiStepLR],
// [ExponentialLR], [LinearWarmup], [CosineLR], [CosineRestarts], [OneCycleLR], several of them in a
// row ([Sequential]) or at once ([Chained]), or a function of the program's own ([ScheduleFunc]). A
// [Plateau] reduces rates when a metric stops improving. [ClipGradNorm] and [ClipGradValue] come
// between Backward and Step, and [EMA] keeps averages of the parameters; none of them waits for the
// device.
//
// # Mixed precision
//
// Under autocast (torch.Tensor.Autocast) parameters, gradients and state are float32. With float16
// a [GradScaler] scales the loss and skips steps whose gradients overflowed.
//
// Parameters of bfloat16 or float16 (nn.ToDType) take half the memory, but 8 or 11 bits of mantissa
// lose most updates: 1 - 0.001 is 1 in bfloat16. With MasterWeights an optimizer keeps a float32
// copy of each such parameter, its master. Step converts the gradients to float32, updates the
// masters with float32 state by the formula, and rounds the result to the parameters. Masters are
// copied from the parameters at their first Step, and afterwards are the values that count: a
// parameter that the program changes itself changes back at the next Step. State has them as
// "master_param"; a state without them makes them anew from the parameters.
//
// # State
//
// [Save] and [Load] write and read the state in PyTorch's layout, to the last bit: training that
// goes on from a file goes on as if it had not stopped. State and LoadState do the same for a file
// with more in it; State.PyTorch makes the dict for a checkpoint of torch.save. A Scheduler's state
// is its Count, a Plateau's its State, and that of an EMA are named tensors.
//
// # CUDA graphs
//
// Step can be captured in a CUDA graph after at least one Step outside of a capture, which
// allocates the state. A graph keeps the values that it was captured with, including the learning
// rates. With Capturable the rates lie in device memory, and SetLR applies to the graph's next
// replay. Step counts lie there always.
package optim
