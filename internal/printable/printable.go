// Package printable makes names from archives and file systems safe to print: one with escape
// sequences could move a terminal's cursor or hide other lines, one with a newline could add lines.
package printable

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// Name returns a name as it is, or in Go's quotes with escapes if it holds quotes, backslashes,
// bytes that are no UTF-8, or characters that do not print or change the direction of the text.
func Name(name string) string {
	if quoted := strconv.Quote(name); quoted[1:len(quoted)-1] != name {
		return quoted
	}
	return name
}

// Text returns a text of several lines with such characters as Go's escapes, and all others as they
// are. Newlines and tabs stay too.
func Text(text string) string {
	var b strings.Builder
	for len(text) > 0 {
		r, size := utf8.DecodeRuneInString(text)
		switch c := text[:size]; {
		case r == '\n', r == '\t', strconv.IsPrint(r) && !(r == utf8.RuneError && size == 1):
			b.WriteString(c)
		default:
			quoted := strconv.Quote(c)
			b.WriteString(quoted[1 : len(quoted)-1])
		}
		text = text[size:]
	}
	return b.String()
}
