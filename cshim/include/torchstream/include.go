// Package torchstream has the C headers that torchstream.h and torchstream_image.h include, one for
// each noun. Package include imports it so that `go mod vendor` copies them too.
package torchstream
