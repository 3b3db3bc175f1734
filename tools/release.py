#!/usr/bin/env python3
"""Make the release archive: both libraries, headers, pkg-config files, the CMake package, licences, and a list of parts.

  release.py [OUT]  write torchstream-VERSION-libtorch-VERSION-linux-x86_64.tar.gz and its .sha256 into OUT (default release)

The archive has no path of this machine. Two builds of one commit on one distribution have the same bytes: times are
SOURCE_DATE_EPOCH (default: the time of the commit), names are sorted, owners are numbers. LibTorch is not in it: it lies
in lib/libtorch, a folder with torch/ and nvidia/ or a link to one. `torchstream setup -from ARCHIVE` installs both, with
the lock in share/torchstream. sbom.cdx.json (CycloneDX) names everything that is in the libraries, and what they need.

Needs what `make shim` needs, and Debian's package manager, which knows the licences of the codecs.
"""

import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import uuid
from urllib.parse import quote

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = os.path.join(ROOT, "cshim", "build-release")

# The codecs that are linked statically, by their CMake names, with the SPDX names of their licences.
CODECS = {
    "jpeg": ("libjpeg-turbo", "IJG AND BSD-3-Clause AND Zlib"),
    "png": ("libpng", "libpng-2.0"),
    "webp": ("libwebp", "BSD-3-Clause"),
    "z": ("zlib", "Zlib"),
}


class DistError(Exception):
    """An error whose message says what is wrong and what to do."""


def say(text):
    print("release: " + text, file=sys.stderr, flush=True)


def output(*command):
    """Return what a command prints. Fail with its own message."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise DistError("%s failed: %s" % (" ".join(command), done.stderr.strip()))
    return done.stdout.strip()


def epoch():
    """Return the time of all files in the archive, in seconds since 1970."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given:
        if not given.isdigit():
            raise DistError("SOURCE_DATE_EPOCH=%s: it is not a number of seconds" % given)
        return int(given)
    try:
        return int(output("git", "-c", "safe.directory=*", "log", "-1", "--format=%ct"))
    except DistError:
        raise DistError("this is not a clone, so the time of the commit is unknown: set SOURCE_DATE_EPOCH") from None


def cache(name):
    """Return the value of a variable in CMake's cache of the build."""
    with open(os.path.join(BUILD, "CMakeCache.txt"), encoding="utf-8") as f:
        found = re.search(r"^%s:[A-Z]+=(.*)$" % re.escape(name), f.read(), re.M)
    if not found:
        raise DistError("%s has no %s: delete the folder and start again" % (BUILD, name))
    return found.group(1)


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        for block in iter(lambda: f.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def read(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)


def packages():
    """Return (name, Debian's package, its version, licence, file with the licence) of every codec."""
    found = []
    for key, (name, licence) in CODECS.items():
        library = os.path.realpath(cache("TS_%s_A" % key))
        try:
            package = output("dpkg", "-S", library).split(":")[0]
            version = output("dpkg-query", "-W", "-f", "${Version}", package)
        except (DistError, FileNotFoundError):
            raise DistError(
                "%s belongs to no Debian package, so its version and licence are unknown: make the archive on Debian or Ubuntu "
                "with their packages" % library
            ) from None
        text = os.path.join("/usr/share/doc", package, "copyright")
        if not os.path.exists(text):
            raise DistError("%s is missing (does this system drop documentation?): apt-get install --reinstall %s" % (text, package))
        found.append((name, package, version, licence, text))
    return found


def distribution():
    """Return the ID in os-release, such as debian or ubuntu."""
    found = re.search(r"^ID=(.*)$", read("/etc/os-release"), re.M)
    return found.group(1).strip("\"'") if found else "debian"


def torch_licences(site, version):
    """Return (path below the package's folder, path) of LibTorch's licences, whose headers are compiled into the library."""
    folder = os.path.join(site, "torch-%s.dist-info" % version)
    files = [os.path.join(base, name) for base, _, names in os.walk(folder) for name in names if re.match("LICENSE|NOTICE", name)]
    if not files:
        raise DistError("%s has no LICENSE: make the archive with the LibTorch that the set-up installs (unset LIBTORCH)" % folder)
    return sorted((os.path.relpath(path, folder), path) for path in files)


def required(path, library):
    """Return the highest versions of the symbols of the C and C++ libraries that a shared library needs."""
    text = output("objdump", "-T", os.path.join(path, library))
    highest = {}
    for name, version in re.findall(r"\b(GLIBC|GLIBCXX|CXXABI)_([0-9.]+)", text):
        as_numbers = [int(part) for part in version.split(".")]
        highest[name] = max(highest.get(name, []), as_numbers)
    return {name: ".".join(map(str, version)) for name, version in highest.items()}


def component(name, version, licence, **more):
    out = {"type": "library", "bom-ref": "%s@%s" % (name, version), "name": name, "version": version}
    if licence:
        out["licenses"] = [{"expression": licence}]
    out.update(more)
    return out


def sbom(stage, version, torch, time):
    """Return the CycloneDX list of what is in the libraries, and of what they need."""
    parts, needs = [], []
    for name, package, package_version, licence, _ in packages():
        purl = "pkg:deb/%s/%s@%s?arch=amd64" % (distribution(), quote(package), quote(package_version))
        parts.append(component(name, package_version, licence, purl=purl, description="linked statically into libtorchstream_image.so"))
    parts.append(component("LibTorch headers", torch, "BSD-3-Clause", description="inline functions, compiled into libtorchstream.so"))
    parts.append(
        component(
            "NVTX headers", nvtx(), "Apache-2.0 WITH LLVM-exception",
            description="inline functions, compiled into libtorchstream.so",
        )
    )  # fmt: skip
    for line in requirements():
        name, locked = line.split()[0].split("==")
        if name in ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-nvvm", "nvidia-nvjpeg"):
            continue  # only building needs them
        needs.append(
            component(
                name, locked, None, purl="pkg:pypi/%s@%s" % (name, locked), scope="required",
                description="not in this archive; libtorchstream.so needs it",
                hashes=[{"alg": "SHA-256", "content": line.rsplit("sha256:", 1)[1]}],
            )
        )  # fmt: skip
    own = []
    lib = os.path.join(stage, "lib")
    for library in ("libtorchstream_image.so", "libtorchstream.so"):
        properties = [{"name": "torchstream:needs:" + k, "value": v} for k, v in sorted(required(lib, library).items())]
        own.append(
            component(
                library, version, "Apache-2.0", properties=properties,
                hashes=[{"alg": "SHA-256", "content": sha256(os.path.join(lib, library))}],
            )
        )  # fmt: skip
    identity = "".join(each["hashes"][0]["content"] for each in own)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": "urn:uuid:" + str(uuid.uuid5(uuid.NAMESPACE_URL, identity)),
        "version": 1,
        "metadata": {"timestamp": iso(time), "component": component("torchstream", version, "Apache-2.0")},
        "components": own + parts + needs,
        "dependencies": [
            {"ref": own[0]["bom-ref"], "dependsOn": [part["bom-ref"] for part in parts[: len(CODECS)]]},
            {"ref": own[1]["bom-ref"], "dependsOn": [own[0]["bom-ref"]] + [p["bom-ref"] for p in parts[len(CODECS) :] + needs]},
        ],
    }


def iso(time):
    return subprocess.run(["date", "-u", "-d", "@%d" % time, "+%Y-%m-%dT%H:%M:%SZ"], stdout=subprocess.PIPE, check=True, text=True).stdout.strip()


def location(name):
    """Return a location of LibTorch, such as CUDA_INCLUDE, that cshim/setup/libtorch.sh has written into the build folder."""
    return re.search(r'^set\(TS_%s "(.*?)"' % name, read(os.path.join(BUILD, "libtorch.cmake")), re.MULTILINE).group(1)


def lock():
    """Return the path of the lock with the wheels of LibTorch."""
    return os.path.join(ROOT, "cshim", "libtorch-%s.lock" % (os.environ.get("TORCHSTREAM_LIBTORCH") or "2.11"))


def requirements():
    """Return the lines of the lock without comments."""
    lines = [line.strip() for line in read(lock()).splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def nvtx():
    """Return the version of the NVTX headers."""
    text = read(os.path.join(location("CUDA_INCLUDE"), "nvtx3", "nvToolsExt.h"))
    return re.search(r"#define NVTX_VERSION (\d+)", text).group(1)


def no_paths(stage):
    """Fail if a file of the archive names a folder of this machine."""
    home = os.path.expanduser("~")
    for base, _, names in os.walk(stage):
        for name in names:
            path = os.path.join(base, name)
            with open(path, "rb") as f:
                content = f.read()
            for secret in (ROOT, home if len(home) > 1 else ROOT, location("SITE")):
                if secret.encode() in content:
                    raise DistError("%s contains the path %s of this machine" % (os.path.relpath(path, stage), secret))


def pack(stage, prefix, archive, time):
    """Write the folder as a .tar.gz whose bytes depend on contents, names and time only."""
    entries = []
    for base, folders, names in os.walk(stage):
        entries += [os.path.join(base, name) for name in folders + names]
    with open(archive, "wb") as f, gzip.GzipFile("", "wb", 9, f, mtime=time) as compressed:
        with tarfile.open(fileobj=compressed, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for path in sorted(entries):
                info = tar.gettarinfo(path, os.path.join(prefix, os.path.relpath(path, stage)))
                info.uid = info.gid = 0
                info.uname = info.gname = ""
                info.mtime = time
                info.mode = 0o755 if info.isdir() or path.endswith(".so") else 0o644
                if info.isreg():
                    with open(path, "rb") as content:
                        tar.addfile(info, content)
                else:
                    tar.addfile(info)


def checksums(stage):
    lines = []
    for base, _, names in os.walk(stage):
        lines += ["%s  %s\n" % (sha256(os.path.join(base, n)), os.path.relpath(os.path.join(base, n), stage)) for n in names]
    return "".join(sorted(lines, key=lambda line: line.split("  ", 1)[1]))


def main(args):
    if len(args) > 1 or args and args[0].startswith("-"):
        print(__doc__.strip(), file=sys.stderr)
        return 2
    out = os.path.abspath(args[0] if args else os.path.join(ROOT, "release"))
    os.makedirs(BUILD, exist_ok=True)
    subprocess.run([os.path.join(ROOT, "cshim", "setup", "libtorch.sh"), os.path.join(BUILD, "libtorch.cmake")], check=True)
    if not location("CUDA"):
        raise DistError("release archives are of the shim with CUDA: unset LIBTORCH and TORCHSTREAM_LIBTORCH, which name a LibTorch without it")
    time = epoch()
    os.environ["SOURCE_DATE_EPOCH"] = str(time)
    os.environ["CCACHE_BASEDIR"] = ""  # with it the compiler sees other paths, which errors name
    subprocess.run([os.path.join(ROOT, "cshim", "setup", "shim.sh"), BUILD, "-DTS_RELOCATABLE=ON"], check=True)
    version, torch = cache("CMAKE_PROJECT_VERSION"), location("LIBTORCH_VERSION")
    name = "torchstream-%s-libtorch-%s-linux-x86_64" % (version, torch)
    stage = os.path.join(BUILD, "stage")
    shutil.rmtree(stage, ignore_errors=True)
    for part in ("image", "torchstream"):
        output("cmake", "--install", BUILD, "--prefix", stage, "--component", part, "--strip")
    # The static library is for builds with the same codecs, which a program's own build has.
    os.remove(os.path.join(stage, "lib", "libtorchstream_image.a"))
    write(os.path.join(stage, "share", "torchstream", os.path.basename(lock())), read(lock()))
    licences = os.path.join(stage, "share", "licenses", "torchstream")
    write(os.path.join(licences, "LICENSE"), read(os.path.join(ROOT, "LICENSE")))
    for codec, _, _, _, text in packages():
        write(os.path.join(licences, codec, "copyright"), read(text))
    for file, text in torch_licences(location("SITE"), torch):  # many have the name LICENSE
        write(os.path.join(licences, "libtorch", file), read(text))
    write(os.path.join(stage, "sbom.cdx.json"), json.dumps(sbom(stage, version, torch, time), indent=1) + "\n")
    no_paths(stage)
    write(os.path.join(stage, "SHA256SUMS"), checksums(stage))
    os.makedirs(out, exist_ok=True)
    archive = os.path.join(out, name + ".tar.gz")
    pack(stage, name, archive, time)
    write(archive + ".sha256", "%s  %s\n" % (sha256(archive), os.path.basename(archive)))
    say("%s, %.1f MB, sha256 %s" % (archive, os.path.getsize(archive) / 1e6, sha256(archive)))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except DistError as e:
        print("release: error: %s" % e, file=sys.stderr)
        sys.exit(1)
    except subprocess.CalledProcessError as e:
        sys.exit(e.returncode)
