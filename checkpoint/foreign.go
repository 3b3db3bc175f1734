package checkpoint

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"unicode"
	"unicode/utf8"
)

// foreign lists kinds of files that a user might pass instead of a checkpoint. Each has magic bytes
// at an offset, and advice for the user.
var foreign = []struct {
	offset     int
	magic      string
	name, next string
}{
	{0, "\x1f\x8b", "a gzip file (.gz, .tgz)", "unpack it, if the checkpoint is in it"},
	{0, "\x28\xb5\x2f\xfd", "a zstd file (.zst)", "unpack it, if the checkpoint is in it"},
	{0, "\xfd7zXZ\x00", "an xz file", "unpack it, if the checkpoint is in it"},
	{0, "BZh", "a bzip2 file", "unpack it, if the checkpoint is in it"},
	{257, "ustar", "a tar archive", "unpack it, if the checkpoint is in it"},
	{0, "\x89HDF\r\n\x1a\n", "an HDF5 file (.h5, of Keras and others)", "save its tensors as safetensors"},
	{0, "GGUF", "a GGUF file, of llama.cpp",
		"take the safetensors of the same model, or save the tensors of gguf.GGUFReader as safetensors"},
	{0, "\x93NUMPY", "a NumPy file (.npy)", "save its arrays as safetensors"},
	{4, "TFL3", "a TensorFlow Lite model", "save its tensors as safetensors"},
	{0, "\x80\x02", pickleName, pickleNext},
	{0, "\x80\x03", pickleName, pickleNext},
	{0, "\x80\x04", pickleName, pickleNext},
	{0, "\x80\x05", pickleName, pickleNext},
	{0, "(dp0\n", pickleName, pickleNext},
	{0, "}q\x00", pickleName, pickleNext},
	{0, "\xff\xd8\xff", "a JPEG", "name the checkpoint"},
	{0, "\x89PNG", "a PNG", "name the checkpoint"},
	{0, "version https://git-lfs", "a pointer of Git LFS", "fetch the file that it stands for, with git lfs pull"},
	{0, "<", "a page of HTML or XML, which a server may have sent in place of the file", "download it again"},
	{0, "{", "JSON", "the index of a sharded checkpoint ends in .safetensors.index.json or .bin.index.json"},
}

const (
	pickleName = "a pickle that torch.save did not write"
	pickleNext = "save its tensors with torch.save, or as safetensors"
)

// isONNX reports whether a file that starts with head is an ONNX model. ONNX is a protocol buffer:
// field 1, the version of the format, precedes field 2, the name of the producer, or field 7, the
// graph.
func isONNX(head []byte) bool {
	const (
		version  = 1 << 3   // a number, whose wire type is 0
		producer = 2<<3 | 2 // text
		graph    = 7<<3 | 2 // a message that starts with a node, field 1
		node     = 1<<3 | 2
	)
	if len(head) < 8 || head[0] != version || head[1] == 0 || head[1] >= 0x80 {
		return false
	}
	switch head[2] {
	case producer:
		text := head[4:min(4+int(head[3]), len(head))]
		return head[3] < 0x80 && firstLine(text) != ""
	case graph:
		_, n := binary.Uvarint(head[3:])
		return n > 0 && 3+n < len(head) && head[3+n] == node
	}
	return false
}

// describeForeign guesses from the first bytes what kind of file this is, and returns a description
// with advice. It returns "" for an unknown kind.
func describeForeign(head []byte) string {
	for _, f := range foreign {
		if len(head) > f.offset && bytes.HasPrefix(head[f.offset:], []byte(f.magic)) {
			return f.name + ": " + f.next
		}
	}
	if isONNX(head) {
		return "a model of ONNX: save the state_dict() of the PyTorch model, or in Python the arrays of " +
			"onnx.numpy_helper as safetensors"
	}
	if start := firstLine(head); start != "" {
		return fmt.Sprintf("a text, which begins with %q: name the checkpoint", start)
	}
	return ""
}

// firstLine returns up to 20 characters of a text's first line, or "" if the bytes are not text.
func firstLine(head []byte) string {
	var line []rune
	for len(head) > 0 {
		r, n := utf8.DecodeRune(head)
		switch {
		case r == utf8.RuneError && len(head) < utf8.UTFMax: // perhaps a character that is cut off
			return string(line)
		case r == '\n' || r == '\r':
			if len(line) > 0 {
				return string(line)
			}
		case r == utf8.RuneError || !unicode.IsPrint(r) && r != '\t':
			return ""
		case len(line) == 20:
			return string(line)
		default:
			line = append(line, r)
		}
		head = head[n:]
	}
	return string(line)
}
