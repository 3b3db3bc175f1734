// Package cudatest helps test programs that use GPUs. It selects the tests for a machine, gives
// each test a stream, detects leaks, injects faults, and compares tensors.
//
//	func TestStep(t *testing.T) {
//		cudatest.NoLeaks(t)                 // first, so that it looks last
//		gpu := cudatest.RequireGPUs(t, 1)[0] // or the test is skipped
//		s := cudatest.Stream(t, gpu)
//		cudatest.Delay(t, s, 10*time.Millisecond) // work on s comes late: a missing wait shows
//		var got *torch.Tensor
//		err := cuda.WithStream(s, func() error { got = step(gpu); return got.Err() })
//		if err != nil {
//			t.Fatal(err)
//		}
//		defer got.Close()
//		cudatest.Equal(t, got, want, cudatest.Tolerance{})
//	}
//
// On a machine without a GPU the test above is skipped. A runner that has GPUs sets
// TORCHSTREAM_REQUIRE_GPUS to their number. Tests that need at most this number then fail instead
// of being skipped, so that a broken driver does not turn a whole suite green. docs/gpu-ci.md has
// the files for such a runner.
//
// # Concurrency
//
// Functions take a testing.TB and report through it. Functions that can end the test must be called
// from the test's goroutine. [NoLeaks], [NoFindings], [StartSanitizer] and [OutOfMemory] see the
// whole process: tests that use them must not run in parallel with others.
package cudatest
