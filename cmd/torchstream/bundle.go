//go:build linux && cgo

package main

import (
	"context"
	"fmt"
	"io"

	"github.com/torchstream/torchstream/internal/bundle"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/imagecapi"
	"github.com/torchstream/torchstream/internal/library"
	"github.com/torchstream/torchstream/internal/printable"
)

// bundleCommand copies a program and its libraries into a relocatable folder.
func bundleCommand(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set := cli.Flags("torchstream bundle PROGRAM -o DIR", "Copies PROGRAM and the libraries that it "+
		"loads, with those of LibTorch and CUDA, into a folder that runs on any machine with glibc (and "+
		"the driver, for\n"+
		"its GPUs): no Go, LibTorch, CUDA, Python or compiler. What LibTorch's packages have and PROGRAM "+
		"never loads is left out. Start DIR/bin/PROGRAM there.", stderr)
	out := set.String("o", "", "`DIR` to make, or an empty one (required)")
	shim := set.String("shim", "",
		"`DIR` with libtorchstream.so and libtorchstream_image.so (default: where programs find them)")
	asJSON := set.Bool("json", false, "print one JSON object")
	program := ""
	if len(args) > 0 && args[0] != "" && args[0][0] != '-' { // options may follow the program
		program, args = args[0], args[1:]
	}
	want := 0
	if program == "" {
		want = 1
	}
	if err := cli.Parse(set, args, want); err != nil {
		return err
	}
	if program == "" {
		program = set.Arg(0)
	}
	if *out == "" {
		return cli.UsageError{Message: "bundle needs -o DIR"}
	}
	search := library.Here(imagecapi.Version())
	if *shim != "" {
		search.Library = *shim
	}
	r, err := bundle.Make(ctx, bundle.Options{Program: program, Out: *out, Find: search.Find})
	if err != nil {
		return fmt.Errorf("bundle: %w", err)
	}
	if *asJSON {
		return cli.WriteJSON(stdout, r)
	}
	return printBundle(stdout, r)
}

func printBundle(w io.Writer, r *bundle.Report) error {
	t := printable.NewTable(w, 0)
	row := func(bytes int64, path, why string) {
		fmt.Fprintf(t, "%7.1f MB\t%s\t%s\n", float64(bytes)/1e6, path, why)
	}
	for _, f := range r.Files {
		row(f.Bytes, f.Path, f.For)
	}
	for _, f := range r.LeftOut {
		row(f.Bytes, f.Path, "left out: never loaded")
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "%s: %.2f GB, with licences; left out of LibTorch: %.2f GB\n", r.Out,
		float64(r.Bytes)/1e9, float64(r.LeftOutBytes)/1e9)
	return err
}
