#!/usr/bin/env bash
# Installs both libraries into a scratch prefix, moves the prefix, and builds and runs examples/06-c from it, with
# pkg-config and with CMake. The libraries must have been built.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
fail() {
  echo "test-install: error: $*" >&2
  exit 1
}
for component in image torchstream; do
  cmake --install cshim/build --prefix "$scratch/first" --component $component >/dev/null
done
mv "$scratch/first" "$scratch/prefix"
# The component image alone has all headers that it needs.
cmake --install cshim/build --prefix "$scratch/image" --component image >/dev/null
cc -std=c11 -Werror -fsyntax-only -I "$scratch/image/include" examples/06-c/thumbnail.c
export PKG_CONFIG_PATH=$scratch/prefix/lib/pkgconfig
unset LD_LIBRARY_PATH
picture=$PWD/cshim/test/data/420.jpg

# finds_image FILE: fails unless the dynamic loader finds the prefix's image library for a program or library.
finds_image() {
  local path
  path=$(ldd "$1" | awk '/libtorchstream_image/ {print $3}')
  [[ -e $path && $path -ef $scratch/prefix/lib/libtorchstream_image.so ]] ||
    fail "$1 finds libtorchstream_image.so at '$path', not in $scratch/prefix/lib"
}

# thumbnail PROGRAM: fails unless the program decodes the picture to the same pixels as the first program.
expected=
thumbnail() {
  "$1" "$picture" >"$scratch/pixels"
  (($(stat -c %s "$scratch/pixels") == 64 * 64 * 3 + 13)) || fail "$1 wrote no picture of 64 x 64 pixels"
  local sum
  sum=$(cksum <"$scratch/pixels")
  [[ -z $expected || $sum == "$expected" ]] || fail "$1 and the first program decode different pixels"
  expected=$sum
}

# run FOLDER: runs the programs in the folder.
run() {
  "$1/06-c" "$picture"
  thumbnail "$1/thumbnail"
  finds_image "$1/thumbnail"
  if ldd "$1/thumbnail" | grep -E 'libtorch[._]|libtorch_|libc10|not found'; then
    fail "thumbnail loads the libraries above"
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

# libtorchstream finds the image library by itself, for a program that links libtorchstream alone or loads it by its path.
finds_image "$scratch/prefix/lib/libtorchstream.so"

# The static library has no codecs; pkg-config --static names them.
# shellcheck disable=SC2046 # options are words
cc -std=c11 -o "$scratch/static" examples/06-c/thumbnail.c $(pkg-config --cflags torchstream_image) \
  "$scratch/prefix/lib/libtorchstream_image.a" $(pkg-config --libs-only-l --static torchstream_image | sed 's/-ltorchstream_image//')
thumbnail "$scratch/static"
