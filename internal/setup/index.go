package setup

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// index holds the places to look for Python packages, as in pip's options.
type index struct {
	urls    []string // simple indexes
	links   []string // pages with links to wheels
	files   []string // folders with wheels
	proxy   string   // URL; "" means that HTTPS_PROXY and HTTP_PROXY choose the proxy
	cert    string   // file or folder of trusted certificates; "": the system's certificates
	trusted []string // hosts whose certificates are not verified
	netrc   string   // file of names and passwords
}

// client returns an HTTP client with the index's proxy, certificates and passwords.
func (i index) client() (*http.Client, error) {
	transport, ok := http.DefaultTransport.(*http.Transport)
	if !ok {
		return http.DefaultClient, nil
	}
	transport = transport.Clone()
	if i.proxy != "" {
		address := i.proxy
		if !strings.Contains(address, "://") { // pip accepts this too
			address = "http://" + address
		}
		proxy, err := url.Parse(address)
		if err != nil {
			return nil, fmt.Errorf("pip's option proxy: %w", invalid(address))
		}
		transport.Proxy = http.ProxyURL(proxy)
	}
	if i.cert != "" {
		roots, err := certificates(i.cert)
		if err != nil {
			return nil, fmt.Errorf("pip's option cert: %w", err)
		}
		transport.TLSClientConfig = &tls.Config{RootCAs: roots}
	}
	logins, err := readNetrc(i.netrc)
	if err != nil {
		return nil, err
	}
	return &http.Client{Transport: indexTransport{verified: transport, unverified: unverified(transport),
		trusted: i.trusted, logins: logins}}, nil
}

// unverified returns a copy of a transport that accepts every certificate.
func unverified(t *http.Transport) *http.Transport {
	t = t.Clone()
	if t.TLSClientConfig == nil {
		t.TLSClientConfig = &tls.Config{}
	}
	t.TLSClientConfig.InsecureSkipVerify = true // the user trusts the host, and files are verified by SHA-256
	return t
}

// certificates reads the certificates in a file, or in the files of a folder.
func certificates(path string) (*x509.CertPool, error) {
	files := []string{path}
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		if files, err = filepath.Glob(filepath.Join(path, "*")); err != nil {
			return nil, err
		}
	}
	roots, found := x509.NewCertPool(), false
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		found = roots.AppendCertsFromPEM(text) || found
	}
	if !found {
		return nil, fmt.Errorf("%s has no certificate in PEM", path)
	}
	return roots, nil
}

// indexTransport adds the passwords of a netrc file to requests. It does not verify the
// certificates of trusted hosts.
type indexTransport struct {
	verified, unverified *http.Transport
	trusted              []string
	logins               map[string]*url.Userinfo // by host; "" is the default
}

// RoundTrip implements http.RoundTripper.
func (t indexTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	login := t.logins[r.URL.Hostname()]
	if login == nil {
		login = t.logins[""]
	}
	if login != nil && r.URL.User == nil && r.Header.Get("Authorization") == "" {
		r = r.Clone(r.Context())
		password, _ := login.Password()
		r.SetBasicAuth(login.Username(), password)
	}
	if slices.Contains(t.trusted, r.URL.Hostname()) || slices.Contains(t.trusted, r.URL.Host) {
		return t.unverified.RoundTrip(r)
	}
	return t.verified.RoundTrip(r)
}

// readNetrc returns the names and passwords in a netrc file, by host. The key of the entry
// "default" is "". A missing file gives an empty map.
func readNetrc(file string) (map[string]*url.Userinfo, error) {
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("the netrc file: %w", err)
	}
	return parseNetrc(string(text)), nil
}

// parseNetrc reads a netrc file as Python's module netrc does. If a word that starts with # stands
// where a keyword is expected, the rest of the line is a comment. A macro ends at an empty line.
func parseNetrc(text string) map[string]*url.Userinfo {
	logins := map[string]*url.Userinfo{}
	var host, name, password string
	keyword, macro := "", false // keyword: the next word is its value
	for line := range strings.Lines(text) {
		if macro {
			macro = strings.TrimSpace(line) != ""
			continue
		}
		for word, rest := netrcWord(line); word != "" || rest != ""; word, rest = netrcWord(rest) {
			switch keyword {
			case "machine":
				host, name, password = word, "", ""
			case "login", "user":
				name = word
			case "password":
				password = word
			case "":
				switch {
				case strings.HasPrefix(word, "#"):
					rest = ""
				case word == "macdef":
					macro, rest = true, ""
				case word == "default":
					host, name, password = "", "", ""
				case slices.Contains([]string{"machine", "login", "user", "password", "account"}, word):
					keyword = word
				}
				continue
			}
			keyword = ""
			if password != "" {
				logins[host] = url.UserPassword(name, password)
			}
		}
	}
	return logins
}

// netrcWord returns the first word of a line of a netrc file, and the rest of the line. Both are ""
// at the end of the line. Quotes enclose a word with spaces. A backslash takes the next character
// literally.
func netrcWord(line string) (word, rest string) {
	line = strings.TrimLeft(line, " \t\r\n")
	var b strings.Builder
	quoted := strings.HasPrefix(line, `"`)
	if quoted {
		line = line[1:]
	}
	for i := 0; i < len(line); i++ {
		c := line[i]
		switch {
		case quoted && c == '"', !quoted && strings.IndexByte(" \t\r\n", c) >= 0:
			return b.String(), line[i+1:]
		case c == '\\' && i+1 < len(line):
			i++
			c = line[i]
		}
		b.WriteByte(c)
	}
	return b.String(), ""
}

// environmentIndex returns the index that the environment or pip's configuration files name, or
// else the public index.
func environmentIndex() index {
	var files []string
	if config, err := os.UserConfigDir(); err == nil {
		files = []string{filepath.Join(config, "pip", "pip.conf")}
	}
	if home, err := os.UserHomeDir(); err == nil {
		files = append(files, filepath.Join(home, ".pip", "pip.conf"))
	}
	return readIndex(os.Getenv, append(files, "/etc/xdg/pip/pip.conf", "/etc/pip.conf"))
}

// readIndex reads pip's options as `pip download` does. An option's value is the first one found:
// in the environment variables, then in the command's section of each file, in order, and then in
// the section [global] of each file.
func readIndex(getenv func(string) string, files []string) index {
	switch file := getenv("PIP_CONFIG_FILE"); file {
	case "":
	case os.DevNull: // pip then reads no file at all
		files = nil
	default:
		files = append([]string{file}, files...)
	}
	option := func(name string) []string {
		if v := getenv("PIP_" + strings.ToUpper(strings.ReplaceAll(name, "-", "_"))); v != "" {
			return strings.Fields(v)
		}
		for _, section := range []string{"[download]", "[global]"} {
			for _, file := range files {
				if v := configured(file, section, name); len(v) > 0 {
					return v
				}
			}
		}
		return nil
	}
	var i index
	for _, place := range option("find-links") {
		if path, ok := strings.CutPrefix(place, "file://"); ok || !strings.Contains(place, "://") {
			i.files = append(i.files, path)
		} else {
			i.links = append(i.links, place)
		}
	}
	if no := option("no-index"); len(no) == 0 ||
		!slices.Contains([]string{"1", "true", "yes", "on", "y", "t"}, strings.ToLower(no[0])) {
		i.urls = option("index-url")
		if len(i.urls) == 0 {
			i.urls = []string{"https://pypi.org/simple"}
		}
		i.urls = append(i.urls, option("extra-index-url")...)
	}
	i.proxy = strings.Join(option("proxy"), "")
	i.cert = strings.Join(option("cert"), " ")
	for _, name := range []string{"REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"} {
		if i.cert == "" {
			i.cert = getenv(name)
		}
	}
	i.trusted = option("trusted-host")
	if i.netrc = getenv("NETRC"); i.netrc == "" && getenv("HOME") != "" {
		i.netrc = filepath.Join(getenv("HOME"), ".netrc")
	}
	return i
}

// configured returns the values of an option in a section of a pip configuration file. A line that
// starts with a space continues the line above.
func configured(file, section, name string) []string {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil // pip ignores such a file too
	}
	in, found := "", false
	var values []string
	for line := range strings.Lines(string(text)) {
		trimmed := strings.TrimSpace(line)
		switch {
		case trimmed == "" || trimmed[0] == '#' || trimmed[0] == ';':
		case trimmed[0] == '[':
			in, found = trimmed, false
		case line[0] == ' ' || line[0] == '\t':
			if found {
				values = append(values, strings.Fields(trimmed)...)
			}
		default:
			at := strings.IndexAny(trimmed, "=:")
			found = at > 0 && in == section && strings.ReplaceAll(strings.TrimSpace(trimmed[:at]), "_", "-") == name
			if found {
				values = strings.Fields(trimmed[at+1:])
			}
		}
	}
	return values
}
