#!/usr/bin/env python3
"""Check that the files of imageloader's top level form a ladder: a file uses the files below it.

  file_order.py [-list]

A reference is a use, in one file, of a function, a type, a constant, a variable, or a method of Loader or Options that
another file declares. A name counts once for each file that uses it. -list prints the references that point upwards.
"""

import pathlib
import re
import sys

FOLDER = "imageloader"
# From the lowest file up. A new file gets a place.
ORDER = ["doc", "errors", "sources", "state", "batch", "options", "loader", "stats", "identity", "index", "restore", "fill", "epoch",
         "inspect", "repair"]
MAX_REFERENCES, MAX_UPWARDS = 120, 15

def names(source):
    """Returns the names that a file declares, and the methods of Loader and Options."""
    found = set(re.findall(r"^(?:func|type|var|const) (\w+)", source, re.M))
    for group in re.findall(r"^(?:const|var) \(\n(.*?)^\)", source, re.M | re.S):
        found.update(re.findall(r"^\t(\w+)\b", group, re.M))
    return found, set(re.findall(r"^func \(\w+ \*?(?:Loader|Options|devicePlanner)\) (\w+)", source, re.M))


def code(source):
    """Returns a file without its comments, strings, imports, and the names of fields and parameters."""
    source = re.sub(r"^import \(.*?^\)", "", source, flags=re.M | re.S)
    source = re.sub(r'"(?:\\.|[^"\\\n])*"|`[^`]*`|//[^\n]*', " ", source)
    return re.sub(r"^\t\w+(?:, \w+)* +(?=[\w\[*.(]+)", " ", source, flags=re.M)


def main():
    files = {path.stem: path.read_text() for path in pathlib.Path(FOLDER).glob("*.go") if not path.stem.endswith("_test")}
    bad = [f"{FOLDER}/{name}.go has no place in ORDER of tools/lint/file_order.py" for name in files if name not in ORDER]
    bad += [f"{name} of ORDER is no file of {FOLDER}" for name in ORDER if name not in files]
    declared = {name: names(source) for name, source in files.items()}
    total, upwards = 0, []
    for user, source in files.items():
        text = code(source)
        words = set(re.findall(r"(?<![\w.])(\w+)\b(?!:)", text))
        calls = set(re.findall(r"\b(?:l|o|\(\*Loader\)\(p\))\.(\w+)\(", text))
        for owner, (plain, methods) in declared.items():
            if owner == user or user not in ORDER or owner not in ORDER:
                continue
            used = (plain & words) | (methods & calls)
            total += len(used)
            if ORDER.index(owner) > ORDER.index(user):
                upwards += [f"{user}.go uses {name} of {owner}.go" for name in sorted(used)]
    if total > MAX_REFERENCES:
        bad.append(f"{total} references between the files of {FOLDER}, want at most {MAX_REFERENCES}")
    if len(upwards) > MAX_UPWARDS:
        bad += upwards + [f"{len(upwards)} of them point upwards, want at most {MAX_UPWARDS}"]
    if sys.argv[1:] == ["-list"]:
        print("\n".join(upwards), f"\n{total} references, {len(upwards)} upwards")
    for line in bad:
        print(f"file_order: error: {line}", file=sys.stderr)
    sys.exit(1 if bad else 0)


main()
