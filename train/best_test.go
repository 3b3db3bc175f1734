package train

import "testing"

func TestBestEpochHasTheHighestPrecision(t *testing.T) {
	eval := func(m Metrics) *Epoch { return &Epoch{Train: &Metrics{Loss: 1}, Eval: &m} }
	best := eval(Metrics{Loss: 2, MAP: 0.5})
	for _, c := range []struct {
		epoch *Epoch
		want  bool
	}{
		{eval(Metrics{Loss: 9, MAP: 0.6}), true},
		{eval(Metrics{Loss: 1, MAP: 0.4}), false},
		{eval(Metrics{Loss: 1, MAP: 0.5}), true},
		{eval(Metrics{Loss: 2, MAP: 0.5}), false},
		{&Epoch{Train: &Metrics{Loss: 1}}, true}, // without an evaluation the losses are compared
	} {
		if got := c.epoch.betterThan(best); got != c.want {
			t.Errorf("%+v is better than %+v: got %v, want %v", c.epoch.decisive(), best.Eval, got, c.want)
		}
	}
}
