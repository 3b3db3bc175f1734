// Command torchstream looks at the machine and at archives of images, trains classifiers, and
// measures.
//
//	torchstream setup                       installs the shim and LibTorch
//	torchstream doctor                      what is installed, what is missing, what to do
//	torchstream inspect FILE                classes, counts, sizes, formats and bad members of an archive
//	torchstream inspect -fix OUT FILE       and writes an archive without the bad members
//	torchstream index FILE                  the index of an archive, otherwise made by the first epoch
//	torchstream preview -archive FILE       a contact sheet of batches as a training loop gets them
//	torchstream train -archive FILE         a classifier of the archive's classes, for Go and PyTorch
//	torchstream evaluate -archive FILE      how often a checkpoint of train is right, and what it confuses
//	torchstream predict IMAGE|FOLDER...     the classes of images, by a checkpoint of train
//	torchstream bundle PROGRAM -o DIR       a program with all that it loads, for other machines
//	torchstream version                     the version of torchstream and of Go
//	torchstream help COMMAND                the options of a command
//	torchstream bench loader -archive FILE  how fast an archive becomes batches
//	torchstream bench streams               what the stream calls cost, on a GPU
//	torchstream bench train                 images and tokens a second in training, beside PyTorch
//	torchstream bench operators             what the call of an operator costs, beside C++
//	torchstream bench dist                  all-reduces and data-parallel training of several processes
//	torchstream bench serve -images FOLDER  the latency of requests of encoded images to a batch
//
// The program opens the shim and LibTorch when a command needs them: inspect, index, preview and
// bench loader to host memory need the image library alone.
//
// Results go to standard output, progress and errors to standard error. The exit status is 0 when
// all is well, 1 when something failed or the command found something bad, 2 when the command line
// was wrong, and 130 when it was interrupted: SIGINT, SIGTERM and SIGHUP end every command, within
// seconds wherever it is, and a second SIGINT or SIGTERM at once. Only train has a minute, to finish
// its step and write its checkpoint. Under nohup SIGHUP ends nothing.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/interrupt"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/torch"
)

func main() {
	grace := interrupt.Grace
	if len(os.Args) > 1 && os.Args[1] == "train" {
		grace = time.Minute
	}
	ctx, stop := interrupt.Context(grace)
	status := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(status)
}

// entry is one command of the program, or one benchmark of `bench`.
type entry struct {
	name  string
	args  string
	about string
	run   func(ctx context.Context, args []string, stdout, stderr io.Writer) error
}

func commands() []entry {
	return []entry{
		{"setup", "[-from ARCHIVE]", "installs the shim and LibTorch, outside of a clone", setupCommand},
		{"doctor", "[-dist] [-json]", "what is installed, what to do; -dist: links between GPUs", doctor},
		{"inspect", "[-fix OUT] FILE", "classes, sizes, formats and bad members of an archive", inspect},
		{"index", "[-json] FILE", "writes the index of an archive, as a first epoch does", index},
		{"preview", "-archive FILE", "a contact sheet of batches as a training loop gets them", preview},
		{"train", "-archive FILE", "trains a classifier of the archive's classes", trainCommand},
		{"evaluate", "-archive FILE", "how often a checkpoint of train is right", evaluateCommand},
		{"predict", "IMAGE|FOLDER...", "the classes of images, by a checkpoint of train", predictCommand},
		{"bundle", "PROGRAM -o DIR", "a program with all that it loads, for other machines", bundleCommand},
		{"version", "", "the version of torchstream and of Go", versionCommand},
	}
}

func benchmarks() []entry {
	return []entry{
		{"loader", "-archive FILE", "how fast an archive becomes batches", benchLoader},
		{"streams", "[-json]", "what the stream calls cost, on a GPU", benchStreams},
		{"train", "[-json]", "images and tokens a second in training, beside PyTorch", benchTrain},
		{"operators", "[-json]", "what the call of an operator costs, beside C++", benchOperators},
		{"dist", "[-ranks N]", "all-reduces and training of several processes", benchDist},
		{"serve", "-images FOLDER", "the latency of requests of encoded images to a batch", benchServe},
	}
}

func usage(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintln(&b, "torchstream looks at the machine and at archives of images, trains classifiers, and measures.")
	fmt.Fprintln(&b)
	for _, e := range commands() {
		b.WriteString(e.usage(""))
	}
	for _, e := range benchmarks() {
		b.WriteString(e.usage("bench "))
	}
	fmt.Fprintln(&b, "\nEach command explains its options with -h, and so does `torchstream help COMMAND`.")
	_, err := io.WriteString(w, b.String())
	return err
}

// usage returns the line of a command in the list of all.
func (e entry) usage(prefix string) string {
	return fmt.Sprintf("  torchstream %-26s  %s\n", prefix+e.name+" "+e.args, e.about)
}

// benchUsage lists the benchmarks.
func benchUsage(w io.Writer) error {
	text := "usage: torchstream bench NAME [options]\nMeasures one of:\n\n"
	for _, e := range benchmarks() {
		text += e.usage("bench ")
	}
	_, err := io.WriteString(w, text+"\nEach explains its options with -h.\n")
	return err
}

// errFound is returned by a command that did its work and found something bad, which it has
// reported already.
var errFound = errors.New("something bad was found")

// interruptedError is the error of an interrupted command that says how to go on.
type interruptedError struct{ message string }

func (e interruptedError) Error() string { return e.message }

// usageError is a wrong command line.
type usageError struct{ message string }

func (e usageError) Error() string { return e.message }

// run executes one command line and returns the exit status.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	err := dispatch(ctx, args, stdout, stderr)
	var wrong usageError
	var interrupted interruptedError
	switch {
	case err == nil || errors.Is(err, flag.ErrHelp):
		return 0
	case errors.Is(err, errFound):
		return 1
	case errors.As(err, &wrong):
		fmt.Fprintf(stderr, "torchstream: %v\n%s\n", err, hint(args))
		return 2
	case errors.As(err, &interrupted):
		fmt.Fprintf(stderr, "torchstream: %s\n", printable.Text(interrupted.message))
		return interrupt.Status
	case ctx.Err() != nil:
		fmt.Fprintln(stderr, "torchstream: interrupted")
		return interrupt.Status
	}
	command, _ := first(args)
	fmt.Fprintf(stderr, "torchstream: %s\n", printable.Text(advised(err, command)))
	return 1
}

// advised returns the text of an error of a command. That of a bad sample names the command that
// removes it, in place of the options of package imageloader; that of an archive that is cut off
// names the one that lists what is readable, unless that command has the error.
func advised(err error, command string) string {
	text := err.Error()
	var damage *imageloader.ArchiveError
	if command != "inspect" && errors.As(err, &damage) && errors.Is(damage, io.ErrUnexpectedEOF) {
		text = strings.Replace(text, damage.Error(), fmt.Sprintf("%v (`torchstream inspect %s` lists what is readable)", damage, printable.Name(damage.File)), 1)
	}
	var bad *imageloader.SampleError
	if !errors.As(err, &bad) {
		return text
	}
	before, after, found := strings.Cut(text, bad.Error())
	if !found {
		return text
	}
	_, more, joined := strings.Cut(after, "\n") // the texts of errors.Join
	if joined {
		more = "\n" + more
	}
	skip := ""
	if errors.As(err, &skippableError{}) {
		skip = ", -bad-samples skip leaves them out"
	}
	return fmt.Sprintf("%s%v (`torchstream inspect -fix OUT %s` writes an archive without the bad members%s)%s", before, bad, printable.Name(bad.File), skip, more)
}

// hint names the help for a wrong command line.
func hint(args []string) string {
	name, rest := first(args)
	known, prefix := commands(), ""
	if name == "bench" {
		name, _ = first(rest)
		known, prefix = benchmarks(), "bench "
	}
	if slices.ContainsFunc(known, func(e entry) bool { return e.name == name }) {
		return "See `torchstream " + prefix + name + " -h`."
	}
	return "Run `torchstream help` for what there is."
}

func dispatch(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	kind, known, want := "command", commands(), "setup, doctor, inspect, index, preview, train, evaluate, predict, bundle, version or bench"
	name, args := first(args)
	list := usage
	if name == "bench" {
		kind, known, want, list = "benchmark", benchmarks(), "loader, streams, train, operators, dist or serve", benchUsage
		name, args = first(args)
	}
	switch name {
	case "help":
		if kind == "command" && len(args) > 0 {
			return help(ctx, args, stdout)
		}
		return list(stdout)
	case "-h", "-help", "--help":
		return list(stdout)
	case "-version", "--version":
		name = "version"
	}
	for _, e := range known {
		if e.name == name {
			return e.run(ctx, args, stdout, stderr)
		}
	}
	if name == "" {
		return usageError{fmt.Sprintf("a %s is needed: %s", kind, want)}
	}
	names := make([]string, len(known))
	for i, e := range known {
		names[i] = e.name
	}
	if kind == "command" {
		names = append(names, "bench")
	}
	if near := nearest(names, name); near != "" {
		return usageError{fmt.Sprintf("there is no %s %q: did you mean %s?", kind, name, near)}
	}
	return usageError{fmt.Sprintf("there is no %s %q: want %s", kind, name, want)}
}

// help prints the options of the command, or of the benchmark, that the arguments name.
func help(ctx context.Context, args []string, stdout io.Writer) error {
	most := 1
	if args[0] == "bench" {
		most = 2
	}
	if len(args) > most {
		return usageError{"help takes the name of one command, and has: " + strings.Join(printables(args), " ")}
	}
	return dispatch(ctx, append(slices.Clone(args), "-h"), stdout, stdout)
}

func first(args []string) (string, []string) {
	if len(args) == 0 {
		return "", nil
	}
	return args[0], args[1:]
}

// flags returns a flag set whose explanations go to stderr. name has the command and the arguments
// that it needs.
func flags(name, about string, stderr io.Writer) *flag.FlagSet {
	command, _, _ := strings.Cut(name, " -")
	set := flag.NewFlagSet(command, flag.ContinueOnError)
	set.SetOutput(stderr)
	set.Usage = func() {
		fmt.Fprintf(stderr, "usage: torchstream %s\n%s", name, wrapped(about, ""))
		printOptions(set, stderr)
	}
	return set
}

// printOptions prints the options of a command as package flag does, with wrapped explanations.
func printOptions(set *flag.FlagSet, w io.Writer) {
	var list, about strings.Builder
	set.SetOutput(&list)
	set.PrintDefaults()
	set.SetOutput(w)
	for line := range strings.Lines(list.String()) {
		if strings.HasPrefix(line, "    \t") { // of an explanation
			about.WriteString(line)
			continue
		}
		fmt.Fprint(w, wrapped(about.String(), "        "), line)
		about.Reset()
	}
	fmt.Fprint(w, wrapped(about.String(), "        "))
}

// wrapped returns the words of a text in lines that begin with indent. A line has at most 100
// characters, unless one word is longer.
func wrapped(text, indent string) string {
	const columns = 100
	var b strings.Builder
	column := 0
	for _, word := range strings.Fields(text) {
		length := utf8.RuneCountInString(word)
		if column > 0 && column+1+length <= columns {
			b.WriteString(" " + word)
			column += 1 + length
			continue
		}
		if column > 0 {
			b.WriteString("\n")
		}
		b.WriteString(indent + word)
		column = len(indent) + length
	}
	if column > 0 {
		b.WriteString("\n")
	}
	return b.String()
}

// threadsOption adds -threads to a command that computes. The command passes its value to setThreads
// before it computes.
func threadsOption(set *flag.FlagSet) *int {
	return set.Int("threads", 0, "threads of LibTorch inside an operator on the CPU (default: the number of cores, and at most GOMAXPROCS, which follows a container's quota)")
}

// setThreads sets LibTorch's threads to the value of -threads; 0 leaves them.
func setThreads(n int) error {
	switch {
	case n == 0:
		return nil
	case n < 0 || n > maxThreads:
		return usageError{fmt.Sprintf("-threads %d: must be from 1 to %d", n, maxThreads)}
	}
	return torch.SetNumThreads(n)
}

const maxThreads = 1 << 16 // of torch.SetNumThreads

// oneOrMore is the number of arguments of a command that takes any, and at least one.
const oneOrMore = -1

// parse reads a command's options and checks that `want` arguments are left. Numbers are finite:
// NaN and infinities, which flag accepts, would pass most comparisons.
func parse(set *flag.FlagSet, args []string, want int) error {
	if err := parseOptions(set, args); err != nil {
		return err
	}
	var infinite error
	set.Visit(func(f *flag.Flag) {
		if getter, ok := f.Value.(flag.Getter); ok {
			if v, ok := getter.Get().(float64); ok && (math.IsNaN(v) || math.IsInf(v, 0)) {
				infinite = usageError{fmt.Sprintf("-%s %v: must be a finite number", f.Name, f.Value)}
			}
		}
	})
	if infinite != nil {
		return infinite
	}
	if given := set.NArg(); given == want || given > 0 && want == oneOrMore {
		return nil
	}
	return usageError{miscounted(set, want)}
}

// miscounted says what is wrong with the number of arguments of a command, which is not want.
func miscounted(set *flag.FlagSet, want int) string {
	if say := misplaced(set, want); say != "" {
		return say
	}
	given := strings.Join(printables(set.Args()), " ")
	switch command, argument, _ := strings.Cut(set.Name(), " "); {
	case want == 0:
		return fmt.Sprintf("%s takes options only, and no argument: %s", set.Name(), given)
	case set.NArg() == 0:
		return fmt.Sprintf("%s needs an argument: %s", command, argument)
	default:
		return fmt.Sprintf("%s takes one argument, %s, and has %d: %s", command, argument, set.NArg(), given)
	}
}

// misplaced says what is probably meant by more arguments than a command takes: an archive without
// its option, or options behind the arguments, where flag reads none. It returns "" if neither is
// likely.
func misplaced(set *flag.FlagSet, want int) string {
	quoted := printables(set.Args())
	_, argument, _ := strings.Cut(set.Name(), " ")
	if archive := set.Lookup("archive"); want == 0 && archive != nil && archive.Value.String() == "" {
		return fmt.Sprintf("%s takes its archive as an option: did you mean -archive %s?", set.Name(), strings.Join(quoted, " "))
	}
	if want == 1 && set.NArg() > 1 && strings.HasPrefix(set.Arg(1), "-") && argument != "" {
		return fmt.Sprintf("options come before %s: %s %s", argument, strings.Join(quoted[1:], " "), quoted[0])
	}
	return ""
}

// parseOptions reads a command's options. The list of all options is printed for -h alone: after a
// mistake it would hide the message.
func parseOptions(set *flag.FlagSet, args []string) error {
	list, out := set.Usage, set.Output()
	set.Usage = func() {}
	set.SetOutput(io.Discard)
	err := set.Parse(args)
	set.Usage = list
	set.SetOutput(out)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, flag.ErrHelp):
		list()
		return err
	}
	name, unknown := strings.CutPrefix(err.Error(), "flag provided but not defined: -")
	if !unknown {
		return usageError{refused(set, err.Error())}
	}
	message := "no option -" + name
	var names []string
	set.VisitAll(func(f *flag.Flag) { names = append(names, f.Name) })
	if near := nearest(names, name); near != "" {
		message += ": did you mean -" + near + "?"
	}
	return usageError{message}
}

// refused says which value an option wants, in place of flag's message about one that it cannot
// read.
func refused(set *flag.FlagSet, message string) string {
	invalid, rest, found := strings.Cut(message, "\" for ")
	_, value, quoted := strings.Cut(invalid, " value \"")
	name, why, _ := strings.Cut(strings.TrimPrefix(strings.TrimPrefix(rest, "flag "), "-"), ": ")
	f := set.Lookup(name)
	if !found || !quoted || f == nil {
		return message
	}
	if getter, ok := f.Value.(flag.Getter); ok {
		switch getter.Get().(type) {
		case int, int64:
			why = "want a whole number of at most 64 bits"
		case uint, uint64:
			why = "want a whole number of at least 0 and at most 64 bits"
		case float64:
			why = "want a number"
		case bool:
			why = "want true or false"
		case time.Duration:
			why = "want a duration, such as 90s or 1h30m"
		}
	}
	return fmt.Sprintf("-%s \"%s\": %s", name, value, why)
}

// nearest returns the name that differs least from a text, or "" if all differ in more than a third
// of it.
func nearest(names []string, text string) string {
	found, least := "", max(1, len(text)/3)+1
	for _, name := range names {
		if d := editDistance(name, text); d < least {
			found, least = name, d
		}
	}
	return found
}

// editDistance counts the insertions, deletions and substitutions of bytes, and the swaps of two
// neighbours, that make one text the other (the optimal string alignment distance).
func editDistance(a, b string) int {
	// table[i][j] is the distance of the first i bytes of a and the first j bytes of b.
	table := make([][]int, len(a)+1)
	for i := range table {
		table[i] = make([]int, len(b)+1)
		table[i][0] = i
	}
	for j := range table[0] {
		table[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			replaced := table[i-1][j-1]
			if a[i-1] != b[j-1] {
				replaced++
			}
			least := min(replaced, table[i-1][j]+1, table[i][j-1]+1)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				least = min(least, table[i-2][j-2]+1)
			}
			table[i][j] = least
		}
	}
	return table[len(a)][len(b)]
}

func writeJSON(w io.Writer, value any) error {
	encoder := json.NewEncoder(w)
	encoder.SetEscapeHTML(false)
	return encoder.Encode(value)
}
