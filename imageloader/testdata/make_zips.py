"""Writes testdata/zip: one set of members, packed by several makers of zips.

Needs Info-ZIP's zip 3.0. The members are no real images: a PNG's signature and a text. macos.zip and
dos.zip are written here, and imitate other makers: macos.zip has names in UTF-8 without the flag,
data descriptors and __MACOSX, as zips from macOS have; dos.zip has CP437 and backslashes.
"""
import os, struct, subprocess, sys, tempfile, time, zipfile, zlib

os.environ["TZ"] = "UTC"
time.tzset()
OUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "zip")
os.makedirs(OUT, exist_ok=True)
PNG = b"\x89PNG\r\n\x1a\n"
MEMBERS = [(f"{folder}/{i}.png", PNG + f"{folder} {i} ".encode() * (1 + 400 * (i % 2))) for i in range(3) for folder in ("café", "owl")]
WHEN = (2024, 1, 2, 3, 4, 6)


def python(name, method, strict=True):
    with zipfile.ZipFile(os.path.join(OUT, name), "w", method) as z:
        for folder in ("café", "owl"):
            z.writestr(zipfile.ZipInfo(folder + "/", WHEN), b"")
        for member, data in MEMBERS:
            info = zipfile.ZipInfo(member, WHEN)
            info.compress_type = method
            z.writestr(info, data)


def infozip(name, *options):
    path = os.path.join(OUT, name)
    if os.path.exists(path):
        os.remove(path)
    with tempfile.TemporaryDirectory() as work:
        for member, data in MEMBERS:
            file = os.path.join(work, member)
            os.makedirs(os.path.dirname(file), exist_ok=True)
            with open(file, "wb") as f:
                f.write(data)
            os.utime(file, (1704164646, 1704164646))
        names = [member for member, _ in MEMBERS]
        subprocess.run(["zip", "-q", *options, path, *names], cwd=work, check=True, env={**os.environ, "LC_ALL": "C.UTF-8"})


def macos(name):
    body, directory, count = b"", b"", 0
    double = b"\0\5\x16\7" + bytes(22)
    for member, data in [(m, d) for member, data in MEMBERS for m, d in
                         ((member, data), ("__MACOSX/" + member.replace("/", "/._"), double))]:
        deflate = zlib.compressobj(6, zlib.DEFLATED, -15)
        packed = deflate.compress(data) + deflate.flush()
        raw, at = member.encode(), len(body)
        common = struct.pack("<HHHHH", 20, 8, 8, 0x1883, 0x5822)
        body += b"PK\3\4" + common + struct.pack("<IIIHH", 0, 0, 0, len(raw), 0) + raw + packed
        body += b"PK\7\x08" + struct.pack("<III", zlib.crc32(data), len(packed), len(data))
        directory += b"PK\1\2" + struct.pack("<BB", 21, 3) + common + struct.pack("<III", zlib.crc32(data), len(packed), len(data))
        directory += struct.pack("<HHHHHII", len(raw), 0, 0, 0, 0, 0o100644 << 16, at) + raw
        count += 1
    end = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, count, count, len(directory), len(body), 0)
    with open(os.path.join(OUT, name), "wb") as f:
        f.write(body + directory + end)


def dos(name):
    """Rewrites the names of Python's zip in CP437, with backslashes, in the manner of old makers on Windows."""
    with open(os.path.join(OUT, "python-stored.zip"), "rb") as f:
        data = f.read()
    with zipfile.ZipFile(os.path.join(OUT, "python-stored.zip")) as z:
        members = [(i, z.read(i)) for i in z.infolist() if not i.is_dir()]
    body, directory = b"", b""
    for info, content in members:
        raw, at = info.filename.replace("/", "\\").encode("cp437"), len(body)
        common = struct.pack("<HHHHH", 20, 0, 0, 0x1883, 0x5822)
        sizes = struct.pack("<III", info.CRC, len(content), len(content))
        body += b"PK\3\4" + common + sizes + struct.pack("<HH", len(raw), 0) + raw + content
        directory += b"PK\1\2" + struct.pack("<BB", 20, 0) + common + sizes + struct.pack("<HHHHHII", len(raw), 0, 0, 0, 0, 0, at) + raw
    end = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, len(members), len(members), len(directory), len(body), 0)
    with open(os.path.join(OUT, name), "wb") as f:
        f.write(body + directory + end)


python("python-stored.zip", zipfile.ZIP_STORED)
python("python-deflated.zip", zipfile.ZIP_DEFLATED)
python("python-bzip2.zip", zipfile.ZIP_BZIP2)
infozip("infozip.zip")
infozip("infozip-descriptors.zip", "-fd")
infozip("infozip-zip64.zip", "-fz")
infozip("infozip-encrypted.zip", "-P", "secret")
macos("macos.zip")
dos("dos.zip")
