package cli

import (
	"os"
	"testing"
)

func TestSpinBrieflyFollowsTheEnvironment(t *testing.T) {
	for _, c := range []struct{ policy, spins, want string }{
		{"", "", "1000"}, {"active", "", ""}, {"", "50", "50"}, {"passive", "50", "50"},
	} {
		t.Setenv("OMP_WAIT_POLICY", c.policy)
		t.Setenv("GOMP_SPINCOUNT", c.spins)
		if err := SpinBriefly(); err != nil || os.Getenv("GOMP_SPINCOUNT") != c.want {
			t.Errorf("OMP_WAIT_POLICY=%s GOMP_SPINCOUNT=%s: got %q, %v, want %q", c.policy, c.spins,
				os.Getenv("GOMP_SPINCOUNT"), err, c.want)
		}
	}
}
