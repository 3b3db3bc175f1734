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

func TestURLsHaveNoSecret(t *testing.T) {
	for address, want := range map[string]string{
		"https://host/a.tar.gz":                     "https://host/a.tar.gz",
		"https://name:SECRET@host/a.tar.gz":         "https://***@host/a.tar.gz",
		"https://SECRET@host/a":                     "https://***@host/a",
		"https://name:SEC@RET@host/a":               "https://***@host/a",
		"https://name:SEC/RET@host/a":               "https://***@host/a",
		"https://name:SEC?RET@host/a":               "https://***?***",
		"https://name:SEC#RET@host/a":               "https://***?***",
		"https://host/a?token=SECRET":               "https://host/a?***",
		"https://host/a?token=a@SECRET":             "https://***?***",
		"https://host/a#SECRET":                     "https://host/a?***",
		"https://name:SECRET@host/a?token=a@SECRET": "https://***?***",
		"name:SECRET@host:3128":                     "***@host:3128",
		"https:name:SECRET@host/a":                  "***@host/a",
		"host/a?SECRET":                             "host/a?***",
		"/data/a@b?c.tar.gz":                        "/data/a@b?c.tar.gz",
		"./a@b.tar.gz":                              "./a@b.tar.gz",
		"a.tar.gz":                                  "a.tar.gz",
	} {
		if got := URL(address); got != want {
			t.Errorf("%s is shown as %s, want %s", address, got, want)
		}
	}
}
