#!/usr/bin/env python3
"""Write packages of torchvision's networks for this machine's GPU, with what PyTorch computes from them, and time them.

  make_gpu_packages.py FOLDER [NAME...]

FOLDER gets NAME.pt2 and NAME.pt (inputs and outputs). The tests of package aoti read it:
TORCHSTREAM_AOTI_PACKAGES=FOLDER go test ./aoti -run GPU -bench GPU
"""

import os
import sys
import time

import torch
import torchvision

here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(here, "../../tools"))
from export import export  # noqa: E402

BATCH = 8


def timed(what, run, seconds=1.0):
    """Print the microseconds of a call: the median of five rounds."""
    for _ in range(10):
        run()
    rounds = []
    for _ in range(5):
        torch.cuda.synchronize()
        start, calls = time.perf_counter(), 0
        while time.perf_counter() - start < seconds / 5:
            run()
            calls += 1
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - start) / calls * 1e6)
    print(f"{what}: {sorted(rounds)[2]:.1f} us a call", flush=True)


def main():
    folder, names = sys.argv[1], sys.argv[2:] or ["resnet50", "vit_b_16", "convnext_tiny"]
    os.makedirs(folder, exist_ok=True)
    for name in names:
        torch.manual_seed(0)
        net = torchvision.models.get_model(name, weights=None).eval().to("cuda", torch.bfloat16)
        x = torch.randn(BATCH, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
        if name != "vit_b_16":
            net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        path = os.path.join(folder, name + ".pt2")
        start = time.time()
        export(net, (x,), path=path)
        print(f"{name}: exported in {time.time() - start:.0f} s, {os.path.getsize(path) >> 20} MB", flush=True)
        package = torch._inductor.aoti_load_package(path, run_single_threaded=True)
        with torch.no_grad():
            y = package(x)
            torch.save({"input.x": x, "output.output": y}, os.path.join(folder, name + ".pt"))
            timed(f"{name}: eager, PyTorch", lambda: net(x))
            timed(f"{name}: the package, PyTorch's loader", lambda: package.loader.boxed_run([x]))
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                package(x)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    package(x)
            timed(f"{name}: the package as a graph, PyTorch", graph.replay)


if __name__ == "__main__":
    main()
