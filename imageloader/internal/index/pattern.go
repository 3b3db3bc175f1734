package index

import (
	"fmt"
	"strings"
)

// Pattern describes names of members. It is a name in which one "*" stands for any text, including
// slashes. A ".*" at the end stands for any extension. The zero Pattern matches nothing.
type Pattern struct {
	text           string
	prefix, suffix string
	anyExtension   bool
}

// ParsePattern parses a pattern. Not counting a ".*" at the end, it must have exactly one "*".
func ParsePattern(text string) (Pattern, error) {
	p := Pattern{text: text}
	rest := text
	if before, found := strings.CutSuffix(text, ".*"); found && strings.Contains(before, "*") {
		rest, p.anyExtension = before, true
	}
	var found bool
	if p.prefix, p.suffix, found = strings.Cut(rest, "*"); !found || strings.Contains(p.suffix, "*") {
		return Pattern{}, fmt.Errorf("%q needs one \"*\" for the text that the two names of a pair share; "+
			"a \".*\" at the end stands for any extension", text)
	}
	return p, nil
}

func (p Pattern) String() string { return p.text }

// key returns the part of a name for which the "*" of the pattern stands. ok is false if the name
// does not match.
func (p Pattern) key(name string) (key string, ok bool) {
	if p.text == "" {
		return "", false
	}
	if p.anyExtension {
		dot := strings.LastIndexByte(name, '.')
		if dot < 0 || dot == len(name)-1 || strings.IndexByte(name[dot:], '/') >= 0 {
			return "", false
		}
		name = name[:dot]
	}
	if len(name) <= len(p.prefix)+len(p.suffix) || !strings.HasPrefix(name, p.prefix) ||
		!strings.HasSuffix(name, p.suffix) {
		return "", false
	}
	return name[len(p.prefix) : len(name)-len(p.suffix)], true
}
