#!/usr/bin/env python3
"""Check that imports between the Go packages point down, as the table below allows.

  go_layers.py

The rows of the table go from the lowest package up. A package imports only packages of earlier rows, so no import can
point upwards or in a circle. Every package has a row. Tests are exempt: they may import any package.

The table under "Layout" in CONTRIBUTING.md says what the folders are for. It must name each package of the table, or a
folder/ above it, and each folder of C++ sources, once, and nothing that does not exist.
"""

import json
import os
import re
import subprocess
import sys

import cxx_layers

ROOT = "github.com/torchstream/torchstream"

# Each package, and the packages of this module that it may import. A new package gets a row. A new import needs a reason
# that a reviewer accepts.
LAYERS = {
    # The C headers as Go types. No other package uses cgo.
    "internal/picture": [],
    "internal/racecheck": ["internal/picture"],
    "internal/library": [],
    "internal/printable": [],
    "internal/normalform": [],
    "internal/system": [],
    "cshim": [],
    "internal/setup": ["cshim", "internal/library", "internal/printable", "internal/system"],
    "cshim/include/torchstream": [],
    "cshim/include": ["cshim/include/torchstream"],
    "internal/machine": ["internal/library", "internal/setup", "internal/system"],
    "internal/imagecapi": ["cshim/include", "internal/library"],
    "internal/capi": [
        "cshim/include",
        "internal/imagecapi",
        "internal/library",
        "internal/racecheck",
        "internal/system",
    ],
    # Small packages that import no other, or nearly none.
    "internal/decodeplan": [],
    "internal/origin": [],
    "internal/freeport": [],
    "internal/interrupt": [],
    "internal/resident": [],
    "internal/safefile": ["internal/system"],
    "internal/tfevents": [],
    "internal/order": [],
    "internal/assembly": [],
    "leaks": ["internal/origin"],
    "tensor": [],
    "checkpoint/internal/blocksum": [],
    "checkpoint/internal/ptfile": ["checkpoint/internal/blocksum", "tensor"],
    # The loader: no LibTorch (see FREE).
    "imageloader/internal/raster": [],
    "imageloader/internal/codec": ["imageloader/internal/raster", "internal/imagecapi"],
    "imageloader/internal/arena": ["internal/system"],
    "imageloader/internal/parquet": [],
    "imageloader/internal/hostmem": [],
    "imageloader/internal/digest": [],
    "imageloader/internal/archive": [
        "imageloader/internal/digest",
        "imageloader/internal/parquet",
        "internal/imagecapi",
        "internal/printable",
        "internal/safefile",
        "internal/system",
    ],
    "imageloader/internal/index": [
        "imageloader/internal/archive",
        "imageloader/internal/arena",
        "imageloader/internal/codec",
        "imageloader/internal/digest",
        "imageloader/internal/hostmem",
        "internal/imagecapi",
        "internal/normalform",
        "internal/safefile",
        "internal/system",
    ],
    "imageloader/internal/archivetest": ["internal/system"],
    "imageloader/internal/indextest": [],
    "imageloader/internal/sourcetest": ["imageloader/internal/archive"],
    "imageloader/transform": ["internal/imagecapi", "tensor"],
    "imageloader/decode": [
        "imageloader/internal/codec",
        "internal/order",
        "imageloader/transform",
        "internal/decodeplan",
        "internal/imagecapi",
        "internal/origin",
    ],
    "imageloader/internal/audit": ["internal/imagecapi"],
    "imageloader/internal/sample": ["imageloader/internal/archive", "imageloader/internal/codec", "internal/assembly", "internal/imagecapi"],
    "imageloader/internal/count": ["imageloader/internal/archive", "imageloader/internal/sample"],
    "imageloader/internal/box": ["imageloader/internal/parquet", "imageloader/transform", "internal/imagecapi"],
    "imageloader/internal/mask": ["imageloader/internal/codec", "imageloader/transform", "internal/imagecapi", "tensor"],
    "imageloader/internal/devplan": [
        "imageloader/internal/arena",
        "imageloader/internal/digest",
        "imageloader/internal/index",
        "imageloader/internal/sample",
        "internal/decodeplan",
        "internal/imagecapi",
    ],
    "imageloader/internal/epoch": [
        "imageloader/internal/archive",
        "imageloader/internal/arena",
        "imageloader/internal/box",
        "imageloader/internal/codec",
        "imageloader/internal/count",
        "imageloader/internal/devplan",
        "imageloader/internal/index",
        "imageloader/internal/mask",
        "internal/order",
        "imageloader/internal/sample",
        "imageloader/transform",
        "internal/assembly",
        "internal/decodeplan",
        "internal/imagecapi",
        "tensor",
    ],
    "imageloader": [
        "imageloader/internal/arena",
        "imageloader/internal/archive",
        "imageloader/internal/audit",
        "imageloader/internal/box",
        "imageloader/internal/codec",
        "imageloader/internal/count",
        "imageloader/internal/devplan",
        "imageloader/internal/epoch",
        "imageloader/internal/index",
        "imageloader/internal/mask",
        "internal/order",
        "imageloader/internal/sample",
        "imageloader/transform",
        "internal/decodeplan",
        "internal/imagecapi",
        "internal/safefile",
        "tensor",
    ],
    "imageloader/pack": [
        "imageloader",
        "imageloader/internal/archive",
        "imageloader/internal/arena",
        "imageloader/internal/codec",
        "imageloader/internal/index",
        "imageloader/internal/sample",
        "internal/imagecapi",
        "internal/order",
        "internal/safefile",
    ],
    "imageloader/blob": ["imageloader", "internal/printable"],
    "imageloader/prometheus": ["imageloader"],
    # Streams, tensors, networks.
    "cuda": ["internal/capi", "internal/origin", "internal/racecheck", "internal/system"],
    "torch/internal/schema": [],
    "torch": ["cuda", "internal/capi", "internal/origin", "tensor", "torch/internal/schema"],
    "checkpoint": ["checkpoint/internal/blocksum", "checkpoint/internal/ptfile", "cuda", "internal/safefile", "internal/system", "tensor", "torch"],
    "internal/hostblock": ["cuda", "torch"],
    "nn": ["checkpoint", "cuda", "internal/hostblock", "torch"],
    "optim": ["checkpoint", "cuda", "nn", "torch"],
    "models": ["checkpoint", "cuda", "imageloader/transform", "nn", "torch"],
    "aoti": ["cuda", "internal/capi", "internal/hostblock", "internal/origin", "internal/safefile", "nn", "torch"],
    # Processes that train together.
    "internal/control": [],
    "distributed": ["checkpoint", "cuda", "internal/control", "internal/capi", "nn", "optim", "tensor", "torch"],
    "trace": ["internal/capi", "internal/picture", "internal/safefile"],
    "prefetcher/internal/ring": [],
    # internal/capi: the decoder.
    "prefetcher": [
        "cuda",
        "internal/assembly",
        "internal/capi",
        "internal/decodeplan",
        "internal/order",
        "internal/origin",
        "internal/system",
        "prefetcher/internal/ring",
        "tensor",
        "torch",
        "trace",
    ],
    "imagefeed": ["imageloader", "prefetcher"],
    "train": ["checkpoint", "cuda", "distributed", "imageloader", "internal/resident", "internal/safefile", "internal/tfevents", "nn", "optim", "prefetcher", "torch"],
    # internal/capi: the decoder.
    "serve": ["cuda", "imageloader/decode", "internal/capi", "internal/decodeplan", "internal/origin", "tensor", "torch"],
    "serve/prometheus": ["serve"],
    "serve/opentelemetry": ["imageloader/decode", "serve"],
    "internal/httpserve": ["imageloader/decode", "serve"],
    # For other people's tests.
    "cudatest": ["cuda", "internal/capi", "leaks", "torch"],
    # Generators, models and mutations: programs and packages for tests, which import nothing that ships.
    "torch/internal/opgen": ["torch/internal/schema"],
    "internal/settle": [],
    "internal/trampoline": [],
    "internal/portable": [],
    "internal/simulate": [],
    "internal/streamprog": [],
    "internal/mutate": [],
    "internal/parquettest": [],
    "internal/simworld/world": [],
    "internal/simworld/os": ["internal/simworld/world"],
    "internal/simworld/sync": [],
    "internal/simworld/system": ["internal/simworld/world"],
    "internal/simworld/imagecapi": ["internal/imagecapi", "internal/simworld/world"],
    "internal/simworld/loadersim": ["imageloader", "internal/parquettest", "internal/simworld/imagecapi",
                                    "internal/simworld/world"],
    "internal/simworld/cuda": [],
    "internal/simworld/rand": ["internal/simworld/world"],
    "internal/simworld/torch": ["internal/simworld/cuda", "tensor"],
    "internal/simworld/savesim": ["checkpoint", "internal/simworld/world", "torch"],
    "internal/simworld/net": ["internal/simworld/world"],
    "internal/simworld/time": ["internal/simworld/world"],
    "internal/simworld/controlsim": ["internal/control", "internal/simworld/world"],
    "internal/simworld/seeds": [],
    "internal/simworld": ["internal/simworld/world"],
    # Programs.
    "internal/bundle": [],
    "internal/cli": [
        "cuda",
        "imageloader",
        "imageloader/transform",
        "internal/capi",
        "internal/interrupt",
        "internal/printable",
        "prefetcher",
        "torch",
    ],
    "internal/clitest": [],
    "internal/foldersync": [],
    "internal/collectives": ["cuda", "distributed", "internal/freeport", "torch"],
    "internal/loaderbench": [
        "cuda",
        "imageloader",
        "internal/cli",
        "internal/printable",
        "internal/resident",
        "internal/safefile",
        "internal/system",
        "prefetcher",
        "tensor",
        "trace",
    ],
    "cmd/torchstream": [
        "aoti",
        "checkpoint",
        "cuda",
        "distributed",
        "imageloader",
        "imageloader/decode",
        "imageloader/pack",
        "imageloader/transform",
        "internal/bundle",
        "internal/capi",
        "internal/cli",
        "internal/collectives",
        "internal/freeport",
        "internal/httpserve",
        "internal/imagecapi",
        "internal/interrupt",
        "internal/library",
        "internal/loaderbench",
        "internal/machine",
        "internal/normalform",
        "internal/printable",
        "internal/safefile",
        "internal/setup",
        "internal/system",
        "models",
        "nn",
        "optim",
        "prefetcher",
        "serve",
        "tensor",
        "torch",
        "trace",
        "train",
    ],
    # The project's own benchmarks.
    "lab/internal/labcapi": ["internal/capi", "internal/imagecapi", "internal/library"],
    "lab/internal/httpload": ["internal/system"],
    "lab/torchstream-lab": [
        "aoti",
        "checkpoint",
        "cuda",
        "distributed",
        "imageloader",
        "imageloader/decode",
        "imageloader/transform",
        "internal/capi",
        "internal/cli",
        "internal/collectives",
        "internal/freeport",
        "internal/interrupt",
        "internal/loaderbench",
        "internal/printable",
        "lab/internal/httpload",
        "lab/internal/labcapi",
        "models",
        "nn",
        "optim",
        "prefetcher",
        "serve",
        "torch",
        "trace",
        "train",
    ],
    "examples/internal/lesson": ["cuda", "internal/interrupt", "trace"],
    "examples/internal/study": ["cuda", "internal/safefile", "torch"],
    "examples/01-train": [
        "checkpoint",
        "cuda",
        "examples/internal/lesson",
        "imagefeed",
        "imageloader",
        "imageloader/decode",
        "internal/httpserve",
        "internal/interrupt",
        "internal/printable",
        "internal/safefile",
        "nn",
        "optim",
        "prefetcher",
        "serve",
        "torch",
    ],
    "examples/02-overlap": ["cuda", "examples/internal/lesson", "torch"],
    "examples/03-p2p": ["cuda", "examples/internal/lesson", "internal/capi", "torch"],
    "examples/04-graph": ["cuda", "examples/internal/lesson", "optim", "torch"],
    "examples/05-parallel": ["cuda", "examples/internal/lesson", "nn", "torch"],
    "examples/07-chargpt": [
        "cuda",
        "examples/internal/lesson",
        "examples/internal/study",
        "internal/interrupt",
        "nn",
        "optim",
        "prefetcher",
        "torch",
    ],
    "examples/08-finetune": [
        "cuda",
        "examples/internal/lesson",
        "examples/internal/study",
        "imageloader",
        "internal/interrupt",
        "nn",
        "optim",
        "prefetcher",
        "torch",
    ],
    "examples/09-dcgan": [
        "cuda",
        "examples/internal/lesson",
        "examples/internal/study",
        "internal/interrupt",
        "nn",
        "optim",
        "prefetcher",
        "tensor",
        "torch",
    ],
    "examples/10-segment": [
        "cuda",
        "examples/internal/lesson",
        "examples/internal/study",
        "imageloader",
        "imageloader/transform",
        "internal/interrupt",
        "nn",
        "optim",
        "prefetcher",
        "tensor",
        "torch",
    ],
    "examples/11-distributed": [
        "cuda",
        "distributed",
        "examples/internal/lesson",
        "imagefeed",
        "imageloader",
        "internal/interrupt",
        "models",
        "nn",
        "optim",
        "prefetcher",
        "torch",
        "trace",
        "train",
    ],
    "examples/13-tabular": [
        "cuda",
        "examples/internal/lesson",
        "examples/internal/study",
        "nn",
        "optim",
        "prefetcher",
        "torch",
        "train",
    ],
    "examples/14-detect": [
        "cuda",
        "examples/internal/lesson",
        "examples/internal/study",
        "imagefeed",
        "imageloader",
        "imageloader/transform",
        "nn",
        "optim",
        "prefetcher",
        "torch",
    ],
    "examples/15-serve": [
        "aoti",
        "cuda",
        "examples/internal/lesson",
        "imageloader/decode",
        "imageloader/transform",
        "internal/httpserve",
        "serve",
        "torch",
    ],
    "examples/12-weights": [
        "checkpoint",
        "cuda",
        "examples/internal/lesson",
        "examples/internal/study",
        "internal/interrupt",
        "models",
        "nn",
        "prefetcher",
        "torch",
        "trace",
    ],
}

LIBTORCH = {"internal/capi", "cuda", "torch"}
# Packages that must not depend on the packages of the set, directly or indirectly.
FREE = {
    "imageloader": LIBTORCH | {"prefetcher"},
    "imageloader/transform": LIBTORCH | {"prefetcher"},
    "imageloader/decode": LIBTORCH | {"prefetcher", "imageloader", "imageloader/internal/archive"},
    "imageloader/blob": LIBTORCH | {"prefetcher"},
    "imageloader/prometheus": LIBTORCH | {"prefetcher"},
    "tensor": LIBTORCH,
    "checkpoint/internal/blocksum": LIBTORCH,
    "checkpoint/internal/ptfile": LIBTORCH,
    "prefetcher": {"imageloader"},
}

MODULES = [".", "imageloader/blob", "imageloader/prometheus", "lab", "serve/opentelemetry", "serve/prometheus"]
TAGS = ["", "debug"]


def packages(module, tags):
    """Map each package of the module to its imports from the project; names are relative to the root."""
    out = subprocess.run(
        ["go", "list", "-deps", "-tags", tags, "-json=ImportPath,Imports", "./..."],
        cwd=module, stdout=subprocess.PIPE, check=True, text=True,
    ).stdout  # fmt: skip
    decoder, at, found = json.JSONDecoder(), 0, {}
    while at < len(out):
        package, at = decoder.raw_decode(out, at)
        at += len(out[at:]) - len(out[at:].lstrip())
        if package["ImportPath"].startswith(ROOT):
            found[relative(package["ImportPath"])] = [relative(i) for i in package.get("Imports", []) if i.startswith(ROOT)]
    return found


def relative(path):
    return path[len(ROOT) + 1 :] or "."


def way(graph, start, goals):
    """Return the chain of imports from start to one of the goals, or None."""
    paths = [[start]]
    seen = {start}
    while paths:
        path = paths.pop(0)
        for name in graph.get(path[-1], []):
            if name in goals:
                return path + [name]
            if name not in seen:
                seen.add(name)
                paths.append(path + [name])
    return None


def table_errors():
    order = list(LAYERS)
    for n, (package, allowed) in enumerate(LAYERS.items()):
        for name in allowed:
            if name not in LAYERS:
                yield "the table allows %s to import %s, which has no row" % (package, name)
            elif order.index(name) >= n:
                yield "the table allows %s to import %s, whose row is not above in the text" % (package, name)


def graph_errors(graph, free):
    for package, imports in sorted(graph.items()):
        if package not in LAYERS:
            yield "%s has no row in the table of tools/lint/go_layers.py: give it one, in the text below the rows of all packages that it imports" % package
            continue
        for name in imports:
            if name not in LAYERS[package]:
                yield "%s imports %s, which the table of tools/lint/go_layers.py does not allow" % (package, name)
    for package, refused in free.items():
        if path := way(graph, package, refused):
            yield "%s must not depend on %s: %s" % (package, path[-1], " -> ".join(path))


def layout_errors(page):
    """Compare the table under "Layout" in CONTRIBUTING.md with the table above, and with the folders of C++ sources."""
    table = page.partition("\n## Layout\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.M)
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    for name in sorted(set(named)):
        if named.count(name) + named.count(name + "/") > 1:
            yield "CONTRIBUTING.md names %s twice under Layout" % name
        if not os.path.isdir(name):
            yield "CONTRIBUTING.md names %s under Layout, which is no folder" % name
    for folder in [*LAYERS, *("cshim/src/" + name for name in cxx_layers.FOLDERS)]:
        if folder not in named and not any(name.endswith("/") and (folder + "/").startswith(name) for name in named):
            yield "%s has no row in CONTRIBUTING.md under Layout: add the folder to a row" % folder


def main():
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
    bad = list(table_errors())
    with open("CONTRIBUTING.md", encoding="utf-8") as page:
        bad += layout_errors(page.read())
    for module in MODULES:
        for tags in TAGS if module == "." else [""]:
            bad += [e for e in graph_errors(packages(module, tags), FREE) if e not in bad]
    for line in bad:
        print("go_layers: error: " + line, file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
