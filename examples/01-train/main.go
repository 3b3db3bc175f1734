// Command 01-train is a complete training job: it trains a small convolutional network on an
// archive of labelled photographs, tests it on a held-out archive, writes a checkpoint, and
// predicts with it.
//
//	01-train train                              train on examples/data, in the repository's root
//	01-train train -archive A.tgz -test B.tgz   train on other images: directory = class
//	01-train predict FILE...                    predict photographs, or archives or folders of them
//	01-train serve                              predict photographs that are uploaded over HTTP
//
// Start reading in train.go: train sets up all parts, and trainer.epoch has the training loop.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/examples/internal/lesson"
	"github.com/torchstream/torchstream/internal/interrupt"
)

func main() {
	ctx, stop := interrupt.Context(interrupt.Grace)
	status := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(status)
}

// run executes one command line and returns the exit status.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	commands := map[string]func(context.Context, []string, io.Writer,
		io.Writer) error{"train": trainCommand, "predict": predictCommand, "serve": serveCommand}
	const usageText = "usage: 01-train train [options]\n       01-train predict [options] FILE...\n      " +
		" 01-train serve [options]\n" +
		"Trains a small network on an archive of labelled photographs, and predicts photographs with it. " +
		"All list their options with -h."
	switch {
	case len(args) > 0 && slices.Contains([]string{"-h", "-help", "--help", "help"}, args[0]):
		fmt.Fprintln(stderr, usageText)
		return 0
	case len(args) == 0 || commands[args[0]] == nil:
		if len(args) > 0 {
			fmt.Fprintf(stderr, "01-train: there is no command %q\n", args[0])
		}
		fmt.Fprintln(stderr, usageText)
		return 2
	}
	err := commands[args[0]](ctx, args[1:], stdout, stderr)
	var usage usageError
	switch {
	case err == nil || errors.Is(err, flag.ErrHelp):
		return 0
	case errors.As(err, &usage):
		fmt.Fprintf(stderr, "01-train: %v\n", err)
		return 2
	}
	return lesson.Status(ctx, "01-train", err, stderr)
}

// usageError reports a wrong command line.
type usageError struct{ message string }

func (e usageError) Error() string { return e.message }

// flags returns a flag set whose -h explains a command. call is the command's name with its
// arguments.
func flags(call, about string, stderr io.Writer) *flag.FlagSet {
	set := flag.NewFlagSet("01-train", flag.ContinueOnError)
	set.SetOutput(stderr)
	lesson.Usage(set, "01-train "+call, about)
	return set
}

func parse(set *flag.FlagSet, args []string) error {
	if err := set.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return err
		}
		return usageError{err.Error()}
	}
	return nil
}

// pickDevice parses -device. "" selects the first GPU, or the CPU if there is none.
func pickDevice(name string) (cuda.Device, error) {
	count := cuda.DeviceCount()
	index, gpu := 0, name == "cuda"
	if after, ok := strings.CutPrefix(name, "cuda:"); ok {
		n, err := strconv.Atoi(after)
		if err != nil || n < 0 {
			return 0, usageError{fmt.Sprintf("-device %q: want cpu, cuda or cuda:0, cuda:1, ...", name)}
		}
		index, gpu = n, true
	}
	switch {
	case gpu && index >= count:
		return 0, fmt.Errorf("-device %s: this machine has no such GPU (%d are usable); `make doctor` "+
			"says why; -device cpu needs none", name, count)
	case gpu:
		return cuda.Device(index), nil
	case name == "" && count > 0:
		return cuda.Device(0), nil
	case name == "" || name == "cpu":
		return cuda.CPU, nil
	}
	return 0, usageError{fmt.Sprintf("-device %q: want cpu, cuda or cuda:0, cuda:1, ...", name)}
}
