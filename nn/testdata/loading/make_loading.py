"""Writes small files of one network with other dtypes and names than its own, and expected.json: what PyTorch's
load_state_dict makes of each.

    python make_loading.py           (needs torch 2.11, safetensors; run beside this file)

The network is Linear(3, 4), BatchNorm1d(4), Linear(4, 2). expected.json has, by the file's name, the dtype of the network
that loads it and its state as lists of numbers. "network" is the state that most files have in some form. Values of the
tied network are in the file tied.safetensors's entry.
"""
import collections
import json
import pathlib
import warnings

import safetensors.torch
import torch
from torch import nn

here = pathlib.Path(__file__).parent
expected = {}


def network():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(3.7).add_(0.011)
        net[1].running_mean.normal_()
        net[1].running_var.uniform_(0.3, 2)
        net[1].num_batches_tracked.fill_(5)
    return net


def numbers(state):
    return {k: v.double().reshape(-1).tolist() for k, v in state.items()}


def save(name, value):
    path = here / name
    if name.endswith(".safetensors"):
        safetensors.torch.save_file(value, path)
    else:
        torch.save(value, path)


def loads(name, state, into=torch.float32):
    """Notes what a network of a dtype has after it has loaded the state."""
    net = network().to(into)
    with torch.no_grad():
        for t in net.state_dict().values():
            t.fill_(9)
    net.load_state_dict(state)
    expected[name] = {"dtype": str(into).removeprefix("torch."), "state": numbers(net.state_dict())}


def dtypes():
    state = network().double().state_dict()
    for n in (0, 2):  # between two float32 numbers, so that two roundings to float16 differ from one
        state[f"{n}.weight"] += 1e-9
    state["0.bias"][0] = 1 + 2**-11 + 2**-40
    for name, dtype in (("float64.pt", torch.float64), ("float16.pt", torch.float16), ("bfloat16.safetensors", torch.bfloat16),
                        ("float8_e4m3fn.safetensors", torch.float8_e4m3fn), ("float8_e5m2.safetensors", torch.float8_e5m2)):
        cast = {k: v.to(dtype) if v.is_floating_point() else v for k, v in state.items()}
        save(name, cast)
        loads(name, cast)
    for into in (torch.float16, torch.bfloat16, torch.float64):
        loads(f"float64.pt into {str(into).removeprefix('torch.')}", state, into)
        cast = {k: v.bfloat16() if v.is_floating_point() else v for k, v in state.items()}
        loads(f"bfloat16.safetensors into {str(into).removeprefix('torch.')}", cast, into)
    # model.state_dict() with .half() on every tensor.
    half = {k: v.half() for k, v in network().state_dict().items()}
    save("all_half.safetensors", half)
    loads("all_half.safetensors", half)
    half["1.num_batches_tracked"] = torch.tensor(750_000).half()  # infinite
    save("infinite_count.safetensors", half)
    old = network().state_dict()
    old["1.num_batches_tracked"] = old["1.num_batches_tracked"].int().reshape(1)
    save("int32_count.safetensors", old)
    loads("int32_count.safetensors", old)
    quantized = network().state_dict()
    quantized["0.weight"] = (quantized["0.weight"] * 20).to(torch.int8)
    save("int8_weight.safetensors", quantized)


def names():
    net = network()
    state = net.state_dict()
    expected["network"] = {"dtype": "float32", "state": numbers(state)}
    save("data_parallel.pt", nn.DataParallel(net).state_dict())
    save("compiled.pt", torch.compile(net).state_dict())
    save("compiled_parallel.safetensors", torch.compile(nn.DataParallel(net)).state_dict())
    inner = nn.Sequential(collections.OrderedDict([("0", torch.compile(net[0])), ("1", net[1]), ("2", net[2])]))
    save("compiled_layer.safetensors", inner.state_dict())
    average = torch.optim.swa_utils.AveragedModel(net)
    average.update_parameters(net)
    save("averaged_model.pt", average.state_dict())
    lightning = {"model." + k: v for k, v in state.items()}
    save("lightning.ckpt", {"epoch": 3, "global_step": 12, "pytorch-lightning_version": "2.5.0", "state_dict": lightning, "callbacks": {}, "hyper_parameters": {"lr": 0.1}})
    # Other parts of the file's model have no place in the network.
    more = {"backbone." + k: v for k, v in state.items()} | {"neck.weight": torch.ones(2)}
    save("detector.safetensors", more)
    other = {k: torch.zeros_like(v) for k, v in state.items()}
    for key in ("net", "params_ema", "state_dict_ema", "weird_name"):
        save(f"dict_{key}.pt", {key: state, "epoch": 1})
    save("raw_and_averages.pt", {"state_dict": other, "model_ema": {"module": state}})
    save("gan.pt", {"generator": state, "critic": {"a": torch.ones(1)}})
    save("unrelated.safetensors", {f"encoder.{i}.gain": torch.ones(1) for i in range(7)})


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a_head = nn.Linear(3, 5, bias=False)
        self.tokens = nn.Embedding(5, 3)
        self.a_head.weight = self.tokens.weight


def tied():
    torch.manual_seed(2)
    net = Tied()
    with warnings.catch_warnings():
        safetensors.torch.save_model(net, here / "tied.safetensors")
    save("tied.pt", net.state_dict())
    both = torch.arange(4.0)
    save("halves.pt", {"a": both[:2], "b": both[2:]})  # one storage, but not the same numbers
    expected["tied.safetensors"] = {"dtype": "float32", "state": numbers(net.state_dict())}


def index():
    state = network().state_dict()
    first = {k: v for k, v in state.items() if k < "2"}
    save("pytorch_model-00001-of-00002.bin", first)
    save("pytorch_model-00002-of-00002.bin", {k: v for k, v in state.items() if k not in first})
    weight_map = {k: f"pytorch_model-0000{1 if k in first else 2}-of-00002.bin" for k in state}
    total = sum(v.nbytes for v in state.values())
    (here / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1) + "\n")


dtypes()
names()
tied()
index()
text = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in expected.items())
(here / "expected.json").write_text("{" + text + "}\n")
