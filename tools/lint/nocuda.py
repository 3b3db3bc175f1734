#!/usr/bin/env python3
"""Check that src/nocuda has whatever the shim calls of CUDA, so that the build without CUDA does not break unseen.

  nocuda.py [CSHIM]

Reads the undefined symbols of the built libtorchstream.so, and the functions of the kernels, by name. The compiler and the
linker of a build without CUDA check the rest: `make test-cpu-only`.
"""

import glob
import os
import re
import subprocess
import sys


def main(cshim="cshim"):
    library = os.path.join(cshim, "build", "lib", "libtorchstream.so")
    source = os.path.join(cshim, "src")
    text = ""
    for folder, _, names in os.walk(os.path.join(source, "nocuda")):
        for name in names:
            with open(os.path.join(folder, name), encoding="utf-8") as f:
                text += f.read()
    wanted = set()
    symbols = subprocess.run(["nm", "-D", "--undefined-only", "--demangle", library], check=True, capture_output=True, text=True)
    for line in symbols.stdout.splitlines():
        symbol = line.split(None, 1)[1].split("@")[0]
        # Sources of CUDA, and of NCCL, which call the rest, are not in that build.
        if m := re.match(r"(?:cuda|(?:c10|at|torch)::cuda::(?:\w+::)*|at::CUDA\w+::)~?(\w+)", symbol):
            wanted.add(symbol if symbol.startswith("cuda") else m.group(1))
    if not wanted:
        return 0  # the library was built without CUDA
    wanted.discard("cudaDriverGetVersion")  # of cuda/toolkit.cc
    wanted.discard("cudaFuncSetAttribute")  # of decode/inflate.cu
    for header in glob.glob(os.path.join(source, "*", "*.h")):
        with open(header, encoding="utf-8") as f:
            wanted.update(re.findall(r"^cudaError_t (\w+)\(", f.read(), re.M))
    lacks = sorted(name for name in wanted if not re.search(r"\b%s\b" % name, text))
    for name in lacks:
        print("nocuda: error: %s is not in src/nocuda: add it to absent.cc, or, of CUDA's runtime, to include/cuda_runtime_api.h" % name, file=sys.stderr)
    return 1 if lacks else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
