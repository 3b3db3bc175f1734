//go:build !notorch

package main

import "github.com/torchstream/torchstream/internal/capi"

// buildNote is the end of the usage.
const buildNote = ""

func checkLibrary() error { return capi.Check() }
