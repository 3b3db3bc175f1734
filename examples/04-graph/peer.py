"""Measures the same sequences with PyTorch, eagerly and as CUDA graphs: 64 tensors of 1000 elements.

Prints one JSON object: medians of 51 rounds in microseconds.
"""
import json, time, torch

dev = torch.device('cuda')
tensors = [torch.randn(1000, device=dev) for _ in range(64)]


def loop():
    total = torch.zeros((), device=dev)
    for t in tensors:
        total = total + t.float().norm(2) ** 2
    clip = (1.0 / (total.sqrt() + 1e-6)).clamp(max=1.0)
    for t in tensors:
        t.mul_(clip)


params = [torch.nn.Parameter(torch.randn(1000, device=dev)) for _ in range(64)]
for p in params:
    p.grad = torch.randn_like(p)
sgd = torch.optim.SGD(params, lr=0.01, momentum=0.9, foreach=True)


def foreach():
    torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)


def step():
    sgd.step()


def median(fn, rounds=51):
    for _ in range(5):
        fn()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        fn()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[rounds // 2] * 1e6


figures = {}
for name, fn in (('loop', loop), ('foreach', foreach), ('step', step)):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            fn()
    torch.cuda.synchronize()
    figures[name + '_eager'] = median(fn)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    figures[name + '_graph'] = median(graph.replay)
    host = []
    for _ in range(51):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        host.append(time.perf_counter() - start)
    figures[name + '_host'] = sorted(host)[25] * 1e6
print(json.dumps(figures))
