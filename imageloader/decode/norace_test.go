//go:build !race

package decode_test

const underRace = false
