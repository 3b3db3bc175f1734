package train

import (
	"fmt"
	"math"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// Metrics holds the results of one pass over samples.
type Metrics struct {
	Samples int64   `json:"samples"`
	Loss    float64 `json:"loss"` // mean over the samples
	// Top1 is the share of samples whose class has the largest output, and Top5 the share of
	// samples whose class has one of the five largest outputs. Both are 0 if Classes is 0.
	Top1 float64 `json:"top1"`
	Top5 float64 `json:"top5"`
	// Classes is the number of classes. It is 0 if the outputs are not [N classes], or if the
	// batches have no class labels.
	Classes int `json:"classes"`
	// MAP is the mean average precision of an evaluation with MultiLabel: the mean of
	// AveragePrecision over the classes that a sample has. It is 0 if no sample has a class, and
	// in training. With MultiLabel, Classes is 0.
	MAP float64 `json:"map,omitempty"`
	// AveragePrecision is, by class, the precision of the samples in falling order of their
	// outputs, averaged over the samples that have the class (scikit-learn's
	// average_precision_score). It is NaN for a class that no sample has. It is nil without
	// MultiLabel, for training, and for epochs before a resume.
	AveragePrecision []float64 `json:"-"`
	// Confusion counts the samples of an evaluation: Confusion[label][predicted class]. It is nil
	// for training, if Classes is 0, and for epochs before a resume. Confusions sorts it, and
	// SaveConfusion writes it to files.
	Confusion [][]int64 `json:"-"`
}

// sums holds the totals behind Metrics. They are exact in JSON.
type sums struct {
	Samples int64   `json:"samples"`
	Loss    float64 `json:"loss"`
	Top1    int64   `json:"top1"`
	Top5    int64   `json:"top5"`
	Classes int     `json:"classes"`
}

// meter adds up metrics on the device, so that no step waits for a result.
type meter struct {
	samples   int64
	classes   int
	loss      *torch.Tensor // float64 scalar
	right     *torch.Tensor // int64 scalar: top-1
	among     *torch.Tensor // int64 scalar: top-5
	confusion *torch.Tensor // int64 [classes*classes]; nil in training
	multi     bool          // MultiLabel: there are scores instead of classes
	scores    scores        // of an evaluation, if multi
}

// newMeter returns a meter that starts with the given totals.
func newMeter(device cuda.Device, from sums, multi bool) (*meter, error) {
	m := &meter{samples: from.Samples, classes: from.Classes, multi: multi}
	var err error
	if m.loss, err = torch.Full(device, torch.Float64, from.Loss); err != nil {
		return nil, err
	}
	if m.right, err = torch.Full(device, torch.Int64, float64(from.Top1)); err != nil {
		m.close()
		return nil, err
	}
	if m.among, err = torch.Full(device, torch.Int64, float64(from.Top5)); err != nil {
		m.close()
		return nil, err
	}
	return m, nil
}

// add adds the mean loss and the outputs of n samples. labels may be nil. In an evaluation,
// add also counts confusions or, if multi is set, keeps scores.
func (m *meter) add(output, loss, labels *torch.Tensor, n int, evaluation bool) error {
	m.samples += int64(n)
	if err := m.loss.AddScaled_(loss.NoGrad(), float64(n)).Err(); err != nil {
		return fmt.Errorf("adding up the loss: %w", err)
	}
	if m.multi {
		if !evaluation {
			return nil
		}
		return m.scores.add(output, labels)
	}
	labels, classes := classLabels(output, labels)
	if classes == 0 {
		return nil
	}
	if m.classes != 0 && m.classes != classes {
		return fmt.Errorf("the model has %d outputs now, and had %d before", classes, m.classes)
	}
	m.classes = classes
	output = output.NoGrad()
	predicted := output.ArgMax(1, false)
	if err := m.right.Add_(predicted.Eq(labels).Sum()).Err(); err != nil {
		return err
	}
	_, best := output.TopK(int64(min(5, classes)), 1)
	if err := m.among.Add_(best.Eq(labels.Unsqueeze(1)).Sum()).Err(); err != nil {
		return err
	}
	if !evaluation {
		return nil
	}
	return m.confuse(predicted, labels)
}

// classLabels returns the class labels [N] and the number of classes. The number is 0 if the output
// and the labels are not a classifier's. For mixed labels [N classes], a sample's class is the one
// with the largest component.
func classLabels(output, labels *torch.Tensor) (*torch.Tensor, int) {
	if labels == nil {
		return nil, 0
	}
	shape := output.Shape()
	if len(shape) != 2 || shape[1] < 2 {
		return nil, 0
	}
	switch of := labels.Shape(); {
	case labels.DType() == torch.Int64 && len(of) == 1:
		return labels, int(shape[1])
	case len(of) == 2 && of[1] == shape[1]:
		return labels.ArgMax(1, false), int(shape[1])
	}
	return nil, 0
}

// confuse counts pairs of label and prediction.
func (m *meter) confuse(predicted, labels *torch.Tensor) error {
	if m.confusion == nil {
		c := int64(m.classes)
		var err error
		if m.confusion, err = torch.Zeros(predicted.Device(), torch.Int64, c*c); err != nil {
			return err
		}
	}
	pair := labels.MulInt(int64(m.classes)).Add(predicted)
	ones := pair.Eq(pair).ToDType(torch.Int64)
	_, err := torch.Call("index_add_", m.confusion, 0, pair, ones)
	return err
}

// read returns the totals so far. A loss that is not finite is an error. read waits for the device.
func (m *meter) read(of string) (s sums, err error) {
	s.Samples, s.Classes = m.samples, m.classes
	if s.Loss, err = m.loss.Float64(); err != nil {
		return s, err
	}
	if math.IsNaN(s.Loss) || math.IsInf(s.Loss, 0) {
		return s, fmt.Errorf("the %s loss is %v: lower the learning rate, warm it up, or clip the gradients; "+
			"checkpoints, if any, are from before", of, s.Loss)
	}
	if s.Top1, err = m.right.Int64(); err != nil {
		return s, err
	}
	s.Top5, err = m.among.Int64()
	return s, err
}

// tally returns the totals so far, and the confusion counts or the scores of an evaluation. It
// waits for the device.
func (m *meter) tally(of string) (t tally, err error) {
	if t.Sums, err = m.read(of); err == nil && m.confusion != nil {
		t.Confusion, err = m.confusion.Int64s()
	}
	if err == nil && m.multi {
		t.Scores, err = m.scores.read()
	}
	return t, err
}

// metrics converts totals to metrics.
func (t *tally) metrics(of string) (*Metrics, error) {
	s := &t.Sums
	if s.Samples == 0 {
		return nil, fmt.Errorf("the %s feed has no samples", of)
	}
	n := float64(s.Samples)
	r := &Metrics{Samples: s.Samples, Loss: s.Loss / n, Classes: s.Classes, Top1: float64(s.Top1) / n,
		Top5: float64(s.Top5) / n}
	for label := 0; t.Confusion != nil && label < s.Classes; label++ {
		r.Confusion = append(r.Confusion, t.Confusion[label*s.Classes:(label+1)*s.Classes])
	}
	r.AveragePrecision, r.MAP = t.Scores.averagePrecision()
	return r, nil
}

func (m *meter) close() {
	for _, t := range []*torch.Tensor{m.loss, m.right, m.among, m.confusion} {
		if t != nil {
			t.Close()
		}
	}
	m.scores.close()
}
