//go:build race

package decode_test

// underRace reports whether the race detector is on. The detector uses many times the memory that
// it watches.
const underRace = true
