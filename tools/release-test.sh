#!/usr/bin/env bash
# Makes the release archive twice, in copies of the tree in two folders, without ccache, and fails if one byte differs. Then
# installs it, and builds and runs examples/06-c from it. The copies have all committed, staged and changed files.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
fail() {
  echo "release-test: error: $*" >&2
  exit 1
}
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -c safe.directory='*' log -1 --format=%ct)}
export SOURCE_DATE_EPOCH CCACHE_DISABLE=1 PYTHONDONTWRITEBYTECODE=1
unset LD_LIBRARY_PATH
# The second folder's name is longer, so that an address or a size that depends on it shows.
folders=("$scratch/a" "$scratch/a-folder-with-a-longer-name/below")
for folder in "${folders[@]}"; do
  mkdir -p "$folder"
  git -c safe.directory='*' ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    [[ ! -e $file && ! -L $file ]] || printf '%s\0' "$file"
  done | tar --null --files-from=- -cf - | tar -C "$folder" -xf -
  (cd "$folder" && umask $((RANDOM % 2 ? 22 : 77)) && tools/release.py "$folder/out")
done
first=("${folders[0]}"/out/*.tar.gz) second=("${folders[1]}"/out/*.tar.gz)
cmp "${first[0]}" "${second[0]}" || {
  for i in 0 1; do mkdir "$scratch/$i" && tar -C "$scratch/$i" --strip-components=1 -xf "${folders[i]}"/out/*.tar.gz; done
  diff -r "$scratch/0" "$scratch/1" >&2 || true
  fail "two builds have different bytes: the files above"
}
(cd "${folders[0]}/out" && sha256sum --quiet -c ./*.sha256)

prefix=$scratch/prefix
mkdir "$prefix"
tar -C "$prefix" --strip-components=1 -xf "${first[0]}"
(cd "$prefix" && sha256sum --quiet -c SHA256SUMS)
python3 -m json.tool "$prefix/sbom.cdx.json" >/dev/null || fail "sbom.cdx.json is no JSON"
for library in "$prefix"/lib/*.so; do
  run_path=$(readelf -d "$library" | sed -n 's/.*(RUNPATH).*\[\(.*\)\]/\1/p')
  # shellcheck disable=SC2016 # the loader expands $ORIGIN
  while IFS= read -r -d : folder; do
    [[ $folder == '$ORIGIN' || $folder == '$ORIGIN/'* ]] || fail "$library looks for libraries in $folder"
  done <<<"$run_path:"
  ! readelf -S "$library" | grep -qE '\.(symtab|debug_)' || fail "$library is not stripped"
done
ln -s "$(make -s libtorch-path)" "$prefix/lib/libtorch"
rm -rf "${folders[@]}" # nothing of a build may be needed
export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
cp -R examples/06-c "$scratch/06-c"
make -s -C "$scratch/06-c" CFLAGS=-Werror
"$scratch/06-c/06-c" cshim/test/data/420.jpg
"$scratch/06-c/thumbnail" cshim/test/data/420.jpg >/dev/null
echo "release-test: two builds are the same bytes"
