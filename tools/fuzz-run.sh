#!/usr/bin/env bash
# Runs the fuzzers of a bundle, each in a process of its own, one for each core at a time.
#
#   run.sh [TARGET...]       TARGET or TARGET=PROCESSES; default: one process each, and two of entries_fuzz and jpeg_fuzz
#
# OUT=DIR        folder for report.txt, logs, findings and grown corpora (default ./out/fuzz)
# FUZZ_TIME=N    seconds for each process (default 60)
# MERGE_TIME=N   seconds to minimise the C++ fuzzers' corpora afterwards (default 60; 0 does not minimise them)
# JOBS=N         number of concurrent processes (default: number of cores)
# FUZZ_PACK=1    write only packed files to OUT
#
# A finding ends neither its own target nor other targets. The exit status is 0 only if there was no finding, and every target
# ran.
set -uo pipefail
bundle=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${OUT:-$PWD/out/fuzz}
mkdir -p "$out" && out=$(cd "$out" && pwd)
seconds=${FUZZ_TIME:-60}
merge=${MERGE_TIME:-60}
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
tar -xzf "$bundle/payload.tar.gz" -C "$here" || exit 2

libraries=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

work=$here/work
mkdir -p "$work/logs" "$work/findings" "$work/corpus"
# The sanitizers of older compilers fail with the address randomisation of newer kernels.
plain=(setarch "$(uname -m)" -R)
"${plain[@]}" true 2>/dev/null || plain=()

max_bytes() {
  case $1 in
    jpeg_fuzz) echo 60000 ;;
    inflate_fuzz) echo 20000 ;;
    png_fuzz | webp_fuzz) echo 12000 ;;
    entries_fuzz) echo 6000 ;;
    *) echo 2000 ;;
  esac
}

# one TARGET NUMBER: runs process NUMBER of the target until the time is over.
one() {
  local target=$1 number=$2 log=$work/logs/$1.$2.log begin=$SECONDS left round=0
  TIMEFORMAT='cpu %U %S'
  while left=$((seconds - (SECONDS - begin))) && ((left >= 5 && round < 30)); do
    round=$((round + 1))
    if [[ $target == *_fuzz ]]; then
      mkdir -p "$work/corpus/$target" "$work/findings/$target"
      time "${plain[@]}" "$here/bin/$target" -max_total_time="$left" -max_len="$(max_bytes "$target")" -timeout=20 -rss_limit_mb=3000 \
        -use_value_profile=$((number % 2 == 0)) -dict="$here/words.dict" -print_final_stats=1 -artifact_prefix="$work/findings/$target/" \
        "$work/corpus/$target" "$here/corpus/$target" </dev/null
    else
      # Each process has its own folder, because Go writes a finding into testdata.
      # Other packages' testdata lies at the same place beside it as in the repository.
      local name package folder root=$here/go/$target.$number
      name=$(sed -n "s/^$target //p" "$here/go-targets")
      package=$here/tree/$name folder=$root/$name
      if [[ ! -e $folder/testdata ]]; then
        mkdir -p "$folder" && cp -R "$package/testdata" "$folder/"
        mkdir -p "$root/imageloader"
        [[ -e $root/imageloader/testdata ]] || ln -s "$here/tree/imageloader/testdata" "$root/imageloader/testdata"
      fi
      mkdir -p "$folder/testdata/fuzz/$target" "$work/corpus/$target"
      cp -rn "$here/corpus/$target/." "$work/corpus/$target/" 2>/dev/null
      ls "$folder/testdata/fuzz/$target" >"$folder/before"
      (cd "$folder" && time LD_LIBRARY_PATH=$libraries GOMAXPROCS=2 "$package/fuzz.test" -test.run '^$' -test.fuzz "^$target\$" \
        -test.fuzztime "${left}s" -test.fuzzminimizetime 20x -test.parallel 1 -test.fuzzcachedir "$work/corpus" </dev/null)
      ls "$folder/testdata/fuzz/$target" | comm -13 "$folder/before" - | while read -r file; do
        mkdir -p "$work/findings/$target" && mv "$folder/testdata/fuzz/$target/$file" "$work/findings/$target/"
      done
    fi
    echo "round $round: exit status $?"
  done >"$log" 2>&1
}

cd "$here" || exit 2
if (($# == 0)); then
  for folder in "$here"/corpus/*; do
    target=$(basename "$folder")
    case $target in jpeg_fuzz | entries_fuzz) set -- "$@" "$target=2" ;; *) set -- "$@" "$target" ;; esac
  done
fi
targets=()
running=0
for word; do
  target=${word%%=*}
  targets+=("$target")
  [[ $word == *=* ]] && copies=${word#*=} || copies=1
  for ((i = 1; i <= copies; ++i)); do
    if ((running >= ${JOBS:-$(nproc)})); then wait -n && running=$((running - 1)); fi
    one "$target" "$i" &
    running=$((running + 1))
  done
done
wait

if ((merge > 0)); then
  for target in "${targets[@]}"; do
    [[ $target == *_fuzz ]] || continue
    (
      mkdir -p "$work/small/$target"
      timeout "$merge" "${plain[@]}" "$here/bin/$target" -merge=1 -max_len=60000 -timeout=20 "$work/small/$target" "$work/corpus/$target" "$here/corpus/$target" \
        >"$work/logs/$target.merge.log" 2>&1 </dev/null && rm -rf "$work/corpus/$target" && mv "$work/small/$target" "$work/corpus/$target"
    ) &
  done
  wait
  rm -rf "$work/small"
fi

{
  echo "torchstream $(cat "$here/VERSION"), $(nproc) cores, $seconds s"
  printf '%-16s %9s %14s %10s %10s %7s %9s\n' target 'CPU min' executions coverage features corpus findings
  for target in "${targets[@]}"; do
    logs=("$work/logs/$target".[0-9]*.log)
    cpu=$(sed -n 's/^cpu //p' "${logs[@]}" | awk '{s += $1 + $2} END {printf "%.1f", s / 60}')
    if [[ $target == *_fuzz ]]; then
      runs=$(sed -n 's/^stat::number_of_executed_units: //p' "${logs[@]}" | awk '{s += $1} END {print s + 0}')
      cov=$(grep -hoE 'cov: [0-9]+' "${logs[@]}" | awk '$2 > m {m = $2} END {print m + 0}')
      ft=$(grep -hoE 'ft: [0-9]+' "${logs[@]}" | awk '$2 > m {m = $2} END {print m + 0}')
    else
      runs=$(for log in "${logs[@]}"; do awk '/^round /{s += n; n = 0} match($0, /execs: [0-9]+/) {n = substr($0, RSTART + 7, RLENGTH - 7)} END {print s + n}' "$log"; done | awk '{s += $1} END {print s}')
      cov=- ft=$(grep -hoE 'total: [0-9]+' "${logs[@]}" | awk '$2 > m {m = $2} END {print m + 0}')
    fi
    printf '%-16s %9s %14s %10s %10s %7s %9s\n' "$target" "$cpu" "$runs" "$cov" "$ft" \
      "$(find "$work/corpus/$target" -type f | wc -l)" "$(find "$work/findings/$target" -type f 2>/dev/null | wc -l)"
  done
} | tee "$out/report.txt"
find "$work/findings" -type d -empty -delete 2>/dev/null
count=$(find "$work/findings" -type f 2>/dev/null | wc -l)
if [[ -n ${FUZZ_PACK:-} ]]; then
  for part in logs findings corpus; do [[ -d $work/$part ]] && tar -C "$work" -czf "$out/$part.tar.gz" "$part"; done
else
  cp -R "$work/." "$out/"
fi
# A fuzzer that ran nothing has proved nothing.
idle=$(awk 'NR > 2 && $3 == 0 {print $1}' "$out/report.txt" | tr '\n' ' ')
[[ -z $idle ]] || echo "run.sh: error: no execution of $idle: see the logs" >&2
((count == 0)) && [[ -z $idle ]]
