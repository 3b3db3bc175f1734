//go:build linux && cgo

package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/printable"
)

// inspection is the report as JSON.
type inspection struct {
	File      string    `json:"file"`
	Format    string    `json:"format"`
	FileBytes int64     `json:"file_bytes"`
	Samples   int       `json:"samples"` // including bad ones
	Ignored   int       `json:"ignored"`
	Orphans   int       `json:"orphans"`  // ignored images that are in no directory or have no label
	LeftOut   []leftOut `json:"left_out"` // folders and links that are not classes
	// OrphansNamed lists the first 10 images without a label, with -webdataset.
	OrphansNamed []orphanImage    `json:"orphans_named"`
	Classes      []inspectedClass `json:"classes"`
	Formats      map[string]int   `json:"formats"`
	Width        spread           `json:"width"`
	Height       spread           `json:"height"`
	Bytes        spread           `json:"bytes"`
	Turned       int              `json:"turned"`   // good images that are not upright by their EXIF orientation
	Findings     []kindFound      `json:"findings"` // tolerated, refused or rare properties
	BadCount     int              `json:"bad_count"`
	Bad          []badMember      `json:"bad"` // the first 1,000
	BadBy        map[string]int   `json:"bad_by_reason"`
	Warnings     int              `json:"warned_count"`
	Warned       []badMember      `json:"warned"` // the first 1,000 that are damaged but decode
	// Damage describes damage of the archive file itself. If it is set, the other fields describe
	// only the part of the file before the damage.
	Damage string        `json:"damage,omitempty"`
	Fixed  *fixedArchive `json:"fixed,omitempty"` // set by -fix
	// Advice says what an archive without samples may be, and the next step. Instead is the path to
	// open instead.
	Advice  string        `json:"advice,omitempty"`
	Instead string        `json:"instead,omitempty"`
	List    *comparedList `json:"list,omitempty"` // set by -list
}

// comparedList compares -list with the archive.
type comparedList struct {
	File             string `json:"file"`
	Columns          string `json:"columns"`
	Rows             int    `json:"rows"`
	Duplicates       int    `json:"duplicates"`
	WithoutImage     int    `json:"without_image"`
	FirstWithout     string `json:"first_without,omitempty"`
	FirstWithoutLine int    `json:"first_without_line,omitempty"`
	Unlisted         int    `json:"unlisted"`
	FirstUnlisted    string `json:"first_unlisted,omitempty"`
}

// orphanImage is an image without a label.
type orphanImage struct {
	Name   string `json:"name"`
	Reason string `json:"reason"`
}

type leftOut struct {
	What  string   `json:"what"`
	Count int      `json:"count"`
	First []string `json:"first"`
}

type kindFound struct {
	Verdict string   `json:"verdict"` // tolerated, refused or rare
	What    string   `json:"what"`
	Count   int      `json:"count"`
	First   []string `json:"first"`
}

// fixedArchive describes the output of -fix.
type fixedArchive struct {
	File      string   `json:"file"`
	Bytes     int64    `json:"bytes"`
	Members   int      `json:"members"`
	LeftOut   int      `json:"left_out"`
	Rewritten int      `json:"rewritten"`
	Dropped   []string `json:"dropped_classes"`
}

type inspectedClass struct {
	Name    string `json:"name"`
	Label   int    `json:"label"`
	Samples int    `json:"samples"`
	Bad     int    `json:"bad"`
	Bytes   int64  `json:"bytes"`
	// Directories lists the first 5 directories that hold samples of the class. It is null if
	// directories are not classes.
	Directories []string `json:"directories"`
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

const inspectHelp = `Reads an archive of images (` + cli.ArchiveKinds +
	`; directory = class) through, decodes every image in full, and prints classes, sizes, formats and bad
members, and what is tolerated, refused or rare. Damaged images that are decoded all the same are listed apart. Exit status 1 if the archive
is damaged or a member is bad; with -fix 0 if the fixed archive was written.`

const fixHelp = `write an archive without the bad members to ` + "`OUT`" +
	` (.tar, .tgz, .tar.gz or .tar.zst): names, order, labels and the bytes of
all other members stay. With -damaged partial, images that are cut off are written again as PNG, under their names`

// checkInspect checks that the options of inspect are compatible.
func checkInspect(labels *cli.Images, fix string, byIndex, drop bool) error {
	switch {
	case labels.MultiLabel && labels.List == "":
		return cli.UsageError{Message: "inspect reads several labels of an image from -list FILE alone: leave -multi-label " +
			"out, or use preview"}
	case fix != "" && labels.List != "":
		return cli.UsageError{Message: "-fix takes no -list: it would name members that are left out"}
	case fix != "" && byIndex, drop && fix == "":
		return cli.UsageError{Message: "-fix decodes every image, without -index, and -drop-classes is for -fix"}
	}
	return nil
}

// inspect prints the contents of an archive, after decoding every image in full.
func inspect(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set := cli.Flags("torchstream inspect FILE", inspectHelp, stderr)
	asJSON := set.Bool("json", false, "print one JSON object")
	byIndex := set.Bool("index", false, "answer from the archive's index, which is made first if there "+
		"is none: at once, but no image is decoded, so only damage to headers is found")
	var labels cli.Images
	labels.Register(set, cli.LabelOptions|cli.MultiLabelOptions)
	limit := set.Int("show", 20, "how many bad members, and how many damaged ones that decode all the "+
		"same, are named (at most 1000; JSON names as many)")
	damaged := damagedFlag(set)
	fix := set.String("fix", "", fixHelp)
	drop := set.Bool("drop-classes", false,
		"-fix may leave out classes whose members are all bad, which changes the labels of the classes behind them")
	if err := cli.Parse(set, args, 1); err != nil {
		return err
	}
	if err := cmp.Or(labels.Check(), checkInspect(&labels, *fix, *byIndex, *drop)); err != nil {
		return err
	}
	o := imageloader.Options{Damaged: *damaged}
	labels.SetLabels(&o)
	var report *imageloader.Report
	var written *imageloader.FixReport
	var err error
	progress, done := cli.ReadingProgress(stderr)
	switch {
	case *fix != "":
		report, written, err = imageloader.Fix(ctx, set.Arg(0), *fix, o,
			imageloader.FixOptions{DropClasses: *drop}, progress)
	case *byIndex:
		report, err = imageloader.InspectIndex(ctx, set.Arg(0), o, progress)
	default:
		report, err = imageloader.Inspect(ctx, set.Arg(0), o, progress)
	}
	done()
	if errors.Is(err, imageloader.ErrOtherLabels) {
		return fmt.Errorf("%w: inspect with their options, such as -list FILE, or without -index; torchstream index "+
			"replaces the index", err)
	}
	var damage *imageloader.ArchiveError
	if report == nil || err != nil && !errors.As(err, &damage) {
		return err
	}
	found := inspectionOf(report, err)
	if written != nil {
		found.Fixed = &fixedArchive{written.File, written.Bytes, written.Members, written.LeftOut,
			written.Rewritten, append([]string{}, written.Dropped...)}
	}
	if *asJSON {
		if err := cli.WriteJSON(stdout, found); err != nil {
			return err
		}
	} else if err := found.print(stdout, *limit, labels.WebDataset, labels.List != ""); err != nil {
		return err
	} else {
		printList(stdout, set.Arg(0), report.List)
	}
	if *fix != "" && written == nil {
		return fmt.Errorf("nothing was written to %s: the archive itself is damaged: fetch it again, or "+
			"unpack what is readable "+
			"(tar -xf %s -C FOLDER) and fix that (torchstream inspect -fix %s FOLDER)", *fix,
			printable.Archive(set.Arg(0)), *fix)
	}
	if err != nil || written == nil && (found.BadCount > 0 || found.Samples == 0) {
		return cli.ErrFound
	}
	return nil
}

func inspectionOf(r *imageloader.Report, damage error) inspection {
	out := inspection{
		File: r.File, Format: r.Format, FileBytes: r.FileBytes, Samples: r.Samples, Ignored: r.Ignored,
		Orphans: r.Orphans, Formats: r.Formats,
		Width: spread(r.Width), Height: spread(r.Height), Bytes: spread(r.Bytes), Turned: r.Turned,
		Classes: []inspectedClass{}, Bad: []badMember{}, Warned: []badMember{}, BadBy: map[string]int{},
		Findings: []kindFound{}, Warnings: r.WarnedCount, LeftOut: []leftOut{}, OrphansNamed: []orphanImage{},
		Advice: cli.InFlags(r.Advice), Instead: r.Instead,
	}
	for _, l := range r.LeftOut {
		out.LeftOut = append(out.LeftOut, leftOut(l))
	}
	for _, o := range r.OrphansNamed {
		out.OrphansNamed = append(out.OrphansNamed, orphanImage(o))
	}
	for _, f := range r.Findings {
		out.Findings = append(out.Findings, kindFound{string(f.Verdict), cli.InFlags(f.What), f.Count, f.First})
	}
	for label, c := range r.Classes {
		out.Classes = append(out.Classes, inspectedClass{c.Name, label, c.Samples, c.Bad, c.Bytes, c.Directories})
	}
	for _, b := range r.Bad {
		out.Bad = append(out.Bad, memberOf(b))
	}
	for _, w := range r.Warned {
		out.Warned = append(out.Warned, memberOf(w))
	}
	for reason, n := range r.BadBy {
		out.BadBy[string(reason)] = n
		out.BadCount += n
	}
	if r.List != nil {
		list := comparedList(*r.List)
		out.List = &list
	}
	if damage != nil {
		out.Damage = damage.Error()
	}
	return out
}

// byteSize formats a number of bytes in a unit small enough that the number does not round to 0.0.
func byteSize(bytes int64) string {
	switch {
	case bytes < 100:
		return printable.Counted(bytes, "byte", "bytes")
	case bytes < 1e6:
		return fmt.Sprintf("%.1f KB", float64(bytes)/1e3)
	}
	return fmt.Sprintf("%.1f MB", float64(bytes)/1e6)
}

func memberOf(e *imageloader.SampleError) badMember {
	detail := ""
	if e.Err != nil {
		detail = cli.InFlags(e.Err.Error())
	}
	return badMember{e.Name, string(e.Reason), detail}
}

// damagedFlag adds the flag for Options.Damaged.
func damagedFlag(set *flag.FlagSet) *imageloader.DamagePolicy {
	policy := new(imageloader.DamagePolicy)
	set.Func("damaged", "`POLICY` that says which damaged images are bad: warned (those that Pillow "+
		"refuses too), partial (not those that are cut off) or refuse (all) (default warned)",
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
	if r.Width.Max > 0 { // 0: no image could be read
		fmt.Fprintf(table, "width\t%d to %d pixels, median %d\n", r.Width.Min, r.Width.Max, r.Width.Median)
		fmt.Fprintf(table, "height\t%d to %d pixels, median %d\n", r.Height.Min, r.Height.Max, r.Height.Median)
	}
	fmt.Fprintf(table, "size\t%.1f to %.1f KB, median %.1f\n", float64(r.Bytes.Min)/1e3,
		float64(r.Bytes.Max)/1e3, float64(r.Bytes.Median)/1e3)
	switch {
	case r.Turned > 0:
		fmt.Fprintf(table, "sideways\t%s on the side by the EXIF orientation: -upright turns them\n",
			printable.Counted(r.Turned, "image lies", "images lie"))
	case r.Width.Max > 0:
		fmt.Fprintln(table, "sideways\tno image lies on its side by its EXIF orientation")
	}
}

// rows reports whether the samples are rows with labels. listed is set if labels come from a list.
func (r inspection) rows(listed bool) bool { return r.Format == imageloader.FormatParquet && !listed }

// directories reports whether the classes are directories.
func (r inspection) directories(web, listed bool) bool { return !web && !listed && !r.rows(listed) }

// printNoImages says why no row of a Parquet file is a sample.
func (r inspection) printNoImages(w io.Writer, listed bool) {
	if r.rows(listed) && r.Samples+r.Orphans == 0 {
		fmt.Fprintln(w, "\nno samples: "+noImages)
	}
}

// printIgnored prints the members that are not samples. It then prints the folders and links that
// may have been meant as classes.
func (r inspection) printIgnored(table io.Writer, web, listed bool) {
	if r.Ignored > 0 {
		what := printable.Counted(r.Ignored, "member", "members")
		members, orphans := "that are no images in the folder of a class", "in no folder at all"
		switch {
		case r.rows(listed):
			what = printable.Counted(r.Ignored, "row", "rows")
			members, orphans = "without the bytes of an image or without a label", "without a label"
		case !web && !listed && r.Ignored == 1:
			members = "that is no image in the folder of a class"
		case web:
			members, orphans = "no part of a sample", "without a label"
		case listed:
			members, orphans = "that the list does not name", ""
		}
		fmt.Fprintf(table, "ignored\t%s %s", what, members)
		if r.Orphans > 0 {
			fmt.Fprintf(table, ", among them %s",
				strings.TrimSpace(printable.Counted(r.Orphans, "image", "images")+" "+orphans))
		}
		fmt.Fprintln(table)
	}
	for _, l := range r.LeftOut {
		names := make([]string, len(l.First))
		for i, name := range l.First {
			names[i] = printable.Name(name)
		}
		if l.Count > len(names) {
			names = append(names, "...")
		}
		fmt.Fprintf(table, "no class\t%d %s: %s\n", l.Count, l.What, strings.Join(names, ", "))
	}
}

// print writes the report. web is set if labels are WebDataset labels; listed is set if labels come
// from a list.
func (r inspection) print(w io.Writer, limit int, web, listed bool) error {
	if r.Damage != "" && r.Samples+r.BadCount+r.Ignored == 0 {
		_, err := fmt.Fprintf(w,
			"The file is no archive (a .tar, .tar.gz, .tar.zst, .zip or .parquet), or its beginning is "+
				"damaged:\n%s\n", printable.Text(r.Damage))
		return err
	}
	table := printable.NewTable(w, 0)
	fmt.Fprintf(w, "%s: %s, %s\n", printable.Name(r.File), r.Format, byteSize(r.FileBytes))
	fmt.Fprintf(table, "samples\t%d in %s, %d bad\n", r.Samples,
		printable.Counted(len(r.Classes), "class", "classes"), r.BadCount)
	r.printIgnored(table, web, listed)
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

	if err := r.printClasses(w, r.directories(web, listed)); err != nil {
		return err
	}
	r.printNoImages(w, listed)
	if err := r.printFindings(w); err != nil {
		return err
	}
	if err := r.printOrphans(w); err != nil {
		return err
	}
	if len(r.Bad) > 0 {
		fmt.Fprintf(w, "\nbad members: %d\n", r.BadCount)
		table = printable.NewTable(w, 0)
		for _, reason := range byCount(r.BadBy) {
			fmt.Fprintf(table, "%7d\t%s\n", r.BadBy[reason], reason)
		}
		fmt.Fprintln(table)
		if err := printMembers(w, table, r.Bad, limit, r.BadCount); err != nil {
			return err
		}
	}
	if len(r.Warned) > 0 {
		fmt.Fprintf(w, "\ndamaged members that are decoded all the same: %d (-damaged refuse has them be bad)\n", r.Warnings)
		if err := printMembers(w, printable.NewTable(w, 0), r.Warned, limit, r.Warnings); err != nil {
			return err
		}
	}
	if f := r.Fixed; f != nil {
		fmt.Fprintf(w, "\nwrote %s: %s, %s; %d left out, %d written again as PNG\n",
			printable.Name(f.File), byteSize(f.Bytes), printable.Counted(f.Members, "member", "members"),
			f.LeftOut, f.Rewritten)
		for _, class := range f.Dropped {
			fmt.Fprintf(w, "class %s has no member left\n", printable.Name(class))
		}
	}
	if r.Damage != "" {
		fmt.Fprintf(w, "\nThe archive is damaged, and the above is what comes before that:\n%s\n",
			printable.Text(r.Damage))
	}
	return nil
}

// printClasses prints the classes as a table. If directories are the classes, it flags those with
// suspiciously few images, and gives advice about too few classes.
func (r inspection) printClasses(w io.Writer, directories bool) error {
	if len(r.Classes) > 0 {
		// A Parquet file names its classes, even those without samples.
		most := max(1, slices.MaxFunc(r.Classes, func(a, b inspectedClass) int { return a.Samples - b.Samples }).Samples)
		var few suspicion // finds likely typos in directory names
		if directories {
			few = fewImages(r.Classes, func(c inspectedClass) int { return c.Samples })
		}
		table := printable.NewTable(w, 0)
		fmt.Fprintln(table, "\nlabel\tclass\tsamples\tbad\t")
		for _, c := range r.Classes {
			bar := strings.Repeat("#", (30*c.Samples+most-1)/most)
			if note := few.note(c.Samples); note != "" {
				bar += "  " + note
			}
			fmt.Fprintf(table, "%5d\t%s\t%7d\t%3d\t%s\n", c.Label, printable.Name(c.Name), c.Samples, c.Bad, bar)
		}
		if err := table.Flush(); err != nil {
			return err
		}
		fmt.Fprint(w, few.summary())
		if directories && partsOfASet(r.Classes, func(c inspectedClass) string { return c.Name }) {
			fmt.Fprintln(w, onlyParts)
		}
		if err := r.printDirectories(w); err != nil {
			return err
		}
	}
	switch {
	case r.Instead != "":
		fmt.Fprintf(w, "\n%s\n%s\n    torchstream inspect '%s'\n", noClass, printable.Text(r.Advice), printable.Text(r.Instead))
	case r.Advice != "":
		fmt.Fprintf(w, "\n%s\n%s\n", noClass, printable.Text(r.Advice))
	case directories && r.Samples == 0:
		fmt.Fprintf(w, "\n%s\n-webdataset takes labels from .cls and .json members, -list from a CSV file\n", noClass)
	case directories && len(r.Classes) == 1:
		fmt.Fprintf(w, "\n%s: `torchstream train` refuses it\n", oneClass)
	}
	return nil
}

// noImages says why a Parquet file has no samples.
const noImages = "none of its rows has the bytes of an image: a Parquet file holds the images themselves, not only " +
	"their paths"

// maxMerged is how many classes with several directories the report names.
const maxMerged = 10

// printDirectories names the classes whose samples are in several directories.
func (r inspection) printDirectories(w io.Writer) error {
	merged := slices.DeleteFunc(slices.Clone(r.Classes), func(c inspectedClass) bool { return len(c.Directories) < 2 })
	if len(merged) == 0 {
		return nil
	}
	fmt.Fprintf(w, "\n%s from several directories, because a class is the directory that an image lies "+
		"in, whatever is above.\n"+
		"Are these parts of a set, such as train and test? Make an archive of each:\n",
		printable.Counted(len(merged), "class comes", "classes come"))
	for _, c := range merged[:min(len(merged), maxMerged)] {
		fmt.Fprintf(w, "  %s: %s\n", printable.Name(c.Name), fromDirectories(c.Directories))
	}
	var err error
	if more := len(merged) - maxMerged; more > 0 {
		_, err = fmt.Fprintf(w, "  and %d more\n", more)
	}
	return err
}

// fromDirectories lists the directories of a class.
func fromDirectories(directories []string) string {
	var list []string
	for _, d := range directories {
		list = append(list, printable.Name(d))
	}
	return strings.Join(list, ", ")
}

// printFindings prints tolerated, refused and rare properties as a table.
func (r inspection) printFindings(w io.Writer) error {
	if len(r.Findings) == 0 {
		return nil
	}
	fmt.Fprintln(w)
	table := printable.NewTable(w, 0)
	fmt.Fprintln(table, "verdict\tcount\twhat\tfirst members")
	for _, f := range r.Findings {
		const named = 3
		names := make([]string, 0, named+1)
		for _, name := range f.First[:min(len(f.First), named)] {
			names = append(names, printable.Name(name))
		}
		if f.Count > len(names) {
			names = append(names, "...")
		}
		fmt.Fprintf(table, "%s\t%7d\t%s\t%s\n", f.Verdict, f.Count, printable.Text(f.What), strings.Join(names, ", "))
	}
	return table.Flush()
}

// printOrphans names the first images without a label, and gives the reason.
func (r inspection) printOrphans(w io.Writer) error {
	if len(r.OrphansNamed) == 0 {
		return nil
	}
	fmt.Fprintf(w, "\nimages without a label: %d\n", r.Orphans)
	table := printable.NewTable(w, 0)
	for _, o := range r.OrphansNamed {
		fmt.Fprintf(table, "%s\t%s\n", printable.Name(o.Name), o.Reason)
	}
	err := table.Flush()
	if more := r.Orphans - len(r.OrphansNamed); err == nil && more > 0 {
		_, err = fmt.Fprintf(w, "... and %d more\n", more)
	}
	return err
}

// printMembers names up to limit members in a table, and says how many more there are.
func printMembers(w io.Writer, table *tabwriter.Writer, list []badMember, limit, all int) error {
	shown := min(max(limit, 0), len(list))
	for _, m := range list[:shown] {
		fmt.Fprintf(table, "%s\t%s\t%s\n", printable.Name(m.Name), m.Reason, printable.Text(m.Detail))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	switch n := all - shown; {
	case n > 0 && shown < len(list):
		fmt.Fprintf(w, "... and %d more (-show %d names %d)\n", n, len(list), len(list))
	case n > 0:
		fmt.Fprintf(w, "... and %d more\n", n)
	}
	return nil
}

// byCount sorts names by frequency, the most frequent first.
func byCount(counts map[string]int) []string {
	return slices.SortedFunc(maps.Keys(counts), func(a, b string) int {
		if counts[a] != counts[b] {
			return counts[b] - counts[a]
		}
		return strings.Compare(a, b)
	})
}
