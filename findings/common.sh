# Sourced by the scripts of this folder: makes a temporary folder $scratch, and changes to it.
#
#   packages NAME==VERSION...   installs the packages with pip
#   py                          runs the Python program on standard input
#   expect WANT GOT             fails, saying got and want, if the two differ
#
# PYTHON is the interpreter (default python3). VENV=DIR keeps the environment in DIR (default: a temporary folder).
name=$(basename "$0" .sh)
scratch=$(cd "$(mktemp -d)" && pwd -P)
trap 'rm -rf "$scratch"' EXIT
venv=${VENV:-$scratch/venv}
[[ $venv == /* ]] || venv=$PWD/$venv
mkdir "$scratch/work"
cd "$scratch/work"

packages() {
  [[ -x $venv/bin/python ]] || "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

py() { "$venv/bin/python" -; }

expect() {
  if [[ $2 != "$1" ]]; then
    printf '%s: error: the behaviour has changed\n got: %s\nwant: %s\n' "$name" "$2" "$1" >&2
    exit 1
  fi
  echo "$name: $2"
}
