//go:build linux && cgo

package main

import (
	"context"
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// versionCommand prints the version of this program.
func versionCommand(_ context.Context, args []string, stdout, stderr io.Writer) error {
	set := cli.Flags("torchstream version", "Prints the version of torchstream, the revision of its "+
		"sources if the program knows it, and the version of Go. torchstream doctor has that of LibTorch.", stderr)
	if err := cli.Parse(set, args, 0); err != nil {
		return err
	}
	_, err := fmt.Fprintln(stdout, programVersion(debug.ReadBuildInfo()))
	return err
}

// programVersion describes the program's version in one line. A program built from a clone has no
// module version. programVersion then uses the C headers' version.
func programVersion(info *debug.BuildInfo, known bool) string {
	version, of := imagecapi.Version(), ""
	if known {
		if v := info.Main.Version; strings.HasPrefix(v, "v") {
			version = v
		}
		settings := map[string]string{}
		for _, s := range info.Settings {
			settings[s.Key] = s.Value
		}
		if revision := settings["vcs.revision"]; revision != "" {
			of = ", revision " + revision
			if settings["vcs.modified"] == "true" {
				of += " with changes"
			}
		}
	}
	return fmt.Sprintf("torchstream %s%s, %s, %s/%s", version, of, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}
