#!/usr/bin/env bash
# Runs the tests that need Python's torch: each has to run and to pass, where `go test` skips them without it.
#
#   test-pytorch.sh           run the tests
#   test-pytorch.sh python    print the Python that they would run in, and fail if there is none
#
# The Python's version is that of LibTorch's wheel, 3.12: python3.12, python3, or one of pyenv's. Its torch is the LibTorch
# that `torchstream setup` installs, and what torch imports is installed once, beside it, from tools/test-pytorch.lock.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
  echo "test-pytorch: error: $*" >&2
  exit 1
}

find_python() {
  local program
  for program in python3.12 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python3; do
    if "$program" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; then
      command -v "$program"
      return
    fi
  done
  fail "no Python 3.12 with venv, for which LibTorch's wheel is: apt-get install python3.12-venv where there is such a package"
}

python=$(find_python)
if [[ ${1:-} == python ]]; then
  echo "$python"
  exit
fi

site=$(make -s libtorch-path)
lock=tools/test-pytorch.lock
cache=${TORCHSTREAM_CACHE:-$HOME/.cache/torchstream}
venv=$cache/pytorch-tests-$(sha256sum "$lock" | cut -c1-12)
mkdir -p "$cache"
exec 9>"$venv.lock"
flock 9
if [[ ! -e $venv/complete ]]; then
  echo "test-pytorch: installing what torch imports into $venv (once)" >&2
  rm -rf "$venv"
  unset PYTHONHOME PYTHONPATH PIP_TARGET PIP_USER PIP_PREFIX PIP_REQUIRE_VIRTUALENV PIP_CONSTRAINT
  "$python" -m venv "$venv"
  "$venv/bin/python3" -m pip install -q --disable-pip-version-check --no-input --no-deps --only-binary=:all: --require-hashes -r "$lock"
  touch "$venv/complete"
fi
flock -u 9

export PYTHONPATH=$site TORCHSTREAM_PYTHON=$venv/bin/python3 PATH=$venv/bin:$PATH
"$TORCHSTREAM_PYTHON" -c 'import torch.distributed.run' || fail "the LibTorch in $site has no torch that Python can import: unset LIBTORCH"

log=$(mktemp)
trap 'rm -f "$log"' EXIT
# A line has a package and its tests. Packages run concurrently: Python takes seconds to import torch, on one core.
packages=() tests=()
while read -ra line; do
  packages+=("${line[0]}") tests+=("${line[@]:1}")
done <<'TESTS'
./checkpoint/internal/ptfile TestPyTorchReadsWhatIsWritten
./checkpoint TestPyTorchLoadsCheckpoints TestPyTorchReadsDividedCheckpoints
./optim TestPyTorchLoadsOptimizers TestTwentyStepsMatchPyTorchInTheSameRun
./train TestGeneratorsInPyTorch
./distributed TestTorchrunLaunches
./examples/11-distributed TestTorchrunRestarts TestTorchrunScales
TESTS
pattern="^($(IFS='|' && echo "${tests[*]}"))\$"
go test -count=1 -v -run "$pattern" "${packages[@]}" | tee "$log" | grep -vE '^(===|    ---)' || fail "a test has failed (above)"
for name in "${tests[@]}"; do
  grep -q "^--- PASS: $name " "$log" || fail "$name has not passed"
done
if grep -q -- '--- SKIP' "$log"; then fail "a test was skipped"; fi
