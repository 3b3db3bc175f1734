//go:build notorch

package main

import (
	"context"
	"fmt"
	"io"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// buildNote is the end of the usage.
const buildNote = "\nThis build has no LibTorch: doctor, train, bench streams, bench train and -device are not in it."

func checkLibrary() error { return imagecapi.Check() }

// notInBuild is the error of whatever needs LibTorch.
func notInBuild(what string) error {
	return fmt.Errorf("%s needs LibTorch, and this program was built without it (-tags notorch): "+
		"run `make shim`, then `go build ./cmd/torchstream` without the tag", what)
}

func doctor(context.Context, []string, io.Writer, io.Writer) error {
	return fmt.Errorf("%w; `make doctor` looks at the machine without it", notInBuild("doctor"))
}

func trainCommand(context.Context, []string, io.Writer, io.Writer) error {
	return notInBuild("train")
}

func benchStreams(context.Context, []string, io.Writer, io.Writer) error {
	return notInBuild("bench streams")
}

func benchTrain(context.Context, []string, io.Writer, io.Writer) error {
	return notInBuild("bench train")
}

func pickTarget(name string) (target, error) { return nil, notInBuild("-device " + name) }
