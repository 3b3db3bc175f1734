//go:build linux && cgo

package main

import (
	"runtime"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// The version is the module version, or the headers' version in a build without a module version.
// The source revision follows.
func TestProgramVersion(t *testing.T) {
	goVersion := ", " + runtime.Version() + ", " + runtime.GOOS + "/" + runtime.GOARCH
	revision := debug.BuildSetting{Key: "vcs.revision", Value: "abc"}
	for want, info := range map[string]*debug.BuildInfo{
		"torchstream v1.2.3": {Main: debug.Module{Version: "v1.2.3"}},
		"torchstream v1.2.4-0.x, revision abc": {Main: debug.Module{Version: "v1.2.4-0.x"},
			Settings: []debug.BuildSetting{revision}},
		"torchstream " + imagecapi.Version() +
			", revision abc with changes": {Main: debug.Module{Version: "(devel)"},
			Settings: []debug.BuildSetting{revision, {Key: "vcs.modified", Value: "true"}}},
		"torchstream " + imagecapi.Version(): nil,
	} {
		if got := programVersion(info, info != nil); got != want+goVersion {
			t.Errorf("%q, want %q", got, want+goVersion)
		}
	}
}

// The command version and the flags -version and --version print the line that doctor prints about
// the program.
func TestVersion(t *testing.T) {
	want := programVersion(debug.ReadBuildInfo())
	for _, name := range []string{"version", "-version", "--version"} {
		if status, stdout, stderr := command(t, name); status != 0 || stdout != want+"\n" || stderr != "" {
			t.Errorf("%s: status %d, %q, %q, want status 0, stdout %v, stderr \"\"",
				name, status, stdout, stderr, want+"\n")
		}
	}
	if f := examine(t.Context(), "")[0]; f.What != "program" || f.Found != want {
		t.Errorf("got %+v, want the program to be %s", f, want)
	}
}

// help with a command's name prints the command's -h text to standard output.
func TestHelpOfACommand(t *testing.T) {
	for _, args := range [][]string{{"train"}, {"version"}, {"bench", "loader"}} {
		_, want, _ := command(t, append(args, "-h")...)
		if status, stdout, stderr := command(t, append([]string{"help"}, args...)...); status != 0 ||
			stdout != want || !strings.HasPrefix(want, "usage: torchstream "+strings.Join(args, " ")) || stderr != "" {
			t.Errorf("help %q: status %d, %q, %s", args, status, stderr, stdout)
		}
	}
	_, want, _ := command(t, "bench", "-h")
	if status, stdout, _ := command(t, "help", "bench"); status != 0 || stdout != want {
		t.Errorf("help bench: status %d, %s, want status 0, stdout %v", status, stdout, want)
	}
	for says, args := range map[string][]string{"did you mean train?": {"trian"},
		"did you mean loader?": {"bench", "lodaer"}, "help takes the name of one command": {"train", "doctor"}} {
		if status, stdout, stderr := command(t, append([]string{"help"}, args...)...); status != 2 ||
			stdout != "" || !strings.Contains(stderr, says) {
			t.Errorf("help %q: status %d, %q, %s, want status 2, stdout \"\", stderr with %q",
				args, status, stderr, stdout, says)
		}
	}
}
