"""Writes the files of opaque/ with torch.save: a state_dict beside one value that the reader does not build.

    python make_opaque.py            (needs torch 2.11 and numpy; run beside this file)

Each file is a dict of "state_dict", of which "weight" is [[0, 1], [2, 3]] and "bias" is [4, 5], and "value".
"""

import argparse
import collections
import enum
import os
import pathlib

import numpy as np
import torch

HERE = pathlib.Path(__file__).parent


class Phase(enum.Enum):
    TRAIN = 1


class Config(dict):
    """A dict with attributes, one of which is the object itself."""

    def __init__(self):
        super().__init__(lr=0.1)
        self.me = self
        self.names = {"a": [self]}


class Slots:
    """An object that Python makes with keyword arguments."""

    def __new__(cls, *, n):
        o = super().__new__(cls)
        o.n = n
        return o

    def __getnewargs_ex__(self):
        return (), {"n": self.n}


class Weight(torch.Tensor):
    pass


def main():
    os.chdir(HERE)
    os.makedirs("opaque", exist_ok=True)
    state = collections.OrderedDict(weight=torch.arange(4.0).reshape(2, 2), bias=torch.tensor([4.0, 5.0]))
    noted = torch.ones(2)
    noted.note = "an attribute"
    recursive = ([],)
    recursive[0].append(Slots(n=recursive))
    values = {
        "seed": 2**63 + 1,
        "negative_seed": -(2**63) - 1,
        "long_integer": 1 << 4000,
        "generator": np.random.default_rng(1).bit_generator.state,
        "namespace": argparse.Namespace(lr=0.1),
        "nested": {"args": argparse.Namespace(lr=0.1), "groups": [{"lr": np.float64(0.1), "eps": 1e-8}]},
        "numpy_scalar": np.float64(0.7),
        "numpy_array": np.arange(3),
        "set": {"a", "b"},
        "frozenset": frozenset("a"),
        "bytearray": bytearray(b"x"),
        "complex": 1 + 2j,
        "tuple_key": {("a", 1): 2, "b": 3},
        "not_a_number_key": {float("nan"): 2},
        "deque": collections.deque([1]),
        "defaultdict": collections.defaultdict(list, a=[1]),
        "path": pathlib.PurePosixPath("a/b"),
        "enum": Phase.TRAIN,
        "class": collections.OrderedDict,
        "function": torch.nn.functional.relu,
        "object": Config(),
        "surrogate": "caf\udce9.jpg",
        "sparse": torch.eye(2).to_sparse(),
        "compressed_rows": torch.eye(2).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "meta": torch.empty(2, device="meta"),
        "conjugate": torch.ones(1, dtype=torch.complex64).conj(),
        "float4": torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "subclass": torch.ones(2).as_subclass(Weight),
        "module": torch.nn.Linear(1, 1),
        # These are tensors.
        "buffer": torch.nn.Buffer(torch.ones(2)),
        "attribute": noted,
    }
    for name, value in values.items():
        torch.save({"state_dict": state, "value": value}, f"opaque/{name}.pt")
    for name, value in {"set": {"a", "b"}, "frozenset": frozenset("a"), "bytearray": bytearray(b"x"), "slots": Slots(n=1), "recursive": Slots(n=recursive)}.items():
        torch.save({"state_dict": state, "value": value}, f"opaque/{name}_protocol5.pt", pickle_protocol=5)


main()
