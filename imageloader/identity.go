package imageloader

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/internal/order"
)

// Identity identifies everything that determines the batches of a loader's epochs. Loaders whose
// identities differ only in Path and Rank are ranks of one training run: they share the samples of
// each epoch.
type Identity struct {
	// path of the archive as given to Open, without the parts of a URL that may be secret
	Path    string            `json:"path"`
	Bytes   int64             `json:"bytes"`   // size of the archive
	Samples int               `json:"samples"` // 0 for an archive that was opened without reading it
	Digest  string            `json:"digest"`  // digest of the samples' names, sizes and labels; "" if Samples is 0
	Classes string            `json:"classes"` // the number of classes and a digest of their names
	Options map[string]string `json:"options"` // options that change a batch, by field name
	Batches int               `json:"batches"` // batches of an epoch on this rank; -1 if Samples is 0
	Rank    int               `json:"rank"`
	World   int               `json:"world"`
}

// Identity returns the identity of the loader's batches. For a large archive the first call takes a
// while, and so does the first saving of a State.
func (l *Loader) Identity() Identity {
	id := l.identity(l.index.Load())
	return Identity{Path: archive.Shown(l.path), Bytes: id.Bytes, Samples: id.Samples, Digest: id.Digest,
		Classes: l.classesDigest(),
		Options: l.fingerprint(l.opened), Batches: l.Batches(), Rank: l.o.Rank, World: l.o.World}
}

// Difference describes how two identities differ, except in Path and Rank. It lists the values of i
// first. It returns "" for ranks of one training run.
func (i Identity) Difference(other Identity) string {
	switch {
	case i.Bytes != other.Bytes:
		return fmt.Sprintf("an archive of %d bytes, and not of %d", i.Bytes, other.Bytes)
	case i.Classes != other.Classes:
		return "other classes, or the same in another order"
	case i.Samples != other.Samples:
		return fmt.Sprintf("an archive of %d samples, and not of %d", i.Samples, other.Samples)
	case i.Digest != other.Digest:
		return fmt.Sprintf("samples with other names, sizes or labels (digest %s, and not %s)", i.Digest, other.Digest)
	case i.World != other.World:
		return fmt.Sprintf("Options.World %d, and not %d", i.World, other.World)
	}
	for _, name := range sortedKeys(i.Options, other.Options) {
		if a, b := i.Options[name], other.Options[name]; a != b {
			return fmt.Sprintf("Options.%s %s, and not %s", name, a, b)
		}
	}
	if i.Batches != other.Batches {
		return fmt.Sprintf("%d batches an epoch, and not %d", i.Batches, other.Batches)
	}
	return ""
}

// sortedKeys returns the keys of all maps, each once.
func sortedKeys(maps ...map[string]string) (keys []string) {
	for _, m := range maps {
		for k := range m {
			keys = append(keys, k)
		}
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}

// identity identifies the archive. The first call takes a while for a large archive.
func (l *Loader) identity(x *index.Index) archiveIdentity {
	id := archiveIdentity{Bytes: l.info.Size()}
	if x == nil {
		return id
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.digest == "" {
		h := sha256.New()
		var buf []byte
		for i := range x.Len() {
			buf = append(buf[:0], x.Name(i)...)
			buf = append(buf, 0)
			buf = binary.AppendVarint(buf, x.Size(i))
			buf = binary.AppendVarint(buf, int64(x.Label(i)))
			if l.o.MultiLabel {
				for _, label := range x.Labels(i) {
					buf = binary.AppendVarint(buf, int64(label))
				}
			}
			if l.boxes != nil {
				buf = l.boxes.Append(buf, x.Label(i))
			}
			if x.Paired() {
				buf = append(append(buf, x.Name(x.Partner(i))...), 0)
				buf = binary.AppendVarint(buf, x.Size(x.Partner(i)))
			}
			h.Write(buf)
		}
		l.digest = hex.EncodeToString(h.Sum(nil)[:16])
	}
	id.Samples, id.Digest = x.Len(), l.digest
	return id
}

// classesDigest returns the number of classes and a digest of their names, in order.
func (l *Loader) classesDigest() string {
	h := sha256.New()
	classes := l.Classes()
	for _, c := range classes {
		fmt.Fprintf(h, "%d %s\n", len(c), c)
	}
	return strconv.Itoa(len(classes)) + " " + hex.EncodeToString(h.Sum(nil)[:16])
}

// harmless lists the fields of Options that do not change a batch, or that fingerprint handles
// separately. List and ListFormat are among them because the digest of the archive covers the
// samples and labels of a List.
var harmless = []string{"Workers", "WorkerNice", "WorkerCPUs", "IndexFile", "NoIndex", "TrustIndex",
	"NoEntryPoints", "MaxTranscodedBytes", "Logger", "Progress", "StatsEvery", "Rank", "World", "Classes", "Weights",
	"ShuffleBuffer", "ShuffleBytes", "ShareOnHost", "List", "ListFormat"}

// laterOptions lists fields that were added after the first version of states, with their defaults.
// A state omits a field that has its default, so that earlier versions can read the state. A state
// without the field is restored as if it had the default. For example, versions without
// Options.Damaged refused the images that Damaged: Warned decodes. If such a version started an
// epoch, this version runs the rest with Damaged: Warned.
var laterOptions = map[string]string{"Damaged": Warned.String(), "Masks": "{}", "Target": "nil",
	"TargetWidth": "0", "MultiLabel": "false", "Unlabelled": "false", "Part": "{}",
	"Columns": "{}", "Boxes": "{}"}

// fingerprint returns the options that determine the content of a batch, by field name.
func (l *Loader) fingerprint(kind order.Kind) map[string]string {
	print := map[string]string{}
	o := l.o
	if o.Boxes.oneFile() {
		o.Boxes.File = "one" // the digest of the archive covers the boxes, and the path may differ
	}
	o.Columns.RowNames = false // the digest of the archive covers the names
	v := reflect.ValueOf(o)
	for i := range v.NumField() {
		if name := v.Type().Field(i).Name; !slices.Contains(harmless, name) {
			value := canonical(v.Field(i))
			if byDefault, later := laterOptions[name]; !later || value != byDefault {
				print[name] = value
			}
		}
	}
	if kind == order.Buffered {
		print["ShuffleBuffer"], print["ShuffleBytes"] = strconv.Itoa(l.o.ShuffleBuffer), strconv.FormatInt(
			l.o.ShuffleBytes, 10)
	}
	if l.weights != nil {
		print["Weights"] = l.weights.Digest()
	}
	return print
}

// typeName returns the name of a type in a fingerprint. Types that have moved to other packages
// keep the names that saved states have.
func typeName(t reflect.Type) string {
	return strings.NewReplacer("transform.", "imageloader.", "archive.", "imageloader.", "sample.",
		"imageloader.").Replace(t.String())
}

// canonical formats a value so that equal values have equal texts in every process. Functions can't
// be compared, and are represented by their types.
func canonical(v reflect.Value) string {
	switch v.Kind() {
	case reflect.Struct:
		var parts []string
		for i := range v.NumField() {
			if !v.Field(i).IsZero() {
				parts = append(parts, v.Type().Field(i).Name+":"+canonical(v.Field(i)))
			}
		}
		return "{" + strings.Join(parts, " ") + "}"
	case reflect.Slice, reflect.Array:
		var parts []string
		for i := range v.Len() {
			parts = append(parts, canonical(v.Index(i)))
		}
		return "[" + strings.Join(parts, " ") + "]"
	case reflect.Map:
		var parts []string
		for _, k := range v.MapKeys() {
			parts = append(parts, canonical(k)+":"+canonical(v.MapIndex(k)))
		}
		slices.Sort(parts)
		return "{" + strings.Join(parts, " ") + "}"
	case reflect.Pointer, reflect.Interface:
		if v.IsNil() {
			return "nil"
		}
		return typeName(v.Elem().Type()) + " " + canonical(v.Elem())
	case reflect.Func, reflect.Chan, reflect.UnsafePointer:
		if v.IsNil() {
			return "nil"
		}
		return typeName(v.Type())
	}
	return fmt.Sprint(v)
}
