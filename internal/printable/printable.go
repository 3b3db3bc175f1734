// Package printable makes names from archives and file systems safe to print: one with escape
// sequences could move a terminal's cursor or hide other lines, one with a newline could add lines.
package printable

import (
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Name returns a name unchanged if it is safe. A name with quotes, backslashes, invalid UTF-8,
// unprintable characters or characters that change the text direction is returned in Go's quotes
// with escapes.
func Name(name string) string {
	if quoted := strconv.Quote(name); quoted[1:len(quoted)-1] != name {
		return quoted
	}
	return name
}

// Text returns a text of several lines with such characters as Go's escapes. All others, including
// newlines and tabs, are unchanged.
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

// URL returns a URL as a message may show it: without user, password, query and fragment, which may
// be secret. It need not be a valid URL: "***" stands for a host that may be a part of a password.
// A path that begins with / or . is shown as it is.
func URL(address string) string {
	scheme, rest, found := strings.Cut(address, "://")
	switch {
	case found:
		scheme += "://"
	case strings.HasPrefix(address, "/"), strings.HasPrefix(address, "."):
		return address
	default:
		scheme, rest = "", address
	}
	shown, hidden := rest, ""
	if i := strings.IndexAny(rest, "?#"); i >= 0 {
		shown, hidden = rest[:i], rest[i:]
	}
	switch i := strings.LastIndexByte(shown, '@'); {
	case strings.Contains(hidden, "@"): // what is before it may be of a password with ? or #
		shown = "***"
	case i >= 0: // a password may have any other character
		shown = shown[i+1:]
	}
	return scheme + shown
}

// Archive returns the path of an archive or a shard as a message may show it: a URL as [URL] shows
// it, also with braces in it, and any other path as it is.
func Archive(path string) string {
	if strings.Contains(path, "://") {
		return URL(path)
	}
	return path
}

// ArchiveName returns the path of an archive as [Archive] and [Name] show it.
func ArchiveName(path string) string { return Name(Archive(path)) }

// urlInText matches a URL in a text, up to a space or a quote. A backslash starts an escape of %q.
var urlInText = regexp.MustCompile(`[A-Za-z][A-Za-z0-9+.-]*://(?:\\.|[^\s"\\])+`)

// Error returns err with a text in which every URL has the form that [URL] returns. Use it for
// errors of other libraries.
func Error(err error) error { return shown{err} }

type shown struct{ err error }

func (e shown) Unwrap() error { return e.err }
func (e shown) Error() string { return URLs(e.err.Error()) }

// URLs returns a text in which every URL has the form that [URL] returns.
func URLs(text string) string {
	return urlInText.ReplaceAllStringFunc(text, func(address string) string {
		bare := strings.TrimRight(address, ".,:;')]}") // the text's own
		return URL(bare) + address[len(bare):]
	})
}

// Names returns the results of [Name].
func Names(names []string) []string {
	shown := make([]string, len(names))
	for i, name := range names {
		shown[i] = Name(name)
	}
	return shown
}
