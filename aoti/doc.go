// Package aoti runs models that PyTorch exports: packages (.pt2) that PyTorch's AOTInductor
// compiled ahead of time. The program needs no Python.
//
// A package contains native code. [Load] runs it with all rights of the process, as opening a
// shared library does. Load packages only from where the program's own code comes from, or pin
// their contents with [Options.SHA256]. [Open] reads a package's description and runs nothing.
//
//	model, err := aoti.Load("resnet50.pt2", aoti.Options{})
//	if err != nil {
//		return err
//	}
//	defer model.Close()
//	logits, err := model.Run(ctx, images) // on the goroutine's current stream
//
// tools/export.py writes packages from models of torchvision, timm and Hugging Face, and from a
// team's own modules. Its packages describe their inputs and outputs (names, dtypes, and shapes
// with their ranges), so Run checks its arguments before the call. For other packages, PyTorch's
// compiled code makes these checks, with errors that name inputs by their position.
//
// # Instances
//
// A model has [Options.Instances] instances, each with the weights in memory. A run borrows an
// instance while it enqueues its work. So this number bounds how many goroutines enqueue at the
// same time; others wait in Run. A run on a GPU returns as soon as its work is enqueued. Runs on
// different streams overlap on the GPU even with one instance.
//
// # Graphs
//
// A torch.Graphed may capture Run. Its first call, before the capture, also loads the kernels. The
// graph keeps the instance that it captured.
package aoti
