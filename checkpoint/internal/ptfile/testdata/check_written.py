"""Compares files that Go wrote with the files that it read.

    python check_written.py ORIGINAL WRITTEN [ORIGINAL WRITTEN ...]

torch.load(weights_only=True) must read WRITTEN, mapped too, as the same values: types, order, dtypes, shapes, strides,
sharing of storages and elements.
"""

import sys
import zipfile

import torch


def same(a, b, storages, path):
    assert type(a) is type(b) or {type(a), type(b)} <= {tuple, torch.Size} or "Counter" in str(type(a)), (path, type(a), type(b))
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.stride(), a.requires_grad) == (b.dtype, b.shape, b.stride(), b.requires_grad), path
        assert a.storage_offset() == b.storage_offset(), path
        assert storages.setdefault(a.untyped_storage()._cdata, b.untyped_storage()._cdata) == b.untyped_storage()._cdata, path
        if "float8" in str(a.dtype) or "uint" in str(a.dtype):  # torch.equal lacks some of them
            a, b = a.to(torch.float64), b.to(torch.float64)
        assert torch.equal(a, b), path
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for k in a:
            same(a[k], b[k], storages, f"{path}/{k}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b)):
            same(x, y, storages, f"{path}/{i}")
    elif isinstance(a, (torch.dtype, torch.device)):
        assert b is None, path
    else:
        assert a == b, (path, a, b)


def main():
    for original, written in zip(sys.argv[1::2], sys.argv[2::2]):
        with zipfile.ZipFile(written) as z:
            assert z.testzip() is None
        want = torch.load(original, weights_only=False, map_location="cpu")
        for mapped in (False, True):
            got = torch.load(written, weights_only=True, mmap=mapped)
            if isinstance(want, dict):
                for k in want:
                    if isinstance(want[k], (torch.dtype, torch.device)):
                        want[k] = None
            same(want, got, {}, written)
        print("equal", original)


main()
