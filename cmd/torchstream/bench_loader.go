//go:build linux && cgo

package main

import (
	"context"
	"io"

	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/loaderbench"
)

// benchLoader turns an archive into shuffled batches as fast as possible, and prints the rate and
// the resources used.
func benchLoader(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set, o := loaderbench.Flags("torchstream bench loader -archive FILE",
		"Turns an archive into batches, epoch after epoch, for a while. The clock starts at the first "+
			"batch. `make bench-loader` does the same\n"+
			"with other libraries. Says what each stage took, and which one the others wait for.", stderr)
	if err := cli.Parse(set, args, 0); err != nil {
		return err
	}
	m, err := o.Measurement()
	if err != nil {
		return err
	}
	if o.Outputs != "" {
		return o.WriteOutputs(ctx, m, stdout)
	}
	if err := m.Run(ctx, stderr); err != nil {
		return err
	}
	if err := m.RecordKernels(ctx, stderr); err != nil {
		return err
	}
	if o.JSON {
		return cli.WriteJSON(stdout, &m.Result)
	}
	return m.Result.Print(stdout)
}
