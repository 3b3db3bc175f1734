package imageloader

import (
	"fmt"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// Identity is what decides the batches of a loader's epochs. Loaders whose identities differ only
// in Path and Rank are ranks of one training: every epoch deals them the same sequence.
type Identity struct {
	Path    string            `json:"path"`    // of the archive, as given to Open; of a URL without what may be secret
	Bytes   int64             `json:"bytes"`   // of the archive
	Samples int               `json:"samples"` // 0 for an archive that was opened without reading it
	Digest  string            `json:"digest"`  // of the samples' names, sizes and labels; "" as Samples is 0
	Classes string            `json:"classes"` // the number of classes and a digest of their names
	Options map[string]string `json:"options"` // those that change a batch, by the names of their fields
	Batches int               `json:"batches"` // of an epoch on this rank; -1 as Samples is 0
	Rank    int               `json:"rank"`
	World   int               `json:"world"`
}

// Identity returns what decides the loader's batches. The first call takes a while for a large
// archive, as saving a State does.
func (l *Loader) Identity() Identity {
	id := l.identity(l.index.Load())
	return Identity{Path: archive.Shown(l.path), Bytes: id.Bytes, Samples: id.Samples, Digest: id.Digest, Classes: l.classesDigest(),
		Options: l.fingerprint(l.opened), Batches: l.Batches(), Rank: l.o.Rank, World: l.o.World}
}

// Difference says in what two identities differ, beside Path and Rank: with the values of i first.
// It returns "" for ranks of one training.
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
