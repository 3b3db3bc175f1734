#!/usr/bin/env bash
# Runs README.md's program in a bare Debian or Ubuntu, with Go and without a clone, by the commands that README.md has for that, and
# prints what each takes. The module comes from this tree, as a file that the go command takes for a module proxy. Needs root
# and the distribution's mirror.
#
#   no-clone-test.sh [ARCHIVE]     ARCHIVE is a release archive: the libraries are unpacked, not built
#
# SUITE=bookworm is the release; with noble or jammy the mirror is Ubuntu's. BASE= is a folder with the system, which is
# copied, instead of one that debootstrap makes. SCRATCH= is a folder with 15 GB free
# (default: TMPDIR).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
((EUID == 0)) || { echo "no-clone-test: error: debootstrap needs root" >&2 && exit 1; }
suite=${SUITE:-bookworm}
mirror=http://deb.debian.org/debian options=(--variant=minbase --include=ca-certificates) script=()
case $suite in
  noble | jammy)
    mirror=http://archive.ubuntu.com/ubuntu
    options+=("--components=main,universe")
    script=(/usr/share/debootstrap/scripts/gutsy) # the script of every Ubuntu; an old debootstrap does not know new names
    ;;
esac
scratch=$(mktemp -d -p "${SCRATCH:-${TMPDIR:-/tmp}}")
trap 'rm -rf "$scratch"' EXIT
root=$scratch/root version=v0.1.0-test
step() { printf 'no-clone-test: %4d s  %5d MB  %s\n' "$SECONDS" "$(du -sm "$root" | cut -f1)" "$*" >&2; }

if [[ -n ${BASE:-} ]]; then
  cp -a "$BASE" "$root"
else
  debootstrap "${options[@]}" "$suite" "$root" "$mirror" "${script[@]}" >"$scratch/log" 2>&1 || { tail -n 5 "$scratch/log" >&2 && exit 1; }
fi
cp /etc/resolv.conf "$root/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/" # this machine may trust more authorities
step "$suite"
cp -a "$(go env GOROOT)" "$root/usr/local/go"
step "Go"

# The module proxy is a folder: GOPROXY=file://. The zip has what git has, and what is changed or new.
module=$(go list -m)
proxy=$root/modules/$module/@v
mkdir -p "$proxy" "$scratch/zip/$module@$version"
git -c safe.directory='*' ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
  [[ ! -f $file || -L $file ]] || printf '%s\0' "$file"
done | tar --null --files-from=- -cf - | tar -C "$scratch/zip/$module@$version" -xf -
# Folders with a go.mod of their own are other modules.
find "$scratch/zip/$module@$version" -mindepth 2 -name go.mod -printf '%h\0' | xargs -0 -r rm -rf
(cd "$scratch/zip" && python3 -c 'import shutil, sys; shutil.make_archive(sys.argv[1], "zip", ".", sys.argv[2])' "$proxy/$version" "$module@$version")
cp go.mod "$proxy/$version.mod"
echo "{\"Version\":\"$version\"}" >"$proxy/$version.info"
echo "$version" >"$proxy/list"
rm -rf "$scratch/zip"
# The newest version is asked for with @latest, which a pre-release is if there is no other.

inside() {
  # shellcheck disable=SC2016 # the inner shell expands these
  unshare --mount --pid --fork bash -euc '
    root=$1
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    mount --rbind /sys "$root/sys"
    exec env -i PATH=/usr/local/go/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root DEBIAN_FRONTEND=noninteractive \
      SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt GOTOOLCHAIN=local GOSUMDB=off GOFLAGS=-modcacherw \
      GOPROXY="file:///modules,$3" "$(command -v chroot)" "$root" bash -euc "mkdir -p /program && cd /program && $2"' \
    bash "$root" "$1" "$(go env GOPROXY)"
}

# The program and the commands of README.md.
mkdir -p "$root/program"
sed -n '1,/^```go$/!p' README.md | sed '/^```$/,$d' >"$root/program/main.go"
sed -i 's/range 5 {/range 2 {/' "$root/program/main.go" # epochs
grep -q 'func main' "$root/program/main.go" || { echo "no-clone-test: error: README.md has no program" >&2 && exit 1; }
cp examples/data/photos-train.tgz "$root/program/train.tgz"
mapfile -t commands < <(sed -n '/in an empty folder, and without a clone/,/^    go run \.$/s/^    //p' README.md)
((${#commands[@]} == 5)) || { echo "no-clone-test: error: README.md has ${#commands[@]} commands for a program without a clone, not 5" >&2 && exit 1; }
if (($# > 0)); then
  cp "$1" "$1.sha256" "$root/opt/"
  commands[0]="apt-get install -y gcc libc6-dev"
  commands[1]+=" -from /opt/${1##*/}"
fi
for command in "${commands[@]}"; do
  inside "$command" >"$scratch/log" 2>&1 || { tail -n 20 "$scratch/log" >&2 && echo "no-clone-test: error: $command" >&2 && exit 1; }
  step "$command"
done
tail -n 5 "$scratch/log"
