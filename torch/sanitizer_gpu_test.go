package torch_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

// sanitized runs a program under a separate sanitizer and returns its findings.
func sanitized(t *testing.T, program func() error) []cuda.Finding {
	t.Helper()
	if err := gpu.Synchronize(); err != nil {
		t.Fatal(err)
	}
	s := cudatest.StartSanitizer(t)
	defer s.Stop()
	if err := errors.Join(program(), gpu.Synchronize()); err != nil {
		t.Fatal(err)
	}
	return s.Findings()
}

// wantFinding requires exactly one finding of the kind whose missing line ends in missing.
func wantFinding(t *testing.T, found []cuda.Finding, kind cuda.FindingKind, missing string) {
	t.Helper()
	matching := 0
	for _, f := range found {
		if f.Kind == kind && strings.HasSuffix(f.Missing, missing) {
			matching++
			for _, use := range []string{f.First.At.File, f.Second.At.File} {
				if use != "" && !strings.HasSuffix(use, "sanitizer_gpu_test.go") {
					t.Errorf("the place of a use is %s, not this test:\n%v", use, &f)
				}
			}
		} else if !f.Kind.Note() {
			t.Errorf("also found:\n%v", &f)
		}
	}
	if matching != 1 {
		t.Errorf("%d findings of kind %s with the missing line %q, want 1", matching, kind, missing)
		for _, f := range found {
			t.Logf("found:\n%v", &f)
		}
	}
}

func wantNone(t *testing.T, found []cuda.Finding) {
	t.Helper()
	for _, f := range found {
		t.Errorf("found in a correct program:\n%v", &f)
	}
}

// planted has two tensors, an exclusive stream and an event.
type planted struct {
	t      *testing.T
	x, y   *torch.Tensor
	memory *cuda.Pinned
	pinned *torch.Tensor // over memory
	side   *cuda.OwnedStream
	event  *cuda.Event
}

func newPlanted(t *testing.T) *planted {
	t.Helper()
	cudatest.RequireGPUs(t, 1)
	p := &planted{t: t}
	full := func(v float64) *torch.Tensor {
		x, err := torch.Full(gpu, torch.Float32, v, 1024)
		return must(t, x, err)
	}
	p.x, p.y = full(1), full(2)
	memory, err := cuda.NewPinned(4096)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { memory.Close() })
	p.memory = memory
	over, err := torch.FromMemory(memory.Bytes(), torch.Float32, 1024)
	p.pinned = must(t, over, err)
	if p.side, err = cuda.NewOwnedStream(gpu, cuda.StreamOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.side.Close() })
	if p.event, err = cuda.NewEvent(cuda.EventOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.event.Close() })
	return p
}

// on runs an in-place addition of b to a on the stream.
func (p *planted) on(s cuda.Stream, a, b *torch.Tensor) error {
	return cuda.WithStream(s, func() error { return a.Add_(b).Err() })
}

var defaultStream = cuda.DefaultStream(gpu)

// The sanitizer finds the race of each of the ten mistakes in docs/streams.md, and nothing in the
// same program without the mistake.
func TestSanitizerFindsTheTenMistakes(t *testing.T) {
	const toDefault = "cuda.DefaultStream(0))"

	t.Run("1 a goroutine does not inherit the stream", func(t *testing.T) {
		p := newPlanted(t)
		program := func(inherit bool) func() error {
			return func() error {
				return cuda.WithStream(p.side.Stream, func() error {
					err := p.x.AddScalar_(1).Err()
					done := make(chan error)
					go func() {
						use := func() error { return p.y.Add_(p.x).Err() }
						if inherit {
							done <- cuda.WithStream(p.side.Stream, use)
						} else {
							done <- use()
						}
					}()
					return errors.Join(err, <-done)
				})
			}
		}
		found := sanitized(t, program(false))
		wantFinding(t, found, cuda.FindingRace, ")")
		if len(found) > 0 && !strings.HasPrefix(found[0].Missing, "cuda.DefaultStream(0).Wait(") {
			t.Errorf("the missing line is %q", found[0].Missing)
		}
		wantNone(t, sanitized(t, program(true)))
	})

	t.Run("2 a stream reads a result of the default stream", func(t *testing.T) {
		p := newPlanted(t)
		program := func(wait bool) func() error {
			return func() error {
				err := p.x.AddScalar_(1).Err()
				if wait {
					err = errors.Join(err, p.side.Wait(defaultStream))
				}
				return errors.Join(err, p.on(p.side.Stream, p.y, p.x))
			}
		}
		wantFinding(t, sanitized(t, program(false)), cuda.FindingRace, ".Wait("+toDefault)
		wantNone(t, sanitized(t, program(true)))
	})

	t.Run("3 a wait for an event that was never recorded", func(t *testing.T) {
		p := newPlanted(t)
		found := sanitized(t, func() error {
			err := p.x.AddScalar_(1).Err()
			if e := p.side.WaitEvent(p.event); !errors.Is(e, cuda.ErrNotRecorded) {
				t.Errorf("the wait returns %v, want cuda.ErrNotRecorded", e)
			}
			return errors.Join(err, p.on(p.side.Stream, p.y, p.x))
		})
		wantFinding(t, found, cuda.FindingRace, ".Wait("+toDefault)
		if len(found) == 0 || found[0].Kind != cuda.FindingNotRecorded {
			t.Errorf("got the findings %v, want %v first", found, cuda.FindingNotRecorded)
		}
		wantNone(t, sanitized(t, func() error {
			return errors.Join(p.x.AddScalar_(1).Err(), p.event.Record(defaultStream),
				p.side.WaitEvent(p.event), p.on(p.side.Stream, p.y, p.x))
		}))
	})

	t.Run("4 a new stream for every batch", func(t *testing.T) {
		cudatest.RequireGPUs(t, 1)
		found := sanitized(t, func() error {
			for range cuda.PoolStreams + 1 {
				if _, err := cuda.NewStream(gpu, cuda.StreamOptions{}); err != nil {
					return err
				}
			}
			return nil
		})
		wantFinding(t, found, cuda.FindingSharedStream, "NewOwnedStream(device, cuda.StreamOptions{})")
	})

	t.Run("5 pinned memory is refilled while its copy is queued", func(t *testing.T) {
		p := newPlanted(t)
		program := func(wait bool) func() error {
			return func() error {
				err := cuda.WithStream(p.side.Stream,
					func() error { return p.y.CopyFrom(p.pinned, torch.CopyOptions{NonBlocking: true}) })
				if wait {
					err = errors.Join(err, p.side.Synchronize())
				}
				return errors.Join(err, p.pinned.Fill_(3).Err())
			}
		}
		wantFinding(t, sanitized(t, program(false)), cuda.FindingRace, ".Synchronize()")
		wantNone(t, sanitized(t, program(true)))
	})

	t.Run("5 a slice of pinned memory is refilled while its copy is queued", func(t *testing.T) {
		cudatest.RequireGPUs(t, 1)
		program := func(wait bool) func() error {
			return func() error {
				p := newPlanted(t) // the sanitizer has to see the allocation
				p.memory.Bytes()[7] = 1
				err := errors.Join(p.side.Wait(defaultStream), cuda.WithStream(p.side.Stream, func() error {
					return p.y.CopyFrom(p.pinned, torch.CopyOptions{NonBlocking: true})
				}))
				if wait {
					err = errors.Join(err, p.side.Synchronize())
				}
				p.memory.Bytes()[7] = 2
				return errors.Join(err, p.side.Synchronize())
			}
		}
		wantFinding(t, sanitized(t, program(false)), cuda.FindingRace, ".Synchronize()")
		wantNone(t, sanitized(t, program(true)))
	})

	t.Run("6 an asynchronous copy from pageable memory", func(t *testing.T) {
		p := newPlanted(t)
		pageable := floats(t, make([]float32, 1024))
		copyFrom := func(src *torch.Tensor) func() error {
			return func() error { return p.y.CopyFrom(src, torch.CopyOptions{NonBlocking: true}) }
		}
		wantFinding(t, sanitized(t, copyFrom(pageable)), cuda.FindingPageable, "cuda.NewPinned")
		wantNone(t, sanitized(t, copyFrom(p.pinned)))
	})

	t.Run("7 the next writer does not wait for the reader", func(t *testing.T) {
		p := newPlanted(t)
		program := func(wait bool) func() error {
			return func() error {
				err := errors.Join(p.x.AddScalar_(1).Err(), p.side.Wait(defaultStream), p.on(p.side.Stream, p.y, p.x))
				if wait {
					err = errors.Join(err, defaultStream.Wait(p.side.Stream))
				}
				return errors.Join(err, p.x.AddScalar_(1).Err())
			}
		}
		wantFinding(t, sanitized(t, program(false)), cuda.FindingRace, ")")
		wantNone(t, sanitized(t, program(true)))
	})

	t.Run("8 memory is freed while another stream reads it", func(t *testing.T) {
		p := newPlanted(t)
		program := func(record bool) func() error {
			return func() error {
				x, err := torch.Full(gpu, torch.Float32, 1, 1024)
				err = errors.Join(err, p.side.Wait(defaultStream), p.on(p.side.Stream, p.y, x))
				if record {
					err = errors.Join(err, x.RecordStream(p.side.Stream))
				}
				return errors.Join(err, x.Close())
			}
		}
		wantFinding(t, sanitized(t, program(false)), cuda.FindingFreed, ")")
		wantNone(t, sanitized(t, program(true)))
	})

	t.Run("9 a branch is not joined", func(t *testing.T) {
		p := newPlanted(t)
		program := func(join bool) func() error {
			return func() error {
				err := errors.Join(cuda.Fork(defaultStream, p.side.Stream), p.on(p.side.Stream, p.x, p.x))
				if join {
					err = errors.Join(err, cuda.Join(defaultStream, p.side.Stream))
				}
				return errors.Join(err, p.y.Add_(p.x).Err())
			}
		}
		wantFinding(t, sanitized(t, program(false)), cuda.FindingRace, ")")
		wantNone(t, sanitized(t, program(true)))
	})

	t.Run("9 gradients are read on another stream than Backward's", func(t *testing.T) {
		p := newPlanted(t)
		if err := p.x.SetRequiresGrad(true); err != nil {
			t.Fatal(err)
		}
		program := func(wait bool) func() error {
			return func() error {
				scope := torch.NewScope("loss")
				defer scope.Close()
				err := cuda.WithStream(p.side.Stream, func() error {
					loss := p.x.In(scope).Mul(p.y).Sum()
					return errors.Join(loss.Err(), loss.Backward())
				})
				if wait {
					err = errors.Join(err, defaultStream.Wait(p.side.Stream))
				}
				gradient := p.x.Grad()
				if gradient == nil {
					return errors.New("there is no gradient")
				}
				err = errors.Join(err, p.y.Add_(gradient).Err(), gpu.Synchronize())
				return errors.Join(err, gradient.Close(), torch.ClearGrads(p.x))
			}
		}
		// Both the gradient and y, which backward reads, are used without a wait.
		races := 0
		for _, f := range sanitized(t, program(false)) {
			if f.Kind == cuda.FindingRace && strings.HasPrefix(f.Missing, "cuda.DefaultStream(0).Wait(") {
				races++
			}
		}
		if races == 0 {
			t.Error("found 0 races with the default stream, want at least 1")
		}
		wantNone(t, sanitized(t, program(true)))
	})

	t.Run("10 a copy between GPUs has a side stream on one of them", func(t *testing.T) {
		p := newPlanted(t)
		cudatest.RequireGPUs(t, 2)
		there, err := torch.Empty(1, torch.Float32, 1024)
		there = must(t, there, err)
		program := func(both bool) func() error {
			return func() error {
				err := p.on(p.side.Stream, p.x, p.x)
				if both {
					err = errors.Join(err, torch.CopyPeer([]*torch.Tensor{there}, cuda.DefaultStream(1),
						[]*torch.Tensor{p.x}, p.side.Stream))
				} else {
					err = errors.Join(err, there.CopyFrom(p.x, torch.CopyOptions{NonBlocking: true}))
				}
				return errors.Join(err, cuda.Device(1).Synchronize())
			}
		}
		wantFinding(t, sanitized(t, program(false)), cuda.FindingRace, ")")
		wantNone(t, sanitized(t, program(true)))
	})
}

// Views are compared by their bytes: streams may work on different rows, or columns, of one tensor.
func TestSanitizerComparesBytes(t *testing.T) {
	p := newPlanted(t)
	x, err := torch.Zeros(gpu, torch.Float32, 32, 32)
	x = must(t, x, err)
	halves := func(dim int64) (a, b *torch.Tensor) {
		a, b = x.Narrow(dim, 0, 16), x.Narrow(dim, 16, 16)
		return must(t, a, a.Err()), must(t, b, b.Err())
	}
	top, bottom := halves(0)
	left, right := halves(1)
	both := func(a, b *torch.Tensor) func() error {
		return func() error {
			return errors.Join(a.AddScalar_(1).Err(),
				cuda.WithStream(p.side.Stream, func() error { return b.AddScalar_(1).Err() }))
		}
	}
	wantNone(t, sanitized(t, both(top, bottom)))
	wantNone(t, sanitized(t, both(left, right)))
	wantFinding(t, sanitized(t, both(top, left)), cuda.FindingRace, "cuda.DefaultStream(0))")
}

// A replay counts by the memory that its graph holds.
func TestSanitizerSeesReplays(t *testing.T) {
	p := newPlanted(t)
	graph, err := cuda.Capture(cuda.CaptureOptions{}, func() error { return p.x.AddScalar_(1).Err() })
	if err != nil {
		t.Fatal(err)
	}
	defer graph.Close()
	if found := sanitized(t, func() error { return graph.Replay(p.side.Stream) }); len(found) > 0 {
		t.Errorf("a graph that was captured before the sanitizer's start: got %v, want no finding", found)
	}
	program := func(wait bool) func() error {
		return func() error {
			graph, err := cuda.Capture(cuda.CaptureOptions{}, func() error { return p.x.AddScalar_(1).Err() })
			if err != nil {
				return err
			}
			defer graph.Close()
			err = graph.Replay(p.side.Stream)
			if wait {
				err = errors.Join(err, defaultStream.Wait(p.side.Stream))
			}
			return errors.Join(err, p.y.Add_(p.x).Err(), gpu.Synchronize())
		}
	}
	found := sanitized(t, program(false))
	wantFinding(t, found, cuda.FindingRace, ")")
	if len(found) == 1 && !strings.Contains(found[0].First.Within, "aten::add_") {
		t.Errorf("the finding does not name the operator in the graph:\n%v", &found[0])
	}
	wantNone(t, sanitized(t, program(true)))
}

// An event that was recorded, and that nothing waited for before its Close, is noted.
func TestSanitizerNotesAnEventThatNothingAwaits(t *testing.T) {
	p := newPlanted(t)
	program := func(wait bool) func() error {
		return func() error {
			e, err := cuda.NewEvent(cuda.EventOptions{})
			if err != nil {
				return err
			}
			err = errors.Join(p.on(p.side.Stream, p.x, p.x), e.Record(p.side.Stream))
			if wait {
				err = errors.Join(err, defaultStream.WaitEvent(e), p.y.Add_(p.x).Err())
			}
			return errors.Join(err, e.Close())
		}
	}
	wantFinding(t, sanitized(t, program(false)), cuda.FindingEventNotAwaited, "stream.WaitEvent(event)")
	wantNone(t, sanitized(t, program(true)))
}

// A stream that waits for an external event is ordered after the part of a replay before the
// record. The part of a replay after a wait is ordered after the work before the record.
func TestSanitizerKnowsExternalEventsOfGraphs(t *testing.T) {
	p := newPlanted(t)
	z, err := torch.Zeros(gpu, torch.Float32, 1024)
	z = must(t, z, err)
	// with runs a program with an external event and a graph that is captured on the side stream.
	with := func(before func(e *cuda.Event) error, captured func(e *cuda.Event) error,
		after func(e *cuda.Event) error) func() error {
		return func() error {
			e, err := cuda.NewEvent(cuda.EventOptions{External: true})
			if err != nil {
				return err
			}
			defer e.Close()
			if err := before(e); err != nil {
				return err
			}
			g, err := cuda.Capture(cuda.CaptureOptions{Stream: p.side.Stream}, func() error { return captured(e) })
			if err != nil {
				return err
			}
			defer g.Close()
			return errors.Join(g.Replay(p.side.Stream), after(e), gpu.Synchronize())
		}
	}
	nothing := func(*cuda.Event) error { return nil }

	signals := func(read *torch.Tensor) func() error {
		return with(nothing, func(e *cuda.Event) error {
			return errors.Join(p.x.AddScalar_(1).Err(), e.Record(p.side.Stream), p.y.AddScalar_(1).Err())
		}, func(e *cuda.Event) error {
			return errors.Join(defaultStream.WaitEvent(e), z.Add_(read).Err())
		})
	}
	wantNone(t, sanitized(t, signals(p.x)))
	wantFinding(t, sanitized(t, signals(p.y)), cuda.FindingRace, ")")

	waits := func(before bool) func() error {
		return with(func(e *cuda.Event) error {
			return errors.Join(p.x.AddScalar_(1).Err(), e.Record(defaultStream))
		}, func(e *cuda.Event) error {
			wait := func() error { return p.side.WaitEvent(e) }
			use := func() error { return p.y.Add_(p.x).Err() }
			if before {
				return errors.Join(wait(), use())
			}
			return errors.Join(use(), wait())
		}, nothing)
	}
	wantNone(t, sanitized(t, waits(true)))
	wantFinding(t, sanitized(t, waits(false)), cuda.FindingRace, "cuda.DefaultStream(0))")
}

// The engine orders the streams of a backward pass, and its hooks. It does not order a hook's work
// on another stream, or other work on the hook's results.
func TestSanitizerKnowsTheOrderOfBackward(t *testing.T) {
	p := newPlanted(t)
	forward, caller := cudatest.Stream(t, gpu), cudatest.Stream(t, gpu)
	w, err := torch.Full(gpu, torch.Float32, 3, 1024)
	w = must(t, w, err)
	if err := w.SetRequiresGrad(true); err != nil {
		t.Fatal(err)
	}
	// program computes a result on the stream forward, and runs its backward pass from the stream
	// caller. The pass calls the hook with the gradient of the result.
	program := func(hook func(g *torch.Tensor) error, after func() error) func() error {
		return func() error {
			scope := torch.NewScope("pass")
			defer scope.Close()
			err := cuda.Fork(defaultStream, forward, caller)
			var loss *torch.Tensor
			err = errors.Join(err, cuda.WithStream(forward, func() error {
				square := w.In(scope).Square()
				loss = square.Sum()
				_, err := square.RegisterHook(func(g *torch.Tensor) (*torch.Tensor, error) { return nil, hook(g) })
				return errors.Join(loss.Err(), err)
			}))
			err = errors.Join(err, caller.Wait(forward), cuda.WithStream(caller, func() error {
				return errors.Join(loss.Backward(), after())
			}))
			return errors.Join(err, gpu.Synchronize(), torch.ClearGrads(w))
		}
	}
	nothing := func() error { return nil }
	here := func(g *torch.Tensor) error { return p.x.Add_(g).Err() } // on forward
	elsewhere := func(wait bool) func(g *torch.Tensor) error {
		return func(g *torch.Tensor) error {
			var err error
			if wait {
				err = p.side.Wait(forward)
			}
			return errors.Join(err, p.on(p.side.Stream, p.y, g), g.RecordStream(p.side.Stream))
		}
	}
	read := func(x *torch.Tensor) error {
		sum := x.Sum()
		return errors.Join(sum.Err(), sum.Close())
	}
	onSide := func(x *torch.Tensor) error {
		return cuda.WithStream(p.side.Stream, func() error { return read(x) })
	}

	t.Run("a hook computes where it runs", func(t *testing.T) {
		wantNone(t, sanitized(t, program(here, nothing)))
	})
	t.Run("the caller reads what a hook has written", func(t *testing.T) {
		wantNone(t, sanitized(t, program(here, func() error { return read(p.x) })))
	})
	t.Run("another stream reads what a hook has written", func(t *testing.T) {
		wantFinding(t, sanitized(t, program(here, func() error { return onSide(p.x) })), cuda.FindingRace, ")")
		wantNone(t, sanitized(t, program(here, func() error { return errors.Join(p.side.Wait(caller), onSide(p.x)) })))
	})
	t.Run("a hook uses another stream", func(t *testing.T) {
		wantNone(t, sanitized(t, program(elsewhere(true), nothing)))
		races := 0
		for _, f := range sanitized(t, program(elsewhere(false), nothing)) {
			if f.Kind == cuda.FindingRace {
				races++
			}
		}
		if races == 0 {
			t.Error("found 0 races, want at least 1")
		}
	})
	t.Run("the caller reads a gradient", func(t *testing.T) {
		gradient := func() error {
			g := w.Grad()
			return errors.Join(read(g), gpu.Synchronize(), g.Close())
		}
		wantNone(t, sanitized(t, program(here, gradient)))
	})
	t.Run("another stream reads a gradient", func(t *testing.T) {
		gradient := func() error {
			g := w.Grad()
			return errors.Join(onSide(g), gpu.Synchronize(), g.Close())
		}
		wantFinding(t, sanitized(t, program(here, gradient)), cuda.FindingRace, ")")
	})
}

// When values have reached the host, it comes after their computation, and later launches come
// after the host.
func TestSanitizerSeesTheHostWait(t *testing.T) {
	p := newPlanted(t)
	program := func(wait func() error) func() error {
		return func() error {
			return errors.Join(p.on(p.side.Stream, p.x, p.x), wait(), p.y.Add_(p.x).Err())
		}
	}
	inside := func(read func() error) func() error {
		return func() error { return cuda.WithStream(p.side.Stream, read) }
	}
	for name, wait := range map[string]func() error{
		"Stream.Synchronize": p.side.Synchronize,
		"Device.Synchronize": gpu.Synchronize,
		"Event.Synchronize":  func() error { return errors.Join(p.event.Record(p.side.Stream), p.event.Synchronize()) },
		"Float32s":           inside(func() error { _, err := p.x.Float32s(); return err }),
		"Float64": inside(func() error {
			one := p.x.Narrow(0, 0, 1)
			defer one.Close()
			_,
				err := one.Float64()
			return err
		}),
		"a blocking copy": inside(func() error { return p.pinned.CopyFrom(p.x, torch.CopyOptions{}) }),
		"a non-blocking copy to the host that is read": inside(func() error {
			host := p.x.ToWith(cuda.CPU, torch.ToOptions{NonBlocking: true})
			defer host.Close()
			_, err := host.Float32s()
			return err
		}),
		"Notify": func() error {
			done, err := p.side.Notify()
			if err == nil {
				<-done
			}
			return err
		},
	} {
		t.Run(name, func(t *testing.T) { wantNone(t, sanitized(t, program(wait))) })
	}
	wantFinding(t, sanitized(t, program(func() error { return nil })), cuda.FindingRace, ")")
}

// A wait of the host orders the work before it, but not the first call after it.
func TestSanitizerSeesRacesBehindTheHostsWait(t *testing.T) {
	p := newPlanted(t)
	for name, wait := range map[string]func() error{
		"Stream.Synchronize": p.side.Synchronize,
		"Device.Synchronize": gpu.Synchronize,
		"Event.Synchronize":  func() error { return errors.Join(p.event.Record(p.side.Stream), p.event.Synchronize()) },
		"Float32s": func() error {
			return cuda.WithStream(p.side.Stream, func() error { _, err := p.x.Float32s(); return err })
		},
	} {
		t.Run(name, func(t *testing.T) {
			found := sanitized(t, func() error {
				return cuda.WithStream(p.side.Stream, func() error { // on one thread, as the waits' entries in the log
					return errors.Join(wait(), p.x.AddScalar_(1).Err(),
						cuda.WithStream(defaultStream, func() error { return p.y.Add_(p.x).Err() }))
				})
			})
			wantFinding(t, found, cuda.FindingRace, ")")
		})
	}
}

// BenchmarkSanitizer measures an operator of a program that is bound by launches, without a
// sanitizer and under one, and the ratio of the two times.
func BenchmarkSanitizer(b *testing.B) {
	cudatest.RequireGPUs(b, 1)
	if cuda.RunningSanitizer() != nil {
		b.Skip("the environment has started a sanitizer")
	}
	one, err := torch.Ones(gpu, torch.Float32, 1024)
	x := must(b, one, err)
	two, err := torch.Ones(gpu, torch.Float32, 1024)
	y := must(b, two, err)
	const operators = 600
	check := func(err error) {
		if err != nil {
			b.Fatal(err)
		}
	}
	// round returns the time of one operator. The device has done all of its work before.
	round := func() time.Duration {
		check(gpu.Synchronize())
		began := time.Now()
		for range operators / 3 {
			sum := x.Add(y)
			check(errors.Join(sum.Mul_(y).Err(), x.AddScalar_(1).Err(), sum.Close()))
		}
		return time.Since(began) / operators
	}
	off, on := time.Hour, time.Hour
	for b.Loop() {
		off = min(off, round())
		s, err := cuda.StartSanitizer(cuda.SanitizerOptions{})
		check(err)
		for range 3 { // the first round records where the calls are
			on = min(on, round())
		}
		if found := s.Findings(); len(found) > 0 {
			b.Errorf("found:\n%v", &found[0])
		}
		s.Stop()
		off = min(off, round())
	}
	b.ReportMetric(float64(off.Nanoseconds()), "off-ns/operator")
	b.ReportMetric(float64(on.Nanoseconds()), "on-ns/operator")
	b.ReportMetric(float64(on)/float64(off), "times")
	b.ReportMetric(0, "ns/op") // of the whole comparison
}
