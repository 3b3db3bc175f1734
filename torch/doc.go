// Package torch has tensors, their operators and automatic differentiation, over LibTorch.
//
// # Tensors and errors
//
// A [Tensor] is a handle to a LibTorch tensor. Operators are its methods and are generated from
// LibTorch's own list, one line each in ops.txt:
//
//	loss := x.MatMul(w).Add(b).ReLU().MSELoss(y)
//	if err := loss.Backward(); err != nil {
//		return err
//	}
//
// Nothing here panics, on no operand. An operator that fails returns a tensor that carries the
// error, with the operator's name, its operands' dtypes, shapes and devices, and the file and line
// that called it; operators on such a tensor return the same error again. It comes out where values
// do: at [Tensor.Backward], [Tensor.Float64], [Tensor.Float32s], [Tensor.Err] and the like.
// errors.Is finds the kind: [ErrClosed], cuda.ErrOutOfMemory, cuda.ErrNoDevice, ... Constructors
// return an error beside the tensor.
//
// A name that ends in an underscore works in place, as in PyTorch: x.Add_(y) changes x. It returns
// x itself, or a failed handle; in that case x is as usable as it was.
//
// # Adding an operator
//
// Any of LibTorch's operators becomes a method by a line in ops.txt and `make generate`; types,
// defaults and the documented schema come from LibTorch's own list:
//
//	erf                     Erf()                           -- the error function
//
// # Memory: scopes
//
// Tensors hold device memory, of which Go's garbage collector knows nothing, so they are freed when
// the program says so. A [Scope] owns tensors and frees all of them in one call when it is closed,
// and it travels with the data: the result of an operator joins the youngest scope among its
// operands. What is computed from a batch that has a scope therefore ends with that batch, and what
// has no scope (parameters, and what is computed from parameters alone) stays. A tensor without a
// scope belongs to whoever made it, who calls [Tensor.Close]. [Tensor.Keep] gives a handle that its
// scope's end leaves alone, [Tensor.In] one that belongs to another scope. Closing a scope between
// forward and backward is allowed: LibTorch keeps what backward needs.
//
// A tensor that was closed, or whose scope was, is [ErrClosed] from then on, which names the scope.
// What is never closed is freed by the garbage collector, some time later; [Caught] counts such
// tensors, so that a program can see what it forgot.
//
// # Gradients
//
// Operators record what backward needs when an operand requires gradients. [Tensor.NoGrad] returns
// a marked handle to the same tensor: operators on it record nothing, and mark what they return.
// The mode travels with the data, as the scope does, since a goroutine has no grad mode of its own.
// So evaluation is net.Forward(images.NoGrad()), and a parameter is changed in place by
// w.NoGrad().Sub_(step).
//
// # Concurrency
//
// All functions and methods may be called from any goroutine. Closing a tensor or a scope while
// another goroutine uses it is safe: the memory goes when the last use is over. What is not ordered
// is what the operators do to the data: an in-place operator beside another use of the same tensor
// is the program's own race, and backward passes that run at the same time must not share leaves.
//
// Work for a GPU is enqueued on the stream that is current on the goroutine's thread, which is the
// default stream unless cuda.WithStream or cuda.SetCUDAStream said otherwise. Operators return when
// the work is enqueued. Reading values (Float64, Float32s, Int64s, String, ...) waits for it.
//
// # Threads
//
// How many threads LibTorch uses inside one operator on the CPU is process-wide; LibTorch's default
// is the machine's core count, which knows nothing of a container's CPU quota or of loader workers
// beside it: see [SetNumThreads]. How many OS threads of the Go program are inside LibTorch at once
// is bounded, and the rest wait as goroutines; nothing needs to be set for that.
//
// On a GPU, LibTorch keeps handles and workspaces for every OS thread that has computed there
// (cuBLAS alone 32 MiB on Hopper), and a goroutine may come to a new thread at any call. A training
// loop whose device memory is to be flat to the byte holds runtime.LockOSThread.
package torch
