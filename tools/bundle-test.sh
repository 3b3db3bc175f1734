#!/usr/bin/env bash
# Bundles examples/01-train, and runs it in a folder that has the bundle and a C library, and nothing else: no Go, LibTorch,
# Python, compiler or shell, and no network. It decodes, trains and predicts there. Needs root. The libraries must have been
# built.
#
#   bundle-test.sh [ROOT]     ROOT is a system to run it in, for example one that debootstrap made (default: this machine's
#                             glibc alone)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
((EUID == 0)) || { echo "bundle-test: error: it changes the root folder of a process, which needs root" >&2 && exit 1; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
go build -trimpath -ldflags '-s -w' -o "$scratch/01-train" ./examples/01-train
go run ./cmd/torchstream bundle "$scratch/01-train" -o "$scratch/app" >"$scratch/table"
sed -n '$p' "$scratch/table"
rm "$scratch/01-train"

root=${1:-$scratch/root}
mkdir -p "$root"/{proc,dev,sys,tmp}
if (($# == 0)); then
  mkdir -p "$root"/lib64 "$root"/lib/x86_64-linux-gnu
  cp -L /lib64/ld-linux-x86-64.so.2 "$root/lib64/"
  for library in libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1 libutil.so.1 libresolv.so.2; do
    cp -L "/lib/x86_64-linux-gnu/$library" "$root/lib/x86_64-linux-gnu/"
  done
fi
for tool in go python3 gcc; do
  [[ ! -e $root/usr/bin/$tool && ! -e $root/usr/local/go/bin/$tool ]] || echo "bundle-test: note: $root has $tool" >&2
done

# inside ARGUMENT...: runs the bundled program, with the bundle and the data in the root's /tmp.
inside() {
  # shellcheck disable=SC2016 # the inner shell expands these
  unshare --mount --pid --net --fork bash -euc '
    root=$1 app=$2 data=$3
    shift 3
    mount -t tmpfs tmpfs "$root/tmp"
    mkdir -p "$root/tmp/app" "$root/tmp/data"
    mount --bind "$app" "$root/tmp/app"
    mount --bind "$data" "$root/tmp/data"
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    mount --rbind /sys "$root/sys"
    cd "$root"
    exec env -i HOME=/tmp "$(command -v chroot)" . /tmp/app/bin/01-train "$@"' bash "$root" "$scratch/app" "$scratch/data" "$@"
}
mkdir "$scratch/data"
cp examples/data/photos-t*.tgz "$scratch/data/"
inside train -archive /tmp/data/photos-train.tgz -test /tmp/data/photos-test.tgz -epochs 2 -size 32 -device cpu \
  -checkpoint /tmp/data/net.safetensors
[[ -s $scratch/data/net.safetensors ]] || { echo "bundle-test: error: no checkpoint was written" >&2 && exit 1; }
inside predict -device cpu -checkpoint /tmp/data/net.safetensors /tmp/data/photos-test.tgz >"$scratch/predictions"
(($(wc -l <"$scratch/predictions") > 10)) || { echo "bundle-test: error: few predictions:" >&2 && cat "$scratch/predictions" >&2 && exit 1; }
echo "bundle-test: the bundle trains and predicts with a C library alone"
