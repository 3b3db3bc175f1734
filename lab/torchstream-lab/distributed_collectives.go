package main

import (
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/torchstream/torchstream/internal/printable"
)

func (r *distReport) collectivesTable(out io.Writer) error {
	if len(r.Collectives) == 0 {
		return nil
	}
	w := printable.NewTable(out, tabwriter.AlignRight)
	fmt.Fprintln(w, "\ncollective\tMiB\tbus GB/s\tms\tof the host\tin a graph\tPyTorch, bus GB/s\tms\tof "+
		"the host\tin a graph\t")
	for _, row := range r.Collectives {
		fmt.Fprintf(w, "%s\t%d\t%v\t%v\t\n", row.Name, row.Bytes>>20, &row.Times, row.PyTorch)
	}
	return w.Flush()
}
