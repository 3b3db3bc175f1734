package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/printable"
)

// inspection is the report as JSON.
type inspection struct {
	File      string           `json:"file"`
	Format    string           `json:"format"`
	FileBytes int64            `json:"file_bytes"`
	Samples   int              `json:"samples"` // bad ones included
	Ignored   int              `json:"ignored"`
	Orphans   int              `json:"orphans"` // images among the ignored ones that lie in no directory, or have no label
	Classes   []inspectedClass `json:"classes"`
	Formats   map[string]int   `json:"formats"`
	Width     spread           `json:"width"`
	Height    spread           `json:"height"`
	Bytes     spread           `json:"bytes"`
	Bad       []badMember      `json:"bad"`
	BadBy     map[string]int   `json:"bad_by_reason"`
	Warned    []badMember      `json:"warned"`           // damaged, and decoded all the same
	Damage    string           `json:"damage,omitempty"` // to the archive itself; all else is about what comes before it
}

type inspectedClass struct {
	Name    string `json:"name"`
	Label   int    `json:"label"`
	Samples int    `json:"samples"`
	Bad     int    `json:"bad"`
	Bytes   int64  `json:"bytes"`
}

type spread struct {
	Min    int64 `json:"min"`
	Median int64 `json:"median"`
	Max    int64 `json:"max"`
}

type badMember struct {
	Name   string `json:"name"`
	Reason string `json:"reason"`
	Detail string `json:"detail,omitempty"`
}

// inspect prints what is in an archive, with every image decoded in full.
func inspect(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set := flags("inspect FILE", "Reads an archive of images (.tgz, .tar; directory = class) through, decodes every image in full, and prints classes, sizes, formats and bad\n"+
		"members. Damaged images that are decoded all the same are listed apart. Exit status 1 if the archive is damaged or a member is bad.", stderr)
	asJSON := set.Bool("json", false, "print one JSON object")
	byIndex := set.Bool("index", false, "answer from the archive's index, which is made first if there is none: at once, but no image is decoded, so only damage to headers is found")
	web := set.Bool("webdataset", false, "with -index: "+webDatasetHelp)
	limit := set.Int("show", 20, "how many bad members, and how many damaged ones that decode all the same, are named; JSON names all")
	damaged := damagedFlag(set)
	if err := parse(set, args, 1); err != nil {
		return err
	}
	if *web && !*byIndex {
		return usageError{"-webdataset is for -index"}
	}
	progress, done := readingProgress(stderr)
	look := imageloader.Inspect
	if *byIndex {
		look = imageloader.InspectIndex
	}
	report, err := look(ctx, set.Arg(0), imageloader.Options{WebDataset: *web, Damaged: *damaged}, progress)
	done()
	if report == nil {
		return err
	}
	found := inspectionOf(report, err)
	if *asJSON {
		if err := writeJSON(stdout, found); err != nil {
			return err
		}
	} else if err := found.print(stdout, *limit, *web); err != nil {
		return err
	}
	if err != nil || len(found.Bad) > 0 || found.Samples == 0 {
		return errFound
	}
	return nil
}

// readingProgress shows how far a file has been read, on a terminal only.
func readingProgress(stderr io.Writer) (progress func(imageloader.Progress), done func()) {
	f, ok := stderr.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return nil, func() {}
	}
	bar := progressbar.NewOptions64(-1, progressbar.OptionSetWriter(stderr), progressbar.OptionSetDescription("reading"),
		progressbar.OptionSetWidth(30), progressbar.OptionThrottle(100*time.Millisecond), progressbar.OptionClearOnFinish())
	return func(p imageloader.Progress) {
		bar.ChangeMax64(p.TotalBytes)
		bar.Set64(p.Bytes) // only the drawing can fail
	}, func() { bar.Finish() }
}

func inspectionOf(r *imageloader.Report, damage error) inspection {
	out := inspection{
		File: r.File, Format: r.Format, FileBytes: r.FileBytes, Samples: r.Samples, Ignored: r.Ignored, Orphans: r.Orphans, Formats: r.Formats,
		Width: spread(r.Width), Height: spread(r.Height), Bytes: spread(r.Bytes), Classes: []inspectedClass{}, Bad: []badMember{}, Warned: []badMember{}, BadBy: map[string]int{},
	}
	for label, c := range r.Classes {
		out.Classes = append(out.Classes, inspectedClass{c.Name, label, c.Samples, c.Bad, c.Bytes})
	}
	for _, b := range r.Bad {
		out.Bad = append(out.Bad, memberOf(b))
	}
	for _, w := range r.Warned {
		out.Warned = append(out.Warned, memberOf(w))
	}
	for reason, n := range r.BadBy {
		out.BadBy[string(reason)] = n
	}
	if damage != nil {
		out.Damage = damage.Error()
	}
	return out
}

func memberOf(e *imageloader.SampleError) badMember {
	detail := ""
	if e.Err != nil {
		detail = e.Err.Error()
	}
	return badMember{e.Name, string(e.Reason), detail}
}

// damagedFlag adds the flag of Options.Damaged.
func damagedFlag(set *flag.FlagSet) *imageloader.DamagePolicy {
	policy := new(imageloader.DamagePolicy)
	set.Func("damaged", "which damaged images are bad: warned (those that Pillow refuses too), partial (not those that are cut off) or refuse (all; default warned)",
		func(name string) error {
			for _, p := range []imageloader.DamagePolicy{imageloader.Warned, imageloader.Partial, imageloader.Refuse} {
				if p.String() == name {
					*policy = p
					return nil
				}
			}
			return errors.New("not warned, partial or refuse")
		})
	return policy
}

func (r inspection) printSizes(table io.Writer) {
	fmt.Fprintf(table, "width\t%d to %d pixels, median %d\n", r.Width.Min, r.Width.Max, r.Width.Median)
	fmt.Fprintf(table, "height\t%d to %d pixels, median %d\n", r.Height.Min, r.Height.Max, r.Height.Median)
	fmt.Fprintf(table, "size\t%.1f to %.1f KB, median %.1f\n", float64(r.Bytes.Min)/1e3, float64(r.Bytes.Max)/1e3, float64(r.Bytes.Median)/1e3)
}

// print writes the report; web says that classes are labels of WebDataset.
func (r inspection) print(w io.Writer, limit int, web bool) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "%s: %s, %.1f MB\n", printable.Name(r.File), r.Format, float64(r.FileBytes)/1e6)
	fmt.Fprintf(table, "samples\t%d in %d classes, %d bad\n", r.Samples, len(r.Classes), len(r.Bad))
	if r.Ignored > 0 {
		members, orphans := "members outside of class directories", "images in no directory at all"
		if web {
			members, orphans = "members that are no samples", "images without a label"
		}
		fmt.Fprintf(table, "ignored\t%d %s", r.Ignored, members)
		if r.Orphans > 0 {
			fmt.Fprintf(table, ", %d of them %s", r.Orphans, orphans)
		}
		fmt.Fprintln(table)
	}
	if r.Samples > 0 {
		r.printSizes(table)
	}
	for i, format := range byCount(r.Formats) {
		name := ""
		if i == 0 {
			name = "formats"
		}
		fmt.Fprintf(table, "%s\t%d %s\n", name, r.Formats[format], format)
	}
	if err := table.Flush(); err != nil {
		return err
	}

	if len(r.Classes) > 0 {
		most := slices.MaxFunc(r.Classes, func(a, b inspectedClass) int { return a.Samples - b.Samples }).Samples
		table = tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		fmt.Fprintln(table, "\nlabel\tclass\tsamples\tbad\t")
		for _, c := range r.Classes {
			fmt.Fprintf(table, "%5d\t%s\t%7d\t%3d\t%s\n", c.Label, printable.Name(c.Name), c.Samples, c.Bad, strings.Repeat("#", (30*c.Samples+most-1)/max(most, 1)))
		}
		if err := table.Flush(); err != nil {
			return err
		}
	}

	if len(r.Bad) > 0 {
		fmt.Fprintf(w, "\nbad members: %d\n", len(r.Bad))
		table = tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		for _, reason := range byCount(r.BadBy) {
			fmt.Fprintf(table, "%7d\t%s\n", r.BadBy[reason], reason)
		}
		fmt.Fprintln(table)
		if err := printMembers(w, table, r.Bad, limit); err != nil {
			return err
		}
	}
	if len(r.Warned) > 0 {
		fmt.Fprintf(w, "\ndamaged members that are decoded all the same: %d (-damaged refuse has them be bad)\n", len(r.Warned))
		if err := printMembers(w, tabwriter.NewWriter(w, 0, 0, 2, ' ', 0), r.Warned, limit); err != nil {
			return err
		}
	}
	if r.Damage != "" {
		fmt.Fprintf(w, "\nThe archive is damaged, and the above is what comes before that:\n%s\n", printable.Text(r.Damage))
	}
	return nil
}

// printMembers names up to limit members in a table, and says how many more there are.
func printMembers(w io.Writer, table *tabwriter.Writer, list []badMember, limit int) error {
	shown := min(max(limit, 0), len(list))
	for _, m := range list[:shown] {
		fmt.Fprintf(table, "%s\t%s\t%s\n", printable.Name(m.Name), m.Reason, printable.Text(m.Detail))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	if n := len(list) - shown; n > 0 {
		fmt.Fprintf(w, "... and %d more (-show %d names all)\n", n, len(list))
	}
	return nil
}

// byCount sorts names by how often they occur, the most frequent first.
func byCount(counts map[string]int) []string {
	return slices.SortedFunc(maps.Keys(counts), func(a, b string) int {
		if counts[a] != counts[b] {
			return counts[b] - counts[a]
		}
		return strings.Compare(a, b)
	})
}
