package printable

import "testing"

func TestName(t *testing.T) {
	for name, want := range map[string]string{
		"":                            "",
		"a/b c.jpg":                   "a/b c.jpg",
		"Fotos/Müller 猫.jpg":          "Fotos/Müller 猫.jpg",
		"it's":                        "it's",
		"\x1b[2J":                     `"\x1b[2J"`,
		"a\nb":                        `"a\nb"`,
		"a\tb":                        `"a\tb"`,
		`a\x1b`:                       `"a\\x1b"`,
		`"a"`:                         `"\"a\""`,
		"\xff":                        `"\xff"`,
		"\u009b1m":                    `"\u009b1m"`,
		"gpj.\u202eexe":               `"gpj.\u202eexe"`,
		"the replacement \ufffd":      "the replacement \ufffd",
		"a name that ends with\u00a0": `"a name that ends with\u00a0"`,
	} {
		if got := Name(name); got != want {
			t.Errorf("%q is printed as %s, want %s", name, got, want)
		}
	}
}

func TestText(t *testing.T) {
	for text, want := range map[string]string{
		"":                           "",
		"one\n\ttwo \"three\" \\n":   "one\n\ttwo \"three\" \\n",
		"open /a/\x1b[2Jb\r: \u202e": `open /a/\x1b[2Jb\r: \u202e`,
		"\xff\ufffdé":                "\\xff\ufffdé",
	} {
		if got := Text(text); got != want {
			t.Errorf("%q is printed as %q, want %q", text, got, want)
		}
	}
}
