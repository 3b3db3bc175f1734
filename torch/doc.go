// Package torch provides tensors, operators and automatic differentiation on LibTorch.
//
// # Tensors and errors
//
// A [Tensor] is a handle to a LibTorch tensor. Operators are its methods. They are generated from
// LibTorch's own list, one line each in ops.txt:
//
//	loss := x.MatMul(w).Add(b).ReLU().MSELoss(y)
//	if err := loss.Backward(); err != nil {
//		return err
//	}
//
// No function panics, whatever its operands. An operator that fails returns a tensor that carries
// the error: the operator's name, the dtypes, shapes and devices of its operands, and the file and
// line of the call. Operators on such a tensor return the same error again. The error surfaces
// where the program reads a result: at [Tensor.Backward], [Tensor.Float64], [Tensor.Float32s],
// [Tensor.Err] and the like. errors.Is finds its kind: [ErrClosed], cuda.ErrOutOfMemory,
// cuda.ErrNoDevice and others. Constructors return a tensor and the error.
//
// An operator whose name ends in an underscore works in place, as in PyTorch: x.Add_(y) changes x.
// It returns x itself, or a failed handle. After a failure x remains usable.
//
// # Adding an operator
//
// A line in ops.txt and `make generate` make any of LibTorch's operators a method. Types, defaults
// and the documented schema come from LibTorch's own list:
//
//	erf                     Erf()                           -- the error function
//
// [Call] runs an operator that is not in ops.txt, by its name and with arguments that it checks at
// run time.
//
// # Parts of tensors
//
// [Tensor.At] and [Tensor.Index] look like Go and work like PyTorch's brackets, and
// [Tensor.SetIndex_] assigns:
//
//	x.At(0)                                     // x[0]
//	x.Index(torch.All, torch.Range(1, 5))       // x[:, 1:5]
//	x.Index(torch.Ellipsis, torch.NewAxis, 0)   // x[..., None, 0]
//	x.Index(x.GtScalar(0))                      // x[x > 0]
//	x.SetIndex_(0, x.IsNaN())                   // x[x.isnan()] = 0
//
// # Values
//
// [FromSlice] copies a Go slice into a tensor of its elements' dtype, and [Tensor.Float32s],
// [Tensor.Int64s], [Tensor.Complex128s] and [Tensor.Bools] copy the elements out. [Borrow] and
// [Memory] share memory in both directions without a copy, with matrices of gonum too. Package fmt
// prints tensors as PyTorch does: see [Tensor.Format].
//
// # Memory: scopes
//
// Tensors hold device memory, which Go's garbage collector does not see, so programs free them
// explicitly. A [Scope] owns tensors and frees all of them in one call when it is closed. A scope
// travels with the data: the result of an operator joins the youngest scope among its operands.
// Results of a batch with a scope therefore end with that batch. Tensors without a scope
// (parameters, and results of parameters alone) stay. The code that made a tensor without a scope
// must call [Tensor.Close].
//
// [Tensor.Keep] returns a handle that outlives the scope, and [Tensor.In] a handle that belongs to
// another scope. If In is called on an operator's result without a scope, that result also ends
// with the new scope, since nothing else would close it. A scope may be closed between forward and
// backward: LibTorch keeps the tensors that backward needs. docs/training.md has the three usual
// mistakes.
//
// Every use of a closed tensor, or of a tensor whose scope is closed, returns [ErrClosed], and the
// error names the scope. The garbage collector eventually frees tensors that were never closed.
// [Caught] counts them, so that a program can detect missing calls of Close. In a build with the
// tag debug, package leaks reports where the program made them.
//
// # Gradients
//
// Operators record data for backward if an operand requires gradients. [Tensor.NoGrad] returns a
// marked handle to the same tensor: operators on a marked handle record nothing, and mark their
// results. The mode travels with the data, as the scope does, because a goroutine has no gradient
// mode. Evaluation is therefore net.Forward(images.NoGrad()), and w.NoGrad().Sub_(step) changes a
// parameter in place.
//
// [Tensor.RegisterHook] and [Tensor.RegisterPostAccumulateGradHook] register Go functions that
// backward calls. [Hook] documents their goroutine and stream. A [Function] is an operator in Go
// with a backward in Go.
//
// # Mixed precision
//
// [Tensor.Autocast] marks a tensor in the same way. Products and convolutions of the tensor, and of
// results computed from it, run in bfloat16 or float16, and losses in float32. [Tensor.Numerics]
// does the same for TF32 and deterministic kernels, and [SetProcessNumerics] sets them for the
// process.
//
// # Other libraries and processes
//
// [Tensor.ToDLPack] and [FromDLPack] pass tensors between libraries of one process in DLPack's
// structs, and [Share] and [OpenShared] between processes of one machine. Nothing is copied, and
// both order the streams of the two sides.
//
// # Concurrency
//
// Any goroutine may call all functions and methods. Closing a tensor or a scope while another
// goroutine uses it is safe: the last use frees the memory. The package does not order the
// operators' accesses to the data. An in-place operator during another use of the same tensor is a
// race of the program, and concurrent backward passes must not share leaves.
//
// Work for a GPU is enqueued on the current stream of the goroutine's thread. This is the default
// stream, unless cuda.WithStream or cuda.SetCUDAStream selected another. Operators return when the
// work is enqueued. Calls that read values (Float64, Float32s, Int64s, String and others) wait for
// the work.
//
// # Threads
//
// The number of threads that LibTorch uses inside one operator on the CPU is process-wide. It is
// LibTorch's default, the number of physical cores, and at most runtime.GOMAXPROCS at the first
// call of the package. GOMAXPROCS follows the CPU quota of a container. LibTorch's default ignores
// the quota: in a container that may use 2 of a machine's 64 cores it is 64 threads. If the
// environment has OMP_NUM_THREADS or MKL_NUM_THREADS, these decide, as in PyTorch. [SetNumThreads]
// takes precedence over all.
//
// The package bounds the number of OS threads of the Go program that are inside LibTorch at once.
// Further callers wait as goroutines. This bound needs no configuration.
//
// On a GPU, LibTorch keeps handles and workspaces for every OS thread that has computed there
// (cuBLAS alone 32 MiB on Hopper), and a goroutine may move to a new thread at any call. If the
// device memory of a training loop must stay constant to the byte, the loop has to call
// runtime.LockOSThread.
package torch
