// Package include has the C headers that the packages of torchstream compile with. They import it
// so that `go mod vendor` copies the headers too.
package include

import _ "github.com/torchstream/torchstream/cshim/include/torchstream" // the headers by noun
