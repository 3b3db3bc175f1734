package collectives

import (
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/torch"
)

// Each row runs the collective that it names.
func TestCollectivesAreThoseOfTheirNames(t *testing.T) {
	world, err := distributed.Init(t.Context(), distributed.Options{CPU: true})
	if err != nil {
		t.Fatal(err)
	}
	defer world.Close()
	x, err := torch.Zeros(cuda.CPU, torch.Float32, 4)
	if err != nil {
		t.Fatal(err)
	}
	x.Close() // errors about closed tensors name the collective
	all, err := Parse(Names())
	if err != nil || len(all) != 5 {
		t.Fatalf("%d, %v, want 5, nil", len(all), err)
	}
	for _, c := range all {
		err := c.call(world, tensors{x, x, x})
		if err == nil || !strings.Contains(strings.ToLower(err.Error()),
			"distributed: "+strings.ReplaceAll(c.Name, "-", "")) {
			t.Errorf("%s: %v, want an error with %q",
				c.Name, err, "distributed: "+strings.ReplaceAll(c.Name, "-", ""))
		}
	}
	if none, err := Parse(""); none != nil || err != nil {
		t.Errorf("%v, %v", none, err)
	}
	if _, err := Parse("all-reduce,reduce"); err == nil || !strings.Contains(err.Error(), `"reduce"`) {
		t.Errorf("an unknown collective: %v, want an error with %q", err, `"reduce"`)
	}
}
