"""Takes the measurements of main.go with PyTorch: python3 peer.py DEVICE ROUNDS.

The last line of the output is a JSON object.
"""

import json
import statistics
import sys

import torch

device = torch.device("cuda", int(sys.argv[1]))
rounds = int(sys.argv[2])
torch.cuda.set_device(device)


class Parallel(torch.nn.Module):
    """Runs each branch on its own stream, the first on the caller's."""

    def __init__(self, branches):
        super().__init__()
        self.branches = torch.nn.ModuleList(branches)
        self.side = [torch.cuda.Stream() for _ in branches[1:]]

    def forward(self, x):
        caller = torch.cuda.current_stream()
        for s in self.side:
            s.wait_stream(caller)
        outputs = [self.branches[0](x)]
        for branch, s in zip(list(self.branches)[1:], self.side):
            x.record_stream(s)
            with torch.cuda.stream(s):
                y = branch(x)
            y.record_stream(caller)
            outputs.append(y)
        for s in self.side:
            caller.wait_stream(s)
        return total(outputs)


class InTurn(torch.nn.Module):
    def __init__(self, branches):
        super().__init__()
        self.branches = torch.nn.ModuleList(branches)

    def forward(self, x):
        return total([branch(x) for branch in self.branches])


def total(outputs):
    y = outputs[0]
    for other in outputs[1:]:
        y = y + other
    return y


class Softmax(torch.nn.Module):
    def __init__(self, times):
        super().__init__()
        self.times = times

    def forward(self, x):
        for _ in range(self.times):
            x = torch.softmax(x, 1)
        return x


def stack(layers):
    modules = []
    for _ in range(layers):
        modules += [torch.nn.Conv2d(32, 32, 3, padding=1, bias=False), torch.nn.ReLU()]
    return torch.nn.Sequential(*modules).to(device)


def measure(run):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    took = []
    for i in range(rounds + 5):
        torch.cuda.current_stream().synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        if i >= 5:
            took.append(1e3 * start.elapsed_time(end))
    return statistics.median_low(took)


def captured(module, x):
    graph = torch.cuda.CUDAGraph()
    module(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        captured.kept.append(module(x))
    captured.kept.append(graph)
    return graph.replay


captured.kept = []

figures = {}
with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
    kinds = {
        "rows": (torch.rand(8, 131072, device=device), [Softmax(n) for n in (40, 30, 20, 10)]),
        "convs": (torch.rand(8, 32, 28, 28, device=device), [stack(n) for n in (12, 9, 6, 3)]),
    }
    for name, (x, branches) in kinds.items():
        ways = {"eager": lambda module: lambda: module(x), "graph": lambda module: captured(module, x)}
        for way, prepare in ways.items():
            figures[f"{name} {way}"] = {
                "alone": [measure(prepare(b)) for b in branches],
                "in_turn": measure(prepare(InTurn(branches))),
                "parallel": measure(prepare(Parallel(branches))),
            }
print(json.dumps(figures))
