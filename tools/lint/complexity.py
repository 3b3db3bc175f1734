#!/usr/bin/env python3
"""Check that no Go function has a cyclomatic complexity over 20. Tests and generated code are exempt.

  complexity.py

A function over the limit does several things: split it into functions that each do one of them. HOT has the loops that a
split would make too slow.
"""

import os
import re
import subprocess
import sys

LIMIT = 20

# Maps "package function" to the reason why it is not split, with the measurement.
HOT = {
    "torch (operator).run": "every operator call runs it; parts in other functions cost more than the call's share, as its comment says",
    "torch (*namedOperator).collect": "converts the arguments of most calls of torch.Call, with few comparisons and no further calls",
}


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
            bad.append("cannot parse the output of gocyclo: " + line)
            continue
        complexity, package, function, place = match.groups()
        seen.add(package + " " + function)
        if package + " " + function not in HOT:
            bad.append("%s: %s has a cyclomatic complexity of %s, more than %d: split it" % (place, function, complexity, LIMIT))
    for function in HOT.keys() - seen:
        bad.append("%s is no longer over %d: remove it from HOT in tools/lint/complexity.py" % (function, LIMIT))
    for line in bad:
        print("complexity: error: " + line, file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
