"""Writes testdata/zip: one set of photographs, deflated by several makers of zips.

Needs Info-ZIP's zip 3.0, 7-Zip (7zz), numpy and Pillow. Each photograph has a comment, so that its
deflate stream has matches, and blocks with codes of several kinds.
"""
import io, os, shutil, subprocess, tempfile, time, zipfile

import numpy as np
from PIL import Image

os.environ["TZ"] = "UTC"
time.tzset()
OUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "zip")
os.makedirs(OUT, exist_ok=True)
WHEN = (2024, 1, 2, 3, 4, 6)


def photograph(seed):
    rng = np.random.default_rng(seed)
    height, width = 144 + 8 * seed, 200 - 12 * seed
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / (5 + c + seed)) * np.cos(y / (7 + c)) * 60 for c in range(3)]
    pixels = np.stack(waves, -1) + 128 + rng.normal(0, 22, (height, width, 3))
    text = "".join(f"{seed} photograph {k * k % 97} of testdata, {'the same words again ' * (k % 3)}" for k in range(60))
    out = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(
        out, "JPEG", quality=80, subsampling=seed % 3, comment=text.encode())
    return out.getvalue()


MEMBERS = [(f"{'owl' if i % 2 else 'cat'}/{i}.jpg", photograph(i)) for i in range(5)]


def python(name, level):
    with zipfile.ZipFile(os.path.join(OUT, name), "w", zipfile.ZIP_DEFLATED, compresslevel=level) as z:
        for member, data in MEMBERS:
            info = zipfile.ZipInfo(member, WHEN)
            info.compress_type = zipfile.ZIP_DEFLATED
            z.writestr(info, data, compresslevel=level)


def program(name, *command):
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
        subprocess.run([*command, path, *[member for member, _ in MEMBERS]], cwd=work, check=True,
                       stdout=subprocess.DEVNULL)


python("python-1.zip", 1)
python("python-9.zip", 9)
program("infozip.zip", "zip", "-q", "-fd")
program("7zip.zip", shutil.which("7zz") or "7z", "a", "-tzip", "-mx=9")
