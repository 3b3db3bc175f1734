// Package bench has the C header of the measurements of `torchstream bench`, as package include has
// the others.
package bench
