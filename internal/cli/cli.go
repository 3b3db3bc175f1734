// Package cli implements the command lines of this project's programs: commands, options that
// several commands share, help, messages for mistakes, and exit statuses.
//
// The exit status is 0 on success, 1 if something failed or the command found a problem, 2 if the
// command line was wrong, and interrupt.Status if the program was interrupted.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/torchstream/torchstream/internal/interrupt"
	"github.com/torchstream/torchstream/internal/printable"
)

// Program is a program that runs one of its commands.
type Program struct {
	Name  string // name of the executable, such as "torchstream"
	About string // purpose of the program, in a sentence
	Commands
}

// Commands lists the commands of a program, or the subcommands of a command.
type Commands struct {
	Kind string // "command" or "benchmark"
	List []Command
}

// Command is one command of a program. It either calls Run or has subcommands in Under.
type Command struct {
	Name  string
	Args  string // required arguments
	About string // purpose of the command, in a few words
	Run   func(ctx context.Context, args []string, stdout, stderr io.Writer) error
	Under Commands
}

// Run executes one command line and returns the exit status.
func (p *Program) Run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	err := p.dispatch(ctx, args, stdout, stderr)
	var wrong UsageError
	var interrupted InterruptedError
	var help helpError
	if errors.As(err, &help) {
		_, err = io.WriteString(stdout, help.text)
	}
	switch {
	case err == nil:
		return 0
	case errors.Is(err, ErrFound):
		return 1
	case errors.As(err, &wrong):
		fmt.Fprintf(stderr, "%s: %s\n%s\n", p.Name, printable.URLs(err.Error()), p.hint(args))
		return 2
	case errors.As(err, &interrupted):
		if interrupted.Message != "" {
			fmt.Fprintf(stderr, "%s: %s\n", p.Name, printable.Text(interrupted.Message))
		}
		return interrupt.Status
	case ctx.Err() != nil:
		fmt.Fprintf(stderr, "%s: interrupted\n", p.Name)
		return interrupt.Status
	}
	command, _ := first(args)
	fmt.Fprintf(stderr, "%s: %s\n", p.Name, printable.Text(printable.URLs(Advised(err, command))))
	return 1
}

// find descends through the command groups named at the start of args. It returns the last group's
// commands, the text before their names, and the remaining arguments.
func (p *Program) find(args []string) (from Commands, path string, rest []string) {
	from, path, rest = p.Commands, p.Name, args
	for len(rest) > 0 {
		c := from.named(rest[0])
		if c == nil || c.Run != nil {
			break
		}
		from, path, rest = c.Under, path+" "+c.Name, rest[1:]
	}
	return from, path, rest
}

func (c Commands) named(name string) *Command {
	i := slices.IndexFunc(c.List, func(c Command) bool { return c.Name == name })
	if i < 0 {
		return nil
	}
	return &c.List[i]
}

// hint tells the user which help to read after a wrong command line.
func (p *Program) hint(args []string) string {
	from, path, rest := p.find(args)
	if name, _ := first(rest); from.named(name) != nil {
		return "See `" + path + " " + name + " -h`."
	}
	return "Run `" + p.Name + " help` for what there is."
}

func (p *Program) dispatch(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	from, path, args := p.find(args)
	name, args := first(args)
	switch name {
	case "help":
		if path == p.Name && len(args) > 0 {
			return p.help(ctx, args, stdout)
		}
		return p.list(from, path, stdout)
	case "-h", "-help", "--help":
		return p.list(from, path, stdout)
	case "-version", "--version":
		name = "version"
	}
	if c := from.named(name); c != nil {
		return c.Run(ctx, args, stdout, stderr)
	}
	names := make([]string, len(from.List))
	for i, c := range from.List {
		names[i] = c.Name
	}
	want := names[0]
	if n := len(names); n > 1 {
		want = strings.Join(names[:n-1], ", ") + " or " + names[n-1]
	}
	if name == "" {
		return Usagef("a %s is needed: %s", from.Kind, want)
	}
	if near := Nearest(names, name); near != "" {
		return Usagef("there is no %s %q: did you mean %s?", from.Kind, name, near)
	}
	return Usagef("there is no %s %q: want %s", from.Kind, name, want)
}

// help prints the options of the command that the arguments name.
func (p *Program) help(ctx context.Context, args []string, stdout io.Writer) error {
	if _, _, rest := p.find(args); len(rest) > 1 {
		return UsageError{Message: "help takes the name of one command, and has: " +
			strings.Join(printable.Names(args), " ")}
	}
	return p.dispatch(ctx, append(slices.Clone(args), "-h"), stdout, stdout)
}

// list prints the commands at a path: all commands of the program, or a command's subcommands.
func (p *Program) list(of Commands, path string, w io.Writer) error {
	var b strings.Builder
	if path == p.Name {
		fmt.Fprintln(&b, p.About)
		fmt.Fprintln(&b)
		of.rows(&b, path)
		fmt.Fprintf(&b, "\nEach command explains its options with -h, and so does `%s help COMMAND`.\n", p.Name)
	} else {
		fmt.Fprintf(&b, "usage: %s NAME [options]\nMeasures one of:\n\n", path)
		of.rows(&b, path)
		fmt.Fprint(&b, "\nEach explains its options with -h.\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// rows writes a line for each command of the path, and for each of its subcommands.
func (c Commands) rows(w io.Writer, path string) {
	program, group, _ := strings.Cut(path, " ")
	for _, c := range c.List {
		if c.Run == nil {
			c.Under.rows(w, path+" "+c.Name)
			continue
		}
		line := strings.TrimSpace(group + " " + c.Name)
		fmt.Fprintf(w, "  %s %-26s  %s\n", program, line+" "+c.Args, c.About)
	}
}

func first(args []string) (string, []string) {
	if len(args) == 0 {
		return "", nil
	}
	return args[0], args[1:]
}

// Main runs the process's command line and exits. After the first signal a command has the time
// grace to end by itself.
func (p *Program) Main(grace time.Duration) {
	ctx, stop := interrupt.Context(grace)
	status := p.Run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(status)
}

// WriteJSON writes a value as one line of JSON.
func WriteJSON(w io.Writer, value any) error {
	encoder := json.NewEncoder(w)
	encoder.SetEscapeHTML(false)
	return encoder.Encode(value)
}
