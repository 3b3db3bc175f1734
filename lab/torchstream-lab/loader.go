package main

import (
	"context"
	"errors"
	"io"

	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/loaderbench"
)

// loaderReport is the output of loader.
type loaderReport struct {
	*loaderbench.Result
	Peers []gpuPeer `json:"peers,omitempty"` // with -peers
}

// benchLoader measures the loader like `torchstream bench loader`, and other decoders on the same
// images.
func benchLoader(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set, o := loaderbench.Flags("torchstream-lab loader -archive FILE",
		"Does what torchstream bench loader does, and then measures other GPU decoders of the archive's "+
			"images: NVIDIA's nvJPEG, and torchvision\n"+
			"and DALI, if -python has them.", stderr)
	names := set.String("peers", "", "then measure other GPU decoders of the same images on the same "+
		"GPU, for 3 s each: all, or some of nvjpeg,torchvision,dali")
	python := set.String("python", "python3", "the Python that has the peers torchvision and dali; empty for none")
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
	peers, err := peersOf(*names, o, m.Device())
	if err != nil {
		return err
	}
	if err := m.Run(ctx, stderr); err != nil {
		return err
	}
	report := loaderReport{Result: &m.Result}
	if peers != nil {
		peers.python = *python
		if report.Peers, err = peers.run(ctx, m); err != nil { // the loader is closed meanwhile
			return err
		}
	}
	if err := m.RecordKernels(ctx, stderr); err != nil {
		return err
	}
	if o.JSON {
		return cli.WriteJSON(stdout, report)
	}
	return errors.Join(report.Print(stdout), printPeers(stdout, report.Peers))
}
