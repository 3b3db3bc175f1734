#!/usr/bin/env python3
"""Write tiny.pt2 with PyTorch 2.11.0 and tools/export.py, and print what PyTorch computes.

  make_packages.py > expected.json
"""

import json
import os
import sys

import torch
from torch import nn

here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(here, "../../tools"))
from export import export  # noqa: E402


class Tiny(nn.Module):
    """Two inputs, one a keyword; a dictionary of two outputs; small parameters and a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self.register_buffer("scale", torch.tensor([0.5, 1.0, 2.0]))

    def forward(self, x, *, mask):
        y = self.second(torch.relu(self.first(x))) * self.scale
        return {"logits": torch.where(mask, y, 0.0), "sums": y.sum(1)}


def fill(module):
    """Give each element a value that depends on its place alone."""
    for i, value in enumerate(module.state_dict().values()):
        value.copy_(torch.sin(torch.arange(value.numel(), dtype=torch.float32) + i).reshape(value.shape))


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
           dynamic_shapes={"x": {0: batch}, "mask": {0: batch}})
    json.dump({k: v.flatten().tolist() for k, v in out.items()}, sys.stdout)


if __name__ == "__main__":
    main()
