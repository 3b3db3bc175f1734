package printable

import (
	"errors"
	"testing"
)

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
		"https://name:SECRET@host/a.tar.gz":         "https://host/a.tar.gz",
		"https://SECRET@host/a":                     "https://host/a",
		"https://name:SEC@RET@host/a":               "https://host/a",
		"https://name:SEC/RET@host/a":               "https://host/a",
		"https://name:SEC?RET@host/a":               "https://***",
		"https://name:SEC#RET@host/a":               "https://***",
		"https://host/a?token=SECRET":               "https://host/a",
		"https://host/a?token=a@SECRET":             "https://***",
		"https://host/a#SECRET":                     "https://host/a",
		"https://name:SECRET@host/a?token=a@SECRET": "https://***",
		"name:SECRET@host:3128":                     "host:3128",
		"https:name:SECRET@host/a":                  "host/a",
		"host/a?SECRET":                             "host/a",
		"/data/a@b?c.tar.gz":                        "/data/a@b?c.tar.gz",
		"./a@b.tar.gz":                              "./a@b.tar.gz",
		"a.tar.gz":                                  "a.tar.gz",
	} {
		if got := URL(address); got != want {
			t.Errorf("%s is shown as %s, want %s", address, got, want)
		}
	}
}

func TestErrorsHaveNoSecretOfTheirURLs(t *testing.T) {
	for text, want := range map[string]string{
		"no URL: a@b?c": "no URL: a@b?c",
		`Get "https://host/a.tgz?sig=SECRET": dial tcp: refused`:      `Get "https://host/a.tgz": dial tcp: refused`,
		"s3://bucket/a?token=SECRET: no such key":                     "s3://bucket/a: no such key",
		"(see https://name:SECRET@host/a, or ftp://host/b?SECRET.)":   "(see https://host/a, or ftp://host/b.)",
		`for URL "ftp://host?a=\"b\"&sig=SECRET"; schemes: file`:      `for URL "ftp://host"; schemes: file`,
		"https://host/a?name='x'&sig=SECRET and then":                 "https://host/a and then",
		"HTTP://host/a?SECRET\nX-Sig: https://host/b?SECRET\tSECRET2": "HTTP://host/a\nX-Sig: https://host/b\tSECRET2",
	} {
		err := errors.New(text)
		if got := Error(err); got.Error() != want || !errors.Is(got, err) {
			t.Errorf("%q is shown as %q, want %q", text, got, want)
		}
	}
}
