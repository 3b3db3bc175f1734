#!/usr/bin/env python3
"""Check that the tests that Makefile and .ci/run list by name exist, in the packages that the command tests.

  test_lists.py

Each alternative of a pattern of -run, -skip and --gtest_filter must match a test: `^Test(A|B)` lists two. Otherwise a test
that gets another name silently leaves its list, for example the tests that run under the race detector.
"""

import fnmatch
import glob
import os
import re
import sys

FILES = ("Makefile", ".ci/run")


def alternatives(pattern):
    """Returns the alternatives of a regular expression with its groups written out."""
    depth, parts, start = 0, [], 0
    for i, c in enumerate(pattern):
        depth += (c == "(") - (c == ")")
        if c == "|" and depth == 0:
            parts.append(pattern[start:i])
            start = i + 1
    parts.append(pattern[start:])
    if len(parts) > 1:
        return [one for part in parts for one in alternatives(part)]
    begin = pattern.find("(")
    if begin < 0:
        return [pattern]
    depth, end = 0, begin
    for end in range(begin, len(pattern)):
        depth += (pattern[end] == "(") - (pattern[end] == ")")
        if depth == 0:
            break
    inner, rest = alternatives(pattern[begin + 1 : end]), pattern[end + 1 :]
    if rest.startswith("?"):
        inner, rest = inner + [""], rest[1:]
    return [pattern[:begin] + a + b for a in inner for b in alternatives(rest)]


def go_tests(folders):
    """Returns the names of the tests and fuzz tests in folders. A folder that ends with /... stands for all below it."""
    names = set()
    for folder in folders:
        tree = folder.endswith("/...")
        for path in glob.glob(os.path.join(folder.removesuffix("/..."), "**" if tree else "", "*_test.go"), recursive=tree):
            with open(path, encoding="utf-8") as f:
                names.update(re.findall(r"^func ((?:Test|Fuzz|Example)\w*)\(", f.read(), re.M))
    return names


def c_tests():
    """Returns the names of the C++ tests, as Suite.Name."""
    names = set()
    for path in glob.glob("cshim/test/**/*.c[cu]", recursive=True):
        with open(path, encoding="utf-8") as f:
            names.update(a + "." + b for a, b in re.findall(r"\bTEST(?:_[FP])?\(\s*(\w+),\s*(\w+)\)", f.read()))
    return names


def commands(text):
    """Yields the line number and the text of each command that tests, and the variables that were assigned before it."""
    variables = {}
    text = re.sub(r"\$\\\n *", lambda m: "\0", text)  # a line that continues without a space
    n = 1
    for line in text.split("\n"):
        joined = line.replace("\0", "")
        assigned = re.match(r"(\w+) = (.*)", joined)
        if assigned:
            variables[assigned.group(1)] = assigned.group(2)
        elif "go test" in joined:
            yield n, joined, variables
        n += 1 + line.count("\0")


def listed(path, text):
    """Yields the place and the patterns of each list, and the folders of the commands that use it."""
    lists = {}
    for n, command, variables in commands(text):
        whole = command + " " + " ".join(variables.get(v, "") for v in re.findall(r"\$\((\w*PACKAGES)\)", command))
        under = re.search(r"\bcd (\S+) &&", command)
        folders = [os.path.join(under.group(1) if under else "", p) for p in re.findall(r"(?<=\s)\./([\w./-]+)", whole)]
        for arg in re.findall(r"-(?:run|skip) +(\"[^\"]*\"|'[^']*'|[^\s)]+)", command):
            names = [v for v in re.findall(r"\$\((\w+)\)", arg) if v != "FULL"]
            for key in names or [arg.strip("\"'")]:
                place, pattern, known = lists.setdefault(key, ("%s:%d" % (path, n), variables.get(key, key), []))
                known.extend(folders)
    return lists.values()


def check(path, text):
    """Yields what is wrong with a file."""
    for place, pattern, folders in listed(path, text):
        tests = go_tests(folders)
        for one in alternatives(pattern.replace("$$", "$")):
            if not any(re.search(one, name) for name in tests):
                yield "%s: no test in %s matches %s" % (place, " ".join(sorted(set(folders))) or "no folder", one)
    for f in re.findall(r"--gtest_filter='([^']*)'", text):
        if not fnmatch.filter(c_tests(), f):
            yield "%s: no C++ test has a name like %s" % (path, f)


def main():
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))
    bad = []
    for path in FILES:
        with open(path, encoding="utf-8") as f:
            bad += check(path, f.read())
    for line in bad:
        print("test_lists: error: " + line, file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
