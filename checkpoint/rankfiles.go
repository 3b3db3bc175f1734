package checkpoint

import (
	"fmt"
	"path/filepath"
)

// A checkpoint that the ranks of a job write together consists of a PyTorch file and one
// safetensors file per rank, in the same folder:
//
//	last.pt
//	last.pt-7715621f060e-rank00000-of-00002.safetensors
//	last.pt-7715621f060e-rank00001-of-00002.safetensors
//
// The number is the checkpoint's id, which is new in each checkpoint. Before Commit, rank 0's file
// is last.pt.tmp-7715621f060e.
//
// The PyTorch file holds everything that is not divided. Its key "shards" describes the rank files.
// In the file, a dict replaces each divided tensor, and says which rank has which elements. The
// rank files hold these elements as rows, under the names in the dicts.

// Keys of a checkpoint of ranks: in its dict, in the dicts that replace tensors, and in the
// metadata of a rank's file.
const (
	shardsKey = "shards"
	idKey     = "id"    // the number in the files' names
	baseKey   = "base"  // the PyTorch file's name, with which the files' names start
	bytesKey  = "bytes" // the files' sizes, by rank
	sealsKey  = "crc32" // CRC-32s of headers and checksums, by rank; absent in older files

	dividedKey = "divided" // the tensor's name in the files
	dtypeKey   = "dtype"   // safetensors' name
	shapeKey   = "shape"
	stridesKey = "strides"
	partsKey   = "parts" // for each part the rank, its first element and the number of elements

	checkpointKey = "checkpoint" // the id
	rankKey       = "rank"
)

// rankFileName returns the name of a rank's file. base is the name of the PyTorch file.
func rankFileName(base, id string, rank, ranks int) string {
	return fmt.Sprintf("%s-%s%s%05d-of-%05d%s", base, id, rankInfix, rank, ranks, shardSuffix)
}

// rankInfix follows the id in the name of a rank's file.
const rankInfix = "-rank"

// unfinished returns the name of rank 0's file before Commit.
func (w *RankWriter) unfinished() string { return w.path + unfinishedInfix + w.id }

// fileOf returns the path of a rank's file.
func (w *RankWriter) fileOf(rank int) string {
	return filepath.Join(filepath.Dir(w.path), rankFileName(filepath.Base(w.path), w.id, rank, w.ranks))
}
