#!/usr/bin/env python3
"""Compile the C++ sources of a build folder again as C++20, for their diagnostics only.

  cxx20.py BUILD_FOLDER [JOBS]

LibTorch after 2.11 requires C++20, so the code must compile as C++20 too: this finds out without that LibTorch. CUDA sources
and tests are left out. Takes
about 20 s of one core for every source that includes LibTorch.
"""

import concurrent.futures
import json
import os
import re
import shlex
import subprocess
import sys


def check(entry):
    command = [a for a in shlex.split(entry["command"]) if a != "-c"]
    if "ccache" in os.path.basename(command[0]):
        command = command[1:]
    out = command.index("-o")
    del command[out : out + 2]
    command = [re.sub(r"^-std=.*", "-std=c++20", a) for a in command] + ["-fsyntax-only"]
    return entry["file"], subprocess.run(command, cwd=entry["directory"], stderr=subprocess.PIPE, text=True)


def main(build, jobs="2"):
    with open(os.path.join(build, "compile_commands.json"), encoding="utf-8") as f:
        entries = [e for e in json.load(f) if re.search(r"/cshim/src/.*\.cc$", e["file"])]
    bad = 0
    with concurrent.futures.ThreadPoolExecutor(int(jobs)) as pool:
        for file, done in pool.map(check, entries):
            print("c++20: %s%s" % (os.path.relpath(file), "" if done.returncode == 0 else ": error"), file=sys.stderr, flush=True)
            if done.returncode != 0:
                print(done.stderr, file=sys.stderr)
                bad = 1
    return bad


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
