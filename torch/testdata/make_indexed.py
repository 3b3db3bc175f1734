"""Writes indexed.json: what PyTorch's t[...] gives for the cases of TestIndexAsInPyTorch, by the text of the index.

    python make_indexed.py           (needs torch 2.11; writes beside this file)

t is arange(24).view(2, 3, 4); "scalar " before an index means a tensor without dimensions. A case has the shape and the
values of t[index], and in "assigned" t after t[index] = the case's value; or an error's text.
"""
import json
import pathlib

import torch

MASK = torch.tensor([[False, True, False], [False, False, True]])
ROWS = torch.tensor([True, False])
NAMES = {"mask": MASK, "rows": ROWS, "t": torch, "i": torch.tensor, "yes": torch.tensor(True), "no": torch.tensor(False), "none": torch.tensor([], dtype=torch.int64)}
VALUES = {"7": 7, "row": torch.tensor([[10, 20, 30, 40]]), "1.5": 1.5}

CASES = [
    "0", "-1", "1, 2", "1, -1, 3", "1:2", "-1:", "5:", "1:1", "2:1", ":", ":, 1:", ":, :-1", ":, -2:-1", ":, 0:3:2", ":, ::2", ":, 1::5", "0, 1:", "...", "..., 0", "0, ..., 1", "..., 1:3", "None",
    ":, None", "..., None", "..., None, 0", "None, 0, None", "mask", "mask, 1:3", "mask, 1", "mask, ...", "mask, None", "None, mask", "mask, i([0, 1])", "rows", "rows, 1:", ":, [True, False, True], ::2",
    "yes", "no", "0, yes", "i(1)", "1, i(2)", "i([1, 0])", "i([[0, 1], [1, 0]])", "[0, 1], [1, 2]", "i([0, 1]), :, i([0, 3])", ":, i([0, 2]), 1", "1, :, i([0, 3])", "i([0]), 1, :", "i([0, 1]), i([[0], [2]])", ":, none",
    "i([-1, 0])", "..., i([0, 0, 3])", "i([1]), 0:2, 3", ":, [0, 1], [1, 2]", ":, [0, 1], None, [1, 2]", "i([1, 0], dtype=t.int32)", "scalar ...", "scalar None", "scalar yes",
    "5", "0, 0, 0, 0", ":, 3", "i([5])", ":, mask", "mask, 0, 0", "i([0.5])", ":, ::-1", "scalar 0", "i([0, 1]), i([0, 1, 2])",
]


def case(text):
    scalar = text.startswith("scalar ")
    index = text.removeprefix("scalar ")
    start = torch.tensor(5) if scalar else torch.arange(24).view(2, 3, 4)
    found = {"index": text}
    try:
        result = eval(f"x[{index}]", {**NAMES, "x": start})
    except (IndexError, ValueError) as e:
        return {**found, "error": str(e)}
    found |= {"shape": list(result.shape), "values": result.flatten().tolist(), "view": result._base is start or result.untyped_storage()._cdata == start.untyped_storage()._cdata}
    found["assigned"] = {}
    for name, value in VALUES.items():
        into = start.clone()
        try:
            exec(f"x[{index}] = v", {**NAMES, "x": into, "v": value})
        except (RuntimeError, IndexError):
            continue
        found["assigned"][name] = into.flatten().tolist()
    return found


path = pathlib.Path(__file__).with_name("indexed.json")
path.write_text("[\n" + ",\n".join(json.dumps(case(text), separators=(",", ":")) for text in CASES) + "\n]\n")
