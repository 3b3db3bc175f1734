"""Measures the same experiment with PyTorch and prints one JSON object: medians in milliseconds."""
import json
import statistics
import sys
import time

import torch

device, rounds = torch.device("cuda", int(sys.argv[1])), int(sys.argv[2])
STEPS, GEMMS, N = 10, 2, 4096
torch.cuda.set_device(device)
torch.backends.cuda.matmul.allow_tf32 = False

a, b = (torch.randn(N, N, device=device) for _ in range(2))
target = torch.empty(N, N, device=device)
memory = {"pinned": torch.randn(N, N).pin_memory(), "pageable": torch.randn(N, N)}
compute, side = torch.cuda.Stream(), torch.cuda.Stream()


def gemms():
    with torch.cuda.stream(compute):
        for _ in range(GEMMS):
            torch.mm(a, b)


def copy(source, stream):
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)


def once(*work):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(STEPS):
        for part in work:
            part()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3


def median(*work):
    once(*work)
    return statistics.median(once(*work) for _ in range(rounds))


figures = {"version": torch.__version__, "compute_ms": median(gemms), "copies_ms": {}, "both_ms": {}}
for name, source in memory.items():
    figures["copies_ms"][name] = median(lambda: copy(source, side))
    for streams, stream in (("two", side), ("one", compute)):
        part = lambda: copy(source, stream)
        figures["both_ms"][f"{name}, {streams}, compute first"] = median(gemms, part)
        figures["both_ms"][f"{name}, {streams}, copies first"] = median(part, gemms)
print(json.dumps(figures))
