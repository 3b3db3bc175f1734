package train

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// checkMultiLabel returns an error unless the labels are rows with a number for each output.
func checkMultiLabel(output, labels *torch.Tensor) error {
	if labels == nil {
		return fmt.Errorf("MultiLabel needs batches with a field \"labels\": %w", cuda.ErrInvalidArgument)
	}
	if output.Err() != nil || labels.Err() != nil {
		return nil // the loss has that error
	}
	of, want := labels.Shape(), output.Shape()
	if len(of) != 2 || !slices.Equal(of, want) || labels.DType() == torch.Int64 {
		return fmt.Errorf("the labels are %v%v, and the model's outputs %v: MultiLabel needs a 0 or 1 for each output "+
			"(imageloader.Options.MultiLabel): %w", labels.DType(), of, want, cuda.ErrInvalidArgument)
	}
	return nil
}

// scores holds the outputs and the labels of an evaluation, on the device, so that no batch waits.
type scores struct {
	outputs, labels []*torch.Tensor // [N classes]: float32 and bool, a pair for each batch
}

// add adds the outputs and labels [N classes] of a batch.
func (s *scores) add(output, labels *torch.Tensor) error {
	if err := checkMultiLabel(output, labels); err != nil {
		return err
	}
	o := output.Detach().ToDType(torch.Float32).Clone().Keep()
	l := labels.Detach().GtScalar(0.5).Keep()
	s.outputs, s.labels = append(s.outputs, o), append(s.labels, l)
	return cmp.Or(o.Err(), l.Err())
}

func (s *scores) close() {
	for _, t := range append(s.outputs, s.labels...) {
		t.Close()
	}
}

// read copies the scores to the host. It waits for the device.
func (s *scores) read() (*ranking, error) {
	r := &ranking{}
	for i, o := range s.outputs {
		values, err := o.Float32s()
		if err != nil {
			return nil, err
		}
		has, err := s.labels[i].Bools()
		if err != nil {
			return nil, err
		}
		r.Classes = int(o.Shape()[1])
		for j, v := range values {
			r.Outputs = binary.LittleEndian.AppendUint32(r.Outputs, math.Float32bits(v))
			label := byte(0)
			if has[j] {
				label = 1
			}
			r.Labels = append(r.Labels, label)
		}
	}
	return r, nil
}

// ranking holds the scores of an evaluation on the host. In JSON the bytes are base64, which is
// exact and short.
type ranking struct {
	Classes int    `json:"classes"`
	Outputs []byte `json:"outputs"` // [N classes], float32, little endian
	Labels  []byte `json:"labels"`  // [N classes], 0 or 1
}

// join adds the scores of another rank.
func (r *ranking) join(other *ranking) *ranking {
	switch {
	case other == nil:
		return r
	case r == nil:
		r = &ranking{}
	}
	return &ranking{max(r.Classes, other.Classes), append(r.Outputs, other.Outputs...), append(r.Labels, other.Labels...)}
}

// averagePrecision returns the average precision of each class, NaN for a class that no sample has,
// and the mean of the others.
func (r *ranking) averagePrecision() (by []float64, mean float64) {
	if r == nil {
		return nil, 0
	}
	n := 0
	for class := range r.Classes {
		by = append(by, r.of(class))
		if !math.IsNaN(by[class]) {
			mean += by[class]
			n++
		}
	}
	return by, mean / float64(max(n, 1))
}

// of returns the average precision of a class. Samples with equal outputs count together, so their
// order does not matter.
func (r *ranking) of(class int) float64 {
	type sample struct {
		output float32
		has    bool
	}
	var all []sample
	total := 0
	for at := class; at < len(r.Labels); at += r.Classes {
		bits := binary.LittleEndian.Uint32(r.Outputs[4*at:])
		all = append(all, sample{math.Float32frombits(bits), r.Labels[at] != 0})
		total += int(r.Labels[at])
	}
	if total == 0 {
		return math.NaN()
	}
	slices.SortFunc(all, func(a, b sample) int { return cmp.Compare(b.output, a.output) })
	sum, right, before := 0.0, 0, 0
	for i, s := range all {
		if s.has {
			right++
		}
		if i == len(all)-1 || all[i+1].output != s.output {
			sum += float64(right-before) * float64(right) / float64(i+1)
			before = right
		}
	}
	return sum / float64(total)
}
