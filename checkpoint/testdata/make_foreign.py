"""Writes the files of foreign/: weights in formats that are no checkpoints of this package, each by its own library.

    python make_foreign.py            (run beside this file)

It writes the files whose libraries it finds: torch 2.11, numpy, onnx 1.23, h5py 3.16, gguf.
"""

import os
import pathlib
import pickle
import zipfile

import numpy as np

HERE = pathlib.Path(__file__).parent


def write_onnx(name, **options):
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", [x], [y], [numpy_helper.from_array(np.ones(2, np.float32), "w")])
    onnx.save(helper.make_model(graph, **options), name)


def write_torch():
    import torch

    class Add(torch.nn.Module):
        def forward(self, x):
            return x + 1

    torch.export.save(torch.export.export(Add(), (torch.ones(1),)), "whole.pt2")
    # The program names files of this machine.
    with zipfile.ZipFile("whole.pt2") as whole, zipfile.ZipFile("program.pt2", "w") as z:
        for i in whole.infolist():
            z.writestr(zipfile.ZipInfo(i.filename), b"{}" if i.filename.endswith("/model.json") else whole.read(i))
    os.remove("whole.pt2")


def write_others():
    import gguf
    import h5py

    write_onnx("named.onnx", producer_name="pytorch", producer_version="2.11.0")
    write_onnx("unnamed.onnx")
    with h5py.File("weights.h5", "w") as f:
        f["w"] = np.ones(2, np.float32)
    writer = gguf.GGUFWriter("model.gguf", "llama")
    writer.add_tensor("w", np.ones(2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    os.chdir(HERE)
    os.makedirs("foreign", exist_ok=True)
    os.chdir("foreign")
    for write in (write_torch, write_others):
        try:
            write()
        except ImportError as e:
            print(write.__name__, e)
    np.savez("arrays.npz", w=np.ones(2, np.float32))
    np.save("array.npy", np.ones(2, np.float32))
    for protocol in range(6):
        with open(f"protocol{protocol}.pkl", "wb") as f:
            pickle.dump({"w": [1.0, 2.0]}, f, protocol)


main()
