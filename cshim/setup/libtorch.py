#!/usr/bin/env python3
"""Find LibTorch, or install it, and print its locations for the build.

  libtorch.py path          print its folder (like a site-packages), and install it if needed
  libtorch.py cmake FILE    install it if needed, and write its locations to FILE as CMake cache settings if they changed
  libtorch.py show          print every location as NAME=VALUE, one per line; install it if needed

With LIBTORCH set, that LibTorch is used: the site-packages that contains torch/, the torch package folder itself, or
an unpacked libtorch zip. Otherwise the wheels in cshim/libtorch-VERSION.lock are installed, once, under
TORCHSTREAM_CACHE (default ~/.cache/torchstream). TORCHSTREAM_LIBTORCH sets VERSION (default 2.11; 2.11-cpu is without CUDA).
Results go to stdout, progress and errors to stderr; the exit status is 1 on an error.

Needs only Python 3.9 or newer and its standard library.
"""

import contextlib
import ctypes
import fcntl
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
LOCKS = os.path.join(os.path.dirname(HERE), "libtorch-%s.lock")
DEFAULT = "2.11"
STAMP = ".torchstream-complete"
# The first and the last version that the shim is built and tested with. One between them is accepted as LIBTORCH=.
OLDEST, NEWEST = (2, 11), (2, 15)
# Wheels and the unpacked tree exist at the same time until the install ends, and wheels have up to 0.65 of the tree's size.
NEED = 1.7
# pip accepts a wheel only if its tag is listed. These are all tags that glibc 2.28 supports.
PLATFORMS = ["manylinux_2_%d_x86_64" % minor for minor in range(28, 4, -1)] + [
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
]


class SetupError(Exception):
    """An error whose message names the failed step and the cure."""


def say(text):
    print("libtorch: " + text, file=sys.stderr, flush=True)


def absolute(name, value):
    """Return the path in the environment variable `name` as an absolute path. Raise an error if the tools cannot use it."""
    path = os.path.abspath(os.path.expanduser(value))
    if re.search(r"[\s:;'\"$\\#]", path):
        raise SetupError(
            "%s=%s: compiler and linker flags cannot carry a path with spaces or any of : ; ' \" $ \\ #; "
            "use a path without them (a symbolic link to it will do)" % (name, path)
        )
    return path


def first_folder(candidates, probe):
    for folder in candidates:
        if folder and os.path.exists(os.path.join(folder, probe)):
            return folder
    return ""


def minor_of(folder):
    """Return the number behind the last dot of a folder's name."""
    return int(re.search(r"\d*$", folder).group() or 0)


def version_of(torch):
    """Return (major, minor, patch) from the headers. The file of the macros depends on the release."""
    for header in ("torch/headeronly/version.h", "torch/csrc/api/include/torch/version.h"):
        try:
            with open(os.path.join(torch, "include", header), encoding="utf-8") as f:
                text = f.read()
        except OSError:
            continue
        parts = [re.search(r"#define TORCH_VERSION_%s (\d+)" % part, text) for part in ("MAJOR", "MINOR", "PATCH")]
        if all(parts):
            return tuple(int(part.group(1)) for part in parts)
    raise SetupError("%s: no torch/version.h in its include folder, so this is not a LibTorch with headers" % torch)


def toolkit(torch, why):
    """Return the locations of the CUDA toolkit for the LibTorch in the folder `torch`, which has CUDA."""
    site = os.path.dirname(torch)
    cuda = first_folder(
        [
            os.path.join(site, "nvidia", "cu13"),
            absolute("CUDA_HOME", os.environ["CUDA_HOME"]) if os.environ.get("CUDA_HOME") else "",
            *sorted(glob.glob("/usr/local/cuda-13.*"), key=minor_of, reverse=True),
            "/usr/local/cuda",
        ],
        os.path.join("bin", "nvcc"),
    )
    if not cuda:
        raise SetupError(
            "no CUDA 13 compiler for %s: looked for bin/nvcc in %s, CUDA_HOME, /usr/local/cuda-13.* and /usr/local/cuda. "
            'Set CUDA_HOME, or install one beside it: pip install "cuda-toolkit[nvcc,nvvm,crt,cccl,cudart,nvjpeg]==13.*"'
            % (why, os.path.join(site, "nvidia", "cu13"))
        )
    include = first_folder(
        [os.path.join(cuda, "include"), os.path.join(cuda, "targets", "x86_64-linux", "include")], "cuda_runtime_api.h"
    )
    if not include:
        raise SetupError('%s: no include/cuda_runtime_api.h; pip install "cuda-toolkit[cudart,crt,cccl]==13.*"' % cuda)
    with open(os.path.join(include, "cuda_runtime_api.h"), encoding="utf-8", errors="replace") as f:
        runtime = re.search(r"#define CUDART_VERSION\s+(\d+)", f.read())
    if not runtime or int(runtime.group(1)) // 1000 != 13:
        raise SetupError(
            "%s is CUDA %s, %s was built with CUDA 13: set CUDA_HOME to a CUDA 13 toolkit"
            % (cuda, int(runtime.group(1)) / 1000 if runtime else "?", why)
        )
    cuda_lib = first_folder([os.path.join(cuda, d) for d in ("lib", "lib64", "targets/x86_64-linux/lib")], "libcudart.so.13")
    if not cuda_lib:
        raise SetupError('%s: no libcudart.so.13 in lib or lib64; pip install "cuda-toolkit[cudart]==13.*"' % cuda)
    # The zip has its own CUDA runtime under another name. Use it, so that a process has only one runtime.
    own = sorted(glob.glob(os.path.join(glob.escape(torch), "lib", "libcudart*.so.13*")))
    return {
        "CUDA": cuda,
        "CUDA_INCLUDE": include,
        "CUDA_LIB": cuda_lib,
        "CUDART": own[0] if own else os.path.join(cuda_lib, "libcudart.so.13"),
    }


def locate(torch, why):
    """Return all locations of the LibTorch in the folder `torch`, which has include/ and lib/. Errors name it as `why`."""
    site = os.path.dirname(torch)
    found = version_of(torch)
    if not OLDEST <= found[:2] <= NEWEST:
        raise SetupError(
            "%s is LibTorch %d.%d.%d, torchstream needs %d.%d to %d.%d: point LIBTORCH at one, or unset LIBTORCH to have one "
            "installed (TORCHSTREAM_LIBTORCH=%s)" % ((why,) + found + OLDEST + NEWEST + (" or ".join(locked()),))
        )
    libs = [os.path.join(torch, "lib")]
    # Empty for a LibTorch without CUDA, for which the shim is built without CUDA too.
    cuda = dict.fromkeys(("CUDA", "CUDA_INCLUDE", "CUDA_LIB", "CUDART"), "")
    if os.path.exists(os.path.join(torch, "lib", "libtorch_cuda.so")):
        cuda = toolkit(torch, why)
        libs.append(cuda["CUDA_LIB"])
    nvidia = os.path.join(site, "nvidia")
    if cuda["CUDA"] and os.path.isdir(nvidia):
        libs += [
            os.path.join(nvidia, d, "lib")
            for d in sorted(os.listdir(nvidia))
            if d != "cu13" and os.path.isdir(os.path.join(nvidia, d, "lib"))
        ]
    yaml = first_folder([os.path.join(site, "torchgen", "packaged", "ATen", "native")], "native_functions.yaml")
    return {
        "SITE": site,
        "TORCH": torch,
        "LIBTORCH_VERSION": "%d.%d.%d" % found,
        **cuda,
        "LIBRARY_PATH": ":".join(libs),
        "NATIVE_FUNCTIONS": os.path.join(yaml, "native_functions.yaml") if yaml else "",
    }


def given(value):
    """Return the locations for LIBTORCH=value."""
    path = absolute("LIBTORCH", value)
    why = "LIBTORCH=" + path
    wanted = (
        "give the site-packages that contains torch/, the torch package folder, or an unpacked libtorch zip "
        "(the folder with include/ and lib/), or unset LIBTORCH to have one installed"
    )
    if not os.path.isdir(path):
        raise SetupError(why + ": no such folder: " + wanted)
    for torch in (os.path.join(path, "torch"), path):
        if os.path.exists(os.path.join(torch, "lib", "libtorch_cpu.so")):
            found = locate(torch, why)
            if not found["CUDA"]:
                say(why + " has no CUDA: the shim is built without CUDA, and finds no GPU")
            return found
    raise SetupError(why + ": neither torch/lib/libtorch_cpu.so nor lib/libtorch_cpu.so is in it: " + wanted)


def locked():
    """Return the versions that have a lock, the oldest first."""
    names = glob.glob(glob.escape(os.path.dirname(HERE)) + "/libtorch-*.lock")
    versions = (re.search(r"libtorch-(.*)\.lock$", name).group(1) for name in names)
    return sorted(versions, key=lambda v: ("cpu" in v, minor_of(v.partition("-")[0])))


def lock():
    """Return the path of the lock that TORCHSTREAM_LIBTORCH selects."""
    version = os.environ.get("TORCHSTREAM_LIBTORCH") or DEFAULT
    if version not in locked():
        raise SetupError(
            "TORCHSTREAM_LIBTORCH=%s: the versions that can be installed are %s; LIBTORCH=FOLDER uses another one"
            % (version, " and ".join(locked()))
        )
    return LOCKS % version


def requirements():
    """Return the lines of the lock without comments."""
    with open(lock(), encoding="utf-8") as f:
        lines = [line.strip() for line in f]
    return [line for line in lines if line and not line.startswith("#")]


def described(name):
    """Return what the lock's comment `# name: text` says, or ""."""
    with open(lock(), encoding="utf-8") as f:
        found = re.search(r"^# %s: (.*)$" % re.escape(name), f.read(), re.MULTILINE)
    return found.group(1) if found else ""


def cached(cache):
    """Return the folder of the locked LibTorch in `cache`, installed or not. Its name depends on the lock's contents."""
    lines = requirements()
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
    version = next(line for line in lines if line.startswith("torch==")).split()[0].split("==")[1]
    return os.path.join(cache, "libtorch-%s-%s" % (version, digest))


def run(step, command, tmp, keep):
    """Run a pip command, and show its output only if it fails. The command inherits `keep`, the lock's descriptor: a pip
    that outlives a killed set-up keeps the lock, so that no other set-up removes the folder that it writes to."""
    env = dict(os.environ, TMPDIR=tmp, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1")
    for name in ("PYTHONHOME", "PYTHONPATH", "PIP_TARGET", "PIP_USER", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV", "PIP_CONSTRAINT"):
        env.pop(name, None)
    done = subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=(keep,)
    )
    if done.returncode == 0:
        return
    text = done.stdout.decode(errors="replace").strip()
    tail = "\n".join("  | " + line for line in text.splitlines()[-12:])
    low = text.lower()
    if "hash" in low and "mismatch" in low or "do not match the hashes" in low:
        cure = "the file is not the one in " + os.path.relpath(lock(), os.path.dirname(os.path.dirname(HERE))) + ": check the package index or mirror that pip uses, then run make again"
    elif "no space left" in low:
        cure = "the disk is full: free space, or set TORCHSTREAM_CACHE to a folder on a bigger disk"
    elif "no matching distribution" in low or "could not find a version" in low:
        cure = "pip's package index does not have it or cannot be reached: check the network and pip's configuration, then run make again"
    elif "ensurepip" in low:
        cure = "this Python has no venv: apt-get install python3-venv"
    else:
        cure = "check the network and pip's configuration, then run make again: finished downloads are kept"
    raise SetupError("%s failed (exit status %d)\n%s\n  cure: %s" % (step, done.returncode, tail, cure))


def size_of(folder):
    total = 0
    for base, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(base, name)).st_size
    return total


@contextlib.contextmanager
def progress(label, *folders):
    """Report the progress: on a terminal in one line that is rewritten every second, elsewhere in a line every 15 seconds.

    Bytes grow in one folder and then move to the next, and for a moment both folders have them. So the progress is that of
    the folder that has gained the most.
    """
    start, stop, terminal = time.monotonic(), threading.Event(), sys.stderr.isatty()
    before = [size_of(folder) for folder in folders]

    def line():
        gained = max(size_of(folder) - size for folder, size in zip(folders, before))
        return "%s, %d MB, %d s" % (label, max(0, gained) // 1000000, time.monotonic() - start)

    def report():
        while not stop.wait(1 if terminal else 15):
            if terminal:
                print("\r\033[Klibtorch: " + line(), end="", file=sys.stderr, flush=True)
            else:
                say(line())

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        if terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    say(line())


def install(cache, target):
    """Install the locked wheels as `target`, a folder in `cache`, unless another set-up has just installed them."""
    try:
        os.makedirs(cache, exist_ok=True)
        keep = os.open(target + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as e:
        raise SetupError("cannot write to the cache %s (%s): set TORCHSTREAM_CACHE to a folder of your own" % (cache, e.strerror))
    try:
        try:
            fcntl.flock(keep, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another set-up that installs into %s" % cache)
            fcntl.flock(keep, fcntl.LOCK_EX)
        if complete(target):
            return
        install_locked(cache, target, keep)
    finally:
        os.close(keep)


def install_locked(cache, target, keep):
    lines = requirements()
    # This set-up has the lock, so a temporary folder belongs to a killed one. Its finished wheels are kept.
    wheels, tmp = target + ".wheels", target + ".tmp"
    shutil.rmtree(tmp, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)  # it has no stamp, so it is incomplete
    os.makedirs(wheels, exist_ok=True)
    free = (shutil.disk_usage(cache).free + size_of(wheels)) / 1e9
    size = described("on disk")
    need = NEED * float(size.split()[0])
    if free < need:
        raise SetupError(
            "%s has %.1f GB free and LibTorch needs %.1f GB while it is installed (%s afterwards): free space, or set "
            "TORCHSTREAM_CACHE to a folder on a bigger disk" % (cache, free, need, size)
        )
    say("installing LibTorch into %s (once; packages: %d; on disk: %s)" % (target, len(lines), size))
    venv, site = os.path.join(tmp, "venv"), os.path.join(tmp, "site")
    for folder in (tmp, site, os.path.join(tmp, "tmp")):
        os.makedirs(folder)
    # Uses its own venv, because distributions forbid pip outside of one, or have no pip outside of one.
    run("making a Python environment for pip", [sys.executable, "-m", "venv", venv], os.path.join(tmp, "tmp"), keep)
    pip = [os.path.join(venv, "bin", "python3"), "-m", "pip", "--no-cache-dir"]
    only = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", "--require-hashes"]
    for tag in PLATFORMS:
        only += ["--platform", tag]
    if described("index"):
        only += ["--extra-index-url", described("index")]
    one = os.path.join(tmp, "one.txt")
    # Downloads one package at a time, so that an interrupted set-up continues where it stopped.
    for n, line in enumerate(lines, 1):
        name, version = line.split()[0].split("==")
        mark = os.path.join(wheels, "%s-%s.done" % (name, version))
        if os.path.exists(mark):
            continue
        with open(one, "w", encoding="utf-8") as f:
            f.write(line + "\n")
        label = "download %d of %d: %s %s" % (n, len(lines), name, version)
        with progress(label, wheels, os.path.join(tmp, "tmp")):
            run("downloading %s %s" % (name, version), pip + ["download", "-q", "-d", wheels, "-r", one] + only, os.path.join(tmp, "tmp"), keep)
        open(mark, "w").close()
    with progress("unpacking", site, os.path.join(tmp, "tmp")):
        run(
            "unpacking the wheels",
            pip + ["install", "-q", "--no-compile", "--no-index", "--find-links", wheels, "--target", site, "-r", lock()] + only,
            os.path.join(tmp, "tmp"),
            keep,
        )
    locate(os.path.join(site, "torch"), "the LibTorch just installed")
    # What the stamp says must hold after a crash of the machine too.
    sync(site)
    with open(os.path.join(site, STAMP), "w", encoding="utf-8") as f:
        f.write("\n".join(lines) + "\n")
        f.flush()
        os.fsync(f.fileno())
    os.rename(site, target)
    shutil.rmtree(wheels, ignore_errors=True)
    shutil.rmtree(tmp, ignore_errors=True)
    say("installed")


def sync(folder):
    """Write what the folder's file system has in memory to the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
            raise SetupError("cannot write %s to the disk: %s" % (folder, os.strerror(ctypes.get_errno())))
    finally:
        os.close(fd)


def complete(target):
    return os.path.exists(os.path.join(target, STAMP))


def find():
    if os.environ.get("LIBTORCH"):
        return given(os.environ["LIBTORCH"])
    cache = absolute("TORCHSTREAM_CACHE", os.environ.get("TORCHSTREAM_CACHE") or "~/.cache/torchstream")
    target = cached(cache)
    if not complete(target):
        install(cache, target)
    return locate(os.path.join(target, "torch"), target)


def write_settings(path, text):
    """Write a build folder's settings if they changed. Then remove its CMake cache, whose compilers are no longer valid."""
    try:
        with open(path, encoding="utf-8") as f:
            if f.read() == text:
                return
    except OSError:
        pass
    build = os.path.dirname(os.path.abspath(path))
    os.makedirs(build, exist_ok=True)
    for stale in ("CMakeCache.txt", "build.ninja"):
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(build, stale))
    shutil.rmtree(os.path.join(build, "CMakeFiles"), ignore_errors=True)
    with open(path + ".new", "w", encoding="utf-8") as f:
        f.write(text)
    os.replace(path + ".new", path)


def main(args):
    if sys.version_info < (3, 9):
        raise SetupError("Python 3.9 or newer is needed, this is %d.%d" % sys.version_info[:2])
    what = args[0] if args else ""
    if what == "path" and len(args) == 1:
        print(find()["SITE"])
    elif what == "show" and len(args) == 1:
        for name, value in find().items():
            print("%s=%s" % (name, value))
    elif what == "cmake" and len(args) == 2:
        locations = find()
        write_settings(
            args[1],
            "# Written by cshim/setup/libtorch.py: where LibTorch and CUDA are.\n"
            + "".join('set(TS_%s "%s" CACHE STRING "" FORCE)\n' % (k, v.replace(":", ";")) for k, v in locations.items()),
        )
    else:
        print(__doc__.strip(), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SetupError as e:
        print("libtorch: error: %s" % e, file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("libtorch: interrupted; run make again to continue", file=sys.stderr)
        sys.exit(130)
