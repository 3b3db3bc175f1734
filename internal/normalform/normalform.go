// Package normalform compares names that may differ only in their Unicode normal form. macOS writes
// an accent as a separate character after its letter (NFD). Most other systems write both as one
// character (NFC).
package normalform

import (
	"fmt"
	"iter"
	"slices"

	"golang.org/x/text/unicode/norm"
)

// Forms returns the names that are not ASCII, keyed by their NFC, for [Twin].
func Forms(names iter.Seq[string]) map[string]string {
	forms := map[string]string{}
	for name := range names {
		if !isASCII(name) {
			forms[norm.NFC.String(name)] = name
		}
	}
	return forms
}

// Twin returns the name in forms that differs from name only in its Unicode normal form. found
// reports whether there is one.
func Twin(name string, forms map[string]string) (twin string, found bool) {
	if len(forms) == 0 || isASCII(name) {
		return "", false
	}
	twin, found = forms[norm.NFC.String(name)]
	return twin, found && twin != name
}

// Hint returns text to append to an error about unknown names. It names the first of names that
// differs from a known name only in its Unicode normal form, and gives advice. It returns "" if
// there is no such name.
func Hint(names, known []string) string {
	forms := Forms(slices.Values(known))
	at := slices.IndexFunc(names, func(name string) bool { _, found := Twin(name, forms); return found })
	if at < 0 {
		return ""
	}
	name := names[at]
	twin, _ := Twin(name, forms)
	return fmt.Sprintf("; %+q and %+q differ only in their Unicode normal form (%s, %s), as names from macOS and "+
		"other systems do: give both the same form (convmv -f utf8 -t utf8 --nfc -r --notest FOLDER)",
		name, twin, form(name), form(twin))
}

// form returns the Unicode normal form of a name: "NFC", "NFD" or "mixed".
func form(name string) string {
	switch {
	case norm.NFC.IsNormalString(name):
		return "NFC"
	case norm.NFD.IsNormalString(name):
		return "NFD"
	}
	return "mixed"
}

func isASCII(name string) bool {
	for i := range len(name) {
		if name[i] >= 0x80 {
			return false
		}
	}
	return true
}
