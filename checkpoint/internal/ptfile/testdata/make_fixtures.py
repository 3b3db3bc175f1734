"""Writes the files of the tests with torch.save, and expected.json: what torch.load reads from them.

    python make_fixtures.py            (needs torch 2.11 and numpy; run beside this file)

expected.json maps a file to its values. A tensor is {"tensor": dtype, "shape", "stride", "offset", "grad", "parameter",
"bytes": its elements in hexadecimal, row-major and little-endian, "storage": which tensors share one}; a dict is
{"dict": [[key, value], ...], "ordered"}; {"list"}, {"tuple"}, {"bytes"}, {"name"} (of a dtype or a device) and {"int"}
(as text) hold one value each.
"""

import collections
import io
import json
import os
import pathlib
import zipfile

import torch
from torch import nn

HERE = pathlib.Path(__file__).parent
KNOWN = "uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 bool".split()


def describe(v, storages):
    if isinstance(v, torch.Tensor):
        flat = v.detach().contiguous().reshape(-1)
        return {
            "tensor": str(v.dtype).removeprefix("torch."),
            "shape": list(v.shape),
            "stride": list(v.stride()),
            "offset": v.storage_offset(),
            "grad": v.requires_grad,
            "parameter": isinstance(v, nn.Parameter),
            "storage": storages.setdefault(v.untyped_storage()._cdata, len(storages)),
            "bytes": bytes(flat.view(torch.uint8).tolist()).hex() if flat.numel() else "",
        }
    if isinstance(v, dict):
        pairs = [[describe(k, storages), describe(x, storages)] for k, x in v.items()]
        return {"dict": pairs, "ordered": isinstance(v, collections.OrderedDict)}
    if isinstance(v, list):
        return {"list": [describe(x, storages) for x in v]}
    if isinstance(v, tuple):
        return {"tuple": [describe(x, storages) for x in v]}
    if isinstance(v, bytes):
        return {"bytes": v.hex()}
    if isinstance(v, (torch.dtype, torch.device)):
        return {"name": str(v)}
    if isinstance(v, int) and not isinstance(v, bool):
        return {"int": str(v)}
    return v


def members(path):
    with zipfile.ZipFile(path) as z:
        return [(i.filename, z.read(i)) for i in z.infolist()]


def rewrite(path, source, compression=zipfile.ZIP_STORED, change=lambda name, data: data):
    """Writes the members of another file, with a fixed date."""
    with zipfile.ZipFile(path, "w") as z:
        for name, data in members(source):
            z.writestr(zipfile.ZipInfo(name), change(name, data), compression)


class Evil:
    def __reduce__(self):
        return os.system, ("echo executed",)


def main():
    os.chdir(HERE)
    torch.manual_seed(1)
    values = {}

    dtypes = {name: torch.tensor([0, 1, 3, 100]).to(getattr(torch, name)).reshape(2, 2) for name in KNOWN}
    dtypes |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3), "negative": torch.tensor([-1.5, float("inf")])}
    values["dtypes.pt"] = dtypes

    a = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    image = torch.arange(24, dtype=torch.int16).reshape(1, 2, 3, 4)
    values["views.pt"] = {
        "a": a,
        "transposed": a.t(),
        "every second": a[1:, ::2],
        "row": a[2],
        "column": a[:, 3],
        "element": a[3, 5],
        "one wide": a[:, 2:3],
        "expanded": a[:1].expand(4, 6),
        "channels_last": image.to(memory_format=torch.channels_last),
        "permuted": torch.arange(120, dtype=torch.float64).reshape(2, 3, 4, 5).permute(3, 1, 0, 2),
    }

    layer = nn.Linear(2, 1)
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    noted = nn.Parameter(torch.ones(1))
    noted.note = "kept in the state of the parameter"
    values["parameters.pt"] = {"weight": layer.weight, "frozen": frozen, "noted": noted, "leaf": torch.ones(1, requires_grad=True)}

    net = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, betas=(0.8, 0.99))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5, 5])
    for _ in range(2):
        net(torch.ones(1, 1, 4, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
    values["checkpoint.pt"] = {
        "epoch": 3,
        "arch": "net \u00e9",
        "state_dict": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "best": torch.tensor(0.75),
        "none": None,
        "flags": [True, False],
        "integers": [0, -1, 255, 65535, 65536, -(2**31), 2**31, 2**63 - 1, -(2**63)],
        "floats": [0.1, -0.0, 1e300],
        "bytes": b"\x00\xff text",
        "no bytes": b"",
        "size": torch.Size([2, 3]),
        "device": torch.device("cuda", 1),
        "cpu": torch.device("cpu"),
        "dtype": torch.bfloat16,
        7: ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        "long": "x" * 300,
        "empty": [{}, collections.OrderedDict(), []],
    }
    torch.save(values["checkpoint.pt"], "checkpoint.pt")
    for name, protocol in {"protocol3.pt": 3, "protocol4.pt": 4, "protocol5.pt": 5}.items():
        values[name] = values["checkpoint.pt"]
        torch.save(values[name], name, pickle_protocol=protocol)
    values["state_dict.pth"] = net.state_dict()
    values["tensor.pt"] = torch.arange(3)
    for name in ("dtypes.pt", "views.pt", "parameters.pt", "state_dict.pth", "tensor.pt"):
        torch.save(values[name], name)

    torch.serialization.set_crc32_options(False)
    torch.save(values["dtypes.pt"], "no_crc.pt")
    torch.serialization.set_crc32_options(True)
    rewrite("compressed.pt", "views.pt", zipfile.ZIP_DEFLATED)
    values |= {"no_crc.pt": values["dtypes.pt"], "compressed.pt": values["views.pt"]}

    # A big-endian file, as a machine of that order writes it.
    def big(name, data):
        if name.endswith("/byteorder"):
            return b"big"
        if "/data/" not in name:
            return data
        key = name.rsplit("/", 1)[1]
        # Storages are numbered in the order of dtypes.
        size = list(dtypes.values())[int(key)].element_size()
        return b"".join(data[i : i + size][::-1] for i in range(0, len(data), size))

    rewrite("big_endian.pt", "dtypes.pt", change=big)
    values["big_endian.pt"] = values["dtypes.pt"]

    expected = {}
    for name, value in sorted(values.items()):
        # Not weights_only: that unpickler refuses protocols above 2.
        loaded = torch.load(name, weights_only=False, map_location="cpu")
        if name != "parameters.pt":
            assert str(loaded) == str(value), name
        storages = {}
        expected[name] = describe(loaded, storages)
    (HERE / "expected.json").write_text(json.dumps(expected, indent=None, sort_keys=True).replace('], ["', '],\n["') + "\n")

    # Files to refuse.
    torch.save(dtypes, "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save({"weight": torch.ones(1), "evil": Evil()}, "system.pt")
    torch.save(nn.Linear(1, 1), "module.pt")
    torch.save({"z": torch.ones(1, dtype=torch.complex64), "u": torch.ones(1, dtype=torch.uint16), "f": torch.ones(1).to(torch.float8_e4m3fn), "ok": torch.ones(1)}, "other_dtypes.pt")
    torch.save({"c": torch.ones(1, dtype=torch.complex64).conj()}, "conjugate.pt")
    torch.save({"s": torch.eye(2).to_sparse()}, "sparse.pt")
    torch.save({"q": torch.quantize_per_tensor(torch.ones(1), 0.1, 0, torch.qint8)}, "quantized.pt")
    torch.save({"seed": 2**63}, "large_integer.pt")
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.ReLU()), buffer)
    pathlib.Path("script.bin").write_bytes(buffer.getvalue())
    # The source map names files of this machine.
    rewrite("script.pt", "script.bin", change=lambda name, data: b"" if name.endswith(".debug_pkl") else data)
    os.remove("script.bin")


main()
