// Package include has the C headers that the packages of torchstream compile with. They import it
// so that `go mod vendor` copies the headers too.
package include
