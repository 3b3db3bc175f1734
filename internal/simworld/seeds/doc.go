// Package seeds has the program that runs scenarios on simulated machines. Its tests need the build
// tag simworld and the overlay that internal/simworld writes.
package seeds
