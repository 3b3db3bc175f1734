#!/usr/bin/env python3
"""Check that no Go function has a cyclomatic complexity over 25: tests and generated code are exempt.

  complexity.py

A function that is over it does several things: take it apart by what they do. HOT has the loops whose calls would cost
more than their length does.
"""

import os
import re
import subprocess
import sys

LIMIT = 25

# "package function": why it stays as it is, with the measurement.
HOT = {}


def main():
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
    out = subprocess.run(
        ["go", "tool", "gocyclo", "-over", str(LIMIT), "-ignore", r"_test\.go$|_gen\.go$|(^|/)testdata/", "."],
        stdout=subprocess.PIPE, text=True,
    ).stdout  # fmt: skip
    bad, seen = [], set()
    for line in out.splitlines():
        match = re.fullmatch(r"(\d+) (\S+) (.+) (\S+:\d+):\d+", line)
        if not match:
            bad.append("cannot read what gocyclo says: " + line)
            continue
        complexity, package, function, place = match.groups()
        seen.add(package + " " + function)
        if package + " " + function not in HOT:
            bad.append("%s: %s has a cyclomatic complexity of %s, more than %d: take it apart" % (place, function, complexity, LIMIT))
    for function in HOT.keys() - seen:
        bad.append("%s is not over %d any more: remove it from HOT in tools/lint/complexity.py" % (function, LIMIT))
    for line in bad:
        print("complexity: error: " + line, file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
