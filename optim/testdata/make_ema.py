"""Writes ema.safetensors: averages of 20 steps by torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn.

    python make_ema.py          (needs torch 2.11, safetensors, numpy; writes beside this file)

The model has the parameters of make_parity.py, and as a buffer a running mean of its first parameter. It is trained with
AdamW. By prefix:
  DTYPE/tensors/KEY    the model after 20 steps; KEY is a parameter's index, or mean
  DTYPE/DECAY/KEY      the averages
"""
import pathlib

import torch
from make_parity import STEPS, clone, forward, initial
from safetensors.torch import save_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

DECAYS = (0.9, 0.999, 1.0)


class Model(torch.nn.Module):
    def __init__(self, params):
        super().__init__()
        self.params = torch.nn.ParameterList(params)
        self.register_buffer("mean", torch.zeros_like(params[0]))

    def forward(self, x, y, step):
        self.mean.lerp_(self.params[0].detach(), 0.25)
        return forward(list(self.params), x, y, step, False)


def tensors(model):
    return {str(i): p for i, p in enumerate(model.params)} | dict(model.named_buffers())


def main():
    torch.set_num_threads(1)
    out = {}
    for dtype in (torch.float64, torch.float32):
        params, x, y = initial(dtype)
        model = Model(clone(params))
        averages = {
            decay: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True) for decay in DECAYS
        }
        for a in averages.values():
            a.update_parameters(model)  # the first update copies
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False, fused=False)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(x, y, step).backward()
            optimizer.step()
            for a in averages.values():
                a.update_parameters(model)
        d = str(dtype).removeprefix("torch.")
        for name, m in [("tensors", model)] + [(name, a.module) for name, a in averages.items()]:
            for key, value in tensors(m).items():
                out[f"{d}/{name}/{key}"] = value.detach().clone().contiguous()
    save_file(out, pathlib.Path(__file__).parent / "ema.safetensors", {"torch": torch.__version__.split("+")[0]})


if __name__ == "__main__":
    main()
