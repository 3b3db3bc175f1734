#!/usr/bin/env bash
# Makes gpu-bundle/ with all tests and programs for a machine that has a GPU and LibTorch, but no Go: see run.sh there.
#
# Layout of payload.tar.xz: tree/ has the folders of the repository, so that a test finds its testdata and that of other
# packages as it does here; each package's test binary is in the package's folder. bin/ has the programs, lib/ the
# libraries, and shim/ the C++ tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=gpu-bundle/.payload
# The maximum size that can be sent to a remote machine at once, together with the repository.
limit_mib=45
say() { echo "gpu-bundle: $*" >&2; }

rm -rf gpu-bundle
mkdir -p "$out"/{bin,lib,shim,tree}

say "C++ libraries and tests"
cshim/setup/shim.sh cshim/build -- all torchstream_lab ts_tests decode_bench inflate_bench
# Installing and stripping remove symbols and the paths of this machine.
cmake --install cshim/build --prefix "$PWD/$out" --component tests --strip >/dev/null
cp cshim/build/lib/libtorchstream.so cshim/build/lib/libtorchstream_image.so cshim/build/lib/libtorchstream_lab.so "$out/lib/"
strip --strip-unneeded "$out"/lib/*.so
rm -f "$out"/shim/image_*_test "$out"/shim/deflate_*_test

build=(-trimpath -ldflags '-s -w')
module=$(go list -m)
# Takes the tests of every package of the two modules that uses LibTorch or CUDA. The loader alone uses neither, so CI tests
# it whole. Examples run as programs there, except the one whose tests end processes.
for root in . lab; do
  {
    [[ $root != . ]] || echo "$module/internal/capi"
    go -C "$root" list -test -f '{{if .ForTest}}{{range .Deps}}{{if eq . "'"$module"'/internal/capi"}}{{$.ForTest}}{{end}}{{end}}{{end}}' ./... | sort -u
  } |
    while read -r package; do
      case $package in */examples/11-*) ;; */examples/* | */internal/httpserve) continue ;; esac
      folder=.${package#"$module"}
      say "tests of ${folder#./}"
      mkdir -p "$out/tree/$folder"
      go -C "$root" test -c "${build[@]}" -o "$PWD/$out/tree/$folder/$(basename "$folder").test" "$package"
    done
  go -C "$root" list -f '{{if eq .Name "main"}}{{.ImportPath}}{{end}}' ./... | grep -v /internal/ | while read -r package; do
    say "program ${package#"$module"/}"
    go -C "$root" build "${build[@]}" -o "$PWD/$out/bin/$(basename "$package")" "$package"
  done
done

# The files that tests and programs read: testdata of every package, the shim's test data, the example archives, launchers.
find . -path ./gpu-bundle -prune -o -path './cshim/build*' -prune -o -path ./.git -prune -o \
  -type d \( -name testdata -o -path ./cshim/test/data -o -path ./examples/data -o -path ./examples/launch \) -print | while read -r folder; do
  mkdir -p "$out/tree/$folder"
  cp -R "$folder/." "$out/tree/$folder/"
done
# Run-time paths point to this clone's build folder and to this machine's LibTorch, which do not exist elsewhere. What is
# relative to the file stays, for `torchstream bundle`.
find "$out/bin" "$out/tree" "$out/lib" "$out/shim" -type f \( -perm -u+x -o -name "*.so" \) | while read -r file; do
  if readelf -h "$file" >/dev/null 2>&1; then
    cmake -DBINARY="$PWD/$file" -P tools/remove_rpath.cmake >/dev/null
  fi
done
git describe --always --dirty --abbrev=12 >"$out/VERSION" 2>/dev/null || echo unknown >"$out/VERSION"
leaks=$(grep -rlaF -e "$PWD" -e "$HOME/" "$out" | tr '\n' ' ' || true)
[[ -z $leaks ]] || say "note: these contain paths of this machine: $leaks"
# The test programs are alike, so a dictionary larger than all of them compresses the tar to a seventh.
tar -C "$out" --sort=name --owner=0 --group=0 -cf - . | xz -T1 --lzma2=preset=4,dict=192MiB >gpu-bundle/payload.tar.xz
rm -rf "$out"
cp tools/gpu-run.sh gpu-bundle/run.sh
size=$(du -sm gpu-bundle | cut -f1)
if ((size > limit_mib)); then
  say "error: gpu-bundle is $size MiB, more than $limit_mib; the largest files in it are"
  tar -tvJf gpu-bundle/payload.tar.xz | sort -rnk3 | head -10 >&2
  exit 1
fi
say "gpu-bundle is ready ($size MiB): copy it to the GPU machine and run gpu-bundle/run.sh there"
