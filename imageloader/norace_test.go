//go:build !race

package imageloader

const underRace = false
