// Package bench has the C header of the measurements of torchstream-lab, as package include has
// the others.
package bench
