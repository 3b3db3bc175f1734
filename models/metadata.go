package models

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// Metadata describes a classifier of images. torchstream train saves a Metadata in its checkpoints.
// Another program that calls train.Run does so with train.Config.Metadata = m.Strings().
// torchstream predict and evaluate, and [Open], read such checkpoints.
type Metadata struct {
	Model   string   // one of Classifiers
	Classes []string // in the order of the labels
	Size    int      // side of the square images, in pixels
	Upright bool     // images are turned upright, by their EXIF orientation, before the transform
	// MultiLabel means that an image has any number of the classes: see Probabilities.
	MultiLabel bool
}

// Keys of the metadata.
const (
	modelKey   = "model"
	classesKey = "classes"
	sizeKey    = "size"
	uprightKey = "upright"
	multiKey   = "multi-label"
)

// maxSize is the largest size for which Transform returns a valid transform.
const maxSize = 28672

// MetadataError says which keys a checkpoint's metadata lacks, or has with an invalid value.
type MetadataError struct {
	Missing []string // with an example: `"model" (such as resnet18)`
}

func (e *MetadataError) Error() string {
	return "models: the metadata has no valid " + strings.Join(e.Missing, ", ")
}

// Classifiers returns the names of [Names] that classify images.
func Classifiers() []string {
	return slices.DeleteFunc(Names(), func(name string) bool { return strings.HasPrefix(name, "gpt") })
}

// ParseMetadata reads the metadata of a checkpoint, for example from [checkpoint.File.Metadata].
// The error is a *[MetadataError]. Other keys are ignored.
func ParseMetadata(about map[string]string) (Metadata, error) {
	m := Metadata{Model: about[modelKey], Upright: about[uprightKey] == "true",
		MultiLabel: about[multiKey] == "true"}
	var missing []string
	if !slices.Contains(Classifiers(), m.Model) {
		missing = append(missing, `"model" (such as resnet18)`)
	}
	if json.Unmarshal([]byte(about[classesKey]), &m.Classes) != nil || len(m.Classes) == 0 {
		missing = append(missing, `"classes" (such as ["cat","dog"])`)
	}
	var err error
	if m.Size, err = strconv.Atoi(about[sizeKey]); err != nil {
		missing = append(missing, `"size" (such as 224)`)
	}
	if len(missing) > 0 {
		return Metadata{}, &MetadataError{missing}
	}
	return m, nil
}

// Strings returns the form that a checkpoint stores.
func (m Metadata) Strings() map[string]string {
	classes, _ := json.Marshal(m.Classes) // marshalling strings never fails
	about := map[string]string{modelKey: m.Model, classesKey: string(classes), sizeKey: strconv.Itoa(m.Size)}
	if m.Upright {
		about[uprightKey] = "true"
	}
	if m.MultiLabel {
		about[multiKey] = "true"
	}
	return about
}

// Transform returns the transform for images that the network classifies. It is the same transform
// with which torchstream train evaluates.
func (m Metadata) Transform() transform.Transform {
	t := transform.Eval(m.Size*8/7, m.Size)
	t.ApplyEXIFOrientation = m.Upright
	return t
}

// Probabilities returns the probabilities of the classes from the network's outputs [N classes]:
// those of each row add up to 1, or with MultiLabel each class has its own, from 0 to 1. The result
// belongs to the scope of the outputs.
func (m Metadata) Probabilities(logits *torch.Tensor) *torch.Tensor {
	if m.MultiLabel {
		return logits.Sigmoid()
	}
	return logits.Softmax(1)
}

// NewModel makes the network, on the CPU, with random parameters.
func (m Metadata) NewModel() (nn.Module, error) {
	o := Options{NumClasses: len(m.Classes)}
	if strings.HasPrefix(m.Model, "vit") {
		o.ImageSize = m.Size
	}
	return ByName(m.Model, o)
}

// Load makes the network on a device, in evaluation mode, with the parameters of a checkpoint. The
// caller closes it with [nn.Close]. The memory of a ViT grows with the square of Size.
func (m Metadata) Load(file *checkpoint.File, device cuda.Device) (nn.Module, error) {
	net, err := m.NewModel()
	if err != nil {
		return nil, err
	}
	_, err = nn.LoadFrom(file, net, nn.LoadOptions{})
	if err == nil {
		nn.Train(net, false)
		err = nn.To(net, device)
	}
	if err != nil {
		return nil, errors.Join(err, nn.Close(net))
	}
	return net, nil
}

// Classifier is a network of a checkpoint, with everything that is needed to use it. Several
// goroutines may use it at once.
type Classifier struct {
	Metadata
	Net nn.Module // in evaluation mode: images float32 [N 3 Size Size] to logits float32 [N len(Classes)]
}

// Open opens a checkpoint with [Metadata], such as "run1/best.pt" of torchstream train, and makes
// its network on a device. The error names the file. It wraps fs.ErrNotExist if the file does not
// exist, and a *[MetadataError] if the file does not describe a network.
func Open(path string, device cuda.Device) (*Classifier, error) {
	file, err := checkpoint.Open(path)
	if err != nil {
		return nil, err
	}
	c := &Classifier{}
	c.Metadata, err = ParseMetadata(file.Metadata())
	if err == nil && (c.Size < 1 || c.Size > maxSize) {
		err = fmt.Errorf("models: size %d: want 1 to %d pixels: %w", c.Size, maxSize, cuda.ErrInvalidArgument)
	}
	if err == nil {
		c.Net, err = c.Load(file, device)
	}
	if err = errors.Join(err, file.Close()); err == nil {
		return c, nil
	}
	if c.Net != nil {
		err = errors.Join(err, nn.Close(c.Net))
	}
	return nil, fmt.Errorf("%s: %w", path, err)
}

// Close frees the network.
func (c *Classifier) Close() error { return nn.Close(c.Net) }
