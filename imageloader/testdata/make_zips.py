"""Writes zips by several makers: imageloader's testdata/zip, and prefetcher's with -photographs.

imageloader's members are no real images: a PNG's signature and a text. macos.zip and dos.zip are
written here, and imitate other makers: macos.zip has names in UTF-8 without the flag, data
descriptors and __MACOSX, as zips from macOS have; dos.zip has CP437 and backslashes. prefetcher's
members are photographs, all deflated. Each has a comment, so that its deflate stream has matches,
and blocks with codes of several kinds.

Needs Info-ZIP's zip 3.0; with -photographs also 7-Zip (7zz), numpy and Pillow.
"""
import io, os, shutil, struct, subprocess, sys, tempfile, time, zipfile, zlib

os.environ["TZ"] = "UTC"
time.tzset()
HERE = os.path.dirname(os.path.abspath(__file__))
WHEN = (2024, 1, 2, 3, 4, 6)


def images():
    png = b"\x89PNG\r\n\x1a\n"
    return [(f"{folder}/{i}.png", png + f"{folder} {i} ".encode() * (1 + 400 * (i % 2))) for i in range(3) for folder in ("café", "owl")]


def photograph(seed):
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(seed)
    height, width = 144 + 8 * seed, 200 - 12 * seed
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / (5 + c + seed)) * np.cos(y / (7 + c)) * 60 for c in range(3)]
    pixels = np.stack(waves, -1) + 128 + rng.normal(0, 22, (height, width, 3))
    text = "".join(f"{seed} photograph {k * k % 97} of testdata, {'the same words again ' * (k % 3)}" for k in range(60))
    out = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=80, subsampling=seed % 3, comment=text.encode())
    return out.getvalue()


class Folder:
    """A folder of zips of the same members."""

    def __init__(self, path, members):
        self.path, self.members = path, members
        os.makedirs(path, exist_ok=True)

    def python(self, name, method, level=None, folders=()):
        with zipfile.ZipFile(os.path.join(self.path, name), "w", method, compresslevel=level) as z:
            for folder in folders:
                z.writestr(zipfile.ZipInfo(folder + "/", WHEN), b"")
            for member, data in self.members:
                info = zipfile.ZipInfo(member, WHEN)
                info.compress_type = method
                z.writestr(info, data, compresslevel=level)

    def program(self, name, *command):
        path = os.path.join(self.path, name)
        if os.path.exists(path):
            os.remove(path)
        with tempfile.TemporaryDirectory() as work:
            for member, data in self.members:
                file = os.path.join(work, member)
                os.makedirs(os.path.dirname(file), exist_ok=True)
                with open(file, "wb") as f:
                    f.write(data)
                os.utime(file, (1704164646, 1704164646))
            subprocess.run([*command, path, *[member for member, _ in self.members]], cwd=work, check=True,
                           stdout=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C.UTF-8"})


def macos(out, name):
    body, directory, count = b"", b"", 0
    double = b"\0\5\x16\7" + bytes(22)
    for member, data in [(m, d) for member, data in out.members for m, d in
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
    with open(os.path.join(out.path, name), "wb") as f:
        f.write(body + directory + end)


def dos(out, name):
    """Rewrites the names of Python's zip in CP437, with backslashes, in the manner of old makers on Windows."""
    with open(os.path.join(out.path, "python-stored.zip"), "rb") as f:
        data = f.read()
    with zipfile.ZipFile(os.path.join(out.path, "python-stored.zip")) as z:
        members = [(i, z.read(i)) for i in z.infolist() if not i.is_dir()]
    body, directory = b"", b""
    for info, content in members:
        raw, at = info.filename.replace("/", "\\").encode("cp437"), len(body)
        common = struct.pack("<HHHHH", 20, 0, 0, 0x1883, 0x5822)
        sizes = struct.pack("<III", info.CRC, len(content), len(content))
        body += b"PK\3\4" + common + sizes + struct.pack("<HH", len(raw), 0) + raw + content
        directory += b"PK\1\2" + struct.pack("<BB", 20, 0) + common + sizes + struct.pack("<HHHHHII", len(raw), 0, 0, 0, 0, 0, at) + raw
    end = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, len(members), len(members), len(directory), len(body), 0)
    with open(os.path.join(out.path, name), "wb") as f:
        f.write(body + directory + end)


def main():
    if sys.argv[1:] == ["-photographs"]:
        out = Folder(os.path.join(HERE, "../../prefetcher/testdata/zip"),
                     [(f"{'owl' if i % 2 else 'cat'}/{i}.jpg", photograph(i)) for i in range(5)])
        out.python("python-1.zip", zipfile.ZIP_DEFLATED, 1)
        out.python("python-9.zip", zipfile.ZIP_DEFLATED, 9)
        out.program("infozip.zip", "zip", "-q", "-fd")
        out.program("7zip.zip", shutil.which("7zz") or "7z", "a", "-tzip", "-mx=9")
        return
    out = Folder(os.path.join(HERE, "zip"), images())
    folders = ("café", "owl")
    out.python("python-stored.zip", zipfile.ZIP_STORED, folders=folders)
    out.python("python-deflated.zip", zipfile.ZIP_DEFLATED, folders=folders)
    out.python("python-bzip2.zip", zipfile.ZIP_BZIP2, folders=folders)
    out.program("infozip.zip", "zip", "-q")
    out.program("infozip-descriptors.zip", "zip", "-q", "-fd")
    out.program("infozip-zip64.zip", "zip", "-q", "-fz")
    out.program("infozip-encrypted.zip", "zip", "-q", "-P", "secret")
    macos(out, "macos.zip")
    dos(out, "dos.zip")


if __name__ == "__main__":
    main()
