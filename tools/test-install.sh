#!/usr/bin/env bash
# Installs both libraries into a scratch prefix, moves it, and builds and runs examples/06-c from it: with pkg-config and
# with CMake. The libraries must have been built.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for component in image torchstream; do
  cmake --install cshim/build --prefix "$scratch/first" --component $component >/dev/null
done
mv "$scratch/first" "$scratch/prefix"
export PKG_CONFIG_PATH=$scratch/prefix/lib/pkgconfig
picture=$PWD/cshim/test/data/420.jpg

run() { # folder with the programs
  "$1/06-c" "$picture"
  "$1/thumbnail" "$picture" | cksum
  if ldd "$1/thumbnail" | grep -E 'libtorch[._]|libtorch_|libc10|not found'; then
    echo "test-install: error: thumbnail loads what is above" >&2
    exit 1
  fi
}

cp -R examples/06-c "$scratch/pkg-config"
make -s -C "$scratch/pkg-config" CFLAGS=-Werror
run "$scratch/pkg-config"

cp -R examples/06-c "$scratch/cmake"
cmake -S "$scratch/cmake" -B "$scratch/cmake/build" -DCMAKE_PREFIX_PATH="$scratch/prefix" >"$scratch/log" 2>&1 ||
  { cat "$scratch/log" >&2 && exit 1; }
cmake --build "$scratch/cmake/build" >"$scratch/log" 2>&1 || { cat "$scratch/log" >&2 && exit 1; }
run "$scratch/cmake/build"

# The static library, which brings no codecs: pkg-config --static names them.
# shellcheck disable=SC2046 # options are words
cc -std=c11 -o "$scratch/static" examples/06-c/thumbnail.c $(pkg-config --cflags torchstream_image) \
  "$scratch/prefix/lib/libtorchstream_image.a" $(pkg-config --libs-only-l --static torchstream_image | sed 's/-ltorchstream_image//')
"$scratch/static" "$picture" | cksum
