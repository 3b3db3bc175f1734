#!/usr/bin/env python3
"""Check that Go structs have at most 12 fields. Tests and generated files are exempt, and so are tables of options and of results (TABLE).

  fat_types.py

Fields that change together, or that one lock guards, are an object: give it a type with methods. FAT lists the structs that
are best as they are. The list only gets shorter, except that a new entry may replace another.
"""

import os
import re
import subprocess
import sys

LIMIT = 12
MAX_FAT = 20

# Tables, whose fields a caller sets or reads one by one: Options, Config, Stats, Report, Result, and the flags of a command.
TABLE = re.compile(r"(Options|^options|Stats|Config|Report|Result)$")

# Maps "file:struct" to the reason why it is not split.
FAT = {
    "cmd/torchstream/inspect.go:inspection": "the JSON document of torchstream inspect",
    "imageloader/internal/raster/tiff.go:tiff": "the tags of an image file, which its decoder reads",
    "imageloader/state.go:wireState": "the JSON of a loader's state",
    "imageloader/transform/transform.go:Transform": "the options of a transform",
    "internal/imagecapi/image.go:Geometry": "the C struct of the same name",
    "internal/loaderbench/loaderbench.go:Measurement": "the settings and the clock of one run",
    "internal/racecheck/checker.go:Checker": "one lock guards the whole history",
    "internal/simulate/simulate.go:World": "the settings and the scheduler of a simulation",
    "lab/torchstream-lab/train.go:trainBench": "the flags of a benchmark",
    "lab/torchstream-lab/train_fed.go:fedMeasurement": "the sums of one measurement",
    "lab/torchstream-lab/train_fed.go:fedRow": "the JSON of a row of results",
    "torch/graphed_module.go:moduleEntry": "one captured pass: each field belongs to its replay",
}

STRUCT = re.compile(r"^(\t*)(?:type )?(\w+)(?:\[[^\]]*\])? struct \{$")


def fields(body):
    """Returns the number of fields of a formatted struct's lines."""
    count, depth = 0, 0
    for line in body:
        code = re.sub(r'`[^`]*`|"(?:\\.|[^"\\])*"', '""', line).split("//")[0].strip()
        if depth == 0 and code:
            names = re.match(r"(\w+(?:, \w+)*) +\S", code)  # otherwise an embedded type
            count += names.group(1).count(",") + 1 if names else 1
        depth += code.count("{") + code.count("(") - code.count("}") - code.count(")")
    return count


def structs(text):
    """Yields the name and the number of fields of each struct type of a file, those in functions too."""
    lines, group = text.split("\n"), False
    for i, line in enumerate(lines):
        group = line == "type (" or group and line != ")"
        match = STRUCT.match(line)
        if match and (line.lstrip("\t").startswith("type ") or group and match.group(1) == "\t"):
            end = lines.index(match.group(1) + "}", i)
            yield match.group(2), fields(lines[i + 1 : end])


def main():
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
    files = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.go"],
        stdout=subprocess.PIPE, check=True, text=True,
    ).stdout  # fmt: skip
    bad, fat = [], set()
    for path in filter(os.path.exists, sorted(set(files.split("\0")))):
        if path.endswith(("_test.go", "_gen.go")):
            continue
        with open(path, encoding="utf-8") as f:
            text = f.read()
        for name, count in structs(text):
            if count <= LIMIT or TABLE.search(name):
                continue
            fat.add(path + ":" + name)
            if path + ":" + name not in FAT:
                bad.append("%s: struct %s has %d fields, more than %d: make the fields that change together a type" % (path, name, count, LIMIT))
    for name in sorted(FAT.keys() - fat):
        bad.append("%s has at most %d fields now, or is gone: remove it from FAT in tools/lint/fat_types.py" % (name, LIMIT))
    if len(FAT) > MAX_FAT:
        bad.append("FAT in tools/lint/fat_types.py has %d structs, more than %d" % (len(FAT), MAX_FAT))
    for line in bad:
        print("fat_types: error: " + line, file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
