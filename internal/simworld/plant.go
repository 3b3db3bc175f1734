package main

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// chosen returns the faults, by number, whose part and name match a regular expression.
func chosen(match string) (map[int]*plantedFault, error) {
	names, err := regexp.Compile(match)
	if err != nil {
		return nil, err
	}
	list := map[int]*plantedFault{}
	for i, f := range faults() {
		if names.MatchString(f.part + ": " + f.name) {
			list[i+1] = &f
		}
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("no fault matches %q", match)
	}
	return list, nil
}

// buildPlanted compiles the program that runs seeds, with faults.
func (r *runner) buildPlanted(work string, list map[int]*plantedFault) error {
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	files := map[string]map[int]*plantedFault{}
	for number, f := range list {
		if files[f.file] == nil {
			files[f.file] = map[int]*plantedFault{}
		}
		files[f.file][number] = f
	}
	changed := map[string]string{}
	for file, some := range files {
		text, err := os.ReadFile(filepath.Join(root, file))
		if err != nil {
			return err
		}
		planted, err := withFaults(file, string(text), some)
		if err != nil {
			return err
		}
		changed[file] = filepath.Join(work, "planted_"+strings.ReplaceAll(file, "/", "_"))
		if err := os.WriteFile(changed[file], []byte(planted), 0o666); err != nil {
			return err
		}
	}
	return r.build(work, changed)
}

// result says how a fault was found.
type result struct {
	*plantedFault
	seeds  uint64 // until one failed; 0: none did
	reason string // of the failing seed
	err    error
}

// plant plants faults, one after the other, and runs seeds until one fails. It is an error if a
// fault is not found that should be, or the reverse.
func (r *runner) plant(list map[int]*plantedFault, first, seeds uint64) error {
	fmt.Fprintf(r.out, "seeds from %d on\n", first)
	results := make([]result, 0, len(list))
	var mu sync.Mutex
	numbers := make(chan int)
	var running sync.WaitGroup
	for range max(1, r.jobs) {
		running.Go(func() {
			for number := range numbers {
				found := r.find(number, list[number], first, seeds)
				mu.Lock()
				results = append(results, found)
				fmt.Fprintln(r.out, found.line())
				mu.Unlock()
			}
		})
	}
	for _, number := range slices.Sorted(maps.Keys(list)) {
		numbers <- number
	}
	close(numbers)
	running.Wait()
	r.table(results)
	var errs []error
	for _, found := range results {
		errs = append(errs, found.wrong())
	}
	return errors.Join(errs...)
}

// find plants a fault and runs seeds until one fails that does not fail without the fault.
func (r *runner) find(number int, f *plantedFault, first, seeds uint64) result {
	planted := *r
	planted.scenario, planted.fault = f.scenario, number
	whole := planted
	whole.fault = 0
	for done := uint64(0); done < seeds; {
		n := min(max(20, done), 1000, seeds-done)
		seed, err := planted.some(first+done, n)
		if err == nil {
			done += n
			continue
		}
		if _, err := whole.execute(seed, 1); err != nil {
			return result{f, 0, "", fmt.Errorf("seed %d fails without the fault", seed)}
		}
		if seeds == 1 {
			fmt.Fprintln(r.out, planted.shorten(os.TempDir(), seed))
		}
		return result{f, seed - first + 1, reason(err), nil}
	}
	return result{f, 0, "", nil}
}

// line describes a result.
func (f *result) line() string {
	switch {
	case f.err != nil:
		return fmt.Sprintf("%s: %s: error: %v", f.part, f.name, f.err)
	case f.seeds == 0:
		return fmt.Sprintf("%s: %s: not found. %s", f.part, f.name, f.missed)
	}
	return fmt.Sprintf("%s: %s: %d seeds. %s", f.part, f.name, f.seeds, f.reason)
}

// wrong returns an error if a fault is not found that should be, or the reverse.
func (f *result) wrong() error {
	switch {
	case f.err != nil:
		return fmt.Errorf("%s: %w", f.name, f.err)
	case f.seeds == 0 && f.missed == "":
		return fmt.Errorf("%s: not found", f.name)
	case f.seeds > 0 && f.missed != "" && f.missed != rare:
		return fmt.Errorf("%s: found, although %s", f.name, f.missed)
	}
	return nil
}

// table prints how many faults of each part were found, and those that were not.
func (r *runner) table(results []result) {
	parts := []string{}
	byPart := map[string][]result{}
	numbers := map[string]int{}
	for i, f := range faults() {
		numbers[f.name] = i
	}
	slices.SortFunc(results, func(a, b result) int { return cmp.Compare(numbers[a.name], numbers[b.name]) })
	for _, f := range results {
		if byPart[f.part] == nil {
			parts = append(parts, f.part)
		}
		byPart[f.part] = append(byPart[f.part], f)
	}
	fmt.Fprint(r.out, "\n| part | planted | found | seeds: median | most |\n|---|---|---|---|---|\n")
	row := func(name string, of []result) {
		var seeds []uint64
		for _, f := range of {
			if f.seeds > 0 {
				seeds = append(seeds, f.seeds)
			}
		}
		slices.Sort(seeds)
		if len(seeds) == 0 {
			seeds = []uint64{0}
		}
		found := len(of) - len(slices.DeleteFunc(slices.Clone(of), func(f result) bool { return f.seeds > 0 }))
		fmt.Fprintf(r.out, "| %s | %d | %d | %d | %d |\n", name, len(of), found, seeds[len(seeds)/2], seeds[len(seeds)-1])
	}
	for _, name := range parts {
		row(name, byPart[name])
	}
	if len(parts) > 1 {
		row("all", results)
	}
	for _, f := range results {
		if f.seeds == 0 && f.err == nil {
			fmt.Fprintf(r.out, "\n- %s: %s", f.name, cmp.Or(f.missed, "?"))
		}
	}
	fmt.Fprintln(r.out)
}

// reason returns the line of a failing run that says why it failed.
func reason(err error) string {
	text := ""
	for line := range strings.Lines(err.Error()) {
		for _, start := range []string{"error: ", "panic: ", "fatal error: "} {
			if strings.HasPrefix(line, start) {
				return strings.TrimSpace(line[:min(len(line), 200)])
			}
		}
		text = cmp.Or(text, strings.TrimSpace(line))
	}
	return text
}
