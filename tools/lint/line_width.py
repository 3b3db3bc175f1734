#!/usr/bin/env python3
"""Check the width of lines in Go files, with tabs of 4 columns.

  line_width.py

Comments wrap at 100 columns, except in generated files, and except preformatted and unbreakable lines. No line has more
than 140 columns, and at most 700 lines of all files have more than 120.
"""

import os
import re
import subprocess
import sys

COMMENT = 100
WIDE = 120
MOST_WIDE = 700
LONGEST = 140


def main():
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
    files = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.go"],
        stdout=subprocess.PIPE, check=True, text=True,
    ).stdout  # fmt: skip
    bad, wide = [], 0
    for path in filter(os.path.exists, sorted(set(files.split("\0")))):
        with open(path, encoding="utf-8") as f:
            text = f.read()
        generated = re.search(r"^// Code generated .* DO NOT EDIT\.$", text, re.M)
        for n, line in enumerate(text.splitlines(), 1):
            width = len(line.expandtabs(4))
            wide += width > WIDE
            most = COMMENT if not generated and wraps(line.lstrip("\t ")) else LONGEST
            if width > most:
                bad.append("%s:%d: %d columns, want at most %d" % (path, n, width, most))
    if wide > MOST_WIDE:
        bad.append("%d lines have more than %d columns, want at most %d" % (wide, WIDE, MOST_WIDE))
    for line in bad:
        print("line_width: error: " + line, file=sys.stderr)
    return 1 if bad else 0


def wraps(line):
    """Tells comments from directives, preformatted text, and words that cannot be broken, such as an address."""
    return line.startswith("//") and not line.startswith(("//go:", "//\t")) and len(line.split()) > 2


if __name__ == "__main__":
    sys.exit(main())
