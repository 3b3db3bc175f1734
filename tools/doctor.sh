#!/usr/bin/env bash
# Shows what this machine has, what is missing and how to get it, before anything is built. It needs only bash, and uses
# other programs if it finds them. If the shim is built, `torchstream doctor` follows and tests the parts that are ok here.
#
# It prints a row for each requirement: ok, note (works, but a part is absent) or missing.
#
# The exit status is 1 if a requirement is missing. A GPU is not a requirement.
set -uo pipefail
root=$(cd "${BASH_SOURCE[0]%/*}/.." && pwd)

states=() names=() found=() cures=()
missing=0
row() { # STATE NAME FOUND [CURE]: adds a row; STATE is ok, note (works, but a part is absent) or missing
  states+=("$1") names+=("$2") found+=("$3") cures+=("${4-}")
  [[ $1 != missing ]] || missing=$((missing + 1))
}
have() { command -v "$1" >/dev/null 2>&1; }
# first_line COMMAND...: prints the first line of the command's output.
first_line() {
  local line=
  IFS= read -r line < <("$@" 2>&1) || true
  printf '%s' "$line"
}
# at_least VERSION WANTED: compares two versions of the form MAJOR.MINOR...
at_least() {
  local major=${1%%.*} minor=${1#*.}
  minor=${minor%%.*}
  ((major > ${2%%.*} || (major == ${2%%.*} && minor >= ${2#*.})))
}
# free_gb FOLDER: prints the free disk space at the nearest existing parent in GB, or nothing if it is unknown.
free_gb() {
  local folder=$1 kb
  while [[ ! -d $folder && $folder == */* ]]; do folder=${folder%/*}; done
  have df || return 0
  { read -r _ && read -r _ _ _ kb _; } < <(df -Pk "${folder:-/}" 2>/dev/null) && printf '%d' $((kb / 1000000))
}

install='`make setup` as root, or: apt-get install'

system() {
  if [[ $OSTYPE == linux* && $HOSTTYPE == x86_64 ]]; then
    row ok system "Linux $HOSTTYPE"
  else
    row missing system "$OSTYPE $HOSTTYPE" "torchstream runs on Linux x86-64"
  fi
  if [[ $root =~ [[:space:]] ]]; then
    row missing clone "$root" "compiler flags cannot carry spaces: clone into a folder without them"
  else
    row ok clone "$root"
  fi
}

go_tools() {
  if ! have go; then
    row missing Go "not in PATH" "install Go 1.25 or newer: https://go.dev/dl"
    return
  fi
  local version
  version=$(GOTOOLCHAIN=local first_line go version)
  if [[ ! $version =~ go1\.([0-9]+)([^ ]*) ]]; then
    row missing Go "$version" "install Go 1.25 or newer: https://go.dev/dl"
  elif ((BASH_REMATCH[1] >= 25)); then
    row ok Go "1.${BASH_REMATCH[1]}${BASH_REMATCH[2]}"
  elif ((BASH_REMATCH[1] >= 21)); then
    row note Go "1.${BASH_REMATCH[1]}${BASH_REMATCH[2]}" "it fetches the Go that go.mod asks for, which needs the network"
  else
    row missing Go "1.${BASH_REMATCH[1]}${BASH_REMATCH[2]}" "install Go 1.25 or newer: https://go.dev/dl"
  fi
}

python() {
  if ! have python3; then
    row missing Python "python3 is not in PATH" "apt-get install python3 python3-venv"
    return
  fi
  local version
  version=$(first_line python3 --version)
  version=${version#Python }
  if [[ ! $version =~ ^[0-9]+\.[0-9]+ ]] || ! at_least "$version" 3.9; then
    row missing Python "$version" "3.9 or newer is needed: put it first in PATH"
  elif [[ ! -e ${VIRTUAL_ENV:-/nonexistent}/bin/pip ]] && ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
    row missing Python "$version without venv" "$install python3-venv"
  else
    row ok Python "$version, with venv"
  fi
}

# tool NAME CURE: adds a row for a program that must be in PATH.
tool() {
  if have "$1"; then
    row ok "$1" "$(first_line "$1" --version)"
  else
    row missing "$1" "not in PATH" "$2"
  fi
}

compilers() {
  tool g++ "$install g++"
  tool make "apt-get install make"
  if have cmake; then
    local version
    version=$(first_line cmake --version)
    version=${version##* }
    if [[ $version =~ ^[0-9]+\.[0-9]+ ]] && at_least "$version" 3.25; then
      row ok cmake "$version"
    else
      row missing cmake "$version" "3.25 or newer is needed: update it, or put a newer one first in PATH"
    fi
  else
    row missing cmake "not in PATH" "$install cmake"
  fi
  tool ninja "$install ninja-build"
}

# in_folders FILE FOLDER...: prints the first FOLDER/FILE that exists.
in_folders() {
  local file=$1 folder
  shift
  for folder in "$@"; do
    [[ ! -e $folder/$file ]] || { printf '%s' "$folder/$file" && return; }
  done
}

codecs() {
  local includes=(/usr/local/include /usr/include /usr/include/x86_64-linux-gnu)
  local libraries=(/usr/local/lib /usr/lib/x86_64-linux-gnu /usr/lib64 /usr/lib)
  local line name header library package
  for line in "JPEG jpeglib.h libjpeg.a libjpeg-dev" "PNG png.h libpng.a libpng-dev" "WebP webp/decode.h libwebp.a libwebp-dev" \
    "zlib zlib.h libz.a zlib1g-dev" "GoogleTest gtest/gtest.h libgtest.a libgtest-dev"; do
    read -r name header library package <<<"$line"
    local lacks=()
    [[ -n $(in_folders "$header" "${includes[@]}") ]] || lacks+=("$header")
    [[ -n $(in_folders "$library" "${libraries[@]}") ]] || lacks+=("$library")
    if ((${#lacks[@]} == 0)); then
      row ok "$name" "$header, $library"
    else
      row missing "$name" "no ${lacks[*]}" "$install $package"
    fi
  done
}

optional() {
  local lacks=()
  have ccache || lacks+=("ccache (faster rebuilds)")
  have clang-format || lacks+=("clang-format (make lint)")
  have clang++ || lacks+=("clang (make fuzz)")
  if ((${#lacks[@]} == 0)); then
    row ok optional "ccache, clang-format, clang"
  else
    local text
    printf -v text '%s, ' "${lacks[@]}"
    row note optional "not installed: ${text%, }"
  fi
}

libtorch() {
  if [[ -n ${LIBTORCH:-} ]]; then
    local folder
    for folder in "$LIBTORCH/torch" "$LIBTORCH"; do
      if [[ -e $folder/lib/libtorch_cuda.so ]]; then
        row ok LibTorch "LIBTORCH=$LIBTORCH"
        return
      elif [[ -e $folder/lib/libtorch_cpu.so ]]; then
        row note LibTorch "LIBTORCH=$LIBTORCH, which has no CUDA" "the shim is built without CUDA too, and uses no GPU"
        return
      fi
    done
    row missing LibTorch "LIBTORCH=$LIBTORCH has no lib/libtorch_cpu.so" \
      "give site-packages, its torch folder or an unpacked libtorch zip, or unset LIBTORCH to have it installed"
    return
  fi
  local cache=${TORCHSTREAM_CACHE:-${HOME:-/root}/.cache/torchstream} target="" stamp
  if have python3; then # the folder's name has the digest of the lock
    target=$(cd "$root/cshim/setup" && python3 -B -c 'import sys; sys.path.insert(0, "."); import libtorch; print(libtorch.cached(sys.argv[1]))' "$cache" 2>/dev/null)
  fi
  if [[ -n $target && -e $target/.torchstream-complete ]]; then
    row ok LibTorch "$target"
    return
  fi
  if [[ -z $target ]]; then
    for stamp in "$cache"/libtorch-*/.torchstream-complete; do
      if [[ -e $stamp ]]; then
        row note LibTorch "${stamp%/*}" "only Python can say whether it is the locked version"
        return
      fi
    done
  fi
  local free
  free=$(free_gb "$cache")
  if [[ -n $free ]] && ((free < 8)); then
    row missing LibTorch "not in $cache, and $free GB are free there" \
      "its installation needs 8 GB: free space, set TORCHSTREAM_CACHE to a folder on a larger disk, or LIBTORCH to an installed one"
  else
    row missing LibTorch "not in $cache${free:+, where $free GB are free}" "\`make shim\` installs it there (2.6 GB to download), or set LIBTORCH to an installed one"
  fi
}

disk() {
  local free
  free=$(free_gb "$root")
  if [[ -z $free ]]; then
    row note disk "unknown: df is not in PATH"
  elif ((free < 1)); then
    row missing disk "less than 1 GB free in $root" "a build takes 1 GB: free space"
  else
    row ok disk "$free GB free in $root"
  fi
}

gpu() {
  local version="" line device gpus=""
  if [[ -r /proc/driver/nvidia/version ]]; then
    read -r line </proc/driver/nvidia/version
    [[ $line =~ [[:space:]]([0-9]{3}\.[0-9.]+) ]] && version=${BASH_REMATCH[1]}
  fi
  if have nvidia-smi; then
    while IFS= read -r device; do
      gpus+=${gpus:+, }$device
    done < <(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null)
  fi
  if [[ -z $version && ! -e /dev/nvidiactl ]]; then
    row note GPU "no NVIDIA driver" "everything runs on the CPU; for a GPU install the NVIDIA driver 580 or newer"
  elif [[ -n $version ]] && ((${version%%.*} < 580)); then
    row missing GPU "NVIDIA driver $version${gpus:+: $gpus}" "CUDA 13 needs the driver 580 or newer: update it"
  elif [[ -z $gpus ]]; then
    row note GPU "NVIDIA driver ${version:-of unknown version}, but nvidia-smi names no GPU" "run nvidia-smi, and look at CUDA_VISIBLE_DEVICES and at /dev/nvidia*"
  else
    row ok GPU "NVIDIA driver ${version:-of unknown version}: $gpus"
  fi
}

# built NAME LIBRARY TARGET SOURCE...: adds a row for a library that `make TARGET` builds from these files and folders of cshim/.
built() {
  local name=$1 library=$root/cshim/build/lib/$2 target=$3 build=$root/cshim/build line home=""
  shift 3
  if [[ ! -e $library ]]; then
    row missing "$name" "not built" "\`make $target\`"
    return
  fi
  if [[ -r $build/CMakeCache.txt ]]; then
    while IFS= read -r line; do
      [[ $line != CMAKE_HOME_DIRECTORY:INTERNAL=* ]] || home=${line#*=}
    done <"$build/CMakeCache.txt"
  fi
  if [[ -n $home && ! $home -ef $root/cshim ]]; then
    row missing "$name" "$build was configured for $home, the sources of another clone" "\`make $target\`"
    return
  fi
  local source file newer=()
  shopt -s globstar nullglob
  for source in "$@"; do
    for file in "$root/cshim/$source" "$root/cshim/$source"/**; do
      [[ -f $file && $file -nt $library ]] && newer+=("${file#"$root/"}")
    done
  done
  if ((${#newer[@]} > 0)); then
    row note "$name" "older than ${#newer[@]} of its sources, such as ${newer[0]}" "\`make $target\`"
  elif [[ -z $home ]]; then
    row note "$name" "$library, built elsewhere: there is no CMakeCache.txt" "\`make $target\` builds this clone's own"
  else
    row ok "$name" "$library"
  fi
}

libraries() {
  local image_headers
  image_headers=$(sed -n 's|^#include "\(torchstream/.*\)"$|include/\1|p' "$root/cshim/include/torchstream_image.h")
  # shellcheck disable=SC2086 # a word for each header
  built "image library" libtorchstream_image.so image CMakeLists.txt include/torchstream_image.h $image_headers src/image src/deflate src/base
  built shim libtorchstream.so shim CMakeLists.txt include src/base src/cuda src/torch
}

print() {
  local i width=0
  for i in "${names[@]}"; do ((${#i} <= width)) || width=${#i}; done
  for i in "${!names[@]}"; do
    printf '%-7s  %-*s  %s\n' "${states[i]}" "$width" "${names[i]}" "${found[i]}"
    [[ -z ${cures[i]} ]] || printf '%-7s  %-*s  -> %s\n' "" "$width" "" "${cures[i]}"
  done
}

system
go_tools
python
compilers
codecs
optional
disk
libtorch
gpu
libraries
print

status=0
if ((missing > 0)); then
  printf '\nMissing: %d. `make shim` installs and builds what it can; `make image` builds the part that needs no LibTorch.\n' "$missing"
  status=1
else
  printf '\nEverything that a build needs is installed.\n'
fi
if [[ -e $root/cshim/build/lib/libtorchstream.so ]] && have go; then
  printf '\nReport of torchstream doctor:\n\n'
  (cd "$root" && go run ./cmd/torchstream doctor) || status=1
fi
exit $status
