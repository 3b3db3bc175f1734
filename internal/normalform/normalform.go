// Package normalform compares names that may differ in their Unicode normal form only. macOS
// writes an accent after its letter (NFD), most other systems both as one character (NFC).
package normalform

import (
	"fmt"
	"iter"
	"slices"

	"golang.org/x/text/unicode/norm"
)

// Forms returns the names that are not ASCII by their NFC, as [Twin] needs them.
func Forms(names iter.Seq[string]) map[string]string {
	forms := map[string]string{}
	for name := range names {
		if !isASCII(name) {
			forms[norm.NFC.String(name)] = name
		}
	}
	return forms
}

// Twin returns the name of forms that differs from a name only in its Unicode normal form. found
// reports whether there is one.
func Twin(name string, forms map[string]string) (twin string, found bool) {
	if len(forms) == 0 || isASCII(name) {
		return "", false
	}
	twin, found = forms[norm.NFC.String(name)]
	return twin, found && twin != name
}

// Hint returns what to add to an error of names that are not known: the first of the names that
// differs from a known one only in its Unicode normal form, and what to do. It returns "" if there
// is no such name.
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

// form names the Unicode normal form of a name.
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
