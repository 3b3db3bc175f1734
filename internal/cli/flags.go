package cli

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/torchstream/torchstream/internal/printable"
)

// Flags returns the flag set of a command, for [Parse]. line is the command with its required
// arguments, such as "torchstream inspect FILE".
func Flags(line, about string, stderr io.Writer) *flag.FlagSet {
	_, command, _ := strings.Cut(line, " ")
	command, _, _ = strings.Cut(command, " -")
	set := flag.NewFlagSet(command, flag.ContinueOnError)
	set.SetOutput(stderr)
	set.Usage = func() {
		w := set.Output()
		fmt.Fprintf(w, "usage: %s\n%s", line, wrapped(about, ""))
		printOptions(set, w)
	}
	return set
}

// Alias makes old another name of an option. The help does not show it.
func Alias(set *flag.FlagSet, old, name string) { set.Var(set.Lookup(name).Value, old, "") }

// printOptions prints the options of a command as package flag does, with wrapped explanations.
func printOptions(set *flag.FlagSet, w io.Writer) {
	var list, about strings.Builder
	shown := flag.NewFlagSet("", flag.ContinueOnError)
	shown.SetOutput(&list)
	set.VisitAll(func(f *flag.Flag) {
		if f.Usage != "" { // "": an alias
			shown.Var(f.Value, f.Name, f.Usage)
			shown.Lookup(f.Name).DefValue = f.DefValue
		}
	})
	shown.PrintDefaults()
	for line := range strings.Lines(list.String()) {
		if strings.HasPrefix(line, "    \t") { // part of an explanation
			about.WriteString(line)
			continue
		}
		fmt.Fprint(w, wrapped(about.String(), "        "), line)
		about.Reset()
	}
	fmt.Fprint(w, wrapped(about.String(), "        "))
}

// wrapped splits the words of a text into lines that start with indent. A line has at most 100
// characters, unless a word is longer.
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

// OneOrMore, as a number of arguments, means at least one.
const OneOrMore = -1

// Parse parses a command's options and requires want remaining arguments. It refuses NaN and
// infinities: package flag accepts them, and a range check can let them pass.
func Parse(set *flag.FlagSet, args []string, want int) error {
	if err := parseOptions(set, args); err != nil {
		return err
	}
	var infinite error
	set.Visit(func(f *flag.Flag) {
		if getter, ok := f.Value.(flag.Getter); ok {
			if v, ok := getter.Get().(float64); ok && (math.IsNaN(v) || math.IsInf(v, 0)) {
				infinite = Usagef("-%s %v: must be a finite number", f.Name, f.Value)
			}
		}
	})
	if infinite != nil {
		return infinite
	}
	if given := set.NArg(); given == want || given > 0 && want == OneOrMore {
		return nil
	}
	return UsageError{Message: miscounted(set, want)}
}

// miscounted returns the error text for a number of arguments other than want.
func miscounted(set *flag.FlagSet, want int) string {
	if say := misplaced(set, want); say != "" {
		return say
	}
	given := strings.Join(printable.Names(set.Args()), " ")
	switch command, argument, _ := strings.Cut(set.Name(), " "); {
	case want == 0:
		return fmt.Sprintf("%s takes options only, and no argument: %s", set.Name(), given)
	case set.NArg() == 0:
		return fmt.Sprintf("%s needs an argument: %s", command, argument)
	default:
		return fmt.Sprintf("%s takes one argument, %s, and has %d: %s", command, argument, set.NArg(), given)
	}
}

// misplaced guesses the reason for excess arguments: an archive without its option, or options
// after the arguments, which package flag does not parse. It returns "" if neither is likely.
func misplaced(set *flag.FlagSet, want int) string {
	quoted := printable.Names(set.Args())
	_, argument, _ := strings.Cut(set.Name(), " ")
	if archive := set.Lookup("archive"); want == 0 && archive != nil && archive.Value.String() == "" {
		return fmt.Sprintf("%s takes its archive as an option: did you mean -archive %s?", set.Name(),
			strings.Join(quoted, " "))
	}
	if want == 1 && set.NArg() > 1 && strings.HasPrefix(set.Arg(1), "-") && argument != "" {
		return fmt.Sprintf("options come before %s: %s %s", argument, strings.Join(quoted[1:], " "), quoted[0])
	}
	return ""
}

// parseOptions parses a command's options. It prints the list of all options only for -h: after a
// mistake the list would hide the message.
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
		var text strings.Builder
		set.SetOutput(&text)
		list()
		set.SetOutput(out)
		return helpError{text.String()}
	}
	name, unknown := strings.CutPrefix(err.Error(), "flag provided but not defined: -")
	if !unknown {
		return UsageError{Message: refused(set, err.Error())}
	}
	message := "no option -" + name
	var names []string
	set.VisitAll(func(f *flag.Flag) { names = append(names, f.Name) })
	if near := Nearest(names, name); near != "" {
		message += ": did you mean -" + near + "?"
	}
	return UsageError{Message: message}
}

// refused says which value an option expects. It replaces flag's message about a value that flag
// cannot parse.
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
