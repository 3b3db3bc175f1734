#!/usr/bin/env bash
# Checks formatting, layers, headers and symbols, and runs the linters. Runs no tests. Reads the exported symbols of the
# libraries, which must have been built.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bad=0
check() { echo "lint: $*" >&2; }
fail() { echo "lint: error: $*" >&2 && bad=1; }

check "gofmt"
unformatted=$(gofmt -l .)
[[ -z $unformatted ]] || fail "not formatted, run gofmt -w on:"$'\n'"$unformatted"

check "clang-format"
mapfile -t sources < <(find cshim/include cshim/src cshim/test cshim/setup lab/cshim -name '*.h' -o -name '*.cc' -o -name '*.cu' 2>/dev/null)
clang-format --dry-run -Werror "${sources[@]}" 2>/tmp/clang-format.$$ || {
  grep -oE '^[^:]+' /tmp/clang-format.$$ | grep -E '^cshim/' | sort -u
  fail "not formatted, run clang-format -i on the files above"
}
rm -f /tmp/clang-format.$$

check "includes between the C++ sources point down"
python3 tools/lint/cxx_layers.py || fail "includes of the C++ sources are out of order"

check "what stands in for CUDA in a build without it"
python3 tools/lint/nocuda.py || fail "the build without CUDA lacks functions"

check "imports between the Go packages point down"
python3 tools/lint/go_layers.py || fail "imports of the Go packages are out of order"

check "references between the files of imageloader"
python3 tools/lint/file_order.py || fail "the files of imageloader are no ladder"

check "width of lines in Go"
python3 tools/lint/line_width.py || fail "lines above are too wide"

check "phrases that make comments hard to read"
python3 tools/lint/voice.py || fail "comments above have more such phrases than tools/lint/voice_budgets.txt allows"

check "fields of Go structs"
python3 tools/lint/fat_types.py || fail "structs above have too many fields"

check "cyclomatic complexity of Go functions"
python3 tools/lint/complexity.py || fail "functions above are too complex"

check "no anonymous namespace in CUDA sources, whose names would depend on the path of the clone"
anonymous=$(grep -rln --include='*.cu' '^namespace {' cshim/src || true)
[[ -z $anonymous ]] || fail "give the anonymous namespace a name, or releases cannot be reproduced:"$'\n'"$anonymous"

check "each C header alone, as C11 and as C++17"
while IFS= read -r header; do
  for language in c11:c c++17:c++; do
    printf '#include "%s"\n' "$header" |
      cc -std="${language%:*}" -Wall -Wextra -pedantic -Werror -fsyntax-only -Icshim/include -Ilab/cshim/include -x "${language#*:}" - ||
      fail "$header is not plain ${language%:*}, or needs another header before it"
  done
done < <(find cshim/include lab/cshim/include -name '*.h' -printf '%P\n' | sort)

check "every C header belongs to exactly one of the two libraries"
# Prints the headers of include/torchstream that a header includes itself.
parts() { sed -n 's|^#include "\(torchstream/.*\)"$|\1|p' "cshim/include/$1" | sort; }
difference=$(diff <(sort <(parts torchstream.h) <(parts torchstream_image.h)) <(cd cshim/include && find torchstream -name '*.h' | sort) || true)
[[ -z $difference ]] || fail "torchstream.h and torchstream_image.h (<) do not include the headers there are (>), each once:"$'\n'"$difference"

check "how objects end: _free returns nothing, _destroy its error"
wrong=$(grep -hE '^TS_API .*_(free|free_all|destroy)\(' cshim/include/*.h cshim/include/torchstream/*.h |
  grep -vE '^TS_API (void ts_[a-z_]+_(free|free_all)|ts_error\* ts_[a-z_]+_destroy)\(' || true)
[[ -z $wrong ]] || fail "against the rule on ends of torchstream_image.h:"$'\n'"$wrong"

check "exported symbols"
symbols() { nm -D --defined-only "cshim/build/lib/$1" | awk '{print $NF}' | sort -u; }
# Prints the functions that the headers declare.
declared() { sed -n 's/^TS_API .*\b\(ts_[a-z0-9_]*\)(.*/\1/p' "$@" | sort -u; }
compare() { # LIBRARY HEADER...: fails if the library's symbols are not the headers' functions
  local library=$1 difference
  shift
  difference=$(diff <(declared "$@") <(symbols "$library") || true)
  [[ -z $difference ]] || fail "$* (<) and $library (>) differ:"$'\n'"$difference"
}
for library in torchstream_image torchstream; do
  mapfile -t headers < <(printf 'cshim/include/%s\n' "$library.h" $(parts "$library.h"))
  compare "lib$library.so" "${headers[@]}"
done
compare libtorchstream_lab.so lab/cshim/include/torchstream_lab.h

check 'import "C" in two packages, and in one of the lab'
others=$(grep -lE '^import "C"$' -r --include='*.go' . | grep -vE '^\./(internal/(image)?capi/|lab/internal/labcapi/|internal/trampoline/main_test.go$)' || true)
[[ -z $others ]] || fail 'import "C" outside internal/capi, internal/imagecapi and lab/internal/labcapi:'$'\n'"$others"

untagged=$(grep -lE '^import "C"$' internal/capi/*.go internal/imagecapi/*.go | xargs grep -LE '^//go:build linux$' || true)
[[ -z $untagged ]] || fail 'import "C" without //go:build linux, so a Mac with a C compiler would compile it:'$'\n'"$untagged"

check "tests that Makefile and .ci/run list by name"
python3 tools/lint/test_lists.py || fail "a list names tests that do not exist: give it their new names"

check "the Go version that go.mod asks for"
for mod in go.mod lab/go.mod imageloader/prometheus/go.mod imageloader/blob/go.mod serve/prometheus/go.mod serve/opentelemetry/go.mod; do
  grep -qx 'go 1.25.0' "$mod" || fail "$mod asks for another Go version than 1.25.0: remove the dependency that needs a newer one"
done

check "other platforms"
go run ./internal/portable || fail "the module does not compile on the platforms above"

check "go vet"
go vet ./... || fail "go vet"
for module in lab imageloader/prometheus imageloader/blob serve/prometheus serve/opentelemetry; do
  (cd $module && go vet ./...) || fail "go vet in $module"
done
check "the build tag debug"
go vet -tags debug ./internal/origin ./leaks ./torch ./cuda ./prefetcher || fail "go vet -tags debug"
go tool staticcheck -tags debug ./internal/origin ./leaks || fail "staticcheck -tags debug"
check "staticcheck"
go tool staticcheck ./... || fail "staticcheck"
staticcheck=$(go tool -n staticcheck)
for module in lab imageloader/prometheus imageloader/blob serve/prometheus serve/opentelemetry; do
  (cd $module && "$staticcheck" ./...) || fail "staticcheck in $module"
done

((bad == 0)) || exit 1
