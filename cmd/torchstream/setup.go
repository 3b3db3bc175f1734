//go:build linux && cgo

package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/imagecapi"
	"github.com/torchstream/torchstream/internal/setup"
)

// setupCommand installs the libraries for this user's programs, and tests them.
func setupCommand(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	set := cli.Flags("torchstream setup", "Installs the shim, the image library and LibTorch (2.6 GB to "+
		"download, 4.3 GB on disk; 4.8 GB for 2.15) into TORCHSTREAM_CACHE, default\n"+
		"~/.cache/torchstream, where every program of this version of torchstream finds them. Without "+
		"-from it builds the libraries, which\n"+
		"needs g++, cmake, ninja and the packages of the image codecs. LIBTORCH=FOLDER uses an installed "+
		"LibTorch: with CUDA 13, or\n"+
		"without CUDA, for which the shim is built without CUDA too. LibTorch's files come from pip's "+
		"package index; neither pip nor Python is\n"+
		"run for them. Of pip's options (PIP_INDEX_URL and others, pip.conf) index-url, extra-index-url, "+
		"find-links, no-index, trusted-host, proxy and cert count, and the passwords of .netrc.", stderr)
	from := set.String("from", "", "release archive: a path, or an https or file URL (default: none; build the libraries)")
	sum := set.String("sha256", "",
		"SHA-256 of the release archive (default: from the file, or the URL, whose path has .sha256 at its end)")
	image := set.Bool("image", false, "install only the image library, which package imageloader needs; no LibTorch")
	only := set.Bool("only-libtorch", false,
		"install only LibTorch, which a build of the shim needs, and print the folder that has it, like "+
			"a site-packages")
	release := set.String("libtorch", "", "LibTorch release to build for: "+releases()+
		" (default: TORCHSTREAM_LIBTORCH, or "+setup.DefaultRelease+")")
	cpu := set.Bool("cpu", false,
		"build for a LibTorch without CUDA, which is a fifth of the size: the same as -libtorch "+
			setup.DefaultRelease+setup.WithoutCUDA)
	if err := cli.Parse(set, args, 0); err != nil {
		return err
	}
	if *only && (*from != "" || *image) {
		return cli.UsageError{Message: "setup: -only-libtorch installs LibTorch alone: it goes with " +
			"neither -from nor -image"}
	}
	chosen := ""
	if *from == "" || *cpu || *release != "" {
		var err error
		if chosen, err = releaseOf(*release, *cpu, *from != "" || *image); err != nil {
			return cli.UsageError{Message: err.Error()}
		}
	}
	if *only {
		return libTorchOnly(ctx, chosen, stdout, stderr)
	}
	cache, err := cacheFolder()
	if err != nil {
		return err
	}
	folder, err := setup.Run(ctx, setup.Options{
		From: *from, SHA256: *sum, Image: *image, Release: chosen,
		LibTorch: os.Getenv("LIBTORCH"), Cache: cache, Version: imagecapi.Version(), Log: stderr,
		Try: func(folder string) error { return tryLibraries(folder, *image) },
	})
	if err != nil {
		return err
	}
	if *image {
		fmt.Fprintf(stdout, "installed in %s: %s\n", folder, imagecapi.JPEGVersion())
		return nil
	}
	fmt.Fprintf(stdout, "installed in %s: LibTorch %s, %s, %d usable GPUs; 1 + 1 = 2\n", folder,
		capi.LibTorchVersion(), builtWith(), cuda.DeviceCount())
	return nil
}

// tryLibraries opens the libraries in a folder and computes with them.
func tryLibraries(folder string, image bool) error {
	if err := os.Setenv("TORCHSTREAM_LIBRARY", folder); err != nil {
		return err
	}
	if image {
		return imagecapi.Check()
	}
	if err := capi.Check(); err != nil {
		return err
	}
	if f := compute(cuda.CPU); f.State != "ok" {
		return fmt.Errorf("%s: %s", f.What, f.Found)
	}
	return nil
}
