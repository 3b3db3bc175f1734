#!/usr/bin/env bash
# Configures and builds the C++ side. Does nothing, in well under a second, when nothing changed.
#
#   shim.sh [BUILD_FOLDER [CMAKE_OPTION...]] [-- TARGET...]
#
# BUILD_FOLDER defaults to cshim/build. JOBS=N overrides the number of compilations at a time.
set -euo pipefail
cshim=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=${1:-$cshim/build}
shift || true
options=() targets=()
while (($# > 0)) && [[ $1 != -- ]]; do options+=("$1") && shift; done
if (($# > 0)); then shift && targets=(--target "$@"); fi

mkdir -p "$build"
# Two builds of one clone at a time would tread on each other: the second waits.
exec 9>"$build/.lock"
flock -n 9 || { echo "shim: another build is at work in $build, waiting for it" >&2; flock 9; }

# A translation unit that includes LibTorch's headers takes up to 2 GB.
if [[ -z ${JOBS:-} ]]; then
  JOBS=$(nproc)
  memory=$(($(sed -n 's/MemAvailable: *\([0-9]*\) kB/\1/p' /proc/meminfo) / 2000000))
  ((memory >= JOBS)) || JOBS=$((memory > 1 ? memory : 1))
fi

if [[ " ${options[*]-} " != *" -DTS_IMAGE_ONLY=ON "* && " ${options[*]-} " != *" -DTS_SANITIZE=ON "* ]]; then
  python3 "$cshim/setup/libtorch.py" cmake "$build/libtorch.cmake"
fi
log=$build/configure.log
if [[ ! -e $build/build.ninja || "${options[*]-}" != "$(cat "$build/.options" 2>/dev/null)" ]]; then
  echo "shim: configuring (log: $log)" >&2
  if ! cmake -S "$cshim" -B "$build" -G Ninja "${options[@]}" >"$log" 2>&1 </dev/null; then
    rm -f "$build/build.ninja"
    tail -n 25 "$log" | sed 's/^/  | /' >&2
    echo "shim: error: CMake could not configure the C++ side (above, whole log in $log)." \
      "Cure: what the message names; after a compiler or LibTorch change, delete $build and run make again" >&2
    exit 1
  fi
  echo "${options[*]-}" >"$build/.options"
fi
quiet() { grep --line-buffered -vE 'no work to do|Re-checking globbed|GLOB mismatch|Configuring done|Generating done|Build files|Entering directory' || true; }
[[ -t 2 ]] && quiet() { cat; }
export NINJA_STATUS='shim: [%f/%t, %es] '
if ! ninja -C "$build" -j "$JOBS" "${targets[@]:1}" </dev/null 2>&1 | quiet >&2; then
  echo "shim: error: the C++ side does not compile (the compiler's message is above). Cure: fix the source that it names;" \
    "after a compiler or LibTorch change, delete $build and run make again" >&2
  exit 1
fi
