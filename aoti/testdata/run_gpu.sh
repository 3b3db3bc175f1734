#!/usr/bin/env bash
# Compiles the models of make_models.py for this machine, and compares package aoti with PyTorch. It needs no Go.
#
#   run_gpu.sh TEST_PROGRAM [OPTIONS of make_models.py]    TEST_PROGRAM is made by go test -c ./aoti
#
# OUT=DIR        folder for the packages and the log (default ./aoti-models)
# PYTHON=PROGRAM a Python with torch, torchvision, safetensors and transformers (default python3)
# JOBS=N         models at a time (default 7, all of them)
# BENCH=REGEXP   benchmarks to run (default none)
#
# LD_LIBRARY_PATH must have the folder of libtorchstream.so, unless it is where the program finds it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
(($# > 0)) || { sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2 && exit 2; }
program=$(realpath "$1") && shift
out=${OUT:-$PWD/aoti-models} python=${PYTHON:-python3} jobs=${JOBS:-7}
mkdir -p "$out/cxx"
out=$(cd "$out" && pwd)

# LibTorch's folders, and the C++ library that PyTorch loads.
IFS=$'\n' read -r -d '' torch shared < <("$python" - <<'PYTHON' && printf '\0'
import torch
print(torch.__path__[0])
print(next(line.split()[-1] for line in open("/proc/self/maps") if "/libstdc++.so" in line))
PYTHON
)
path=$torch/lib
for folder in "$(dirname "$torch")"/nvidia/*/lib /usr/local/cuda/lib64; do [[ ! -d $folder ]] || path+=:$folder; done

# Some compilers link the C++ library statically, which would end the process. gcc, unlike g++, links no C++ library.
# AOTInductor knows the kind of compiler from its name.
ln -sf "$shared" "$out/cxx/libstdc++.so.6"
cat >"$out/cxx/g++" <<WRAPPER
#!/usr/bin/env bash
arguments=()
for a in "\$@"; do [[ \$a == -static-libstdc++ || \$a == -lstdc++ ]] || arguments+=("\$a"); done
case " \$* " in *" -shared "*) arguments+=("-L$out/cxx" -l:libstdc++.so.6 -lm) ;; esac
exec gcc "\${arguments[@]}"
WRAPPER
chmod +x "$out/cxx/g++"
export CXX=$out/cxx/g++ TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-$((($(nproc) + jobs - 1) / jobs))}
export TORCHINDUCTOR_CACHE_DIR=$out/cache

status=0
SECONDS=0
"$python" "$here/make_models.py" "$out/packages" "$@" --jobs "$jobs" 2>&1 | tee "$out/log.txt" || status=1
echo "compiled in $SECONDS seconds" | tee -a "$out/log.txt"
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$path TORCHSTREAM_AOTI_PACKAGES=$out/packages
cd "$here/.."
"$program" -test.v -test.run '^Test(GPU)?Models?(EqualPyTorch|OnStreams)|^TestGPUGraph|^TestGPUWeights|^TestSanitizer' -test.bench "${BENCH:-^\$}" \
  -test.timeout 200s 2>&1 | tee -a "$out/log.txt" || status=1
echo "$SECONDS seconds" | tee -a "$out/log.txt"
exit $status
