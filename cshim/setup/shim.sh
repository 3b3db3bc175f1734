#!/usr/bin/env bash
# Configures and builds the C++ side. Returns in well under a second if nothing changed.
#
#   shim.sh [--image] [BUILD_FOLDER [CMAKE_OPTION...]] [-- TARGET...]
#
# --image builds the part that needs no LibTorch, and does not install LibTorch. A build folder that is configured with
# LibTorch keeps it. BUILD_FOLDER defaults to cshim/build, TARGET to the libraries. JOBS=N sets the number of concurrent
# compilations.
set -euo pipefail
cshim=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
image=0
if [[ ${1:-} == --image ]]; then image=1 && shift; fi
build=$cshim/build
if (($# > 0)) && [[ $1 != -- ]]; then build=$1 && shift; fi
options=() targets=(all)
while (($# > 0)) && [[ $1 != -- ]]; do options+=("$1") && shift; done
if (($# > 0)); then shift && targets=("$@"); fi

mkdir -p "$build"
build=$(cd "$build" && pwd)
# Two concurrent builds in one folder would overwrite each other's files, so the second waits.
exec 9>"$build/.lock"
flock -n 9 || { echo "shim: waiting for another build in $build" >&2; flock 9; }

# A copied or moved clone has a build folder that names the sources of the original.
if [[ -e $build/CMakeCache.txt ]] && ! { grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$cshim" "$build/CMakeCache.txt" &&
  grep -qxF "CMAKE_CACHEFILE_DIR:INTERNAL=$build" "$build/CMakeCache.txt"; }; then
  echo "shim: $build was configured for another folder: deleting its contents" >&2
  find "$build" -mindepth 1 -maxdepth 1 ! -name .lock -exec rm -rf {} +
fi

# Compiling a source that includes LibTorch's headers takes up to 2 GB of memory.
if [[ -z ${JOBS:-} ]]; then
  JOBS=$(nproc)
  memory=$(($(sed -n 's/MemAvailable: *\([0-9]*\) kB/\1/p' /proc/meminfo) / 2000000))
  ((memory >= JOBS)) || JOBS=$((memory > 1 ? memory : 1))
fi

# Passes every option each time, because CMake keeps the options of earlier calls.
sanitize=OFF
[[ " ${options[*]-} " != *" -DTS_SANITIZE=ON "* ]] || image=1 sanitize=ON
if ((image)) && [[ -e $build/build.ninja && -e $build/libtorch.cmake ]]; then
  image=0 # this configuration includes the image library
elif ((!image)); then
  "$cshim/setup/libtorch.sh" "$build/libtorch.cmake"
fi
options=(-DTS_IMAGE_ONLY="$( ((image)) && echo ON || echo OFF)" -DTS_SANITIZE="$sanitize" "${options[@]}")

log=$build/configure.log
configured() {
  [[ -e $build/build.ninja && "${options[*]}" == "$(cat "$build/.options" 2>/dev/null)" ]] || return 1
  # CMake configures the tests only if GoogleTest is installed.
  [[ " ${targets[*]} " != *" ts_tests "* ]] || grep -q '^build bin/image_jpeg_test:' "$build/build.ninja"
}
if ! configured; then
  echo "shim: configuring (log: $log)" >&2
  if ! cmake -S "$cshim" -B "$build" -G Ninja "${options[@]}" >"$log" 2>&1 </dev/null; then
    rm -f "$build/build.ninja"
    tail -n 25 "$log" | sed 's/^/  | /' >&2
    echo "shim: error: CMake could not configure the C++ side (above, whole log in $log)." \
      "Cure: what the message names; after a compiler or LibTorch change, delete $build and run make again" >&2
    exit 1
  fi
  echo "${options[*]}" >"$build/.options"
  configured || { echo "shim: error: GoogleTest is not installed: run cshim/setup/packages.sh" >&2 && exit 1; }
fi
quiet() { grep --line-buffered -vE 'no work to do|Re-checking globbed|GLOB mismatch|Configuring done|Generating done|Build files|Entering directory' || true; }
[[ -t 2 ]] && quiet() { cat; }
export NINJA_STATUS='shim: [%f/%t, %es] '
if ! ninja -C "$build" -j "$JOBS" "${targets[@]}" </dev/null 2>&1 | quiet >&2; then
  echo "shim: error: the C++ side does not compile (the compiler's message is above). Cure: fix the source that it names;" \
    "after a compiler or LibTorch change, delete $build and run make again" >&2
  exit 1
fi
