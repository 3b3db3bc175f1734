// Package schema parses operator schemas in the notation of LibTorch's native_functions.yaml and
// registry.
package schema

import (
	"fmt"
	"strings"
)

// Schema is a parsed operator schema.
type Schema struct {
	Name     string // "add", without namespace
	Overload string // "Tensor", or ""
	Args     []Arg
	Returns  []Return
}

// Arg is one argument.
type Arg struct {
	Name string
	// Type is the type without alias annotation, and with int instead of SymInt: "Tensor",
	// "Tensor?", "Tensor[]", "int[2]", "Scalar".
	Type       string
	Default    string
	HasDefault bool
	Written    bool   // the operator writes to the argument
	Alias      string // the memory's name in the alias annotation: "a" in "Tensor(a!)"; "" without one
}

// Return is one result.
type Return struct {
	Type    string
	Written bool   // the result is an argument that the operator wrote to
	Alias   string // the Alias of that argument
}

// Parse parses a schema such as "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) ->
// Tensor". The namespace may be missing.
func Parse(text string) (Schema, error) {
	head, rest, ok := strings.Cut(text, "(")
	if !ok {
		return Schema{}, fmt.Errorf("schema %q: no arguments", text)
	}
	// Alias annotations contain arrows too: "Tensor(a -> *) self".
	arrow := strings.LastIndex(rest, ") -> ")
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
		t, alias, w := plain(typ)
		s.Args = append(s.Args, Arg{name, t, def, has, w, alias})
	}
	returns = strings.TrimSpace(returns)
	if strings.HasPrefix(returns, "(") && strings.HasSuffix(returns, ")") {
		returns = returns[1 : len(returns)-1]
	}
	for _, r := range split(returns) {
		if typ, _, ok := cutLast(r); ok {
			r = typ
		}
		t, alias, w := plain(r)
		s.Returns = append(s.Returns, Return{t, w, alias})
	}
	return s, nil
}

// split splits at commas outside of brackets and quotes.
func split(text string) []string {
	var parts []string
	depth, start, quote := 0, 0, byte(0)
	for i := range len(text) {
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

// plain removes an alias annotation such as "(a!)". It returns the annotation's name, "a", and
// whether it contains "!".
func plain(t string) (typ, alias string, written bool) {
	if i := strings.IndexByte(t, '('); i >= 0 {
		if j := strings.IndexByte(t[i:], ')'); j >= 0 {
			annotation := t[i+1 : i+j]
			alias, written = strings.TrimRight(annotation, "! ->*|"), strings.Contains(annotation, "!")
			t = t[:i] + t[i+j+1:]
		}
	}
	return strings.Replace(t, "SymInt", "int", 1), alias, written
}
