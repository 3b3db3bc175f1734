package main

// fault is a fault that is planted into a copy of the product: the simulation must find it.
type fault struct {
	name     string
	file     string // path in the repository
	old, new string // old occurs exactly once in the file
	missed   string // why no seed finds it; "": one must
}

// rare is why 10,000 seeds may or may not find a fault: TestRegressionsFindTheirFaults finds it.
const rare = "it is rare: its row of Regressions finds it"

// part is a part of the product with its faults.
type part struct {
	name   string
	faults []fault
}

// plantedFault is a fault that a scenario must find.
type plantedFault struct {
	fault
	part, scenario string
}

// faults returns all planted faults.
func faults() (list []plantedFault) {
	for _, of := range []struct {
		scenario string
		parts    []part
	}{
		{"loader", loaderFaults},
		{"save", []part{{"checkpoints", saveFaults}}},
		{"control", []part{{"lost ranks", controlFaults}}},
	} {
		for _, p := range of.parts {
			for _, f := range p.faults {
				list = append(list, plantedFault{f, p.name, of.scenario})
			}
		}
	}
	return list
}
