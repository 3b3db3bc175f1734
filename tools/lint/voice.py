#!/usr/bin/env python3
"""Count phrases that make comments hard to read, per 1,000 words of comments, against a budget. Counts each Go package
and each folder of C++.

  voice.py            check every package
  voice.py -update    lower the budgets to today's counts; a budget never rises
  voice.py -worst N   also print the N comment lines with most phrases

The phrases are relative clauses that stand for a noun, verbs of motion for a state, and the like. A sentence without them
can still be bad, so a reader grades comments too (CONTRIBUTING.md, "Words"). The table of budgets is voice_budgets.txt.
"""

import pathlib
import re
import subprocess
import sys

# Phrases, each with what to write instead.
PHRASES = {
    r"\b(?:that|those) of\b": "the noun",
    r"\b(?:of|from|in|with|by|to|at|is|are|and|than|but|has|have|had|for|on|gives?|makes?|takes?|needs?|does|do|returns?) what\b":
        "the noun",
    r"\bbeg(?:in|ins|an|un)\b": "start, first",
    r"\bbeside\b": "next to, besides, with",
    r"\bof (?:its|their|one's) own\b": "its own, a separate",
    r"\b(?:go|goes|went|gone) on\b": "continue",
    r"\b(?:lie|lies|lay|lain)\b(?! to\b)": "is, are",
    r"\bin (?:the )?place of\b": "instead of",
    r"\bunder way\b": "running",
    r"\bbut for\b": "except",
    r"\ball the same\b": "nevertheless",
}
REGEXPS = [re.compile(phrase, re.I) for phrase in PHRASES]
DEFAULT = 1.0  # of a package without a row
BUDGETS = pathlib.Path(__file__).with_name("voice_budgets.txt")
SOURCES = ["*.go", "*.h", "*.cc", "*.cu"]
TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|`[^`]*`|\'(?:\\.|[^\'\\\n])+\'|//(?P<line>[^\n]*)|/\*(?P<block>.*?)\*/', re.S)


def comments(source):
    """Yields the comments of a file, without directives, and the number of their line."""
    for match in TOKEN.finditer(source):
        text = match.group("line") if match.group("line") is not None else match.group("block")
        if text and not text.startswith(("go:", "line ", "nolint", "export ", " #")):
            yield text, source.count("\n", 0, match.start()) + 1


def packages():
    """Returns the Go and C++ files of git, by folder. Generated files are left out."""
    tracked = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", *SOURCES], capture_output=True, text=True,
                             check=True).stdout.split()
    found = {}
    for path in map(pathlib.Path, tracked):
        if not path.exists() or "testdata" in path.parts or "DO NOT EDIT" in path.read_text()[:2000]:
            continue
        found.setdefault(str(path.parent), []).append(path)
    return found


def measure(files, lines):
    """Returns the phrases in 1,000 words of the comments of some files, and appends the lines that have any."""
    words = phrases = 0
    for path in files:
        for text, number in comments(path.read_text()):
            words += len(text.split())
            count = sum(len(regexp.findall(text)) for regexp in REGEXPS)
            phrases += count
            if count:
                lines.append((count, f"{path}:{number}: {text.strip()}"))
    return 1000 * phrases / max(words, 300)  # few words allow a phrase


def main():
    budgets = {}
    if BUDGETS.exists():
        for line in BUDGETS.read_text().splitlines():
            package, budget = line.split()
            budgets[package] = float(budget)
    update, lines, bad, rows = "-update" in sys.argv, [], False, []
    for package, files in sorted(packages().items()):
        now, budget = round(measure(files, lines), 1), budgets.get(package, 99.0 if update and not budgets else DEFAULT)
        if now > budget:
            print(f"voice: error: {package}: {now} phrases in 1,000 words of comments, want at most {budget} (voice.py -worst 20 shows them)",
                  file=sys.stderr)
            bad = True
        if min(now, budget) > DEFAULT:
            rows.append(f"{package} {min(now, budget)}")
    if update:
        BUDGETS.write_text("".join(row + "\n" for row in rows))
    if "-worst" in sys.argv:
        for _, line in sorted(lines, key=lambda row: -row[0])[:int(sys.argv[sys.argv.index("-worst") + 1])]:
            print(line)
    sys.exit(bad)


main()
