package transform

import "testing"

// TestAutoAugmentRules compares the tables with torchvision's.
func TestAutoAugmentRules(t *testing.T) {
	for name, rules := range readGolden(t).Policies {
		t.Run(name, func(t *testing.T) {
			policy, known := map[string]AutoAugmentPolicy{"imagenet": ImageNetPolicy,
				"cifar10": CIFAR10Policy, "svhn": SVHNPolicy}[name]
			if !known || len(rules) != 25 {
				t.Fatalf("policy %q has %d rules, want known = true, len(rules) = 25", name, len(rules))
			}
			for i, rule := range rules {
				for j, step := range rule {
					bin, _ := step[2].(float64) // null: no strength
					want := policyStep{policyNames[step[0].(string)], step[1].(float64), int(bin)}
					if got := (AutoAugment{Policy: policy}).rules()[i][j]; got != want {
						t.Errorf("rule %d, step %d: %v, want %v", i, j, got, want)
					}
				}
			}
		})
	}
}
