#!/usr/bin/env bash
# Installs the system packages that building torchstream needs, with apt as root. For other users it names the packages.
#
#   packages.sh [image | lint | tidy]
#
# image installs only the packages that libtorchstream_image needs. lint and tidy also install clang-format and clang-tidy.
set -euo pipefail

fail() {
  echo "packages: error: $*" >&2
  exit 1
}

[[ $(uname -sm) == "Linux x86_64" ]] || fail "torchstream runs on Linux x86-64, this is $(uname -sm)"
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[[ $here =~ [[:space:]] ]] && fail "$here: compiler flags cannot carry spaces; clone into a folder without them"

have() { command -v "$1" >/dev/null 2>&1; }

# The C++ side itself needs Go only to install LibTorch.
if have go; then
  # Go 1.21 and newer download the Go version that go.mod asks for; older versions cannot read the file.
  go=$(GOTOOLCHAIN=local go version | sed -n 's/.* go1\.\([0-9]*\).*/\1/p')
  ((${go:-99} >= 21)) || fail "$(command -v go) is Go 1.$go: install Go 1.25 or newer, or put it first in PATH"
elif [[ ${1:-} != image && -z ${LIBTORCH:-} ]]; then
  fail "Go, which installs LibTorch, is not in PATH: install Go 1.25 or newer, or set LIBTORCH to an installed LibTorch"
fi

missing=()
have g++ || missing+=(g++)
have make || missing+=(make)
have cmake || missing+=(cmake)
have ninja || missing+=(ninja-build)
# Looks for headers in the compiler's folders; the packages also have the static libraries.
headers=(jpeglib.h:libjpeg-dev png.h:libpng-dev webp/decode.h:libwebp-dev zlib.h:zlib1g-dev)
[[ ${1:-} == image ]] || headers+=(gtest/gtest.h:libgtest-dev)
for pair in "${headers[@]}"; do
  header=${pair%%:*}
  [[ -e /usr/include/$header || -e /usr/include/x86_64-linux-gnu/$header || -e /usr/local/include/$header ]] ||
    missing+=("${pair##*:}")
done
case ${1:-} in
  lint)
    have clang-format || missing+=(clang-format)
    have python3 || missing+=(python3) # tools/lint
    ;;
  tidy) have clang-tidy || missing+=(clang-tidy) ;;
esac
[[ ${1:-} == image ]] || have pkg-config || missing+=(pkg-config) # tools/test-install.sh

if ((${#missing[@]} > 0)); then
  have apt-get || fail "missing: ${missing[*]} (Debian's names): install them with your system's package manager"
  if ((EUID != 0)); then
    fail "missing system packages; run: sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}"
  fi
  echo "packages: installing ${missing[*]}" >&2
  export DEBIAN_FRONTEND=noninteractive
  apt=(apt-get -qq -o DPkg::Lock::Timeout=300 -o APT::Get::Assume-Yes=true -o Dpkg::Use-Pty=0)
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  for step in update "install --no-install-recommends ${missing[*]}"; do
    # shellcheck disable=SC2086 # the words of a step are its arguments
    if ! "${apt[@]}" $step </dev/null >"$log" 2>&1; then
      tail -n 15 "$log" | sed 's/^/  | /' >&2
      fail "apt-get $step failed (above): check the network and apt's sources, or install by hand: ${missing[*]}"
    fi
  done
fi

version=$(cmake --version | sed -n '1s/[^0-9]*\([0-9]*\.[0-9]*\).*/\1/p')
if ((${version%%.*} < 3 || (${version%%.*} == 3 && ${version##*.} < 25))); then
  fail "CMake $version is too old, 3.25 or newer is needed: remove it from PATH in favour of the distribution's, or update it"
fi
