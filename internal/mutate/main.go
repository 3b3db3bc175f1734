// Mutate leaves out each ordering edge of the library in turn and requires that a test fails. A
// test that passes without its edge, an edge whose text is no longer in its file, and a test that
// fails with all edges in place are errors. The edges are in edges.go. Each row names the file that
// has the edge, in cshim/src (Stream.Wait: cuda/order.cc) or prefetcher/internal/ring, and the
// tests that fail without it. A new edge gets such a row.
//
//	go run ./internal/mutate               try the edges whose tests need no GPU
//	go run ./internal/mutate -run REGEXP   only those whose names match
//	go run ./internal/mutate -list         print the list of edges in docs/streams.md
//	go run ./internal/mutate -bundle DIR   build the other edges' mutants into DIR, for a GPU
//	                                       machine without Go: DIR/run.sh BUNDLE, where BUNDLE is
//	                                       the unpacked output of make gpu-bundle
//
// Mutate does not change the repository: it replaces Go files by an overlay, and links the shim
// again next to its build.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

func main() {
	bundle := flag.String("bundle", "", "build the mutants that need a GPU into this `folder`")
	only := flag.String("run", "", "only the edges whose names match the `regexp`")
	list := flag.Bool("list", false, "print the list of edges in docs/streams.md")
	flag.Parse()
	if *list {
		fmt.Print(table())
		return
	}
	match, err := regexp.Compile(*only)
	if err == nil {
		err = run(os.Stdout, match, *bundle)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
		os.Exit(1)
	}
}

func run(out io.Writer, match *regexp.Regexp, bundle string) error {
	root, err := output("go", "env", "GOMOD")
	if err != nil {
		return err
	}
	m := &mutator{root: filepath.Dir(strings.TrimSpace(root)), out: out, passes: map[string]bool{}}
	if bundle != "" {
		if m.bundle, err = filepath.Abs(bundle); err != nil {
			return err
		}
		// Use the same names each time, so that a compiler cache recognises unchanged mutants.
		m.work = filepath.Join(m.bundle, ".work")
		err = os.MkdirAll(m.work, 0o777)
	} else {
		m.work, err = os.MkdirTemp("", "torchstream-mutate")
	}
	if err != nil {
		return err
	}
	defer os.RemoveAll(m.work)
	var errs []error
	done := 0
	for i, e := range edges {
		if !match.MatchString(e.name) || (e.gpus > 0) != (bundle != "") {
			continue
		}
		done++
		if err := m.one(i, e); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", e.name, err))
		}
	}
	if done == 0 {
		errs = append(errs, errors.New("no edge was tried"))
	}
	if m.bundle != "" {
		errs = append(errs, m.finish()) // the mutants that could be built can be run
	}
	if err := errors.Join(errs...); err != nil || m.bundle != "" {
		return err
	}
	fmt.Fprintf(out, "%d edges, each covered by its test\n", done)
	return nil
}

// table returns the edges as docs/streams.md lists them: by package and GPUs, a line for each test.
func table() string {
	type group struct {
		folder string
		gpus   int
	}
	var groups []group
	tests := map[group][]string{}           // in the order of the edges
	held := map[group]map[string][]string{} // names of edges
	for _, e := range edges {
		g := group{e.folder, e.gpus}
		if held[g] == nil {
			groups, held[g] = append(groups, g), map[string][]string{}
		}
		if held[g][e.test] == nil {
			tests[g] = append(tests[g], e.test)
		}
		held[g][e.test] = append(held[g][e.test], e.name)
	}
	b := &strings.Builder{}
	for _, g := range groups {
		fmt.Fprintf(b, "`%s`%s:\n\n", g.folder, [...]string{"", ", a GPU", ", two GPUs"}[g.gpus])
		for _, t := range tests[g] {
			b.WriteString(wrap("- `" + t + "`: " + strings.Join(held[g][t], "; ")))
		}
		b.WriteString("\n")
	}
	return b.String()
}

// wrap breaks an item of a list into lines of at most 120 bytes. It indents the second and later
// lines.
func wrap(item string) string {
	b, column := &strings.Builder{}, 0
	for i, word := range strings.Fields(item) {
		switch {
		case i == 0:
		case column+1+len(word) > 120:
			b.WriteString("\n ")
			column = 1
			fallthrough
		default:
			b.WriteString(" ")
			column++
		}
		b.WriteString(word)
		column += len(word)
	}
	return b.String() + "\n"
}

type mutator struct {
	root, work, bundle string
	out                io.Writer
	passes             map[string]bool // tests that pass with all edges in place
	list               strings.Builder // the bundle's list: mutant, GPUs, test program, test
}

// slug returns the edge's name as part of a file name.
func (e edge) slug() string {
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' {
			return r
		}
		return '-'
	}, e.name)
}

// mutated returns the file's text without the edge.
func (e edge) mutated(root string) (string, error) {
	text, err := os.ReadFile(filepath.Join(root, e.file))
	if err != nil {
		return "", err
	}
	if n := strings.Count(string(text), e.old); n != 1 {
		return "", fmt.Errorf("its text occurs %d times in %s, must occur once: update "+
			"internal/mutate/edges.go\n%s", n, e.file, e.old)
	}
	return strings.Replace(string(text), e.old, e.new, 1), nil
}

func (m *mutator) one(i int, e edge) error {
	text, err := e.mutated(m.root)
	if err != nil {
		return err
	}
	name := fmt.Sprintf("%02d", i)
	file := filepath.Join(m.work, e.slug()+filepath.Ext(e.file))
	if err := os.WriteFile(file, []byte(text), 0o666); err != nil {
		return err
	}
	if e.gpus > 0 {
		return m.add(name, e, file)
	}
	program := filepath.Join(m.work, name+".test")
	if err := m.compile(program, e, file); err != nil {
		return err
	}
	folder := filepath.Join(m.root, e.folder)
	key := e.folder + " " + e.test
	if !m.passes[key] {
		whole := filepath.Join(m.work, "whole.test")
		if err := m.compile(whole, e, ""); err != nil {
			return err
		}
		if text, err := test(folder, whole, e.test); err != nil {
			return fmt.Errorf("%s fails with the edge in place: %w\n%s", e.test, err, text)
		}
		m.passes[key] = true
	}
	begin := time.Now()
	said, err := test(folder, program, e.test)
	if err == nil {
		return fmt.Errorf("%s passes without it", e.test)
	}
	if !strings.Contains(said, "--- FAIL") && !strings.Contains(said, "panic: test timed out") {
		return fmt.Errorf("%s did not run: %w\n%s", e.test, err, said)
	}
	fmt.Fprintf(m.out, "%-70s %s fails, %.1f s\n", e.name, e.test, time.Since(begin).Seconds())
	return nil
}

// compile builds the test program. If file is not empty, it replaces the edge's file.
func (m *mutator) compile(program string, e edge, file string, flags ...string) error {
	arguments := append([]string{"test", "-c", "-o", program}, flags...)
	if file != "" {
		overlay, err := json.Marshal(map[string]map[string]string{"Replace": {filepath.Join(m.root, e.file): file}})
		if err != nil {
			return err
		}
		if err := os.WriteFile(file+".json", overlay, 0o666); err != nil {
			return err
		}
		arguments = append(arguments, "-overlay", file+".json")
	}
	_, err := output("go", append(arguments, "./"+e.folder)...)
	return err
}

func test(folder, program, name string) (string, error) {
	c := exec.Command(program, "-test.run", "^"+name+"$", "-test.timeout", "2m")
	c.Dir = folder
	text, err := c.CombinedOutput()
	return string(text), err
}

func output(name string, arguments ...string) (string, error) {
	text, err := exec.Command(name, arguments...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s", name, strings.Join(arguments, " "), err, text)
	}
	return string(text), nil
}

// ---- The bundle

// add builds one mutant into the bundle: a test program, or a shim for the bundle's own test
// programs.
func (m *mutator) add(name string, e edge, file string) error {
	folder := filepath.Join(m.bundle, name)
	if err := os.MkdirAll(folder, 0o777); err != nil {
		return err
	}
	program := e.folder + "/" + filepath.Base(e.folder) + ".test"
	if e.folder == "cshim" {
		suite, name, _ := strings.Cut(e.test, ".")
		sources, err := filepath.Glob(filepath.Join(m.root, "cshim", "test", "*", "*_test.cc"))
		if err != nil {
			return err
		}
		for _, source := range sources {
			text, err := os.ReadFile(source)
			if err != nil {
				return err
			}
			if strings.Contains(string(text), "TEST("+suite+", "+name+")") {
				program = "shim/" + filepath.Base(filepath.Dir(source)) + "_" +
					strings.TrimSuffix(filepath.Base(source), ".cc")
			}
		}
	}
	switch filepath.Ext(e.file) {
	case ".go":
		program = "mutant"
		if err := m.compile(filepath.Join(folder, "mutant.test"), e, file, "-trimpath", "-ldflags",
			"-s -w"); err != nil {
			return err
		}
	default:
		if err := m.shim(filepath.Join(folder, "libtorchstream.so"), e, file); err != nil {
			return err
		}
	}
	fmt.Fprintf(&m.list, "%s|%d|%s|%s|%s|%s\n", name, e.gpus, program, e.folder, e.test, e.name)
	fmt.Fprintf(m.out, "%s %s\n", name, e.name)
	return nil
}

// shim compiles the file instead of the original and links the library with it.
func (m *mutator) shim(library string, e edge, file string) error {
	build := filepath.Join(m.root, "cshim", "build")
	var commands []struct{ Command, File string }
	text, err := os.ReadFile(filepath.Join(build, "compile_commands.json"))
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, &commands); err != nil {
		return err
	}
	object := file + ".o"
	for _, c := range commands {
		if c.File != filepath.Join(m.root, e.file) {
			continue
		}
		before, after, ok := strings.Cut(c.Command, " -o ")
		was, _, ok2 := strings.Cut(after, " -c ")
		if !ok || !ok2 {
			return fmt.Errorf("unexpected command: %s", c.Command)
		}
		if err := shell(build, before+" -Wno-unused -o '"+object+"' -c '"+file+"'"); err != nil {
			return err
		}
		links, err := output("ninja", "-C", build, "-t", "commands", "lib/libtorchstream.so")
		if err != nil {
			return err
		}
		lines := strings.Split(strings.TrimSpace(links), "\n")
		link := lines[len(lines)-1]
		if !strings.Contains(link, " "+was+" ") || !strings.Contains(link, "-o lib/libtorchstream.so ") {
			return fmt.Errorf("unexpected command: %s", link)
		}
		link = strings.Replace(link, " "+was+" ", " '"+object+"' ", 1)
		return shell(build, strings.Replace(link, "-o lib/libtorchstream.so ", "-s -o '"+library+"' ", 1))
	}
	return fmt.Errorf("%s is not in compile_commands.json: make shim", e.file)
}

func shell(folder, command string) error {
	c := exec.Command("sh", "-c", command)
	c.Dir = folder
	if text, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", command, err, text)
	}
	return nil
}

// script runs each test with its edge and without it. A test that fails with the edge, passes
// without it or does not exist is an error. Each mutant has its own copy of the library, so several
// run at a time. They test the order of work in one process, so other processes on the GPU do not
// matter.
const script = `#!/usr/bin/env bash
# run.sh BUNDLE [GPUS] runs every mutant that needs at most GPUS GPUs (default 1) with the tests of
# an unpacked gpu-bundle, under the LD_LIBRARY_PATH that the bundle's run.sh prints.
# JOBS=N runs N mutants at a time (default 4). ONLY=REGEXP selects mutants by name.
# The exit status is 0 only if every test failed as it should.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bundle=$(cd "$1" && pwd) gpus=${2:-1} chosen=0 good=0 bad=0 jobs=${JOBS:-4}
verdicts=$(mktemp)
unset TORCHSTREAM_LIBRARY # a program would load that library, not the mutant's

# run FOLDER LIBRARIES PROGRAM OPTIONS...: runs a test in the folder, and sets said and rc.
run() {
  local at=$1 libraries=$2
  shift 2
  said=$(cd "$at" && LD_LIBRARY_PATH=$libraries timeout -k 5 110 "$@" 2>&1 </dev/null)
  rc=$?
}

one() { # mutant program folder test name
  local mutant=$1 program=$2 folder=$3 test=$4 name=$5 whole=$bundle/$2 at=$bundle/tree/$3 options start=$SECONDS said rc
  options=(-test.v -test.run "^$test\$" -test.timeout 100s)
  case $program in
    mutant) program=$here/$mutant/mutant.test whole=$bundle/tree/$folder/${folder##*/}.test ;;
    shim/*) program=$bundle/$program at=$bundle/shim options=(--gtest_filter="$test") ;;
    *) program=$bundle/tree/$program whole=$program ;;
  esac
  run "$at" "$LD_LIBRARY_PATH" "$whole" "${options[@]}"
  if ((rc != 0)) || ! grep -qE "^--- PASS: $test |^\[       OK " <<<"$said"; then
    echo "does not pass with the edge in place: $name ($test): $(tail -n 3 <<<"$said" | tr '\n' ' ')"
    return
  fi
  run "$at" "$here/$mutant:$LD_LIBRARY_PATH" "$program" "${options[@]}"
  if ((rc == 0)); then
    echo "PASSES without it: $name ($test)"
  elif ! grep -qE '^ *--- FAIL|^\[  FAILED|panic: |terminate called' <<<"$said"; then
    echo "did not run: $name ($test): $(tail -n 3 <<<"$said" | tr '\n' ' ')"
  else
    echo "fails, $((SECONDS - start)) s: $name ($test)"
  fi
}

while IFS='|' read -r mutant needs program folder test name; do
  ((needs <= gpus)) && [[ $name =~ ${ONLY:-.} ]] || continue
  chosen=$((chosen + 1))
  while (($(jobs -rp | wc -l) >= jobs)); do wait -n; done
  one "$mutant" "$program" "$folder" "$test" "$name" | tee -a "$verdicts" &
done <"$here/list"
wait
good=$(grep -c '^fails' "$verdicts") bad=$(grep -vc '^fails' "$verdicts")
rm -f "$verdicts"
echo "$good of $chosen edges held by their tests, $bad not"
((good == chosen && good > 0))
`

func (m *mutator) finish() error {
	return errors.Join(os.WriteFile(filepath.Join(m.bundle, "list"), []byte(m.list.String()), 0o666),
		os.WriteFile(filepath.Join(m.bundle, "run.sh"), []byte(script), 0o777))
}
