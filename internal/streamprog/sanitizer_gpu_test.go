package streamprog

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/torchstream/torchstream/cuda"
)

// sanitize runs the program on GPUs under a sanitizer and returns its findings, except notes.
func (m *machine) sanitize(p *Program) (found []cuda.Finding) {
	s, err := cuda.StartSanitizer(cuda.SanitizerOptions{})
	m.check(err)
	defer s.Stop()
	m.run(p)
	for _, f := range s.Findings() {
		if !f.Kind.Note() {
			found = append(found, f)
		}
	}
	return found
}

// freed replaces the drops of a program by frees, since the garbage collector frees dropped tensors
// at an unknown time.
func freed(ops []Op) (all []Op) {
	for _, o := range ops {
		if o.Kind == Drop {
			o.Kind = Free
		}
		all = append(all, o)
	}
	return all
}

// The sanitizer of real programs on one and on two GPUs reports a program if and only if the order
// of its operations has a race.
func TestSanitizerOnGPUs(t *testing.T) {
	if cuda.RunningSanitizer() != nil {
		t.Skip("the environment has started a sanitizer")
	}
	for _, devices := range []int{1, 2} {
		t.Run(fmt.Sprintf("%d devices", devices), func(t *testing.T) {
			m := newMachine(t, devices)
			m.size(1 << 8)
			races, correct := 0, 0
			for seed := uint64(1); seed <= *sanitized && !t.Failed(); seed++ {
				p := Generate(seed, gpuOptions(seed, devices))
				p.Ops = freed(p.Ops)
				m.program = fmt.Sprintf("seed %d, %d devices: ", seed, devices)
				for _, f := range m.sanitize(p) {
					t.Errorf("%sa correct program has a finding:\n%v", m.program, &f)
				}
				correct++
				less := *p
				rng := rand.New(rand.NewPCG(seed, 4))
				less.Ops = nil
				for _, o := range p.Ops { // edges in graphs stay: CUDA refuses captures without them
					if o.Kind < Wait || rng.IntN(4) > 0 {
						less.Ops = append(less.Ops, o)
					}
				}
				k := runChecked(t, &less)
				found := m.sanitize(&less)
				if len(k.want.races) > 0 {
					races++
				}
				switch {
				case len(k.want.races) > 0 && len(found) == 0:
					t.Errorf("%sof the %d races of a program without edges none is found", m.program, len(k.want.races))
				case len(k.want.races) == 0 && len(found) > 0:
					t.Errorf("%sa program that is correct without its edges has a finding:\n%v", m.program, &found[0])
				}
			}
			t.Logf("%d correct programs, %d with races", correct, races)
		})
	}
}
