"""Measures the same copies and compute with PyTorch and prints one JSON object: medians in milliseconds."""
import contextlib
import json
import sys
import time

import torch

sender, mib, copies, products, rounds = (int(a) for a in sys.argv[1:6])
receiver = sender + 1
s0 = torch.cuda.Stream(device=sender)
s1 = torch.cuda.Stream(device=receiver)
n = mib * 1024**2 // 4
A = torch.ones(n, device=f"cuda:{sender}")
B = torch.ones(n, device=f"cuda:{receiver}")
dst = torch.empty_like(B)


def sync():
    torch.cuda.synchronize(sender)
    torch.cuda.synchronize(receiver)


def median(f):
    for _ in range(3):
        f()
    took = []
    for _ in range(rounds):
        sync()
        start = time.perf_counter()
        f()
        sync()
        took.append(1e3 * (time.perf_counter() - start))
    return sorted(took)[(rounds - 1) // 2]


def copy(non_blocking):
    for _ in range(copies):
        dst.copy_(A, non_blocking=non_blocking)


def compute(*operands):
    for x in operands:
        with torch.cuda.device(x.device):
            for _ in range(products):
                x * x * x * x


result = {"copy_ms": median(lambda: copy(True)), "workloads": []}
for operands in ((B,), (A, B)):
    rows = []
    for send in (False, True):
        for receive in (False, True):
            row = {}
            for non_blocking in (False, True):

                def both():
                    with torch.cuda.stream(s0) if send else contextlib.nullcontext():
                        with torch.cuda.stream(s1) if receive else contextlib.nullcontext():
                            copy(non_blocking)
                    compute(*operands)

                row["non_blocking_ms" if non_blocking else "blocking_ms"] = median(both)
            rows.append(row)
    result["workloads"].append({"compute_ms": median(lambda: compute(*operands)), "choices": rows})
print(json.dumps(result))
