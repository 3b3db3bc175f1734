//go:build !linux || !cgo

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"

	"github.com/torchstream/torchstream/internal/interrupt"
	"github.com/torchstream/torchstream/internal/library"
	"github.com/torchstream/torchstream/internal/machine"
	"github.com/torchstream/torchstream/internal/printable"
)

// errFound ends the program with status 1, without a message.
var errFound = errors.New("something is missing")

// main runs the commands of a program without cgo: setup -only-libtorch, and doctor, which examines
// the machine and the clone, but opens no library.
func main() {
	ctx, stop := interrupt.Context(interrupt.Grace)
	err := bootstrap(ctx, os.Args[1:], os.Stdout, os.Stderr)
	interrupted := ctx.Err() != nil
	stop()
	switch {
	case err == nil || errors.Is(err, flag.ErrHelp):
	case interrupted:
		fmt.Fprintln(os.Stderr, "torchstream: interrupted; the next set-up continues")
		os.Exit(interrupt.Status)
	case errors.Is(err, errFound):
		os.Exit(1)
	default:
		fmt.Fprintln(os.Stderr, "torchstream:", printable.Text(printable.URLs(err.Error())))
		os.Exit(1)
	}
}

func bootstrap(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	command := ""
	if len(args) > 0 {
		command, args = args[0], args[1:]
	}
	set := flag.NewFlagSet("torchstream "+command, flag.ContinueOnError)
	set.SetOutput(stderr)
	switch command {
	case "setup":
		only := set.Bool("only-libtorch", false, "install only LibTorch, and print its folder")
		release := set.String("libtorch", "", "LibTorch release: "+releases())
		cpu := set.Bool("cpu", false, "LibTorch without CUDA")
		if err := parseAll(set, args); err != nil {
			return err
		}
		if *only {
			chosen, err := releaseOf(*release, *cpu, false)
			if err != nil {
				return err
			}
			return libTorchOnly(ctx, chosen, stdout, stderr)
		}
	case "doctor":
		if err := parseAll(set, args); err != nil {
			return err
		}
		return bareDoctor(ctx, stdout)
	}
	return fmt.Errorf("this program has only `doctor` and `setup -only-libtorch`: %s",
		library.CannotCall(runtime.GOOS, runtime.GOARCH))
}

// parseAll parses the options of a command that takes no further arguments.
func parseAll(set *flag.FlagSet, args []string) error {
	if err := set.Parse(args); err != nil {
		return err
	}
	if set.NArg() > 0 {
		return fmt.Errorf("%s: unexpected argument %q: it takes options alone", set.Name(), set.Arg(0))
	}
	return nil
}

// bareDoctor reports what building torchstream needs, and opens no library.
func bareDoctor(ctx context.Context, stdout io.Writer) error {
	root := library.Here("").Clone
	var report []machine.Finding
	if root != "" {
		report = machine.Clone(ctx, root)
	} else {
		report = append(report, machine.Compiler(ctx))
	}
	report = append(report, machine.LibTorch(), machine.GPU(ctx))
	if root != "" {
		report = append(report, machine.Builds(root, true)...)
	}
	missing, err := printFindings(stdout, findings(report...), root != "")
	if err == nil && missing > 0 {
		err = errFound
	}
	return err
}
