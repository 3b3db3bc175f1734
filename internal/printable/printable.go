// Package printable makes names from archives and file systems safe to print. A name with escape
// sequences could move a terminal's cursor or hide other lines. A name with a newline could add
// lines.
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

// Text returns a text of several lines in which unsafe characters are replaced by Go's escapes. All
// other characters, including newlines and tabs, are unchanged.
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

// URL returns a URL in a form that may be printed: without user, password, query and fragment,
// which may be secret. The URL may be invalid. A host that could be part of a password is replaced
// by "***". A path that starts with / or . is unchanged.
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
	case strings.Contains(hidden, "@"): // the text before it may belong to a password with ? or #
		shown = "***"
	case i >= 0: // a password may have any other character
		shown = shown[i+1:]
	}
	return scheme + shown
}

// Archive returns the path of an archive or a shard in a form that may be printed. It passes a URL,
// even one with braces, through [URL], and returns other paths unchanged.
func Archive(path string) string {
	if strings.Contains(path, "://") {
		return URL(path)
	}
	return path
}

// ArchiveName applies [Archive] and [Name] to the path of an archive.
func ArchiveName(path string) string { return Name(Archive(path)) }

// urlInText matches a URL in a text, up to a space or a quote. A backslash starts an escape
// sequence of %q.
var urlInText = regexp.MustCompile(`[A-Za-z][A-Za-z0-9+.-]*://(?:\\.|[^\s"\\])+`)

// Error wraps err so that its text has every URL in the form of [URL]. Use it for errors of other
// libraries.
func Error(err error) error { return shown{err} }

type shown struct{ err error }

func (e shown) Unwrap() error { return e.err }
func (e shown) Error() string { return URLs(e.err.Error()) }

// URLs applies [URL] to every URL in a text.
func URLs(text string) string {
	return urlInText.ReplaceAllStringFunc(text, func(address string) string {
		bare := strings.TrimRight(address, ".,:;')]}") // punctuation of the text
		return URL(bare) + address[len(bare):]
	})
}

// Names applies [Name] to each name.
func Names(names []string) []string {
	shown := make([]string, len(names))
	for i, name := range names {
		shown[i] = Name(name)
	}
	return shown
}
