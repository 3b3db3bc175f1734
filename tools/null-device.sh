#!/usr/bin/env bash
# Runs a command with devices that do nothing in the place of GPUs (cshim/test/cuda/null_runtime.cc): kernels compute
# nothing, and everything that the host does for a GPU happens.
#
#   null-device.sh COMMAND [ARGUMENT...]
#
# NULL_DEVICES=N   number of devices, up to 8 (default 1)
#
# go test -exec "$PWD/tools/null-device.sh" runs the tests of a package so. Results of kernels are meaningless, so only
# tests that compare none can pass; make test-null-device has a list. Convolutions and products have functions that do
# nothing too, so a ResNet trains; cuDNN's attention has none, and a transformer trains with
# TORCH_CUDNN_SDPA_DEPRIORITIZED=1. What LibTorch's allocator counts is what it would be on a GPU. null_nvjpeg stands in
# for nvJPEG. Calls that allocate, free or wait are lines of a file in memory: nullCalls in prefetcher/steady_test.go.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
null=$root/cshim/build/null
[[ -e $null/libnull_runtime.so && -e $null/libcuda.so.1 ]] || {
  echo "null-device: error: no $null/libnull_runtime.so: run cshim/setup/shim.sh -- null_runtime null_driver null_nvjpeg" >&2
  exit 2
}
export LD_LIBRARY_PATH=$null${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export TORCHSTREAM_REQUIRE_GPUS=${NULL_DEVICES:-1}
export LD_PRELOAD=$null/libnull_runtime.so${LD_PRELOAD:+:$LD_PRELOAD}
exec "$@"
