package setup

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"io"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/internal/system"
)

// wheel is a line of a lock, the list of the wheels of a LibTorch release: a package, its version
// and the SHA-256 of its file.
type wheel struct{ name, version, sha256 string }

// lockLines are the lines of a lock without comments.
type lockLines []string

func wheels(lockText string) lockLines {
	var lines lockLines
	for line := range strings.Lines(lockText) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			lines = append(lines, line)
		}
	}
	return lines
}

var lockLine = regexp.MustCompile(`^([\w.-]+)==(\S+) --hash=sha256:([0-9a-f]{64})$`)

func (l lockLines) parse() ([]wheel, error) {
	var all []wheel
	for _, line := range l {
		m := lockLine.FindStringSubmatch(line)
		if m == nil {
			return nil, fmt.Errorf("the lock of LibTorch has the line %q, want NAME==VERSION --hash=sha256:HEX", line)
		}
		all = append(all, wheel{m[1], m[2], m[3]})
	}
	if len(all) == 0 || all[0].name != "torch" {
		return nil, errors.New("the lock of LibTorch does not begin with torch")
	}
	return all, nil
}

// release returns the first two numbers of torch's version.
func (l lockLines) release() string {
	all, err := l.parse()
	if err != nil {
		return ""
	}
	numbers := strings.SplitN(all[0].version, ".", 3)
	return strings.Join(numbers[:min(2, len(numbers))], ".")
}

// folder returns the folder where the lock's wheels are installed. The folder's name depends on the
// lock's contents. It is the same as in earlier versions of this program, so their installations
// are used again.
func (l lockLines) folder(cache, version string) string {
	digest := sha256.Sum256([]byte(strings.Join(l, "\n")))
	return filepath.Join(cache, "libtorch-"+version+"-"+hex.EncodeToString(digest[:])[:12])
}

// cpu reports whether the lock is for a LibTorch without CUDA.
func (l lockLines) cpu() bool {
	all, err := l.parse()
	return err == nil && strings.HasSuffix(all[0].version, "+cpu")
}

// described returns the text of the comment "# name: text" in a lock, or "".
func described(lockText, name string) string {
	for line := range strings.Lines(lockText) {
		if text, ok := strings.CutPrefix(line, "# "+name+": "); ok {
			return strings.TrimSpace(text)
		}
	}
	return ""
}

const (
	stamp = ".torchstream-complete" // file that marks a folder as complete
	// During installation, the disk holds both the wheels and the unpacked files. The lock names
	// the size of the unpacked files. The wheels together have at most 0.65 times that size.
	needFactor = 1.7
)

// installer installs wheels.
type installer struct {
	cache string
	from  index
	log   io.Writer
}

// install installs the wheels of a lock, unless they are installed already, and returns their
// LibTorch folder. It resumes an interrupted set-up.
func (i installer) install(ctx context.Context, lockText string) (string, error) {
	lines := wheels(lockText)
	all, err := lines.parse()
	if err != nil {
		return "", err
	}
	target := lines.folder(i.cache, all[0].version)
	torch, files, site := filepath.Join(target, "torch"), target+".wheels", target+".tmp"
	installed := func() bool { return exists(filepath.Join(target, stamp)) }
	if installed() && !exists(files) {
		return torch, nil // without taking the file lock, because the cache may be read-only
	}
	unlock, err := lock(target+".lock", i.log)
	if err != nil {
		return "", err
	}
	defer unlock()
	if installed() {
		return torch, os.RemoveAll(files) // left by a set-up killed just before its end
	}
	for _, folder := range []string{target, site} { // a killed set-up may have left it
		if err := os.RemoveAll(folder); err != nil {
			return "", err
		}
	}
	if err := errors.Join(os.MkdirAll(files, 0o777), os.MkdirAll(site, 0o777)); err != nil {
		return "", err
	}
	size := described(lockText, "on disk")
	if err := i.room(files, size); err != nil {
		return "", err
	}
	i.from.files = append(slices.Clip(i.from.files), files) // earlier versions kept wheels there, named as by pip
	if extra := described(lockText, "index"); extra != "" {
		i.from.urls = append(slices.Clip(i.from.urls), extra)
	}
	fmt.Fprintf(i.log, "setup: installing LibTorch %s into %s (once; packages: %d; on disk: %s)\n",
		all[0].version, target, len(all), size)
	for n, w := range all {
		fmt.Fprintf(i.log, "setup: %d of %d: %s %s\n", n+1, len(all), w.name, w.version)
		file := filepath.Join(files, w.name+"-"+w.version+".whl")
		if err := i.from.wheel(ctx, w, file, i.log); err != nil {
			return "", fmt.Errorf("%s %s: %w", w.name, w.version, err)
		}
	}
	fmt.Fprintf(i.log, "setup: unpacking %d packages\n", len(all))
	for _, w := range all {
		if ctx.Err() != nil {
			return "", ctx.Err()
		}
		if err := unzip(filepath.Join(files, w.name+"-"+w.version+".whl"), site); err != nil {
			return "", fmt.Errorf("%s %s: %w", w.name, w.version, err)
		}
	}
	if _, err := os.Stat(filepath.Join(site, "torch", "lib", "libtorch_cpu.so")); err != nil {
		return "", fmt.Errorf("the wheels have no LibTorch: %w", err)
	}
	if err := syncFiles(site); err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(site, stamp), []byte(strings.Join(lines, "\n")+"\n"), 0o666); err != nil {
		return "", err
	}
	if err := os.Rename(site, target); err != nil {
		return "", err
	}
	return torch, os.RemoveAll(files)
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// room returns an error if the disk is too small for a LibTorch of the size that the lock names.
// The wheels that are already downloaded count as free space.
func (i installer) room(files, size string) error {
	if size == "" {
		return nil
	}
	number, _, _ := strings.Cut(size, " ")
	onDisk, err := strconv.ParseFloat(number, 64) // GB
	if err != nil {
		return fmt.Errorf("the lock of LibTorch says %q for its size on disk, want a number and GB", size)
	}
	left, _, err := system.Disk(i.cache)
	if err != nil {
		return err
	}
	free := float64(left)
	there, err := filepath.Glob(filepath.Join(files, "*"))
	if err != nil {
		return err
	}
	for _, f := range there {
		if info, err := os.Stat(f); err == nil {
			free += float64(info.Size())
		}
	}
	if need := needFactor * onDisk; free < need*1e9 {
		return fmt.Errorf("%s has %.1f GB free, and LibTorch needs %.1f GB while it is installed (%s afterwards): "+
			"free space, or set TORCHSTREAM_CACHE to a folder on a bigger disk", i.cache, free/1e9, need, size)
	}
	return nil
}

// wheel finds a wheel in an index or a folder, and stores it at path.
func (i index) wheel(ctx context.Context, w wheel, path string, log io.Writer) error {
	if verify(path, w.sha256) == nil {
		return nil
	}
	for _, folder := range i.files {
		found, err := filepath.Glob(filepath.Join(folder, strings.ReplaceAll(w.name, "-", "_")+"-"+w.version+"-*.whl"))
		if err != nil {
			return err
		}
		for _, f := range found {
			if verify(f, w.sha256) == nil {
				return hardLink(f, path)
			}
		}
	}
	client, err := i.client()
	if err != nil {
		return err
	}
	failed := fmt.Errorf("no package index has the file with the SHA-256 %s", w.sha256)
	for _, at := range i.pages(w) {
		address, err := find(ctx, client, at, w)
		if err == nil && address != "" {
			if err = download(ctx, client, address, path, w.sha256, lines(log)); err == nil {
				return nil
			}
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			failed = fmt.Errorf("%w; %w", failed, err) // another index may have it
		}
	}
	return fmt.Errorf("%w: check the network, and PIP_INDEX_URL if you use a mirror", failed)
}

// hardLink makes path a hard link to a file, or a symbolic link if the file is on another disk. If
// file is a symbolic link, hardLink uses its target.
func hardLink(file, path string) error {
	file, err := filepath.EvalSymlinks(file)
	if err != nil {
		return err
	}
	if file, err = filepath.Abs(file); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if os.Link(file, path) == nil {
		return nil
	}
	return os.Symlink(file, path)
}

var (
	anchor     = regexp.MustCompile(`(?is)<a\s[^>]*href\s*=\s*["']([^"']+)["']`)
	separators = regexp.MustCompile(`[-_.]+`)
)

// pages returns the pages that may have a link to a wheel's file.
func (i index) pages(w wheel) []string {
	all := slices.Clone(i.links)
	for _, at := range i.urls {
		all = append(all, strings.TrimSuffix(at, "/")+"/"+separators.ReplaceAllString(strings.ToLower(w.name), "-")+"/")
	}
	return all
}

// find returns the URL of the file with the wheel's SHA-256 on a page of a simple index (PEP 503
// and PEP 691), or "" if the page does not have it.
func find(ctx context.Context, client *http.Client, address string, w wheel) (string, error) {
	page, err := url.Parse(address)
	if err != nil {
		return "", fmt.Errorf("the package index: %w", invalid(address))
	}
	text, err := get(ctx, client, page.String(), "application/vnd.pypi.simple.v1+json, text/html;q=0.5")
	var status *statusError
	if errors.As(err, &status) && status.status == 404 {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	resolve := func(link string) (string, error) {
		u, err := page.Parse(link)
		if err != nil {
			return "", fmt.Errorf("%s: a link: %w", printable.URL(page.String()), invalid(link))
		}
		// The index requires the page's name and password for its files too. A link from an https
		// page to an http file must not get them: they would be sent unencrypted.
		if u.User == nil && u.Host == page.Host && (u.Scheme == page.Scheme || u.Scheme == "https") {
			u.User = page.User
		}
		u.Fragment = ""
		return u.String(), nil
	}
	var answer struct {
		Files []struct {
			URL    string
			Hashes struct{ SHA256 string }
		}
	}
	if json.Unmarshal(text, &answer) == nil {
		for _, f := range answer.Files {
			if strings.EqualFold(f.Hashes.SHA256, w.sha256) {
				return resolve(f.URL)
			}
		}
		return "", nil
	}
	prefix := separators.ReplaceAllString(strings.ToLower(w.name), "_") + "-" + w.version + "-"
	named := ""
	for _, m := range anchor.FindAllStringSubmatch(string(text), -1) {
		link := html.UnescapeString(m[1])
		if strings.HasSuffix(link, "#sha256="+w.sha256) {
			return resolve(link)
		}
		// An index may lack checksums. The file's checksum is verified after the download.
		base, _, _ := strings.Cut(path.Base(link), "#")
		if !strings.Contains(link, "#sha256=") && strings.HasPrefix(strings.ToLower(base), prefix) && fits(base) {
			named = link
		}
	}
	if named == "" {
		return "", nil
	}
	return resolve(named)
}

// fits reports whether a wheel's name matches the platform of the locks.
func fits(name string) bool {
	return strings.HasSuffix(name, "x86_64.whl") &&
		(strings.Contains(name, "-py3-") || strings.Contains(name, "-cp312-cp312-"))
}
