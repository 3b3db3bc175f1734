// Package trace records what ran when, on which stream, and shows it: as events, as a picture of
// the timeline, as a file for Perfetto or chrome://tracing, and as the figures that people look for
// in such pictures. It works with LibTorch's profiler (Kineto and CUPTI); Python is not needed.
//
//	rec, err := trace.Start(trace.Options{})
//	if err != nil {
//		return err
//	}
//	... // the part of the program to look at, in any goroutines
//	tr, err := rec.Stop() // waits for the devices
//	if err != nil {
//		return err
//	}
//	err = tr.WriteFile("timeline.svg", trace.PictureOptions{Title: "one step"}) // .svg, .png or .json
//
// A program that uses package prefetcher needs no code for this: prefetcher.Options.Trace records
// some batches to a file, and so does the environment:
//
//	TORCHSTREAM_TRACE=step.svg ./program                          # batches 2 to 5 of epoch 0
//	TORCHSTREAM_TRACE=step.json,epoch=1,first=100,batches=8 ./program
//
// Without a GPU the operators on the CPU are recorded.
//
// Recording costs time: an operator about a microsecond more, a CUDA call too, and work on the GPU
// very little. Figures of speed come from runs without a recording.
package trace
