#!/usr/bin/env python3
"""Write packages of several kinds of models with random weights, and what PyTorch computes from them.

  make_models.py FOLDER [NAME...] [--device cpu|cuda] [--small] [--fixed] [--jobs N] [--time] [--keep]

FOLDER gets NAME.pt2 and NAME.safetensors for each name. For each size of the inputs (0, 1 ...) the latter has the tensors
SIZE.input.X, and of each output SIZE.package.Y from PyTorch's loader, SIZE.eager.Y, and SIZE.exact.Y computed in float64.
The tests of package aoti read both: TORCHSTREAM_AOTI_PACKAGES=FOLDER go test ./aoti -run 'Models|GPU' -bench GPU

--small   networks of a few layers, for a machine with few cores
--fixed   one fixed size
--time    time the calls on a GPU, too
--keep    keep packages that another version of PyTorch has compiled, and run them with this one: replaces SIZE.package.Y
"""

import argparse
import copy
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Callable, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.export import Dim
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(here, "../../tools"))
from export import REPLACEABLE, export  # noqa: E402


class Example(NamedTuple):
    """A network with its inputs. inputs(size) returns arguments and keyword arguments."""

    net: nn.Module
    inputs: Callable
    sizes: list  # the first is the largest
    dynamic_shapes: dict
    dtype: torch.dtype = torch.bfloat16  # on a GPU
    channels_last: bool = False
    replaceable: bool = False


def of_images(net, side, channels_last):
    """A network of torchvision, which takes a batch of images."""
    shapes = ({0: Dim("batch", min=1, max=8)},)
    return Example(net, lambda n: ((torch.randn(n, 3, side, side),), {}), [8, 3, 1], shapes, channels_last=channels_last)


def resnet50(small):
    import torchvision

    if not small:
        return of_images(torchvision.models.resnet50(), 224, True)
    bottleneck = torchvision.models.resnet.Bottleneck
    return of_images(torchvision.models.ResNet(bottleneck, [1, 1, 1, 1], width_per_group=16), 64, True)


def vit_b_16(small):
    import torchvision

    if not small:
        return of_images(torchvision.models.vit_b_16(), 224, False)
    return of_images(torchvision.models.VisionTransformer(64, 16, 2, 2, 64, 128), 64, False)


def convnext_tiny(small):
    import torchvision

    if not small:
        return of_images(torchvision.models.convnext_tiny(), 224, True)
    block = torchvision.models.convnext.CNBlockConfig
    return of_images(torchvision.models.ConvNeXt([block(16, 32, 1), block(32, 64, 1), block(64, None, 1)]), 64, True)


def bert(small):
    """A text model: the batch and the length of the texts are dynamic."""
    from transformers import BertConfig, BertModel

    config = BertConfig()
    if small:
        config = BertConfig(vocab_size=1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)

    def inputs(size):
        n, length = size
        mask = torch.arange(length) < torch.randint(1, length + 1, (n, 1))
        return (), {"input_ids": torch.randint(0, config.vocab_size, size), "attention_mask": mask.long()}

    shape = {0: Dim("batch", min=1, max=8), 1: Dim("length", min=2, max=512)}
    return Example(BertModel(config), inputs, [(4, 128), (3, 17), (1, 2)], {"input_ids": shape, "attention_mask": shape})


class Pair(nn.Module):
    """Images and texts to vectors and their products, as CLIP. It has nested inputs and outputs of several dtypes."""

    def __init__(self, width):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.words, self.head = nn.Embedding(1000, width), nn.Linear(width, width, bias=False)

    def forward(self, images, texts, *, scale):
        ids, mask = texts
        pictures = functional.normalize(self.patches(images).relu().mean((2, 3)), dim=1)
        words = self.head(self.words(ids)).masked_fill(~mask[..., None], 0)
        lengths = mask.sum(1)
        vectors = functional.normalize(words.sum(1) / lengths[:, None], dim=1)
        return {"pictures": pictures, "texts": (vectors, lengths), "logits": scale.exp() * pictures @ vectors.T}


def pair(small):
    """Two inputs with dynamic sizes that are independent, a scalar, and four outputs."""

    def inputs(size):
        n, texts, length = size
        mask = torch.arange(length) < torch.randint(1, length + 1, (texts, 1))
        ids = torch.randint(0, 1000, (texts, length))
        return (torch.randn(n, 3, 32, 32), (ids, mask)), {"scale": torch.tensor(1.5)}

    text = {0: Dim("texts", min=1, max=16), 1: Dim("length", min=2, max=64)}
    shapes = {"images": {0: Dim("images", min=1, max=8)}, "texts": (text, text), "scale": None}
    return Example(Pair(64 if small else 512), inputs, [(8, 16, 64), (2, 5, 7), (1, 1, 2)], shapes, torch.float32)


class Preprocess(nn.Module):
    """Bytes to normalised pixels, their five largest shares, and sums of the bytes. It has no parameters."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.pixels = dtype

    def double(self):
        return Preprocess(torch.float64)

    def forward(self, images):
        pixels = (images.to(self.pixels) / 255 - 0.45) / 0.225
        pixels = functional.interpolate(pixels, size=(16, 16), mode="bilinear")
        # Pixels can be equal, so the places of the largest would depend on rounding.
        shares, _ = pixels.flatten(1).softmax(1).topk(5)
        return pixels, {"shares": shares, "sums": images.sum((1, 2, 3))}


def preprocess(small):
    shapes = {"images": {0: Dim("batch", min=1, max=8), 2: Dim("height", min=16, max=512), 3: Dim("width", min=16, max=512)}}
    sizes = [(8, 3, 256, 320), (3, 3, 33, 47), (1, 3, 16, 16)]
    return Example(Preprocess(), lambda s: ((torch.randint(0, 256, s, dtype=torch.uint8),), {}), sizes, shapes, torch.float32)


class Scaled(nn.Module):
    """Two layers and a factor: other weights can multiply the outputs by a number."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(64, width), nn.Linear(width, 32)
        self.register_buffer("scale", torch.rand(32) + 0.5)

    def forward(self, x):
        return self.second(torch.relu(self.first(x))) * self.scale


def scaled(small):
    """Its weights can be replaced."""
    shapes = ({0: Dim("batch", min=1, max=64)},)
    net = Scaled(64 if small else 2048)
    return Example(net, lambda n: ((torch.randn(n, 64),), {}), [64, 3, 1], shapes, torch.float32, replaceable=True)


MODELS = {f.__name__: f for f in (resnet50, vit_b_16, convnext_tiny, bert, pair, preprocess, scaled)}


def make(name, small, device):
    """The example on the device. inputs(size) returns the same tensors in each call."""
    torch.manual_seed(0)
    e = MODELS[name](small)
    with torch.no_grad():
        # Constants make parts of some networks have no effect, such as ViT's head, which is zero.
        for value in e.net.state_dict().values():
            if value.is_floating_point() and value.min() == value.max():
                value.add_(torch.randn_like(value) * 0.1)
    dtype = e.dtype if device == "cuda" else torch.float32
    format = torch.channels_last if e.channels_last else torch.contiguous_format

    def move(x):
        x = x.to(device, dtype if x.is_floating_point() else None)
        return x.contiguous(memory_format=format if x.dim() == 4 else torch.contiguous_format)

    def inputs(size):
        torch.manual_seed(1)
        return tree_map(move, e.inputs(size))

    return e._replace(net=e.net.eval().to(device, dtype).to(memory_format=format), inputs=inputs)


def flat(value):
    """The tensors of the outputs of a model, of transformers too."""
    return tree_leaves(dict(value) if hasattr(value, "to_tuple") else value)


def store(tensors, prefix, names, values):
    if len(names) != len(values):
        raise ValueError(f"{prefix}: {len(values)} tensors for the names {names}")
    for name, value in zip(names, values):
        tensors[f"{prefix}.{name}"] = value.detach().cpu().contiguous().clone()


def described(package):
    """The descriptions of the inputs, and the names of the inputs and the outputs, which export() wrote."""
    d = json.loads(package.loader.get_metadata()["torchstream"])
    return d["inputs"], [v["name"] for v in d["inputs"]], [v["name"] for v in d["outputs"]]


def write(name, a):
    """Write the package of one model and its tensors. Return a line about them."""
    torch.set_num_threads(a.threads)
    start, path = time.time(), os.path.join(a.folder, name + ".pt2")
    e = make(name, a.small, a.device)
    sizes = e.sizes[:1] if a.fixed else e.sizes
    args, keywords = e.inputs(sizes[0])
    export(e.net, args, keywords, path=path, dynamic_shapes=None if a.fixed else e.dynamic_shapes,
           config=REPLACEABLE if e.replaceable else None)
    took, tensors = time.time() - start, {}
    package = torch._inductor.aoti_load_package(path, run_single_threaded=True)
    _, input_names, output_names = described(package)
    exact = copy.deepcopy(e.net).double()
    with torch.no_grad():
        for i, size in enumerate(sizes):
            args, keywords = e.inputs(size)
            given = tree_leaves((args, keywords))
            store(tensors, f"{i}.input", input_names, given)
            store(tensors, f"{i}.package", output_names, package.loader.boxed_run(list(given)))
            store(tensors, f"{i}.eager", output_names, flat(e.net(*args, **keywords)))
            args, keywords = tree_map(lambda x: x.double() if x.is_floating_point() else x, (args, keywords))
            store(tensors, f"{i}.exact", output_names, flat(exact(*args, **keywords)))
    save(a.folder, name, tensors, len(sizes))
    return f"{name}: compiled in {took:.0f} s, {os.path.getsize(path) >> 20} MB, {len(sizes)} sizes"


def rerun(name, a):
    """Run a package that exists, and replace the tensors of PyTorch's loader."""
    torch.set_num_threads(a.threads)
    package = torch._inductor.aoti_load_package(os.path.join(a.folder, name + ".pt2"), run_single_threaded=True)
    inputs, _, output_names = described(package)
    with safe_open(os.path.join(a.folder, name + ".safetensors"), "pt") as f:
        tensors, sizes = {key: f.get_tensor(key) for key in f.keys()}, int(f.metadata()["sizes"])
    with torch.no_grad():
        for i in range(sizes):
            given = []
            for v in inputs:
                x = tensors[f"{i}.input.{v['name']}"].to(a.device)
                last = v["memory_format"] == "channels_last"
                given.append(x.contiguous(memory_format=torch.channels_last) if last else x)
            store(tensors, f"{i}.package", output_names, package.loader.boxed_run(given))
    save(a.folder, name, tensors, sizes)
    return f"{name}: run again, {sizes} sizes"


def save(folder, name, tensors, sizes):
    metadata = {"torch": torch.__version__.split("+")[0], "sizes": str(sizes)}
    save_file(tensors, os.path.join(folder, name + ".safetensors"), metadata)


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


def time_calls(name, a):
    """Time calls with the largest size in eager mode, in PyTorch's loader, and as a CUDA graph."""
    e = make(name, a.small, a.device)
    args, keywords = e.inputs(e.sizes[0])
    given = tree_leaves((args, keywords))
    package = torch._inductor.aoti_load_package(os.path.join(a.folder, name + ".pt2"), run_single_threaded=True)

    def run():
        return package.loader.boxed_run(list(given))

    with torch.no_grad():
        timed(f"{name}: eager, PyTorch", lambda: e.net(*args, **keywords))
        timed(f"{name}: the package, PyTorch's loader", run)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                run()
        timed(f"{name}: the package as a graph, PyTorch", graph.replay)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder")
    p.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(MODELS)} (default: all)")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    p.add_argument("--jobs", type=int, default=1, help="models at a time, each in a process (%(default)s)")
    for flag in ("small", "fixed", "time", "keep"):
        p.add_argument("--" + flag, action="store_true")
    a = p.parse_args()
    names = a.names or list(MODELS)
    if unknown := set(names) - set(MODELS):
        p.error(f"unknown models {sorted(unknown)}; there are {', '.join(MODELS)}")
    os.makedirs(a.folder, exist_ok=True)
    # Results on a CPU can depend on the number of threads, so all processes have that of a new process.
    a.threads = torch.get_num_threads()
    failed = []
    with ProcessPoolExecutor(a.jobs, multiprocessing.get_context("spawn")) as pool:
        made = {name: pool.submit(rerun if a.keep else write, name, a) for name in names}
        for name, future in made.items():
            try:
                print(future.result(), flush=True)
            except Exception as error:  # the other models are of use without this one
                failed.append(name)
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    if failed:
        sys.exit(f"make_models.py: error: no results of {', '.join(failed)}")
    if a.time:
        for name in names:
            time_calls(name, a)


if __name__ == "__main__":
    main()
