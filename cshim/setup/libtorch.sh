#!/usr/bin/env bash
# Writes the locations of LibTorch and of its CUDA compiler as CMake cache settings into FILE, if they changed.
#
#   libtorch.sh FILE
#
# LIBTORCH is the LibTorch to use: the site-packages that contains torch/, the torch package folder itself, or an unpacked
# libtorch zip. Without LIBTORCH, `torchstream setup -only-libtorch` installs one, once; only this needs Go.
# FILE is in a build folder. If the settings change, the script removes the folder's CMake cache, whose compilers are no
# longer valid. Errors go to stderr; the exit status is 1 on an error.
set -euo pipefail
shopt -s nullglob
cshim=$(cd "${BASH_SOURCE[0]%/*}/.." && pwd)

say() { echo "libtorch: $*" >&2; }
fail() {
  say "error: $*"
  exit 1
}

# absolute NAME PATH: sets `path` to the absolute path, and fails if the build cannot use it. NAME is the variable that has it.
absolute() {
  path=${2/#\~\//$HOME/}
  [[ $path == /* ]] || path=$PWD/$path
  while [[ $path == ?*/ ]]; do path=${path%/}; done
  [[ ! $path =~ [[:space:]:\;\'\"\$\\#] ]] ||
    fail "$1=$path: compiler and linker flags cannot carry a path with spaces or any of : ; ' \" \$ \\ #;" \
      "use a path without them (a symbolic link to it will do)"
}

# first_folder FILE FOLDER...: prints the first FOLDER that contains FILE.
first_folder() {
  local file=$1 folder
  shift
  for folder in "$@"; do
    [[ -z $folder || ! -e $folder/$file ]] || { printf '%s' "$folder" && return; }
  done
}

# locked: prints the LibTorch releases that have a lock, the oldest first, and those without CUDA last.
locked() {
  local lock
  for lock in "$cshim"/libtorch-*.lock; do
    lock=${lock##*/libtorch-}
    printf '%d %s\n' "$([[ $lock == *-cpu.lock ]] && echo 1 || echo 0)" "${lock%.lock}"
  done | sort -t ' ' -k 1,1n -k 2,2V | cut -d ' ' -f 2
}

# read_version: sets `version` to MAJOR.MINOR.PATCH of the LibTorch in $torch. The header of the macros depends on the release.
read_version() {
  local header part number
  for header in torch/headeronly/version.h torch/csrc/api/include/torch/version.h; do
    [[ -e $torch/include/$header ]] || continue
    version=
    for part in MAJOR MINOR PATCH; do
      number=$(sed -n "s/^#define TORCH_VERSION_$part \([0-9][0-9]*\).*/\1/p" "$torch/include/$header")
      version+=${version:+.}$number
    done
    [[ ! $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || return 0
  done
  fail "$torch: no torch/version.h in its include folder, so this is not a LibTorch with headers"
}

# check_version: fails unless the version is between the oldest and the newest release that the shim is tested with.
check_version() {
  local releases oldest newest minor
  mapfile -t releases < <(locked | grep -v -- -cpu)
  oldest=${releases[0]} newest=${releases[-1]} minor=${version%.*}
  [[ $(printf '%s\n' "$oldest" "$minor" "$newest" | sort -V | sed -n 2p) == "$minor" ]] ||
    fail "$why is LibTorch $version, torchstream needs $oldest to $newest: point LIBTORCH at one, or unset LIBTORCH to have one" \
      "installed (TORCHSTREAM_LIBTORCH=$(locked | paste -sd'|' | sed 's/|/ or /g'))"
}

# find_toolkit: sets the locations of the CUDA 13 toolkit for the LibTorch in $torch, which has CUDA.
find_toolkit() {
  local home="" runtime newest own
  if [[ -n ${CUDA_HOME:-} ]]; then absolute CUDA_HOME "$CUDA_HOME" && home=$path; fi
  mapfile -t newest < <(printf '%s\n' /usr/local/cuda-13.* | sort -rV)
  cuda=$(first_folder bin/nvcc "$site/nvidia/cu13" "$home" "${newest[@]}" /usr/local/cuda)
  [[ -n $cuda ]] ||
    fail "no CUDA 13 compiler for $why: looked for bin/nvcc in $site/nvidia/cu13, CUDA_HOME, /usr/local/cuda-13.* and" \
      "/usr/local/cuda. Set CUDA_HOME, or install one beside it: pip install \"cuda-toolkit[nvcc,nvvm,crt,cccl,cudart,nvjpeg]==13.*\""
  include=$(first_folder cuda_runtime_api.h "$cuda/include" "$cuda/targets/x86_64-linux/include")
  [[ -n $include ]] || fail "$cuda: no include/cuda_runtime_api.h; pip install \"cuda-toolkit[cudart,crt,cccl]==13.*\""
  runtime=$(sed -n 's/^#define CUDART_VERSION  *\([0-9][0-9]*\).*/\1/p' "$include/cuda_runtime_api.h")
  ((${runtime:-0} / 1000 == 13)) ||
    fail "$cuda is CUDA ${runtime:-of unknown version}, $why was built with CUDA 13: set CUDA_HOME to a CUDA 13 toolkit"
  cuda_lib=$(first_folder libcudart.so.13 "$cuda/lib" "$cuda/lib64" "$cuda/targets/x86_64-linux/lib")
  [[ -n $cuda_lib ]] || fail "$cuda: no libcudart.so.13 in lib or lib64; pip install \"cuda-toolkit[cudart]==13.*\""
  # The zip has its own CUDA runtime under another name. Use it, so that a process has only one runtime.
  own=("$torch"/lib/libcudart*.so.13*)
  cudart=${own[0]:-$cuda_lib/libcudart.so.13}
}

# find_given: sets `torch` to the LibTorch folder in LIBTORCH.
find_given() {
  local wanted="give the site-packages that contains torch/, the torch package folder, or an unpacked libtorch zip (the folder"
  wanted+=" with include/ and lib/), or unset LIBTORCH to have one installed"
  absolute LIBTORCH "$LIBTORCH"
  why=LIBTORCH=$path
  [[ -d $path ]] || fail "$why: no such folder: $wanted"
  torch=$(first_folder lib/libtorch_cpu.so "$path/torch" "$path")
  [[ -n $torch ]] || fail "$why: neither torch/lib/libtorch_cpu.so nor lib/libtorch_cpu.so is in it: $wanted"
  [[ -e $torch/lib/libtorch_cuda.so ]] || say "$why has no CUDA: the shim is built without CUDA, and finds no GPU"
}

# install: sets `torch` to the installed LibTorch. The program is built without cgo: it then consists of the installer and
# the doctor, so that errors in other packages do not matter. GOOS and GOFLAGS may be for a program that the user builds.
install() {
  command -v go >/dev/null || fail "Go installs LibTorch, and is not in PATH: install Go 1.25 or newer, or set LIBTORCH to an installed LibTorch"
  why=$(cd "$cshim/.." && CGO_ENABLED=0 GOOS="" GOARCH="" GOFLAGS=-buildvcs=false GOWORK=off go run ./cmd/torchstream setup -only-libtorch) || exit 1
  torch=$why/torch
}

# setting NAME VALUE: prints a line of the file.
setting() { printf 'set(TS_%s "%s" CACHE STRING "" FORCE)\n' "$1" "$2"; }

settings() {
  echo "# Written by cshim/setup/libtorch.sh: where LibTorch and CUDA are."
  setting SITE "$site"
  setting TORCH "$torch"
  setting LIBTORCH_VERSION "$version"
  # The next four are empty for a LibTorch without CUDA, for which the shim is built without CUDA too.
  setting CUDA "$cuda"
  setting CUDA_INCLUDE "$include"
  setting CUDA_LIB "$cuda_lib"
  setting CUDART "$cudart"
  setting LIBRARY_PATH "$libraries"
}

(($# == 1)) || { sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2 && exit 2; }
if [[ -n ${LIBTORCH:-} ]]; then find_given; else install; fi
site=${torch%/*} cuda="" include="" cuda_lib="" cudart=""
read_version
check_version
libraries=$torch/lib
if [[ -e $torch/lib/libtorch_cuda.so ]]; then
  find_toolkit
  libraries+=";$cuda_lib"
  for folder in "$site"/nvidia/*/lib; do
    [[ $folder == "$site/nvidia/cu13/lib" ]] || libraries+=";$folder"
  done
fi

text=$(settings)
[[ ! -e $1 || $(<"$1") != "$text" ]] || exit 0
[[ $1 == */* ]] && build=${1%/*} || build=.
mkdir -p "$build"
rm -rf "$build/CMakeCache.txt" "$build/build.ninja" "$build/CMakeFiles"
printf '%s\n' "$text" >"$1.new"
mv "$1.new" "$1"
