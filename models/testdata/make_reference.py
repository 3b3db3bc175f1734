"""Writes reference.json: what torchvision and Hugging Face's transformers compute for the models of this package.

    python make_reference.py [NAME...]     (writes beside this file; with names only those models, to the terminal)

It needs torch 2.11, torchvision 0.26, transformers 4.57 and numpy, and downloads no weights: every tensor is filled by a
formula that models_test.go computes too (see fill). One record per model has

    options            the options of the model, as the Go package names them
    parameters         the number of trained numbers
    keys               SHA-256 of the lines "NAME [SIZES]" of the state_dict

and, but for the largest,

    input              the shape of the input
    variance           what the running variances are filled around
    exact              whether the same operators compute the logits
    logits             in evaluation, the first numbers of each row; and sha256, that of all of them as float32
    loss, gradients    in training, after torch.manual_seed(2): the mean cross-entropy, and the 2-norm of each gradient
    initial            after torch.manual_seed(1), for each tensor: its first element, and the sum of its squares
"""

import hashlib
import json
import os
import pathlib
import sys

import numpy
import torch
import torchvision
import transformers

SHORT = 8  # logits of each row that the file has


def u(position, count):
    """Return numbers of [-1, 1) with 16 bits: a hash of the position of the tensor and the index of the element."""
    h = numpy.arange(count, dtype=numpy.uint32)
    h = h * numpy.uint32(2654435761) + numpy.uint32((position * 0x9E3779B9 + 0x7F4A7C15) & 0xFFFFFFFF)
    h ^= h >> numpy.uint32(16)
    h *= numpy.uint32(0x85EBCA6B)
    h ^= h >> numpy.uint32(13)
    h *= numpy.uint32(0xC2B2AE35)
    h ^= h >> numpy.uint32(16)
    return (h.view(numpy.int32) >> 16).astype(numpy.float32) / numpy.float32(32768)


def fill(state, variance):
    """Fill the tensors of a state_dict. All numbers are exact in float32.

    A small variance of the batch normalisations keeps the signal of a network with few residual connections alive.
    """
    for position, (name, t) in enumerate(state):
        if t.dtype == torch.int64:
            continue
        values = u(position, t.numel())
        if name.endswith("running_var"):
            values = (1 + values / 2) * numpy.float32(variance)
        elif t.ndim == 1 and name.endswith("weight"):
            values = 1 + values / 4
        elif t.ndim == 1:
            values = values / 4
        else:  # in [-s, s), with the power of two s between 1 and 2 divided by the square root of the fan-in
            fan, s = t.numel() // t.shape[0], 2.0
            while s * s * fan > 4:
                s /= 2
            values = values * numpy.float32(s)
        t.copy_(torch.from_numpy(values).view(t.shape))


def tensors(net):
    """Return the state_dict without the second name of a shared tensor."""
    seen, out = set(), []
    for name, t in net.state_dict(keep_vars=True).items():
        if id(t) not in seen:
            seen.add(id(t))
            out.append((name, t.data))
    return out


def vision(name, size, go=None, variance=1, images=2, exact=True, **options):
    def make():
        return getattr(torchvision.models, name)(weights=None, **options)

    return dict(name=name, go=go or {}, variance=variance, exact=exact, shape=[images, 3, size, size], make=make)


def gpt2(name, shape, go=None, **config):
    def make():
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))

    # The published activation, gelu_new, is written with elementary operators, which round otherwise than LibTorch's GELU.
    return dict(name=name, go=go or {}, variance=1, exact="activation_function" in config, shape=shape, make=make)


MODELS = [
    vision("resnet18", 64),
    vision("resnet18", 64, num_classes=10, zero_init_residual=True, go={"NumClasses": 10, "ZeroInitResidual": True}),
    vision("resnet34", 64),
    vision("resnet50", 64),
    vision("resnet101", 64),
    vision("resnet152", 64),
    vision("resnext50_32x4d", 64),
    vision("resnext101_32x8d", 64),
    vision("resnext101_64x4d", 64),
    vision("wide_resnet50_2", 64),
    vision("wide_resnet101_2", 64),
    vision("mobilenet_v3_small", 64, variance=2**-2),
    vision("mobilenet_v3_large", 64, variance=2**-1),
    vision("efficientnet_b0", 64, variance=2**-2),
    vision("convnext_tiny", 64),
    vision("vit_b_16", 224, images=1),
    vision("vit_b_16", 32, images=1, image_size=32, num_classes=10, dropout=0.25, go={"ImageSize": 32, "NumClasses": 10, "Dropout": 0.25}),
    # PyTorch's MultiheadAttention multiplies the rows of several sequences in another order than package nn.
    vision("vit_b_16", 32, exact=False, image_size=32, go={"ImageSize": 32}),
    gpt2("gpt2", [1, 16]),
    gpt2(
        "gpt2", [2, 24], activation_function="gelu_pytorch_tanh", vocab_size=199, n_positions=32, n_layer=3, n_head=4, n_embd=64,
        go={"VocabSize": 199, "Positions": 32, "Layers": 3, "Heads": 4, "Width": 64},
    ),
    gpt2("gpt2-medium", None, n_layer=24, n_head=16, n_embd=1024),
]


def digest(data):
    return hashlib.sha256(data).hexdigest()


def record(m):
    torch.manual_seed(1)
    with torch.device("cpu" if m["shape"] else "meta"):
        net = m["make"]()
    state = tensors(net)
    r = dict(name=m["name"], options=m["go"], parameters=sum(p.numel() for p in net.parameters()))
    r["keys"] = digest("".join("%s %s\n" % (n, list(t.shape)) for n, t in state).encode())
    if not m["shape"]:
        return r
    r["initial"] = [[float(t.flatten()[0]), float(t.double().square().sum())] for _, t in state]
    with torch.no_grad():
        fill(state, m["variance"])
    r.update(input=m["shape"], variance=m["variance"], exact=m["exact"])
    x = u(1 << 16, int(numpy.prod(m["shape"]))).reshape(m["shape"])
    tokens = x.ndim == 2
    if tokens:
        x = ((x + 1) * 32768).astype(numpy.int64) % net.config.vocab_size
    x = torch.from_numpy(x)

    def run():
        return net(x, use_cache=False).logits if tokens else net(x)

    # With gradients enabled, so that MultiheadAttention takes the operators of training in evaluation too.
    net.eval()
    rows = run().detach().flatten(0, -2)
    r["logits"] = rows[:, :SHORT].tolist()
    r["sha256"] = digest(rows.numpy().tobytes())
    net.train()
    torch.manual_seed(2)
    rows, labels = run(), torch.arange(len(x)) * 7
    if tokens:
        rows, labels = rows[:, :-1].flatten(0, 1), x[:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(rows, labels)
    loss.backward()
    r["loss"] = float(loss.detach())
    r["gradients"] = [float(p.grad.double().norm()) for p in net.parameters()]
    return r


def processor():
    """Return the lines of /proc/cpuinfo that name the model of the first processor."""
    found = []
    for line in open("/proc/cpuinfo").read().split("\n\n")[0].splitlines():
        key, value = (part.strip() for part in line.split(":", 1))
        if key in ("model name", "cpu family", "model", "stepping"):
            found.append("%s: %s" % (key, value))
    return found


def short(value):
    """Return the value with floats of nine digits, which are exact for float32."""
    if isinstance(value, float):
        return float("%.9g" % value)
    if isinstance(value, list):
        return [short(v) for v in value]
    return value


def main():
    torch.set_num_threads(1)
    wanted = sys.argv[1:]
    records = [{k: short(v) for k, v in record(m).items()} for m in MODELS if not wanted or m["name"] in wanted]
    if wanted:
        for r in records:
            print({k: v for k, v in r.items() if k not in ("initial", "gradients")})
        return
    versions = {"torch": torch.__version__, "torchvision": torchvision.__version__, "transformers": transformers.__version__}
    head = {"versions": versions, "processor": processor(), "kernels": torch.backends.cpu.get_cpu_capability()}
    lines = ",\n".join(json.dumps(r, separators=(",", ":")) for r in records)
    path = pathlib.Path(__file__).with_name("reference.json")
    path.write_text('{"made":%s,"models":[\n%s\n]}\n' % (json.dumps(head), lines))


if __name__ == "__main__":
    os.environ.setdefault("USE_TF", "0")
    main()
