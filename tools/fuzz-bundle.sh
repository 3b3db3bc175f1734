#!/usr/bin/env bash
# Makes fuzz-bundle/ with all fuzzers, their corpora and their seeds, and run.sh, which runs them here or on a larger machine
# that has neither clang nor Go. The C++ fuzzers use libFuzzer with the address and undefined-behaviour sanitizers.
#
# FUZZ_SEEDS=DIR   more seeds: DIR/TARGET/files (as run.sh leaves them in $OUT/corpus)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=fuzz-bundle/.payload
limit_mib=60 # maximum size that can be sent to a remote machine at once
say() { echo "fuzz-bundle: $*" >&2; }

clang=${CLANG:-}
for name in clang++ clang++-{20..14}; do
  [[ -n $clang ]] || ! command -v "$name" >/dev/null || clang=$name
done
[[ -n $clang ]] || { say "error: no clang++: apt-get install clang (with libclang-rt-*-dev, which has libFuzzer)" && exit 1; }

rm -rf fuzz-bundle
mkdir -p "$out"/{bin,lib,corpus,tree}
say "libFuzzer programs"
cshim/setup/shim.sh cshim/build-fuzz -DTS_FUZZ=ON -DTS_SANITIZE=ON -DCMAKE_CXX_COMPILER="$clang" -- ts_fuzzers
cp cshim/build-fuzz/bin/*_fuzz "$out/bin/"
cp cshim/test/fuzz/words.dict "$out/"
for program in "$out"/bin/*_fuzz; do
  name=$(basename "$program")
  mkdir -p "$out/corpus/$name"
  find "cshim/test/fuzz/corpus/$name" -type f -exec cp -t "$out/corpus/$name" {} + 2>/dev/null || true
  case $name in
    jpeg_fuzz) cp cshim/test/data/*.jpg "$out/corpus/$name/" ;;
    png_fuzz) cp cshim/test/data/*.png "$out/corpus/$name/" ;;
    webp_fuzz) cp cshim/test/data/*.webp "$out/corpus/$name/" ;;
    follow_fuzz) python3 cshim/test/fuzz/seeds.py inflate_fuzz "$out/corpus/$name" cshim/test/data ;;
    entries_fuzz | exif_fuzz | inflate_fuzz) python3 cshim/test/fuzz/seeds.py "$name" "$out/corpus/$name" cshim/test/data ;;
  esac
done

say "Go fuzzers"
cp cshim/build/lib/libtorchstream_image.so "$out/lib/"
strip --strip-unneeded "$out/lib/libtorchstream_image.so"
# go-targets has the package of each fuzzer. Its test program is tree/PACKAGE/fuzz.test, beside its testdata.
grep -rE '^func Fuzz[A-Za-z]+' --include='*_test.go' imageloader checkpoint/internal/ptfile | sed -E 's|^(.*)/[^/]*:func (Fuzz[A-Za-z]+).*|\2 \1|' | sort >"$out/go-targets"
cut -d' ' -f2 "$out/go-targets" | sort -u | while read -r package; do
  mkdir -p "$out/tree/$package/testdata"
  go test -c -fuzz=Fuzz -trimpath -ldflags '-s -w' -o "$out/tree/$package/fuzz.test" "./$package"
  cp -R "$package/testdata/." "$out/tree/$package/testdata/"
done
cut -d' ' -f1 "$out/go-targets" | while read -r name; do mkdir -p "$out/corpus/$name"; done

if [[ -n ${FUZZ_SEEDS:-} ]]; then
  for folder in "$out"/corpus/*; do
    find "$FUZZ_SEEDS/$(basename "$folder")" -type f -exec cp -t "$folder" {} + 2>/dev/null || true
  done
fi
find "$out/lib" "$out/tree" -name '*.so' -o -name fuzz.test | while read -r file; do
  cmake -DBINARY="$PWD/$file" -P tools/remove_rpath.cmake >/dev/null
done
git describe --always --dirty --abbrev=12 >"$out/VERSION" 2>/dev/null || echo unknown >"$out/VERSION"
tar -C "$out" --sort=name --owner=0 --group=0 -cf - . | gzip -6 >fuzz-bundle/payload.tar.gz
rm -rf "$out"
cp tools/fuzz-run.sh fuzz-bundle/run.sh
size=$(du -sm fuzz-bundle | cut -f1)
((size <= limit_mib)) || { say "error: fuzz-bundle is $size MiB, more than $limit_mib" && exit 1; }
say "fuzz-bundle is ready ($size MiB): fuzz-bundle/run.sh, here or elsewhere"
