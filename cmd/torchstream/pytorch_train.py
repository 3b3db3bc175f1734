"""Measures training steps of PyTorch for `torchstream bench train`, which gives the arguments and reads the JSON.

    python pytorch_train.py DEVICE SIZE SECONDS MODEL,... BATCH,...

The network is under autocast to bfloat16, in channels_last, with SGD and momentum; the data are on the device. Networks
are torchvision's if it is installed, else the same ResNet-18 and ResNet-50 of this file.
"""
import json
import sys
import time

import torch
from torch import nn


class Block(nn.Module):
    """torchvision's BasicBlock, or with wide its Bottleneck."""

    def __init__(self, cin, width, stride, wide):
        super().__init__()
        out = width * 4 if wide else width
        shapes = [(cin, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1)] if wide else [(cin, width, 3, stride), (width, width, 3, 1)]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, k, s, k // 2, bias=False) for a, b, k, s in shapes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in shapes)
        self.relu, self.down = nn.ReLU(inplace=True), None
        if stride > 1 or cin != out:
            self.down = nn.Sequential(nn.Conv2d(cin, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        y = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms)):
            y = norm(conv(y))
            if i + 1 < len(self.convs):
                y = self.relu(y)
        y += x if self.down is None else self.down(x)
        return self.relu(y)


def resnet(name):
    counts, wide = {"resnet18": ([2, 2, 2, 2], False), "resnet50": ([3, 4, 6, 3], True)}[name]
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    cin = 64
    for i, n in enumerate(counts):
        for k in range(n):
            layers.append(Block(cin, 64 << i, 2 if i and not k else 1, wide))
            cin = (64 << i) * (4 if wide else 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, 1000))


def network(name):
    try:
        import torchvision
    except ImportError:
        return resnet(name)
    return getattr(torchvision.models, name)()


def main():
    device, size, seconds = torch.device(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    models, batches = sys.argv[4].split(","), [int(b) for b in sys.argv[5].split(",")]
    gpu = device.type == "cuda"
    torch.backends.cudnn.benchmark = True
    sync = torch.cuda.synchronize if gpu else lambda: None

    def measure(run):
        """Return milliseconds of a step, and of its call with an empty queue."""
        sync()
        start = time.perf_counter()
        for _ in range(3):
            run()
        sync()
        n = max(5, int(seconds / max(1e-6, (time.perf_counter() - start) / 3)))
        start = time.perf_counter()
        for _ in range(n):
            run()
        sync()
        step, issue = (time.perf_counter() - start) / n, []
        for _ in range(9):
            start = time.perf_counter()
            run()
            issue.append(time.perf_counter() - start)
            sync()
        return {"step_ms": step * 1e3, "issue_ms": sorted(issue)[4] * 1e3}

    rows = {}
    for model in models:
        for batch in batches:
            net = network(model).to(device, memory_format=torch.channels_last)
            opt, loss = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9), nn.CrossEntropyLoss()
            x = torch.randn(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
            y = torch.randint(0, 1000, (batch,), device=device)

            def step():
                opt.zero_grad(set_to_none=True)
                with torch.autocast(device.type, dtype=torch.bfloat16):
                    value = loss(net(x), y)
                value.backward()
                opt.step()

            for _ in range(3):
                step()
            rows[f"{model}/{batch}/eager"] = measure(step)
            if gpu:
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(3):
                        step()
                torch.cuda.current_stream().wait_stream(side)
                graph = torch.cuda.CUDAGraph()
                opt.zero_grad(set_to_none=True)
                with torch.cuda.graph(graph):
                    step()
                rows[f"{model}/{batch}/graph"] = measure(graph.replay)
                del graph
            del net, opt, x, y
            if gpu:
                torch.cuda.empty_cache()
    print(json.dumps({"torch": torch.__version__, "rows": rows}))


main()
