#!/usr/bin/env bash
# Builds and tests the loader in a clone that has no LibTorch: the tests that open every kind of archive, and the
# command's. `make test-image` runs all of the loader's tests. The clone has all committed, staged and changed files. TORCHSTREAM_CACHE points to a folder that does not exist, so that no LibTorch can be found.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scratch=$(mktemp -d)
trap 'chmod -R u+w "$scratch" && rm -rf "$scratch"' EXIT
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
  [[ ! -e $file && ! -L $file ]] || printf '%s\0' "$file"
done | tar --null --files-from=- -cf - | tar -C "$scratch" -xf -
cd "$scratch"
export TORCHSTREAM_CACHE=$scratch/no-cache LIBTORCH=
unset TORCHSTREAM_LIBRARY
time make test-image-short
libraries=$(ls cshim/build/lib)
[[ $libraries == *libtorchstream_image.so* && $libraries != *libtorchstream.so* ]] || {
  echo "without-libtorch: error: cshim/build/lib should have only the image library, but has: $libraries" >&2
  exit 1
}
if ldd cshim/build/lib/libtorchstream_image.so | grep -E 'torch_|libc10|cudart|not found'; then
  echo "without-libtorch: error: the image library links the libraries above" >&2
  exit 1
fi
# What needs LibTorch says which command installs it.
said=$(go run ./cmd/torchstream doctor) && status=0 || status=$?
[[ $status == 1 && $said == *"there is no libtorchstream.so"*"make -C $scratch shim"* ]] || {
  echo "without-libtorch: error: torchstream doctor ended with status $status and printed: $said" >&2
  exit 1
}
