package imageloader

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// damagedSample reads testdata/damaged.tgz, which bench/damaged.py writes. The archive has damaged
// files, and the digests of the pixels that Pillow decodes from them.
func damagedSample(t *testing.T) (files map[string][]byte, digests map[string]map[string]string) {
	t.Helper()
	f, err := os.Open("testdata/damaged.tgz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	unpacked, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	files = map[string][]byte{}
	for r := tar.NewReader(unpacked); ; {
		header, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if files[header.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
	if err := json.Unmarshal(files["digests.json"], &digests); err != nil {
		t.Fatal(err)
	}
	delete(files, "digests.json")
	return files, digests
}

// decodedWhole returns the RGB rows of an image.
func decodedWhole(t *testing.T, data []byte, p DamagePolicy) ([]byte, error) {
	t.Helper()
	d, err := sample.NewDecoder(sample.Library{}, 0, p)
	if err != nil {
		t.Skip(err)
	}
	defer d.Close()
	info, err := d.Header(data)
	if err != nil {
		return nil, err
	}
	g := imagecapi.Geometry{CropWidth: info.Width, CropHeight: info.Height, ResizeWidth: info.Width,
		ResizeHeight: info.Height,
		WindowWidth:  info.Width, WindowHeight: info.Height}
	pixels := make([]byte, 3*info.Width*info.Height)
	return pixels, d.Decode(data, &g, pixels, int(3*info.Width))
}

// TestDamagedImagesEqualPillow: damaged files that Pillow opens are decoded to Pillow's pixels,
// which are torchvision's too. docs/imageloader.md lists the parts of Pillow's
// LOAD_TRUNCATED_IMAGES that Partial lacks.
func TestDamagedImagesEqualPillow(t *testing.T) {
	files, digests := damagedSample(t)
	compared := map[DamagePolicy]int{}
	for name, data := range files {
		for _, p := range []DamagePolicy{Warned, Partial} {
			want := digests[name][p.String()]
			if want == "" {
				continue
			}
			pixels, err := decodedWhole(t, data, p)
			if err != nil {
				if p == Partial && digests[name]["warned"] == "" && !strings.Contains(err.Error(), "truncated") {
					continue // Pillow returns an empty image
				}
				t.Errorf("%s, %v: %v, want no error", name, p, err)
				continue
			}
			sum := sha256.Sum256(pixels)
			if got := hex.EncodeToString(sum[:]); got != want {
				t.Errorf("%s, %v: other pixels than Pillow's, got %v, want %v", name, p, got, want)
			}
			compared[p]++
		}
	}
	if compared[Warned] < 30 || compared[Partial] < 50 {
		t.Errorf("only %v files were compared, want compared[Warned] at least 30, compared[Partial] at "+
			"least 50", compared)
	}
}

// damagedMembers returns a good photograph, and files with each kind of damage.
func damagedMembers(t *testing.T) []archivetest.Member {
	t.Helper()
	junk := slices.Insert(archivetest.Photo(t, 2), 136, 1, 2, 3) // after the quantisers
	scan := archivetest.Photo(t, 3)
	scan = slices.Delete(scan, len(scan)/2, len(scan)*3/4)
	cut := archivetest.Photo(t, 4)
	checksum := []byte(archivetest.PNG(t, archivetest.Gradient(40, 30)))
	checksum[len(checksum)-13] ^= 1 // checksum of the image data; the end chunk has 12 bytes
	return []archivetest.Member{
		{Name: "c/good.jpg", Data: string(archivetest.Photo(t, 1))},
		{Name: "c/junk.jpg", Data: string(junk)},
		{Name: "c/scan.jpg", Data: string(scan)},
		{Name: "c/cut.jpg", Data: string(cut[:len(cut)/2])},
		{Name: "c/checksum.png", Data: string(checksum)},
		{Name: "c/header.jpg", Data: string(cut[:30])},
	}
}

// TestDamagedImagesAreCountedByPolicy: damaged images that a policy decodes are counted, named and
// logged apart from bad samples, in every epoch. Entry points change no pixel, and are made for
// good images only.
func TestDamagedImagesAreCountedByPolicy(t *testing.T) {
	archive := archivetest.Tar(t, damagedMembers(t)...)
	names := func(errs []*SampleError) (list []string) {
		for _, e := range errs {
			list = append(list, strings.TrimPrefix(e.Name, "c/"))
		}
		slices.Sort(list)
		return list
	}
	for p, want := range map[DamagePolicy]struct{ warned, bad []string }{
		Warned:  {[]string{"checksum.png", "junk.jpg", "scan.jpg"}, []string{"cut.jpg", "header.jpg"}},
		Partial: {[]string{"checksum.png", "cut.jpg", "junk.jpg", "scan.jpg"}, []string{"header.jpg"}},
		Refuse:  {nil, []string{"checksum.png", "cut.jpg", "header.jpg", "junk.jpg", "scan.jpg"}},
	} {
		t.Run(p.String(), func(t *testing.T) {
			path := archivetest.WriteFile(t, "a.tar", archive)
			var bytesOf []string
			for _, noEntryPoints := range []bool{true, false} {
				var log bytes.Buffer
				l, err := Open(path, Options{BatchSize: 2, Transform: Eval(300, 220), BadSamples: Skip,
					Damaged: p, NoEntryPoints: noEntryPoints,
					Workers: 2, Logger: slog.New(slog.NewTextHandler(&log, nil))})
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				for range 2 {
					batches, err := collect(t, l, 0, 2)
					if err != nil {
						t.Fatal(err)
					}
					bytesOf = append(bytesOf, digest(batches))
				}
				s := l.Stats()
				if !slices.Equal(names(s.WarnedNamed), want.warned) || s.Warned != int64(2*len(want.warned)) ||
					!slices.Equal(names(s.BadNamed), want.bad) || s.Bad != int64(2*len(want.bad)) {
					t.Errorf("%d warned, %v, and %d bad, %v", s.Warned, names(s.WarnedNamed), s.Bad, names(s.BadNamed))
				}
				if n := strings.Count(log.String(), `msg="damaged sample decoded"`); n != 2*len(want.warned) {
					t.Errorf("%d warnings in\n%s\nwant %v", n, &log, 2*len(want.warned))
				}
				if d := s.Since(s); d.Warned != 0 || len(d.WarnedNamed) != len(want.warned) {
					t.Errorf("since now: %+v, want d.Warned = 0, len(d.WarnedNamed) = %v",
						d, len(want.warned))
				}
				data, err := json.Marshal(s)
				if err != nil || !strings.Contains(string(data), fmt.Sprintf(`"warned":%d,`, s.Warned)) {
					t.Errorf("%v in %s", err, data)
				}
				if !noEntryPoints && s.EntriesMade != 1 {
					t.Errorf("entry points of %d images were made, not only of the good image", s.EntriesMade)
				}
			}
			for _, got := range bytesOf {
				if got != bytesOf[0] {
					t.Errorf("the batches have the digests %v, want one", bytesOf)
				}
			}
			r, err := Inspect(t.Context(), path, Options{Damaged: p}, nil)
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(names(r.Warned), want.warned) || !slices.Equal(names(r.Bad), want.bad) {
				t.Errorf("inspect: %v warned, %v bad", names(r.Warned), names(r.Bad))
			}
			for _, e := range r.Warned {
				if e.Err == nil || e.Reason != Damaged || e.Index < 0 {
					t.Errorf("%+v, want e.Err not nil, e.Reason = %v, e.Index at least 0", e, Damaged)
				}
			}
		})
	}
	if _, err := Open("a.tar", Options{Damaged: 3}); err == nil || !strings.Contains(err.Error(), "Options.Damaged") {
		t.Errorf("error %v, want an error with %q", err, "Options.Damaged")
	}
}

// TestDamagedVerdictIgnoresCrop: if an image's structure is damaged, the crop changes neither the
// verdict on it nor its pixels.
func TestDamagedVerdictIgnoresCrop(t *testing.T) {
	for _, m := range damagedMembers(t) {
		for _, p := range []DamagePolicy{Warned, Partial, Refuse} {
			whole, err := decodedWhole(t, []byte(m.Data), p)
			d, failed := sample.NewDecoder(sample.Library{}, 0, p)
			if failed != nil {
				t.Fatal(failed)
			}
			defer d.Close()
			info, headerErr := d.Header([]byte(m.Data))
			if headerErr != nil {
				continue
			}
			var top [3 * 16]byte
			g := imagecapi.Geometry{CropWidth: 16, CropHeight: 1, ResizeWidth: 16, ResizeHeight: 1,
				WindowWidth: 16, WindowHeight: 1}
			topErr := d.Decode([]byte(m.Data), &g, top[:], len(top))
			// Damage to the entropy-coded bytes is after the first row.
			if m.Name != "c/scan.jpg" && (err == nil) != (topErr == nil) {
				t.Errorf("%s, %v: %v for all of it, %v for its first row", m.Name, p, err, topErr)
			}
			if err == nil && !bytes.Equal(whole[:len(top)], top[:]) {
				t.Errorf("%s, %v: other pixels (%d x %d)", m.Name, p, info.Width, info.Height)
			}
			if err != nil && !errors.Is(err, imagecapi.CodeDecode) {
				t.Errorf("%s, %v: %v", m.Name, p, err)
			}
		}
	}
}

// TestStateKeepsTheDamagedPolicy: a loader refuses a state with another policy, because the policy
// changes batches. The default is not written, as in states of versions without the option.
func TestStateKeepsTheDamagedPolicy(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 20, nil))
	options := func(p DamagePolicy) Options {
		return Options{BatchSize: 4, Transform: Eval(4, 4), Damaged: p}
	}
	for _, made := range []DamagePolicy{Warned, Partial, Refuse} {
		_, after := states(t, openFake(t, path, options(made)), 0, 2)
		data, err := json.Marshal(after[0])
		if err != nil {
			t.Fatal(err)
		}
		if written := strings.Contains(string(data), `"Damaged"`); written != (made != Warned) {
			t.Errorf("%v: %s, written %v, want %v", made, data, written, (made != Warned))
		}
		var s State
		if err := json.Unmarshal(data, &s); err != nil {
			t.Fatal(err)
		}
		for _, p := range []DamagePolicy{Warned, Partial, Refuse} {
			err := openFake(t, path, options(p)).Restore(t.Context(), s)
			want := fmt.Sprintf("this loader's Options.Damaged is %v, and the state was made with %v", p, made)
			if (err == nil) != (p == made) || err != nil && !strings.Contains(err.Error(), want) {
				t.Errorf("a state of %v for %v: error %v", made, p, err)
			}
		}
	}
}
