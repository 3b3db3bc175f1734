"""Writes autocast.json: what PyTorch computes under torch.autocast("cpu"), in training mode, for two networks.

    python make_autocast.py          (needs what make_reference.py needs; writes beside this file)

resnet18 is torchvision's, with the images [2 3 64 64] and 10 classes. block is two of nn.TransformerEncoderLayer without
dropout, for sequences [2 6 32], and a linear layer for 10 classes. Tensors, inputs and labels have the numbers of
make_reference.py's functions. One record for each network and dtype has

    exact              whether the Go package runs the same operators: its attention has another layout
    output             the logits as float32, and their dtype
    loss               the mean cross-entropy, which autocast computes in float32
    gradients          the 2-norm of each gradient, in float64
    bits               SHA-256 of output, loss and gradients
    running            the 2-norm of each running statistic afterwards
"""

import hashlib
import json
import pathlib

import numpy
import torch
import torchvision
from make_reference import fill, tensors, u
from torch import nn


class Block(nn.Module):
    """A transformer encoder and a classifier of the mean over the sequence."""

    def __init__(self):
        super().__init__()
        layers = [nn.TransformerEncoderLayer(32, 4, 64, dropout=0, batch_first=True, activation="gelu") for _ in range(2)]
        self.encoder, self.head = nn.Sequential(*layers), nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


def record(name, net, shape, dtype):
    """Run one forward and backward pass."""
    fill(tensors(net), 1)
    net.train()
    x = torch.from_numpy(u(1 << 16, int(numpy.prod(shape)))).view(shape)
    labels = torch.arange(shape[0]) * 7 % 10
    with torch.autocast("cpu", dtype):
        output = net(x)
        loss = nn.functional.cross_entropy(output, labels)
    loss.backward()
    sha = hashlib.sha256()
    for t in [output.detach().float(), loss.detach()] + [p.grad for p in net.parameters()]:
        sha.update(t.contiguous().numpy().tobytes())
    return {
        "name": name,
        "exact": name == "resnet18",
        "dtype": str(dtype).removeprefix("torch."),
        "output": output.detach().float().tolist(),
        "output_dtype": str(output.dtype).removeprefix("torch."),
        "loss": loss.item(),
        "gradients": [p.grad.double().norm().item() for p in net.parameters()],
        "bits": sha.hexdigest(),
        "running": [b.double().norm().item() for n, b in net.named_buffers() if "running" in n],
    }


def main():
    """Write the file."""
    torch.set_num_threads(1)
    records = []
    for dtype in (torch.bfloat16, torch.float16):
        records.append(record("resnet18", torchvision.models.resnet18(num_classes=10), (2, 3, 64, 64), dtype))
        records.append(record("block", Block(), (2, 6, 32), dtype))
    text, first = pathlib.Path("/proc/cpuinfo").read_text(), {}
    for line in text.split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "cpu family", "model", "stepping"):
            first[key.strip()] = value.strip()
    made = {
        "versions": {"torch": torch.__version__, "torchvision": torchvision.__version__},
        "processor": [f"{k}: {v}" for k, v in first.items()],
    }
    out = {"made": made, "models": records}
    (pathlib.Path(__file__).parent / "autocast.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
