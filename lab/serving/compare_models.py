#!/usr/bin/env python3
"""Compare the CPU time and the time of a call of one network: eager PyTorch, packages, and ONNX Runtime, in turn.

  compare_models.py FOLDER PACKAGE... [--model resnet18] [--threads 2] [--calls 25]

FOLDER is make_models.py's, and each PACKAGE a .pt2 in it that takes one image. Other load on the machine adds to both times, so
the smallest of all calls is printed, and the median.
"""

import argparse
import os
import resource
import statistics
import time

import onnxruntime
import torch
import torchvision
from safetensors.torch import load_file


def cpu():
    use = resource.getrusage(resource.RUSAGE_SELF)
    return use.ru_utime + use.ru_stime


def onnx(path, threads, image):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # as PyTorch's threads with GOMP_SPINCOUNT=1000
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    array = image.numpy()
    return lambda: session.run(None, {"x": array})


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder")
    p.add_argument("packages", nargs="+")
    p.add_argument("--model", default="resnet18")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--calls", type=int, default=25)
    a = p.parse_args()
    if "GOMP_SPINCOUNT" not in os.environ:
        raise SystemExit("set GOMP_SPINCOUNT=1000: threads that spin count as CPU time")
    torch.set_num_threads(a.threads)
    image = torch.rand(1, 3, 224, 224)
    path = os.path.join(a.folder, a.model)
    net = torchvision.models.get_model(a.model, weights=None).eval()
    net.load_state_dict(load_file(path + ".safetensors"))
    runs = {"eager": lambda: net(image), "ONNX Runtime": onnx(path + ".onnx", a.threads, image)}
    for name in a.packages:
        package = torch._inductor.aoti_load_package(os.path.join(a.folder, name))
        runs[name] = lambda package=package: package(image)
    times = {name: [] for name in runs}
    with torch.no_grad():
        for i in range(a.calls + 2):
            for name, run in runs.items():
                used, began = cpu(), time.perf_counter()
                run()
                if i >= 2:  # the first calls warm up
                    times[name].append((cpu() - used, time.perf_counter() - began))
    for name, all_times in times.items():
        cpus, walls = ([1e3 * t[i] for t in all_times] for i in range(2))
        print(f"{name}: CPU {min(cpus):.1f} ms, median {statistics.median(cpus):.1f}; "
              f"a call {min(walls):.1f} ms, median {statistics.median(walls):.1f}")


if __name__ == "__main__":
    main()
