package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"slices"
	"strings"
)

// withFaults returns the text of a Go file with faults, by number. Each is in a copy of its
// function, which the function calls if the fault is planted: so one program has all faults.
func withFaults(file, text string, faults map[int]*plantedFault) (string, error) {
	set := token.NewFileSet()
	parsed, err := parser.ParseFile(set, file, text, parser.SkipObjectResolution)
	if err != nil {
		return "", err
	}
	offset := func(p token.Pos) int { return set.Position(p).Offset }
	inserted := map[int]string{offset(parsed.Name.End()): "; import planted \"" + own + "world\""}
	var copies strings.Builder
	for _, number := range slices.Sorted(maps.Keys(faults)) {
		f := faults[number]
		if n := strings.Count(text, f.old); n != 1 {
			return "", fmt.Errorf("%s: its text occurs %d times in %s, want once:\n%s", f.name, n, file, f.old)
		}
		from := strings.Index(text, f.old)
		d := functionAt(parsed, offset, from, from+len(f.old))
		if d == nil {
			return "", fmt.Errorf("%s: its text is not within a function of %s:\n%s", f.name, file, f.old)
		}
		name := fmt.Sprintf("%s_fault%d", d.Name.Name, number)
		call, err := callOf(d, name)
		if err != nil {
			return "", fmt.Errorf("%s: %w", f.name, err)
		}
		inserted[offset(d.Body.Lbrace)+1] += fmt.Sprintf(" if planted.Planted(%d) { %s };", number, call)
		fmt.Fprintf(&copies, "\n%s%s%s%s%s\n", text[offset(d.Pos()):offset(d.Name.Pos())], name,
			text[offset(d.Name.End()):from], f.new, text[from+len(f.old):offset(d.End())])
	}
	for _, at := range slices.Backward(slices.Sorted(maps.Keys(inserted))) {
		text = text[:at] + inserted[at] + text[at:]
	}
	return text + copies.String(), nil
}

// functionAt returns the function whose body has a range of bytes, or nil.
func functionAt(f *ast.File, offset func(token.Pos) int, begin, end int) *ast.FuncDecl {
	for _, d := range f.Decls {
		d, ok := d.(*ast.FuncDecl)
		if ok && d.Body != nil && offset(d.Body.Lbrace) < begin && end <= offset(d.Body.Rbrace) {
			return d
		}
	}
	return nil
}

// callOf returns a statement that calls the function name with the parameters of a function, and
// ends the function with its results.
func callOf(d *ast.FuncDecl, name string) (string, error) {
	var arguments []string
	for _, p := range d.Type.Params.List {
		for _, n := range p.Names {
			arguments = append(arguments, n.Name)
			if _, more := p.Type.(*ast.Ellipsis); more {
				arguments[len(arguments)-1] += "..."
			}
		}
		if len(p.Names) == 0 || p.Names[0].Name == "_" {
			return "", fmt.Errorf("a parameter of %s has no name", d.Name.Name)
		}
	}
	if d.Recv != nil {
		if r := d.Recv.List[0]; len(r.Names) == 0 {
			return "", fmt.Errorf("the receiver of %s has no name", d.Name.Name)
		}
		name = d.Recv.List[0].Names[0].Name + "." + name
	}
	if d.Type.TypeParams != nil {
		var types []string
		for _, p := range d.Type.TypeParams.List {
			for _, n := range p.Names {
				types = append(types, n.Name)
			}
		}
		name += "[" + strings.Join(types, ", ") + "]"
	}
	call := name + "(" + strings.Join(arguments, ", ") + ")"
	if d.Type.Results == nil {
		return call + "; return", nil
	}
	return "return " + call, nil
}
