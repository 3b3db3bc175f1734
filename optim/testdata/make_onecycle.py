"""Writes onecycle.safetensors: OneCycleLR with PyTorch's cycle_momentum.

    python make_onecycle.py          (needs torch 2.11, safetensors, numpy; writes beside this file)

By prefix:
  NAME/rates, NAME/momenta     40 learning rates and momenta (float64) of the schedule that NAME stands for
  DTYPE/NAME/INDEX             the parameters of make_parity.py's network after 20 steps with the optimizer that NAME
                               stands for, under SCHEDULES["cycle"], and its losses and state as in parity.safetensors
"""
import pathlib

import torch
from make_parity import STEPS, clone, forward, initial, record
from safetensors.torch import save_file

O, L = torch.optim, torch.optim.lr_scheduler
SCHEDULES = {
    "default": lambda o: L.OneCycleLR(o, 0.3, total_steps=40),
    "three": lambda o: L.OneCycleLR(
        o, 0.3, total_steps=45, pct_start=0.25, anneal_strategy="linear", div_factor=10, final_div_factor=100,
        three_phase=True, base_momentum=0.5, max_momentum=0.9),
    "cycle": lambda o: L.OneCycleLR(o, 0.05, total_steps=STEPS, base_momentum=0.7),
}
OPTIMIZERS = {
    "sgd": lambda p: O.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.05, foreach=False),
    "sgd-nesterov": lambda p: O.SGD(p, lr=0.05, momentum=0.9, nesterov=True, foreach=False),
    "adam": lambda p: O.Adam(p, lr=0.05, foreach=False, fused=False),
    "adamw": lambda p: O.AdamW(p, lr=0.05, foreach=False, fused=False),
}


def momentum(optimizer):
    group = optimizer.param_groups[0]
    return group["betas"][0] if "betas" in group else group["momentum"]


def main():
    torch.set_num_threads(1)
    out = {}
    for name in ("default", "three"):
        optimizer = OPTIMIZERS["adam"]([torch.nn.Parameter(torch.zeros(1))])
        scheduler = SCHEDULES[name](optimizer)
        rates, momenta = [], []
        for _ in range(40):
            rates.append(optimizer.param_groups[0]["lr"])
            momenta.append(momentum(optimizer))
            optimizer.step()
            scheduler.step()
        out[f"{name}/rates"] = torch.tensor(rates, dtype=torch.float64)
        out[f"{name}/momenta"] = torch.tensor(momenta, dtype=torch.float64)
    for dtype in (torch.float64, torch.float32):
        for name, make in OPTIMIZERS.items():
            params, x, y = initial(dtype)
            params = clone(params)
            optimizer = make(params)
            scheduler = SCHEDULES["cycle"](optimizer)
            losses = []
            for step in range(STEPS):
                optimizer.zero_grad()
                loss = forward(params, x, y, step, False)
                loss.backward()
                optimizer.step()
                if step < STEPS - 1:
                    scheduler.step()
                losses.append(loss.item())
            record(out, f"{str(dtype).removeprefix('torch.')}/{name}", losses, params, [optimizer])
    out = {k: v.detach().clone().contiguous() for k, v in out.items()}
    save_file(out, pathlib.Path(__file__).parent / "onecycle.safetensors", {"torch": torch.__version__.split("+")[0]})


if __name__ == "__main__":
    main()
