//go:build !cgo

package capi

// Without cgo this package does not compile, and the compiler prints this text.
var _ int = "torchstream calls C: install a C compiler (apt-get install gcc libc6-dev), and build with CGO_ENABLED=1"
