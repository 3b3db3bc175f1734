// Package schema reads operator schemas as LibTorch writes them, in native_functions.yaml and in
// its registry.
package schema

import (
	"fmt"
	"strings"
)

// Schema is a parsed operator schema.
type Schema struct {
	Name     string // "add", without a namespace
	Overload string // "Tensor", or empty
	Args     []Arg
	Returns  []Return
}

// Arg is one argument.
type Arg struct {
	Name       string
	Type       string // without alias marks and without int for SymInt: "Tensor", "Tensor?", "Tensor[]", "int[2]", "Scalar"
	Default    string
	HasDefault bool
	Written    bool // the operator changes it
}

// Return is one result.
type Return struct {
	Type    string
	Written bool // it is an argument that the operator changed
}

// Parse reads "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"; the
// namespace may be missing.
func Parse(text string) (Schema, error) {
	head, rest, ok := strings.Cut(text, "(")
	if !ok {
		return Schema{}, fmt.Errorf("schema %q: no arguments", text)
	}
	arrow := strings.LastIndex(rest, ") -> ") // alias marks have arrows too: "Tensor(a -> *) self"
	if arrow < 0 {
		return Schema{}, fmt.Errorf("schema %q: no result", text)
	}
	args, returns := rest[:arrow], rest[arrow+len(") -> "):]
	var s Schema
	s.Name, s.Overload, _ = strings.Cut(strings.TrimPrefix(head, "aten::"), ".")
	for _, a := range split(args) {
		if a == "*" {
			continue
		}
		decl, def, has := strings.Cut(a, "=")
		typ, name, ok := cutLast(decl)
		if !ok {
			return Schema{}, fmt.Errorf("schema %q: argument %q has no name", text, a)
		}
		t, w := plain(typ)
		s.Args = append(s.Args, Arg{name, t, def, has, w})
	}
	returns = strings.TrimSpace(returns)
	if strings.HasPrefix(returns, "(") && strings.HasSuffix(returns, ")") {
		returns = returns[1 : len(returns)-1]
	}
	for _, r := range split(returns) {
		if typ, _, ok := cutLast(r); ok {
			r = typ
		}
		t, w := plain(r)
		s.Returns = append(s.Returns, Return{t, w})
	}
	return s, nil
}

// split cuts at commas outside of brackets and quotes.
func split(text string) []string {
	var parts []string
	depth, start, quote := 0, 0, byte(0)
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case quote != 0:
			if c == quote {
				quote = 0
			}
		case c == '"' || c == '\'':
			quote = c
		case c == '(' || c == '[':
			depth++
		case c == ')' || c == ']':
			depth--
		case c == ',' && depth == 0:
			parts = append(parts, strings.TrimSpace(text[start:i]))
			start = i + 1
		}
	}
	if last := strings.TrimSpace(text[start:]); last != "" {
		parts = append(parts, last)
	}
	return parts
}

func cutLast(s string) (before, after string, ok bool) {
	i := strings.LastIndexByte(s, ' ')
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+1:], true
}

// plain drops the alias mark "(a!)" and says whether it had the "!".
func plain(t string) (string, bool) {
	written := false
	if i := strings.IndexByte(t, '('); i >= 0 {
		if j := strings.IndexByte(t[i:], ')'); j >= 0 {
			written = strings.Contains(t[i:i+j], "!")
			t = t[:i] + t[i+j+1:]
		}
	}
	return strings.Replace(t, "SymInt", "int", 1), written
}
