// Package cshim has the sources of the two C++ libraries, so that a program can build them where
// there is no clone of this module.
package cshim

import "embed"

// Sources has all that building the libraries needs, without their tests. Files lose their modes.
//
//go:embed CMakeLists.txt libtorch-*.lock cmake include setup/*.sh src
var Sources embed.FS
