package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// planted returns the text of the fault's file with the fault.
func (f *fault) planted(root string) (string, error) {
	text, err := os.ReadFile(filepath.Join(root, f.file))
	if err != nil {
		return "", err
	}
	if n := strings.Count(string(text), f.old); n != 1 {
		return "", fmt.Errorf("%s: its text occurs %d times in %s, want once:\n%s", f.name, n, f.file, f.old)
	}
	return strings.Replace(string(text), f.old, f.new, 1), nil
}

// plant plants faults, one after the other, and runs seeds until one fails. It is an error if a
// fault is not found that should be, or the reverse.
func (r *runner) plant(match string, first, seeds uint64) error {
	names, err := regexp.Compile(match)
	if err != nil {
		return err
	}
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "torchstream-simworld")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	var errs []error
	found, all := 0, 0
	for _, f := range faults() {
		if !names.MatchString(f.name) {
			continue
		}
		all++
		n, err := r.one(work, root, &f, first, seeds)
		switch {
		case err != nil:
			errs = append(errs, err)
			fmt.Fprintf(r.out, "%-70s %v\n", f.name, err)
			continue
		case n == 0 && f.missed == "":
			errs = append(errs, fmt.Errorf("%s: not found", f.name))
		case n > 0 && f.missed != "":
			errs = append(errs, fmt.Errorf("%s: found, although %s", f.name, f.missed))
		}
		if n > 0 {
			found++
		}
		fmt.Fprintf(r.out, "%-70s %d\n", f.name, n)
	}
	fmt.Fprintf(r.out, "%d of %d faults found\n", found, all)
	return errors.Join(errs...)
}

// one plants a fault. It returns the number of seeds until one fails, or 0.
func (r *runner) one(work, root string, f *plantedFault, first, seeds uint64) (uint64, error) {
	if err := r.buildPlanted(work, root, f); err != nil {
		return 0, err
	}
	for done := uint64(0); done < seeds; {
		n := min(max(20, done), seeds-done)
		began := time.Now()
		if seed, err := r.all(first+done, n); err != nil {
			fmt.Fprintf(r.out, "  seed %d, %.1f s: %s\n", seed, time.Since(began).Seconds(), reason(err))
			return seed - first + 1, nil
		}
		done += n
	}
	return 0, nil
}

// buildPlanted compiles the program that runs seeds, with a fault in the product.
func (r *runner) buildPlanted(work, root string, f *plantedFault) error {
	text, err := f.planted(root)
	if err != nil {
		return err
	}
	file := filepath.Join(work, "planted.go")
	if err := os.WriteFile(file, []byte(text), 0o666); err != nil {
		return err
	}
	r.scenario = f.scenario
	return r.build(work, map[string]string{f.file: file})
}

// reason returns the line of a failing run that says why it failed.
func reason(err error) string {
	for line := range strings.Lines(err.Error()) {
		for _, start := range []string{"error: ", "panic: ", "fatal error: "} {
			if strings.HasPrefix(line, start) {
				return strings.TrimSpace(line[:min(len(line), 200)])
			}
		}
	}
	return "no reason"
}
