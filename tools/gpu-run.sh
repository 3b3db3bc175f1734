#!/usr/bin/env bash
# Runs torchstream's tests, benchmarks and demo on a machine that has a GPU and LibTorch 2.11, but needs no Go.
#
#   run.sh [STAGE...]      stages: tests sanitize streams bench decode training demo train examples bundle (default: tests
#                          bench demo); none only unpacks
#
# OUT=DIR            folder for logs and results (default ./out)
# LIBTORCH=DIR       a site-packages with torch/ in it, or the torch folder (default: python3's torch)
# TEST_TIMEOUT=SECS  time limit of one test program (default 400)
# TEST_JOBS=N        test programs at a time in tests (default: a quarter of the cores); some always run alone
# RUN=REGEXP         run only the Go tests that match
# ONLY=REGEXP        in tests, sanitize and streams, run only the test programs whose names in the table match
# JOBS=N             test programs at a time in sanitize (default: three quarters of the cores)
# SANITIZE_TIMEOUT=SECS  time limit of one test program in sanitize (default 420)
# DEVICE=cuda|cpu    for demo and train (default cuda)
# ARCHIVE=FILE       archive for train and training (default: makes one with COUNT=8000 photographs, which needs Python's Pillow)
# TRAIN=OPTIONS      more options for train
#
# The exit status is 0 only if everything that ran passed. $OUT/summary.txt has the printed table.
set -uo pipefail
bundle=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${OUT:-$PWD/out}
mkdir -p "$out"
out=$(cd "$out" && pwd)
limit=${TEST_TIMEOUT:-400}
device=${DEVICE:-cuda}
failures=0
summary=$out/summary.txt
: >"$summary"
say() { echo "$*" | tee -a "$summary"; }

# ---- Unpacks the payload beside this script, or in a temporary folder if this script's folder is not writable.
here=$bundle/unpacked
rm -rf "$here" 2>/dev/null
mkdir -p "$here" 2>/dev/null || here=$(mktemp -d) || exit 2
tar -xJf "$bundle/payload.tar.xz" -C "$here" || { echo "run.sh: error: cannot unpack payload.tar.xz into $here (is xz installed?)" >&2 && exit 2; }

# ---- Finds LibTorch and the libraries beside it. LD_LIBRARY_PATH comes before a library's own run-time path.
torch=${LIBTORCH:-$(python3 -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])' 2>/dev/null)}
[[ -e $torch/torch/lib/libtorch_cpu.so ]] && torch=$torch/torch
if [[ ! -e $torch/lib/libtorch_cpu.so ]]; then
  echo "run.sh: error: no LibTorch: python3 cannot import torch; set LIBTORCH to a site-packages with torch/ in it" >&2
  exit 2
fi
path=$here/lib:$torch/lib
for folder in "$(dirname "$torch")"/nvidia/*/lib; do [[ -d $folder ]] && path+=:$folder; done
# A LibTorch without NVIDIA's wheels beside it uses the system's toolkit.
for folder in /usr/local/cuda/lib64 /usr/local/cuda/targets/x86_64-linux/lib; do [[ -d $folder ]] && path+=:$folder; done
export LD_LIBRARY_PATH=$path${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# NVLink multicast belongs to the whole machine, whose other GPUs may be somebody else's.
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
export TMPDIR=${TMPDIR:-/tmp}
archive=${ARCHIVE:-$TMPDIR/torchstream-photos-${COUNT:-8000}.tgz}

say "torchstream $(cat "$here/VERSION"), LibTorch in $torch"
say "$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo 'no nvidia-smi')"
say "$(nproc) cores, $(uname -sr)"

# Prints the test programs that ONLY matches, as "folder<TAB>name<TAB>file<TAB>kind".
programs() { every_program | awk -F'\t' -v only="${ONLY:-.}" '$2 ~ only'; }

every_program() {
  find "$here/tree" -name '*.test' -type f | sort | while read -r f; do
    local folder=${f%/*}
    printf '%s\t%s\t%s\tgo\n' "$folder" "${folder#"$here/tree/"}" "$f"
  done
  mkdir -p "$here/tree/cshim/test"
  find "$here/shim" -name '*_test' -type f | sort | while read -r f; do
    printf '%s\t%s\t%s\tshim\n' "$here/tree/cshim/test" "cshim/$(basename "$f")" "$f"
  done
}

# count KIND LOG: prints how many tests and subtests of a program's log passed, failed and were skipped.
count() {
  if [[ $1 == go ]]; then
    printf '%d %d %d' "$(grep -cE '^ *--- PASS' "$2")" "$(grep -cE '^ *--- FAIL' "$2")" "$(grep -cE '^ *--- SKIP' "$2")"
  else
    printf '%d %d %d' "$(grep -cE '^\[       OK ' "$2")" "$(grep -cE '^\[  FAILED  \].*ms\)$' "$2")" \
      "$(grep -cE '^\[  SKIPPED \].*ms\)$' "$2")"
  fi
}

# Test programs that run alone: their tests compare the device's free memory, or times on its streams.
alone='^(cuda|nn|prefetcher|torch)$|^cshim/(cuda|torch)_'
# The longest programs, which start first.
longest='^(distributed|cmd/torchstream|train|examples/11-distributed)$'

# tested: runs the program `name`, and leaves its output in $one and its status and seconds in $one.rc.
tested() {
  local start rc
  start=$(date +%s.%N)
  if [[ $kind == go ]]; then
    (cd "$folder" && timeout -k 10 "$((limit + 20))" "$file" -test.v -test.timeout "${limit}s" ${RUN:+-test.run "$RUN"}) >"$one" 2>&1 </dev/null
  else
    (cd "$folder" && timeout -k 10 "$limit" "$file") >"$one" 2>&1 </dev/null
  fi
  rc=$?
  echo "$rc $(echo "$(date +%s.%N) $start" | awk '{print $1-$2}')" >"$one.rc"
}

# tested_line NAME KIND: prints the program's line of the table, and what failed.
tested_line() {
  local rc took pass fail skip verdict=
  read -r rc took <"$one.rc"
  read -r pass fail skip <<<"$(count "$2" "$one")"
  # A crash, a time-out or a race may print no FAIL line.
  if ((rc != 0)); then verdict="  FAILED (exit status $rc)" && failures=$((failures + 1)); fi
  say "$(printf '%-34s %6d %6d %6d %7.1f%s' "$1" "$pass" "$fail" "$skip" "$took" "$verdict")"
  { echo "=== $1 (exit status $rc)"; cat "$one"; } >>"$out/tests.log"
  if ((rc != 0)); then
    grep -nE '^ *--- FAIL|^\[  FAILED|panic:|SIG[A-Z]+:|error while loading|_test\.(go|cc):[0-9]+' "$one" | head -20 | sed 's/^/    /' | tee -a "$summary"
    tail -n 5 "$one" | sed 's/^/    | /'
  fi
}

tests() {
  local log=$out/tests.log jobs=${TEST_JOBS:-$(($(nproc) / 4))} begun=$SECONDS number one folder name file kind names=() kinds=()
  ((jobs > 0)) || jobs=1
  : >"$log"
  rm -rf "$out/tests" && mkdir -p "$out/tests"
  while IFS=$'\t' read -r folder name file kind; do
    one=$out/tests/${#names[@]}
    names+=("$name") kinds+=("$kind")
    if [[ $name =~ $alone ]]; then
      wait
      tested
      continue
    fi
    while (($(jobs -rp | wc -l) >= jobs)); do wait -n; done
    tested &
  done < <(programs | awk -F'\t' -v alone="$alone" -v longest="$longest" \
    '{print ($2 ~ longest ? 0 : $2 ~ alone ? 2 : 1) "\t" $0}' | sort -s -n -k1,1 | cut -f2-)
  wait
  say ""
  say "$(printf '%-34s %6s %6s %6s %7s' tests pass fail skip seconds)"
  for ((number = 0; number < ${#names[@]}; number++)); do
    one=$out/tests/$number
    tested_line "${names[number]}" "${kinds[number]}"
  done
  say "tests: $((SECONDS - begun)) seconds, $jobs programs at a time"
  rm -rf "$out/tests"
  {
    echo "=== skipped"
    grep -hE '^ *--- SKIP|^\[  SKIPPED \].*ms\)$' "$log" | sort
  } >>"$log"
}

# Only programs that link or open the shim can use the GPU. The loader's have the image library alone.
uses_gpu() { grep -qaF libtorchstream.so "$1"; }

# Tests that race on purpose: the controls of tests that prove an order.
races_on_purpose='TestOrdering|TestFork|TestJoin|TestCopyBatchIsOrdered|TestCopyPeerIsOrdered|TestStridedCopiesAreOrdered'
races_on_purpose+='|TestFreedMemoryAndOtherStreams|TestProgramsWithoutEdgesOnGPUs|TestGPUMissingEdges|TestUnlockedGoroutinesLoseTheirStream'
races_on_purpose+='|TestDelayShowsAMissingEdge'

# Tests that cannot hold under compute-sanitizer: it takes device memory for itself, it is slow, it may keep streams from
# running side by side, and a process has either it or the profiler, which use the same interface.
memory_figures='KeepDeviceMemoryFlat|KeepMemoryFlat|^TestAllocatorStats'
times='^TestBench|^TestGPUCancelDoesNotWaitForKernels|^TestExternalEventsInAGraph|^TestProductsBeforeAGraphOfTheirStream'
# The tests of kills run in copies of the program.
kills='^TestKilled'
profiler='^TestTrace|^TestRecordsOperatorsOfAllGoroutines|^TestOneRecordingAtATime'

# sanitized TOOL FOLDER COMMAND...: runs a program under a tool, or shard `shard` of its `shards` (GoogleTest's). Leaves the
# output in $one and the status and the seconds in $one.rc.
sanitized() {
  local tool=$1 folder=$2 start=$SECONDS options=() each
  case $tool in
    # Tests cause errors of API calls on purpose: they ask for too much memory, and break captures.
    memcheck) options=(--report-api-errors no) ;;
    racecheck) options=(--kernel-name "kns=$kernels") ;;
  esac
  # Each process needs ports of its own, and starts slowly beside others. Python and the copies of themselves that tests
  # start are not checked.
  for each in "--base-port $((49152 + 16 * number))" "--launch-timeout 120" "--target-processes application-only"; do
    # shellcheck disable=SC2206 # two words
    [[ $help != *"${each% *}"* ]] || options+=($each)
  done
  shift 2
  # --require-cuda-init no, because some programs never use a GPU.
  (cd "$folder" && GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} timeout -k 10 "$((seconds + 20))" \
    "$sanitizer" --tool "$tool" "${options[@]}" --require-cuda-init no --error-exitcode 99 "$@") >"$one" 2>&1 </dev/null
  echo "$? $((SECONDS - start))" >"$one.rc"
}

# report TOOL NAME: prints the line of a program in the table, and what failed.
report() {
  local rc took errors
  read -r rc took <"$one.rc"
  { echo "=== $2, $1 (exit status $rc)"; cat "$one"; } >>"$out/sanitize.log"
  if grep -qi 'device not supported' "$one"; then
    say "$(printf '%-34s %-10s %s' "$2" "$1" 'SKIPPED, compute-sanitizer does not support this device here')"
    return
  fi
  errors=$(grep -oE 'SUMMARY: [0-9]+ (error|hazard)' "$one" | grep -oE '[0-9]+' | awk '{n += $1} END {print n + 0}')
  # Without a summary the tool has not run to its end, unless the program never used the GPU.
  if ! grep -qE '^=+ .*SUMMARY:' "$one"; then
    errors='?'
    ! grep -q 'terminated before first instrumented API call' "$one" || ((rc != 0)) || errors=0
  fi
  say "$(printf '%-34s %-10s %6s %11d %7d' "$2" "$1" "$errors" "$rc" "$took")"
  [[ $rc != 0 || $errors != 0 ]] || return 0
  failures=$((failures + 1))
  {
    grep -E '^=========' "$one" | head -30
    grep -nE '^ *--- FAIL|^\[  FAILED|panic:|SIG[A-Z]+:|error while loading|_test\.(go|cc):[0-9]+' "$one" | head -20
    grep -vE '^=========' "$one" | tail -n 5
  } | sed 's/^/    /' | tee -a "$summary"
}

sanitize() {
  local sanitizer seconds=${SANITIZE_TIMEOUT:-420} jobs=${JOBS:-$(($(nproc) * 3 / 4))} number=0 shards begun=$SECONDS
  local folder name file kind one extra help tools=() names=()
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
  say ""
  if [[ -z $sanitizer ]]; then
    say "sanitize: SKIPPED, compute-sanitizer is not installed"
    return
  fi
  help=$("$sanitizer" --help 2>&1)
  : >"$out/sanitize.log"
  rm -rf "$out/sanitize" && mkdir -p "$out/sanitize"
  # check TOOL COMMAND...: begins a check of each of the program's `shards`, when fewer than the maximum are under way.
  check() {
    local tool=$1 shard label=$name
    shift
    for ((shard = 0; shard < shards; shard++)); do
      while (($(jobs -rp | wc -l) >= jobs && jobs > 0)); do wait -n; done
      one=$out/sanitize/$number
      ((shards == 1)) || label="$name $((shard + 1))/$shards"
      tools+=("$tool") names+=("$label")
      sanitized "$tool" "$folder" "$@" &
      number=$((number + 1))
    done
  }
  while IFS=$'\t' read -r folder name file kind; do
    uses_gpu "$file" || continue
    # racecheck finds hazards between the threads of a block in shared memory, which the kernels of src/decode and
    # src/torch/batch_norm.cu use. That of src/torch/normalize.cu uses none today; racecheck is here for a later version that does. initcheck finds reads of
    # device memory that nothing has written. The tests of the decoder are many and have 10,000 fuzzed images, so each tool
    # gets them in shards. Its large crops use the kernels of its crops with operations, which take a third of the time.
    shards=1
    case $name in
      torch)
        kernels=norm check racecheck "$file" -test.run '^TestGPUBatchNormReLUEqualsOperators$'
        check initcheck "$file" -test.run '^TestGPUBatchNormReLUEqualsOperators$'
        ;;
      cshim/torch_normalize_test) kernels=normalize check racecheck "$file" '--gtest_filter=NormalizeGpu.*' ;;
      cshim/decode_decode_test)
        shards=8
        kernels=decode check racecheck "$file" '--gtest_filter=Gpu/*-*.CropsEqual*'
        check initcheck "$file" '--gtest_filter=Gpu/*'
        ;;
      cshim/decode_inflate_test)
        kernels=inflate check racecheck "$file" '--gtest_filter=Gpu/*.Small*'
        check initcheck "$file" '--gtest_filter=Gpu/*-*.BytesEqual*'
        ;;
    esac
    if [[ $kind != go ]]; then
      # Of the tests of nvJPEG, only NVIDIA's code uses the GPU.
      check memcheck "$file" '--gtest_filter=-Trace*:Nvtx*:Cpu/*:*Nvjpeg*'
      continue
    fi
    extra=()
    # Fewer random programs: each of their kernels is slow now.
    [[ $name == internal/streamprog ]] && extra=(-sanitized 50 -programs 50 -for 2s)
    check memcheck "$file" -test.short -test.timeout "${seconds}s" -test.skip "$races_on_purpose|$memory_figures|$times|$kills|$profiler" \
      ${RUN:+-test.run "$RUN"} "${extra[@]}"
  done < <(programs)
  wait
  say "$(printf '%-34s %-10s %6s %11s %7s' compute-sanitizer tool errors 'exit status' seconds)"
  for ((number = 0; number < ${#names[@]}; number++)); do
    one=$out/sanitize/$number
    report "${tools[number]}" "${names[number]}"
  done
  say "sanitize: $((SECONDS - begun)) seconds, $jobs at a time"
  rm -rf "$out/sanitize"
}

# watched NAME FOLDER COMMAND...: runs a program under the stream sanitizer and prints a line of the table.
watched() {
  local name=$1 folder=$2 found=$out/streams/$1 one=$out/.one rc count
  shift 2
  mkdir -p "$found"
  (cd "$folder" && TORCHSTREAM_SANITIZE=1 TORCHSTREAM_SANITIZE_DIR=$found TORCHSTREAM_SANITIZE_IGNORE=$races_on_purpose \
    timeout -k 10 "$((3 * limit))" "$@") >"$one" 2>&1 </dev/null
  rc=$?
  count=$(find "$found" -name '*.txt' | wc -l)
  # An example that needs more GPUs than there are ends with an error.
  ((rc == 0)) || ! grep -q ': needs .*GPU' "$one" || rc=0
  say "$(printf '%-34s %3d findings, exit status %d' "$name" "$count" "$rc")"
  if ((rc != 0 || count != 0)); then
    failures=$((failures + 1))
    find "$found" -name '*.txt' | sort | head -n 3 | xargs -r cat | sed 's/^/    /'
    ((count > 0)) || tail -n 20 "$one" | sed 's/^/    | /'
  fi
  { echo "=== $name (exit status $rc)"; cat "$one"; } >>"$out/streams.log"
  rm -f "$one"
}

# Prints what the stream sanitizer costs in a program whose time is that of its launches.
cost() {
  [[ ! -e $here/tree/torch/torch.test ]] || say "cost: $(cd "$here/tree/torch" &&
    timeout -k 10 "$limit" ./torch.test -test.run '^$' -test.bench '^BenchmarkSanitizer$' -test.benchtime 20x 2>&1 </dev/null | grep -E '^Benchmark|^ ' | tr -s '\t ' ' ')"
}

# Runs the tests and the examples under the stream sanitizer, which must find nothing.
streams() {
  local folder name file kind program
  rm -rf "$out/streams"
  : >"$out/streams.log"
  say ""
  say "stream sanitizer"
  [[ -n ${RUN:-} ]] || cost
  while IFS=$'\t' read -r folder name file kind; do
    [[ $kind == go ]] || continue
    uses_gpu "$file" || continue
    watched "$name" "$folder" "$file" -test.timeout "$((3 * limit))s" ${RUN:+-test.run "$RUN"}
  done < <(programs)
  [[ -z ${RUN:-} ]] || return 0
  for program in "$here"/bin/0[2-5]-*; do watched "$(basename "$program")" "$here/tree" "$program" -json; done
  watched 01-train "$here/tree" "$here/bin/01-train" train -device "$device" -checkpoint ""
  watched 07-chargpt "$here/tree" "$here/bin/07-chargpt" -steps 60 -text "$bundle/run.sh"
  watched 08-finetune "$here/tree" "$here/bin/08-finetune" -pretrain 1 -epochs 1
  watched 09-dcgan "$here/tree" "$here/bin/09-dcgan" -steps 60
  watched 12-weights "$here/tree" "$here/bin/12-weights" -device "$device"
}

# step NAME LOG COMMAND...: runs a command with a time limit, prints its output and appends the output to a log.
step() {
  local name=$1 log=$2 rc
  shift 2
  say ""
  say "== $name"
  timeout -k 10 600 "$@" </dev/null 2>&1 | tee -a "$log" | tail -n 40
  rc=${PIPESTATUS[0]}
  ((rc == 0)) || { say "$name: FAILED (exit status $rc)" && failures=$((failures + 1)); }
}

bench() {
  cd "$here/tree" || return
  rm -f "$out/bench.txt" "$out/bench-streams.json" "$out/bench-operators.txt"
  step doctor "$out/bench.txt" "$here/bin/torchstream" doctor
  if grep -q 'compute on cuda:1' "$out/bench.txt"; then
    # Slow links and ranks are a finding about the machine, which other jobs may share, and no failure.
    step "doctor -dist" "$out/bench.txt" bash -c 'said=$("$0" doctor -dist); echo "$said"; [[ $said == *all-reduce* ]]' "$here/bin/torchstream"
  fi
  # Writes the JSON object alone to a file, and all output to the log.
  step "bench streams" "$out/bench.txt" bash -c '"$0" streams -json >"$1"; rc=$?; cat "$1"; exit $rc' \
    "$here/bin/torchstream-lab" "$out/bench-streams.json"
  step "bench operators" "$out/bench-operators.txt" "$here/bin/torchstream-lab" operators
}

# make_archive LOG: makes the archive of the benchmarks unless it is there.
make_archive() {
  [[ -f $archive ]] || step "an archive of ${COUNT:-8000} large photographs" "$1" \
    python3 examples/data/make_photos.py big examples/data/photos-train.tgz "$archive" "${COUNT:-8000}"
}

# Measures training steps beside PyTorch, on resident data and fed from an archive: a table in training.txt, and its figures
# as JSON. It takes three to four minutes.
training() {
  cd "$here/tree" || return
  local log=$out/training.txt fed=()
  rm -f "$log" "$out/bench-train.json"
  make_archive "$log"
  [[ ! -f $archive ]] || fed=(-archive "$archive")
  step "bench train" "$log" bash -c 'json=$1; shift; "$@" >"$json"' - "$out/bench-train.json" \
    "$here/bin/torchstream-lab" train -json -table -seconds 0.5 -first 2 -workers 16 "${fed[@]}"
}

# Decodes batches of JPEGs and inflates members of a .tgz on the GPU, compares both with the host's, and writes the time of
# each stage.
decode() {
  cd "$here/tree" || return
  rm -f "$out/decode.txt" "$out/decode.json" "$out/inflate.json"
  step "decode" "$out/decode.txt" bash -c '"$0" >"$1"; rc=$?; cat "$1"; exit $rc' "$here/shim/decode_bench" "$out/decode.json"
  step "inflate" "$out/decode.txt" bash -c '"$0" >"$1"; rc=$?; cat "$1"; exit $rc' "$here/shim/inflate_bench" "$out/inflate.json"
  # The whole way from an archive to batches, decoded by the workers and by the GPU. Other GPU decoders run once.
  local plain=${archive%.tgz}.tar file where workers peers
  rm -f "$out/decode-loader.json"
  make_archive "$out/decode.txt"
  [[ -f $archive ]] || return
  [[ -f $plain ]] || gzip -dc "$archive" >"$plain"
  for file in "$plain" "$archive"; do
    while read -r where workers; do
      peers=()
      [[ $file != "$plain" || $where != device || $workers != 4 ]] || peers=(-peers all)
      step "bench loader, ${file##*.}, $where, $workers workers" "$out/decode.txt" bash -c 'json=$1; shift; "$@" | tee -a "$json"; exit "${PIPESTATUS[0]}"' - \
        "$out/decode-loader.json" "$here/bin/torchstream-lab" loader -json -archive "$file" -batch 256 -workers "$workers" -device cuda -decode "$where" \
        -contract train-bfloat16 -warm 1 -repeat 8 -seconds 8 "${peers[@]}"
    done <<<"host 16"$'\n'"device 4"$'\n'"device 16"
  done
}

demo() {
  cd "$here/tree" || return
  rm -f "$out/demo.txt" "$out/demo.safetensors"
  step "demo on $device" "$out/demo.txt" "$here/bin/01-train" train -device "$device" -checkpoint "$out/demo.safetensors"
  step "demo, predict" "$out/demo.txt" "$here/bin/01-train" predict -checkpoint "$out/demo.safetensors" examples/data/photos-test.tgz
}

# Trains with a network and images that keep the GPU busy, to show whether the next batch is always ready and device memory
# stays constant.
train() {
  cd "$here/tree" || return
  rm -f "$out/train.txt"
  make_archive "$out/train.txt"
  step "bench loader" "$out/train.txt" "$here/bin/torchstream" bench loader -archive "$archive" -batch 256 -seconds 10
  # shellcheck disable=SC2086 # the words of TRAIN are arguments
  step "train, a busy GPU" "$out/train.txt" "$here/bin/01-train" train -device "$device" -archive "$archive" -size 224 -width 192 -batch 256 -epochs 5 -memory 4096 \
    -checkpoint "" -json "$out/train.json" ${TRAIN:-}
}

# Runs the experiments with streams, each compared with PyTorch. Writes their figures as one JSON object per line, and their
# timelines as pictures.
examples() {
  cd "$here/tree" || return
  local program name line rc
  rm -f "$out/examples.json" "$out/examples.txt"
  say ""
  for program in "$here"/bin/0[2-5]-*; do
    name=$(basename "$program")
    line=$(timeout -k 10 "$limit" "$program" -json -timeline "$out/$name.svg" 2>"$out/.one" </dev/null)
    rc=$?
    { echo "=== $name (exit status $rc)"; cat "$out/.one"; } >>"$out/examples.txt"
    if ((rc == 0)); then
      echo "$line" >>"$out/examples.json"
      say "$name: $line"
    elif grep -q ': needs .*GPU' "$out/.one"; then
      say "SKIPPED, $(cat "$out/.one")"
    else
      say "$name: FAILED (exit status $rc)" && failures=$((failures + 1))
      tail -n 5 "$out/.one" | sed 's/^/    | /' | tee -a "$summary"
    fi
  done
  rm -f "$out/.one"
  # 6 GiB of parameters, which it writes first, in 3 GiB of the GPU's memory.
  if [[ $device == cuda ]]; then
    step 12-weights "$out/examples.txt" "$here/bin/12-weights" -device cuda -width 2048 -heads 16 -layers 32 -batch 8 -prompt 512 -memory 3 \
      -timeline "$out/12-weights.svg"
    rm -f 12-weights-*.safetensors*
  fi
}

# Bundles the example with `torchstream bundle`, and runs it from there in an empty environment: it trains, predicts, and
# passes the tests of package torch. Every library that these load must be in the bundle, of glibc or of the driver.
bundle() {
  local log=$out/bundle.txt scratch app driver libraries alone outside
  rm -f "$log"
  scratch=$(mktemp -d) || return # the bundle has 3.5 GB
  scratch=$(cd "$scratch" && pwd -P)
  app=$scratch/app
  step bundle "$log" "$here/bin/torchstream" bundle "$here/bin/01-train" -o "$app" -shim "$here/lib"
  if [[ -d $app ]]; then
    cp "$here/tree/torch/torch.test" "$app/bin/"
    # The driver's folder may be known to LD_LIBRARY_PATH alone.
    driver=$(IFS=: && for folder in $LD_LIBRARY_PATH; do [[ ! -e $folder/libcuda.so.1 ]] || { echo "$folder" && break; }; done)
    mkdir "$scratch/libraries"
    libraries=$scratch/libraries/of
    alone=(env -i HOME="$scratch" TMPDIR="$scratch" NCCL_NVLS_ENABLE="$NCCL_NVLS_ENABLE" LD_DEBUG=libs LD_DEBUG_OUTPUT="$libraries"
      ${driver:+LD_LIBRARY_PATH="$driver"} ${TORCHSTREAM_REQUIRE_GPUS:+TORCHSTREAM_REQUIRE_GPUS="$TORCHSTREAM_REQUIRE_GPUS"})
    cd "$here/tree" || return
    step "the bundle trains on $device" "$log" "${alone[@]}" "$app/bin/01-train" train -device "$device" -checkpoint "$scratch/net.safetensors"
    step "the bundle predicts" "$log" "${alone[@]}" "$app/bin/01-train" predict -device "$device" -checkpoint "$scratch/net.safetensors" \
      examples/data/photos-test.tgz
    cd "$here/tree/torch" || return
    step "the tests of package torch with the bundle's libraries" "$log" "${alone[@]}" "$app/bin/torch.test" -test.timeout "${limit}s"
    # The dynamic loader names every library that it has loaded.
    sed -n 's/.*calling init: \(.*\)/\1/p' "$scratch"/libraries/of.* | sort -u >"$scratch/loaded"
    outside=$(grep -vF "$app/" "$scratch/loaded" |
      grep -vE '/(ld-linux-x86-64|libc|libm|libmvec|libdl|libpthread|librt|libutil|libresolv|libanl|libnsl|libcuda|libcudadebugger|libnvidia-[^/]*)\.so[^/]*$')
    say "the bundle's programs loaded $(grep -cF "$app/" "$scratch/loaded") libraries of the bundle"
    if ! grep -qF "$app/lib/libtorchstream.so" "$scratch/loaded" || [[ -n $outside ]]; then
      say "bundle: FAILED, these libraries are not in the bundle:"$'\n'"${outside:-its own libtorchstream.so}" && failures=$((failures + 1))
    fi
  fi
  cd "$here" && rm -rf "$scratch"
}

(($# > 0)) || set -- tests bench demo
for stage; do
  case $stage in
    tests | sanitize | streams | bench | decode | training | demo | train | examples | bundle) "$stage" ;;
    none) say "unpacked in $here; LD_LIBRARY_PATH=$LD_LIBRARY_PATH" ;;
    *) echo "run.sh: error: no stage \"$stage\": tests, sanitize, streams, bench, decode, training, demo, train, examples or bundle" >&2 && exit 2 ;;
  esac
done
say ""
if ((failures == 0)); then say "all passed"; else say "$failures FAILED"; fi
exit $((failures != 0))
