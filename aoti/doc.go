// Package aoti runs PyTorch models that AOTInductor has compiled ahead of time. It reads them from
// packages, which are .pt2 files, and needs no Python.
//
// A package contains native code. [Load] runs that code with all rights of the process, as opening
// a shared library does. Load only packages that you trust as much as the program itself, or pin
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
// team's own modules. Packages of export.py describe their inputs and outputs: names, dtypes, and
// shapes with their ranges. Run then checks its arguments before it calls the model. In other
// packages, the compiled code makes these checks, and its errors name an input by its position.
//
// # Instances
//
// A model has [Options.Instances] instances, which share the weights. Run borrows an instance while
// it enqueues its work. So at most that many goroutines enqueue at the same time, and others wait
// in Run. A run on a GPU returns as soon as its work is enqueued. Runs on different streams overlap
// on the GPU even with one instance. A program that writes its buffers needs one instance and one
// stream: tools/export.py refuses such a program.
//
// # Weights
//
// [Model.ReplaceWeights] and [Model.LoadWeights] replace the weights while other goroutines run the
// model. The package must be exported with tools/export.py --replaceable. Otherwise PyTorch writes
// small weights into the code, and with the option "freezing" values that it has computed from
// several weights.
//
// # Graphs
//
// A torch.Graphed may capture Run. The Graphed calls its function once before the capture, which
// also loads the kernels. The graph keeps the instance that the captured run has used, and its
// weights. After ReplaceWeights it captures again, unless FixedArguments is set.
package aoti
