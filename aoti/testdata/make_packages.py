#!/usr/bin/env python3
"""Write tiny.pt2 and images.pt2 with PyTorch 2.11.0 and tools/export.py, and print what PyTorch computes.

  make_packages.py > expected.json

images.json gets the results of images.pt2 for the first photographs of examples/data/photos-test.tgz.
"""

import json
import os
import re
import shutil
import sys
import tarfile
import zipfile

import torch
from torch import nn
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(here, "../../tools"))
from export import REPLACEABLE, export  # noqa: E402


class Tiny(nn.Module):
    """Two inputs, one a keyword; a dictionary of two outputs; small parameters, tied and unused ones, and a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self.same, self.unused = self.second, nn.Linear(2, 2)
        self.register_buffer("scale", torch.tensor([0.5, 1.0, 2.0]))

    def forward(self, x, *, mask):
        y = self.second(torch.relu(self.first(x))) * self.scale
        return {"logits": torch.where(mask, y, 0.0), "sums": y.sum(1)}


class Images(nn.Module):
    """Images of 32 x 32 to vectors of 5 numbers, which all differ, and logits of 3 classes."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 5, 4, stride=4), nn.Linear(5, 3)

    def forward(self, images):
        vectors = torch.relu(self.conv(images)).mean((2, 3))
        return {"features": vectors, "logits": self.head(vectors)}


def write_images():
    """Write images.pt2 and images.json. The mean and the standard deviation are not ImageNet's."""
    net, mean, std = Images().eval(), [0.5, 0.4, 0.3], [0.5, 0.25, 0.125]
    fill(net)
    transform = v2.Compose([v2.Resize(40), v2.CenterCrop(32), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])
    names, images = [], []
    with tarfile.open(os.path.join(here, "../../examples/data/photos-test.tgz")) as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(".jpg") and len(names) < 20:
                data = torch.frombuffer(bytearray(archive.extractfile(member).read()), dtype=torch.uint8)
                names.append(member.name)
                images.append(transform(decode_image(data, ImageReadMode.RGB)))
    images = torch.stack(images)
    with torch.no_grad():
        out = net(images)
    export(net, (images[:16],), path=os.path.join(here, "images.pt2"),
           dynamic_shapes={"images": {0: torch.export.Dim("batch", min=2, max=16)}}, config=REPLACEABLE,
           metadata={"images": json.dumps({"resize": 40, "interpolation": "bilinear", "mean": mean, "std": std}),
                     "classes": json.dumps(["a cat", "a dog", "neither"])})
    with open(os.path.join(here, "images.json"), "w") as f:
        json.dump({"names": names, **{k: v.tolist() for k, v in out.items()}}, f)


def forget_paths(path):
    """Remove from a package what names folders of this machine: the sources' text, and paths in the library's messages."""
    folders = re.compile(rb"(/[^\0/\s\"']+)+(?=/(torch/include|c[a-z0-9]{40,})/)")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(path + ".new", "w") as new:
        for member in old.infolist():
            data = old.read(member)
            if member.filename.endswith(".cpp"):
                data = b""  # PyTorch's loader needs the names alone
            elif member.filename.endswith(".so"):  # its size and offsets stay
                data = folders.sub(lambda m: b"/".ljust(len(m[0]), b"x"), data)
            new.writestr(member.filename, data)
    shutil.move(path + ".new", path)


def fill(module, shift=0):
    """Give each element a value that depends on its place and the shift alone."""
    for i, value in enumerate(module.state_dict().values()):
        value.copy_(torch.sin(torch.arange(value.numel(), dtype=torch.float32) + i + shift).reshape(value.shape))


def main():
    net = Tiny().eval()
    x = torch.cos(torch.arange(20.0)).reshape(5, 4)
    mask = (torch.arange(15) % 4 != 0).reshape(5, 3)
    batch = torch.export.Dim("batch", min=1, max=64)
    fill(net)
    with torch.no_grad():
        out = net(x, mask=mask)
    # 256-bit vectors, so that the package runs on every CPU of this decade.
    torch._inductor.config.cpp.simdlen = 256
    export(net, (x,), {"mask": mask}, path=os.path.join(here, "tiny.pt2"),
           dynamic_shapes={"x": {0: batch}, "mask": {0: batch}}, config=REPLACEABLE)
    fill(net, 100)
    with torch.no_grad():
        swapped = net(x, mask=mask)
    out.update({"swapped_" + k: v for k, v in swapped.items()})
    json.dump({k: v.flatten().tolist() for k, v in out.items()}, sys.stdout)
    write_images()
    for name in ("tiny.pt2", "images.pt2"):
        forget_paths(os.path.join(here, name))


if __name__ == "__main__":
    main()
