"""Writes printed.json: how PyTorch prints the tensors of TestTensorsPrintAsInPyTorch.

    python make_printed.py           (needs torch 2.11; writes beside this file)

Each case has the dtype, the shape, the values (complex ones as pairs; "nan", "inf" and "-inf" as strings) and the text
between "tensor(" and the suffix, as printed without an indentation.
"""
import json
import math
import pathlib

import torch
from torch import _tensor_str


def case(tensor):
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    values = [v if isinstance(v, (int, bool)) or math.isfinite(v) else str(v) for v in flat.tolist()]
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "values": values,
        "text": _tensor_str._tensor_str(tensor, 0),
    }


def main():
    torch.manual_seed(1)
    inf, nan = math.inf, math.nan
    tensors = [torch.tensor(v) for v in (
        3.0, 2.5, -1e-7, nan, 7, True, [1.0, 2.0, -3.0], [1.5, 2.0, -30.25], [0.0, 0.0], [], [[]], [1.0, inf, nan], [1.5, -inf, nan], [nan, inf], [1e-5, 1.0],
        [1e9, 1.0], [1e9, 2e9], [1001.0, 1.0], [999.0, 1.5], [1e-4, 0.05], [-0.0, 1.0], [1, -20, 300], [True, False], [[1, 2], [3, -4]], [[[1.5], [2.5]], [[3.5], [4.5]]],
        1 + 2j, [1.5 - 2j, -1j, 0.25 + 0j], [[1 + 1j, 2 - 200j]], [complex(nan, inf), 1 + 0j],
    )]
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2):
        tensors.append(torch.tensor([0.1, -2.0, 448.0, 0.0]).to(dtype))
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        tensors.append(torch.tensor([0, 1, 127], dtype=dtype))
    tensors += [torch.tensor([0.1 + 1e-9j], dtype=torch.complex128), torch.arange(30), torch.arange(30) / 7, torch.arange(1000), torch.arange(1001), torch.arange(1001) / 8]
    tensors += [torch.arange(1200).view(30, 40), torch.arange(1200).view(5, 240), torch.arange(1200).view(240, 5), torch.arange(1200).view(4, 10, 30) / 3, torch.arange(1728).view(2, 6, 12, 12)]
    tensors += [torch.randn(3, 20), torch.randn(2, 3, 4, 2), torch.randn(2, 9) + 1j * torch.randn(2, 9), torch.ones(8, 8, 8, 8, dtype=torch.bool), torch.zeros(2, 0, 3)]
    tensors += [torch.ones(1001, dtype=torch.float8_e4m3fn), torch.arange(1001).to(torch.complex64), torch.arange(4.0).view(2, 2).t()]
    path = pathlib.Path(__file__).with_name("printed.json")
    path.write_text(json.dumps([case(t) for t in tensors], separators=(",", ":")) + "\n")


main()
