package nn_test

import (
	"errors"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
)

func TestRecurrentLayersRefuseShapes(t *testing.T) {
	lstm, gru := nn.NewLSTM(4, 3, nn.LSTMOptions{}), nn.NewGRU(4, 3, nn.GRUOptions{BatchFirst: true})
	defer nn.Close(lstm)
	defer nn.Close(gru)
	x, good := images(t, 5, 2, 4), images(t, 1, 2, 3)
	for name, run := range map[string]func() error{
		"input of an LSTM":   func() error { return lstm.Forward(images(t, 5, 2, 3)).Err() },
		"input of a GRU":     func() error { return gru.Forward(images(t, 5, 2, 3)).Err() },
		"hidden state":       func() error { y, _, _ := lstm.Run(x, images(t, 1, 7, 3), good); return y.Err() },
		"cell state":         func() error { y, _, _ := lstm.Run(x, good, images(t, 1, 2, 4)); return y.Err() },
		"state of the batch": func() error { y, _ := gru.Run(x, good); return y.Err() },
	} {
		t.Run(name, func(t *testing.T) {
			if err := run(); !errors.Is(err, cuda.ErrInvalidArgument) {
				t.Errorf("got %v, want ErrInvalidArgument", err)
			}
		})
	}
	if y, _, _ := lstm.Run(x, good, good); y.Err() != nil {
		t.Error(y.Err())
	}
	if y, _ := gru.Run(x, images(t, 1, 5, 3)); y.Err() != nil {
		t.Error(y.Err())
	}
}
