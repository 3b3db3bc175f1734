#!/usr/bin/env python3
"""Check that includes between the C++ sources point down, between folders and between the files of src/cuda.

  cxx_layers.py [CSHIM]

A unit is a header and the sources of the same name. No unit may reach itself through the includes of others.
"""

import os
import re
import sys

# The folders that each folder of src may include, in addition to itself, the public headers and the system's.
FOLDERS = {
    "base": set(),
    "deflate": {"base"},
    "jpeg": {"base"},
    "image": {"base", "jpeg"},
    "cuda": {"base"},
    "torch": {"base", "cuda"},
    "decode": {"base", "cuda", "deflate", "jpeg", "torch"},
    "distributed": {"base", "cuda", "torch"},
    "nocuda": {"base", "cuda", "torch", "decode"},  # in place of CUDA, for a LibTorch without it
}

# The units of src/cuda, from the lowest up. Each includes only units before it.
CUDA = [
    "libtorch_version",  # what differs between versions of LibTorch
    "same_stream",  # the identity of streams
    "storage",  # the memory behind a tensor
    "workspaces",  # cuBLAS' memory
    "libraries",  # the threads that have handles of cuBLAS and its kin
    "capture",  # the capture registry: whether a capture is under way, and what it allows
    "toolkit",  # what depends on the CUDA of the build
    "device",
    "readings",  # sensors of GPUs
    "partition",  # parts of a GPU's multiprocessors
    "sanitizer",
    "foreign",  # memory that another library or process owns
    "allocator",  # memory pools, statistics, the cache
    "out_of_memory",  # observers of failed allocations
    "pinned",
    "stream",
    "order",  # wait, fork, join
    "event",
    "notify",
    "nvtx",
    "trace",
    "replay_order",  # between replays that share memory
    "randomness",  # random numbers in graphs
    "graph",
]


def units(source):
    """Map each unit, as "cuda/stream", to {included unit: the file that includes it}."""
    found = {}
    for folder, _, files in os.walk(source):
        for name in sorted(files):
            if not name.endswith((".h", ".cc", ".cu")):
                continue
            path = os.path.join(folder, name)
            unit = os.path.splitext(os.path.relpath(path, source))[0]
            includes = found.setdefault(unit, {})
            with open(path, encoding="utf-8") as f:
                for included in re.findall(r'^#include "([^"]+/[^"]+)\.h"', f.read(), re.M):
                    if included != unit:
                        includes.setdefault(included, path)
    return found


def circle(graph):
    """Return the units of one circle of includes, or None."""
    done = set()

    def visit(unit, path):
        if unit in path:
            return path[path.index(unit) :] + [unit]
        if unit in done:
            return None
        for included in graph.get(unit, ()):
            if way := visit(included, path + [unit]):
                return way
        done.add(unit)
        return None

    for unit in graph:
        if way := visit(unit, []):
            return way
    return None


def main(cshim="cshim"):
    graph = units(os.path.join(cshim, "src"))
    bad = []
    for unit, includes in sorted(graph.items()):
        folder, name = unit.split("/", 1)
        if folder not in FOLDERS:
            bad.append("src/%s is in a folder that this script's table does not have: add the folder" % unit)
            continue
        if folder == "cuda" and name not in CUDA:
            bad.append("src/%s is missing in this script's order of src/cuda: add it" % unit)
            continue
        for included, path in includes.items():
            other, other_name = included.split("/", 1)
            if other != folder and other not in FOLDERS[folder]:
                bad.append("%s includes %s.h: src/%s does not build on src/%s" % (path, included, folder, other))
            elif folder == other == "cuda" and other_name in CUDA and CUDA.index(other_name) > CUDA.index(name):
                bad.append("%s includes %s.h, which is above it in the order of src/cuda" % (path, included))
    if way := circle(graph):
        bad.append("a circle of includes: %s" % " -> ".join(way))
    for line in bad:
        print("cxx_layers: error: " + line, file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
