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
// defaults: a zero option stands for PyTorch's default. All are an [Optimizer]. A step makes a few
// calls of LibTorch's fused or foreach kernels, each for all parameters together. LAMB and Muon
// make a few more calls for each different shape. Parameters of several dtypes and devices may
// share an optimizer.
//
// # Groups and fine-tuning
//
// A [Group] has its own learning rate and weight decay:
//
//	opt, err := optim.NewAdamW(nn.Parameters(trunk), optim.AdamWOptions{
//		LR:     1e-5,
//		Groups: []optim.Group{{Params: nn.Parameters(head), LR: 1e-3}},
//	})
//
// Step does not change parameters without a gradient. An optimizer may therefore hold a frozen part
// of a network, and trains it as soon as SetRequiresGrad(true) unfreezes it. Step uses a gradient
// that a parameter got before it was frozen. Freeze after Step, which drops gradients.
//
// # Schedules, clipping, averages
//
// A [Scheduler] applies a [Schedule], a pure function of the step. Schedules are [StepLR],
// [MultiStepLR], [ExponentialLR], [LinearWarmup], [CosineLR], [CosineRestarts], [OneCycleLR],
// several in a row ([Sequential]) or at once ([Chained]), or the program's function
// ([ScheduleFunc]). A [Plateau] reduces rates when a metric stops improving. Call [ClipGradNorm] or
// [ClipGradValue] between Backward and Step. [EMA] keeps averages of the parameters. None of these
// calls waits for the device.
//
// # Mixed precision
//
// Under autocast (torch.Tensor.Autocast) parameters, gradients and state are float32. With float16
// a [GradScaler] scales the loss and skips steps whose gradients overflowed.
//
// Parameters of bfloat16 or float16 (nn.ToDType) take half the memory, but their 8 or 11 bits of
// mantissa lose most updates: 1 - 0.001 is 1 in bfloat16. With MasterWeights an optimizer keeps a
// float32 copy of each such parameter, its master. Step converts the gradients to float32, updates
// the masters with float32 state by the formula, and rounds the result to the parameters. A
// parameter's first Step copies it to its master. From then on Step uses the master. If the program
// changes the parameter, the next Step undoes the change. State includes masters as "master_param".
// Loading a state without them copies them from the parameters.
//
// # State
//
// [Save] and [Load] write and read the state in PyTorch's layout, to the last bit: resumed training
// computes the same bits as uninterrupted training. State and LoadState do the same for a file that
// also holds other data. State.PyTorch makes the dict for a torch.save checkpoint. The state of a
// Scheduler is its Count. The state of a Plateau is its State, and the state of an EMA is its named
// tensors.
//
// # CUDA graphs
//
// Step can be captured in a CUDA graph after at least one Step outside a capture, which allocates
// the state. A graph keeps the values it was captured with, including the learning rates. With
// Capturable the rates are in device memory, and SetLR applies to the graph's next replay. Step
// counts are always in device memory.
package optim
