// Package trace records the work of each stream over time. It presents a recording as events, as a
// picture of the timeline, as a file for Perfetto or chrome://tracing, and as summary figures. It
// uses LibTorch's profiler (Kineto and CUPTI) and does not need Python.
//
//	rec, err := trace.Start(trace.Options{})
//	if err != nil {
//		return err
//	}
//	... // the part of the program to record, in any goroutines
//	tr, err := rec.Stop() // waits for the devices
//	if err != nil {
//		return err
//	}
//	err = tr.WriteFile("timeline.svg", trace.PictureOptions{Title: "one step"}) // or .png, .json
//
// A program that uses package prefetcher needs no code: prefetcher.Options.Trace records some
// batches to a file, and so does an environment variable:
//
//	TORCHSTREAM_TRACE=step.svg ./program                          # batches 2 to 5 of epoch 0
//	TORCHSTREAM_TRACE=step.json,epoch=1,first=100,batches=8 ./program
//
// Without a GPU, the recording contains the operators on the CPU.
//
// Recording costs time: about a microsecond per operator and per CUDA call, and very little for
// work on the GPU. Measure speed without a recording.
package trace
