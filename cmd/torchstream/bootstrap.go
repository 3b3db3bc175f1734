package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/torchstream/torchstream/internal/library"
	"github.com/torchstream/torchstream/internal/machine"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/internal/setup"
)

// A program built without cgo consists of this file and without_cgo.go. Its build needs no C
// compiler. The program examines the machine, and installs LibTorch for make.

// libTorchOnly prints the folder that contains LibTorch. It first installs LibTorch, unless
// LibTorch is already installed or the variable LIBTORCH names one.
func libTorchOnly(ctx context.Context, release string, stdout, stderr io.Writer) error {
	cache, err := cacheFolder()
	if err != nil {
		return err
	}
	site, err := setup.LibTorch(ctx, setup.Options{Release: release, LibTorch: os.Getenv("LIBTORCH"),
		Cache: cache, Log: stderr})
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(stdout, site)
	return err
}

// cacheFolder returns the folder to install into.
func cacheFolder() (string, error) {
	cache, err := library.Cache()
	if err != nil {
		return "", fmt.Errorf("%w: set TORCHSTREAM_CACHE to a folder of your own", err)
	}
	return cache, nil
}

// releaseOf returns the LibTorch release that the options of setup select. The argument other says
// whether -from or -image is set. With either, setup builds nothing against LibTorch, so -cpu is an
// error.
func releaseOf(release string, cpu, other bool) (string, error) {
	switch {
	case cpu && (release != "" || other):
		return "", errors.New("setup: -cpu chooses the LibTorch of a build: it goes with neither " +
			"-libtorch, -from nor -image")
	case cpu:
		return setup.DefaultRelease + setup.WithoutCUDA, nil
	case release == "":
		return os.Getenv("TORCHSTREAM_LIBTORCH"), nil
	}
	return release, nil
}

// finding is a row of the doctor's report.
type finding machine.Finding

func findings(list ...machine.Finding) []finding {
	rows := make([]finding, len(list))
	for i, f := range list {
		rows[i] = finding(f)
	}
	return rows
}

// printFindings prints the doctor's report and returns the number of missing things.
func printFindings(stdout io.Writer, report []finding, clone bool) (missing int, err error) {
	table := printable.NewTable(stdout, 0)
	for _, f := range report {
		fmt.Fprintf(table, "%s\t%s\t%s\n", f.State, f.What, strings.ReplaceAll(f.Found, "\n", "\n\t\t   "))
		if f.ToDo != "" {
			fmt.Fprintf(table, "\t\t-> %s\n", f.ToDo)
		}
	}
	if err := table.Flush(); err != nil {
		return 0, err
	}
	missing = missingOf(report)
	text := "\nAll that is needed is here."
	if missing > 0 {
		text = fmt.Sprintf("\nMissing: %d.", missing)
		if clone {
			text += " `make shim` installs and builds what it can; `make image` builds the part that needs no LibTorch."
		}
	}
	_, err = fmt.Fprintln(stdout, text)
	return missing, err
}

// missingOf returns the number of findings about something missing.
func missingOf(report []finding) (missing int) {
	for _, f := range report {
		if f.State == machine.Missing {
			missing++
		}
	}
	return missing
}

// releases returns the text of the option -libtorch.
func releases() string { return strings.Join(setup.Releases(), " or ") }
