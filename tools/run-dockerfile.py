#!/usr/bin/env python3
"""Run the steps of a Dockerfile in folders that debootstrap makes, for machines without Docker. Needs root and Debian's mirror.

  run-dockerfile.py [--build-context NAME=DIR]... [--build-arg NAME=VALUE]... DOCKERFILE CONTEXT FOLDER [ARGUMENT...]

Every stage becomes FOLDER/NAME (or FOLDER/final). Its image must be one of Debian 12: a tag with "bookworm" or "debian:12".
An image of golang gets a copy of this machine's Go. A stage that continues another one shares its files by hard links.
Then the last stage's entry point runs in its folder, without a network, with the arguments (default: CMD). Prints the
size of each stage and the time of each step.

Knows FROM, RUN, COPY, WORKDIR, ARG, ENV, USER, ENTRYPOINT and CMD, as far as examples/*Dockerfile use them.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time

BUNDLE = "/etc/ssl/certs/ca-certificates.crt"  # the authorities that this machine trusts
MIRROR = "http://deb.debian.org/debian"
PATH = "/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Stage:
    def __init__(self, folder, image, base=None):
        self.folder, self.workdir, self.user, self.entry, self.cmd = folder, "/", "0:0", [], []
        self.environment = {"PATH": PATH, "HOME": "/root", "GOTOOLCHAIN": "local", "SSL_CERT_FILE": BUNDLE, "PIP_CERT": BUNDLE}
        if base:
            self.workdir, self.user, self.environment = base.workdir, base.user, dict(base.environment)
            run(["cp", "-al", base.folder, folder])
            return
        if "bookworm" not in image and not image.startswith("debian:12"):
            sys.exit("run-dockerfile: error: FROM %s: only images of Debian 12 are known" % image)
        run(["debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", folder, MIRROR], quiet=True)
        shutil.copy("/etc/resolv.conf", os.path.join(folder, "etc/resolv.conf"))
        shutil.copy(BUNDLE, folder + BUNDLE)
        if image.startswith("golang:"):
            shutil.copytree(os.path.realpath("/usr/local/go"), os.path.join(folder, "usr/local/go"), symlinks=True)

    def inside(self, path):
        return os.path.join(self.folder, os.path.normpath(os.path.join(self.workdir, path)).lstrip("/"))

    def shell(self, command, network=True):
        """Run a command in the stage's folder, in namespaces of its own."""
        os.makedirs(self.inside("."), exist_ok=True)
        script = (
            'mount -t proc proc "$1/proc" && mount --rbind /dev "$1/dev" && mount --rbind /sys "$1/sys" && '
            'exec chroot --userspec="$2" "$1" sh -c \'cd "$0" && exec "$@"\' "$3" "${@:4}"'
        )
        spaces = ["unshare", "--mount", "--pid", "--fork"] + ([] if network else ["--net"])
        run(spaces + ["bash", "-c", script, "bash", self.folder, self.user, self.workdir] + command, env=self.environment)


def run(command, quiet=False, env=None):
    done = subprocess.run(command, env=env, stdout=subprocess.DEVNULL if quiet else None)
    if done.returncode != 0:
        sys.exit("run-dockerfile: error: exit status %d: %s" % (done.returncode, " ".join(command)))


def instructions(path):
    with open(path, encoding="utf-8") as f:
        lines = [line for line in f.read().splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if line.strip():
            yield line.split(None, 1)


def words(text):
    """Return the words of the JSON form, or those of a shell."""
    return json.loads(text) if text.startswith("[") else ["sh", "-c", text]


def ignored_in(folder):
    """Return the names that the .dockerignore of a context lists."""
    path = os.path.join(folder, ".dockerignore")
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as f:
        return f.read().split()


def copy(stage, source, target, ignored):
    """Copy what is in a folder, or a file, as COPY does."""
    into = stage.inside(target) + ("/" if target.endswith("/") else "")
    os.makedirs(into if os.path.isdir(source) else os.path.dirname(into), exist_ok=True)
    if not os.path.isdir(source):
        shutil.copy(source, into)
        return
    exclude = ["--exclude=./" + name for name in ignored]
    tar = subprocess.Popen(["tar", "-C", source] + exclude + ["-cf", "-", "."], stdout=subprocess.PIPE)
    subprocess.run(["tar", "-C", into, "--no-same-owner", "-xf", "-"], stdin=tar.stdout, check=True)
    if tar.wait() != 0:
        sys.exit("run-dockerfile: error: cannot copy %s" % source)


def main(dockerfile, context, folder, arguments, contexts, given):
    stages, stage = {}, None
    for name, rest in instructions(dockerfile):
        began = time.monotonic()
        if name == "FROM":
            image, _, label = re.match(r"(\S+)( AS (\S+))?$", rest, re.I).groups()
            into = os.path.join(os.path.abspath(folder), label or "final")
            stage = stages[label or "final"] = Stage(into, image, stages.get(image))
        elif name == "RUN":
            stage.shell(["sh", "-c", rest])
        elif name == "COPY":
            options, root = shlex.split(rest), context
            if options[0].startswith("--from="):
                origin = options.pop(0).split("=", 1)[1]
                root = stages[origin].folder if origin in stages else contexts[origin]
            for source in options[:-1]:
                copy(stage, os.path.join(root, source.lstrip("/")), options[-1], ignored_in(root))
        elif name in ("ARG", "ENV"):
            key, value = rest.split("=", 1)
            stage.environment[key] = given.get(key, value) if name == "ARG" else value
        elif name == "WORKDIR":
            stage.workdir = os.path.join(stage.workdir, rest)
        elif name == "USER":
            stage.user = rest
        elif name in ("ENTRYPOINT", "CMD"):
            setattr(stage, "entry" if name == "ENTRYPOINT" else "cmd", words(rest))
        else:
            sys.exit("run-dockerfile: error: %s is not known here" % name)
        print("run-dockerfile: %5d s  %s %s" % (time.monotonic() - began, name, rest[:80]), file=sys.stderr, flush=True)
    for label, each in stages.items():
        size = subprocess.run(["du", "-sm", each.folder], stdout=subprocess.PIPE, check=True, text=True).stdout.split()[0]
        print("run-dockerfile: %s is %s MB" % (label, size), file=sys.stderr, flush=True)
    stage.shell(stage.entry + (arguments or stage.cmd), network=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in "--build-context", "--build-arg":
        parser.add_argument(option, action="append", default=[], type=lambda text: text.split("=", 1))
    for name in "dockerfile", "context", "folder":
        parser.add_argument(name)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    o = parser.parse_args()
    main(o.dockerfile, o.context, o.folder, o.arguments, dict(o.build_context), dict(o.build_arg))
