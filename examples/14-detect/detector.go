package main

import (
	"errors"
	"math"
	"slices"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

const (
	stride = 4             // pixels between two points of the network's output
	points = side / stride // of a row and of a column
	unit   = 8             // pixels of a distance whose logarithm is 0
)

// detector predicts, at each point of a grid, a score for each class, and the distances from the
// point to the four edges of the box. It is a small FCOS ("Fully Convolutional One-Stage Object
// Detection").
type detector struct {
	layers *nn.Sequential // images [N 3 side side] to [N classes+4 points points]
	// The positions of the points in pixels: [1 P 2], and x and y alone as [1 1 P].
	at, x, y *torch.Tensor
}

func newDetector(width int, device cuda.Device) (*detector, error) {
	var layers []nn.Module
	block := func(in, out int, halve bool) {
		layers = append(layers, nn.NewConv2d(in, out, 3, nn.Conv2dOptions{Padding: 1, NoBias: true}),
			nn.NewBatchNorm2d(out, nn.BatchNorm2dOptions{}), nn.NewReLU())
		if halve {
			layers = append(layers, nn.NewMaxPool2d(2, nn.MaxPool2dOptions{}))
		}
	}
	block(3, width, true)
	block(width, 2*width, true)
	block(2*width, 4*width, false)
	block(4*width, 4*width, false)
	layers = append(layers, nn.NewConv2d(4*width, classes+4, 1, nn.Conv2dOptions{}))
	d := &detector{layers: nn.NewSequential(layers...)}
	var at, x, y []float32
	for i := range points * points {
		x, y = append(x, (float32(i%points)+0.5)*stride), append(y, (float32(i/points)+0.5)*stride)
		at = append(at, x[i], y[i])
	}
	var errs [3]error
	d.at, errs[0] = onDevice(device, at, 1, points*points, 2)
	d.x, errs[1] = onDevice(device, x, 1, 1, points*points)
	d.y, errs[2] = onDevice(device, y, 1, 1, points*points)
	if err := errors.Join(append(errs[:], nn.To(d.layers, device))...); err != nil {
		return nil, errors.Join(err, d.close())
	}
	return d, nil
}

// onDevice copies numbers to a device.
func onDevice(device cuda.Device, numbers []float32, shape ...int64) (*torch.Tensor, error) {
	host, err := torch.FromSlice(numbers, shape...)
	if err != nil || device == cuda.CPU {
		return host, err
	}
	defer host.Close()
	t := host.To(device)
	return t, t.Err()
}

func (d *detector) close() error {
	for _, t := range []*torch.Tensor{d.at, d.x, d.y} {
		if t != nil {
			t.Close()
		}
	}
	return nn.Close(d.layers)
}

// split returns the logits of the classes [N P classes] and the distances [N P 4] of the network's
// output, for P points.
func split(output *torch.Tensor) (logits, distances *torch.Tensor) {
	output = output.Flatten(2, 3).Permute(0, 2, 1)
	return output.Narrow(2, 0, classes), output.Narrow(2, classes, 4).Clamp(-5, 5).Exp().MulScalar(unit)
}

// target is the aim of training for P points of N images.
type target struct {
	classes   *torch.Tensor // float32 [N P classes]: 1 for the class of the point's box
	distances *torch.Tensor // float32 [N P 4]: to the edges of the point's box; 1 without a box
	has       *torch.Tensor // float32 [N P]: 1 if the point has a box
}

// assign assigns boxes [N M 5] to points: a point has the smallest box that contains the point and
// whose centre is within a stride of it. Rows without a box have the label -1.
func (d *detector) assign(boxes *torch.Tensor) target {
	column := func(i int64) *torch.Tensor { return boxes.Narrow(2, i, 1) } // [N M 1]
	x, y := d.x, d.y
	left, top, right, bottom, label := column(0), column(1), column(2), column(3), column(4)
	distances := torch.Stack([]*torch.Tensor{x.Sub(left), y.Sub(top), right.Sub(x), bottom.Sub(y)}, 3) // [N M P 4]
	near := func(at, low, high *torch.Tensor) *torch.Tensor {
		return at.Sub(low.Add(high).DivScalar(2)).Abs().LtScalar(stride)
	}
	fits := distances.AMin([]int64{3}, false).GtScalar(0).LogicalAnd(near(x, left, right)).LogicalAnd(
		near(y, top, bottom)).LogicalAnd(label.GeScalar(0)) // [N M P]
	const none = 1e9
	area := right.Sub(left).Mul(bottom.Sub(top))
	smallest, box := area.Expand(fits.Shape()...).MaskedFill(fits.LogicalNot(), none).MinDim(1, true) // [N 1 P]
	has := smallest.LtScalar(none).Select(1, 0)                                                       // [N P]
	shape := distances.Shape()
	own := distances.Gather(1, box.Unsqueeze(3).Expand(shape[0], 1, shape[2], 4)).Select(1, 0)
	class := label.Expand(fits.Shape()...).Gather(1, box).Select(1, 0).ClampMin(0).ToDType(torch.Int64)
	is := has.ToDType(torch.Float32)
	return target{class.OneHot(classes).ToDType(torch.Float32).Mul(is.Unsqueeze(2)),
		own.MaskedFill(has.LogicalNot().Unsqueeze(2), 1), is}
}

// loss returns the focal loss of the classes plus the generalised-IoU loss of the boxes, both
// divided by the number of points with a box.
func (d *detector) loss(output, boxes *torch.Tensor) *torch.Tensor {
	logits, distances := split(output)
	t := d.assign(boxes)
	chance := logits.Sigmoid()
	wrong := chance.Add(t.classes).Sub(chance.Mul(t.classes).MulScalar(2)) // |chance - classes|
	entropy := logits.Softplus(1, 20).Sub(logits.Mul(t.classes))
	focal := wrong.Square().Mul(entropy).Sum()
	overlap := generalisedIoU(distances, t.distances)
	away := overlap.Neg().AddScalar(1).Mul(t.has).Sum()
	return focal.Add(away).Div(t.has.Sum().ClampMin(1))
}

// generalisedIoU returns the generalised intersection over union [N P] of the boxes around the same
// points whose distances to the edges are a and b [N P 4].
func generalisedIoU(a, b *torch.Tensor) *torch.Tensor {
	area := func(d *torch.Tensor) *torch.Tensor {
		return d.Select(2, 0).Add(d.Select(2, 2)).Mul(d.Select(2, 1).Add(d.Select(2, 3)))
	}
	both, hull := area(a.Minimum(b)), area(a.Maximum(b))
	union := area(a).Add(area(b)).Sub(both)
	return both.Div(union).Sub(hull.Sub(union).Div(hull))
}

// detection is a box in an image, in pixels, with a class.
type detection struct {
	left, top, right, bottom float32
	class                    int
	score                    float32
}

// labelled returns the boxes of an image from the rows of a batch.
func labelled(rows []float32) (list []detection) {
	for ; len(rows) > 0 && rows[4] >= 0; rows = rows[5:] {
		list = append(list, detection{rows[0], rows[1], rows[2], rows[3], int(rows[4]), 1})
	}
	return list
}

// detect returns the detections of each image, the most certain first.
func (d *detector) detect(output *torch.Tensor) ([][]detection, error) {
	logits, distances := split(output)
	score, class := logits.Sigmoid().MaxDim(2, false)
	rows, err := torch.Cat([]*torch.Tensor{d.at.Sub(distances.Narrow(2, 0, 2)),
		d.at.Add(distances.Narrow(2, 2, 2)),
		class.ToDType(torch.Float32).Unsqueeze(2), score.Unsqueeze(2)}, 2).Float32s()
	if err != nil {
		return nil, err
	}
	const perPoint, least = 6, 0.05
	var all [][]detection
	for ; len(rows) > 0; rows = rows[perPoint*points*points:] {
		var list []detection
		for i := range points * points {
			if r := rows[perPoint*i:][:perPoint]; r[5] > least {
				list = append(list, detection{r[0], r[1], r[2], r[3], int(r[4]), r[5]})
			}
		}
		all = append(all, suppress(list))
	}
	return all, nil
}

// suppress sorts detections by score and leaves out those that overlap a better one of their class.
func suppress(list []detection) (kept []detection) {
	slices.SortStableFunc(list, func(a, b detection) int { return compare(b.score, a.score) })
	for _, d := range list {
		if !slices.ContainsFunc(kept, func(k detection) bool { return k.class == d.class && k.overlap(&d) > 0.5 }) {
			kept = append(kept, d)
		}
	}
	return kept
}

func compare(a, b float32) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// overlap returns the intersection over union of two boxes.
func (d *detection) overlap(o *detection) float64 {
	w, h := min(d.right, o.right)-max(d.left, o.left), min(d.bottom, o.bottom)-max(d.top, o.top)
	if w <= 0 || h <= 0 {
		return 0
	}
	area := func(d *detection) float32 { return (d.right - d.left) * (d.bottom - d.top) }
	return float64(w * h / (area(d) + area(o) - w*h))
}

// meanAveragePrecision returns the mean of the classes' average precision, which is the area below
// the curve of the precision over the recall. A detection is right if its intersection over union
// with a box of its class is more than half, and no better detection has this box.
func meanAveragePrecision(truth, found [][]detection) float64 {
	total := 0.
	for class := range classes {
		type judged struct {
			score float32
			right bool
		}
		var list []judged
		boxes := 0
		for i := range truth {
			taken := make([]bool, len(truth[i]))
			for k := range truth[i] {
				if truth[i][k].class == class {
					boxes++
				}
			}
			for _, d := range found[i] { // the best first
				if d.class != class {
					continue
				}
				best, most := -1, 0.5
				for k := range truth[i] {
					if t := &truth[i][k]; t.class == class && !taken[k] && d.overlap(t) > most {
						best, most = k, d.overlap(t)
					}
				}
				if best >= 0 {
					taken[best] = true
				}
				list = append(list, judged{d.score, best >= 0})
			}
		}
		slices.SortStableFunc(list, func(a, b judged) int { return compare(b.score, a.score) })
		right, precisions := 0, []float64{}
		for i, j := range list {
			if j.right {
				right++
				precisions = append(precisions, float64(right)/float64(i+1))
			}
		}
		for i, best := len(precisions)-1, 0.; i >= 0; i-- { // the best precision at this recall or a higher one
			best = math.Max(best, precisions[i])
			total += best / float64(max(boxes, 1)) / classes
		}
	}
	return total
}
