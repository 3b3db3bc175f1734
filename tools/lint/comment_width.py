#!/usr/bin/env python3
"""Check that Go comments wrap at 100 columns, with tabs of 4. Generated files, preformatted and unbreakable lines are exempt.

  comment_width.py
"""

import os
import re
import subprocess
import sys

WIDTH = 100


def main():
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
    files = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.go"],
        stdout=subprocess.PIPE, check=True, text=True,
    ).stdout  # fmt: skip
    bad = 0
    for path in filter(os.path.exists, sorted(set(files.split("\0")))):
        with open(path, encoding="utf-8") as f:
            text = f.read()
        if re.search(r"^// Code generated .* DO NOT EDIT\.$", text, re.M):
            continue
        for n, line in enumerate(text.splitlines(), 1):
            comment = line.lstrip("\t ")
            # Skips directives, preformatted text, and words that cannot be broken, such as an address.
            if not comment.startswith("//") or comment.startswith(("//go:", "//\t")) or len(comment.split()) <= 2:
                continue
            width = len(line.expandtabs(4))
            if width > WIDTH:
                print("comment_width: error: %s:%d: %d columns, want at most %d" % (path, n, width, WIDTH), file=sys.stderr)
                bad = 1
    return bad


if __name__ == "__main__":
    sys.exit(main())
