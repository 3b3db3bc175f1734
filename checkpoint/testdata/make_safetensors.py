"""Writes safetensors.json: files, and what the safetensors package says of each.

    python make_safetensors.py            (needs safetensors 0.8.0 and torch 2.11; run beside this file)

A file has its "name", its bytes as "file" in base64, and "opens"; those that the package's writer made have "tensors",
a dict from a name to the bytes in hexadecimal.
"""

import base64
import json
import pathlib
import struct
import tempfile

import torch
from safetensors import safe_open
from safetensors.torch import save

HERE = pathlib.Path(__file__).parent
A = '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]%s}'


def file(header, data=1):
    header = header.encode()
    return struct.pack("<Q", len(header)) + header + b"\1" * data


def one(dtype, shape, data):
    return file('{"a":{"dtype":"%s","shape":%s,"data_offsets":[0,%d]},"z":{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}}' % (dtype, shape, data, data, data + 1), data + 1)


def main():
    plain = A % ""
    cases = {
        "leading space": file(" {%s}" % plain),
        "leading white space": file("\t\n\r {%s}" % plain),
        "many leading spaces": file(" " * 1000 + "{%s}" % plain),
        "trailing white space": file("{%s} \n\t\r " % plain),
        "trailing NUL": file("{%s}\0" % plain),
        "byte order mark": file("\ufeff{%s}" % plain),
        "trailing no-break space": file("{%s}\u00a0" % plain),
        "two objects": file("{%s}{}" % plain),
        "unknown key": file("{%s}" % (A % ',"note":1')),
        "unknown key of an object": file("{%s}" % (A % ',"note":{"x":[1,{"y":null}]}')),
        "unknown key first": file('{"a":{"note":[],"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'),
        "metadata null": file('{"__metadata__":null,%s}' % plain),
        "metadata empty": file('{"__metadata__":{},%s}' % plain),
        "metadata of a number": file('{"__metadata__":{"a":1},%s}' % plain),
        "metadata of null": file('{"__metadata__":{"a":null},%s}' % plain),
        "metadata of an object": file('{"__metadata__":{"a":{}},%s}' % plain),
        "metadata twice": file('{"__metadata__":{},"__metadata__":{},%s}' % plain),
        "metadata a string": file('{"__metadata__":"x"}', 0),
        "metadata a list": file('{"__metadata__":[]}', 0),
        "no tensors": file("{}", 0),
        "no header": file("", 0),
        "dtype twice": file('{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}'),
        "entry null": file('{"a":null}', 0),
        "shape null": file('{"a":{"dtype":"U8","shape":null,"data_offsets":[0,1]}}'),
        "shape of a fraction": file('{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}'),
        "dtype null": file('{"a":{"dtype":null,"shape":[1],"data_offsets":[0,1]}}'),
        "name escaped": file('{"\\u0061":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'),
        "100 dimensions": file('{"a":{"dtype":"U8","shape":[%s],"data_offsets":[0,1]}}' % ",".join(["1"] * 100)),
        "empty tensor within another": file('{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"e":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}', 2),
        "empty tensor at the start of another": file('{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"e":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', 2),
        "gap": file('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}', 3),
        "overlap": file('{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}', 3),
        "bytes behind the tensors": file("{%s}" % plain, 2),
        "F4": one("F4", "[4]", 2),
        "F4 of an odd number": one("F4", "[3]", 2),
        "F4 of another size": one("F4", "[4]", 4),
        "F6_E2M3": one("F6_E2M3", "[4]", 3),
        "F6_E3M2": one("F6_E3M2", "[2,2]", 3),
        "F6_E3M2 of no whole bytes": one("F6_E3M2", "[3]", 3),
        "U32 of another size": one("U32", "[2]", 4),
    }
    written = {}
    for name in "uint16 uint32 uint64 float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz float8_e4m3fn float8_e5m2 complex64 float4_e2m1fn_x2".split():
        dtype = getattr(torch, name)
        size = torch.empty(0, dtype=dtype).element_size()
        tensors = {"a": torch.arange(1, 2 * size + 1, dtype=torch.uint8).view(dtype), "z": torch.tensor([7.0])}
        cases[name] = save(tensors)
        written[name] = {"a": bytes(range(1, 2 * size + 1)).hex(), "z": struct.pack("<f", 7.0).hex()}
    out = []
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "x.safetensors")
        for name, data in cases.items():
            path.write_bytes(data)
            try:
                with safe_open(path, "pt"):
                    opens = True
            except Exception:
                opens = False
            out.append({"name": name, "file": base64.b64encode(data).decode(), "opens": opens})
            if name in written:
                out[-1]["tensors"] = written[name]
    (HERE / "safetensors.json").write_text("[\n" + ",\n".join(json.dumps(c) for c in out) + "\n]\n")


main()
