//go:build race

package imageloader

// underRace reports whether the race detector is on. The detector's memory is many times the memory
// that it watches.
const underRace = true
