// Package cuda has CUDA's streams, events, devices and pinned memory, as LibTorch uses them.
package cuda
