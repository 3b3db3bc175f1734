"""Writes scaler.safetensors: 20 steps of PyTorch's GradScaler on the CPU, with gradients that are not finite in between.

    python make_scaler.py          (needs torch 2.11, safetensors, numpy; writes beside this file)

The parameters, the data and the loss are those of make_parity.py in float32, in its elementwise form; PLANTED says which
gradient is overwritten with what after which backward. By prefix:
  NAME/INDEX             the parameters after the steps with the optimizer that NAME stands for
  NAME/state.INDEX.KEY   the optimizer's state
  NAME/scales            the scale after each step (float64)
  NAME/tracker           the number of good steps in a row after each step
"""
import pathlib

import torch
from make_parity import clone, forward, initial
from safetensors.torch import save_file

STEPS = 20
PLANTED = {0: (2, float("inf")), 2: (0, float("inf")), 3: (3, float("-inf")), 9: (1, float("nan")), 16: (0, float("inf"))}
O = torch.optim
OPTIMIZERS = {
    "sgd": lambda p: O.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True, foreach=False),
    "sgd-plain": lambda p: O.SGD(p, lr=0.05, foreach=False),
    "adam": lambda p: O.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "adamw": lambda p: O.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: O.RMSprop(p, lr=0.01, foreach=False),
    "clipped": lambda p: O.AdamW(p, lr=0.01, fused=True),
}


def main():
    torch.set_num_threads(1)
    out = {}
    for name, make in OPTIMIZERS.items():
        params, x, y = initial(torch.float32)
        params = clone(params)
        optimizer = make(params)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
        scales, tracker = [], []
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(forward(params, x, y, step, True)).backward()
            if step in PLANTED:
                index, value = PLANTED[step]
                params[index].grad.view(-1)[0] = value
            if name == "clipped":
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, 1.0)
            scaler.step(optimizer)
            scaler.update()
            state = scaler.state_dict()
            scales.append(state["scale"])
            tracker.append(state["_growth_tracker"])
        for i, p in enumerate(params):
            out[f"{name}/{i}"] = p.detach().clone()
        for i, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                if value is not None:
                    out[f"{name}/state.{i}.{key}"] = value.clone()
        out[f"{name}/scales"] = torch.tensor(scales, dtype=torch.float64)
        out[f"{name}/tracker"] = torch.tensor(tracker)
    save_file(out, pathlib.Path(__file__).parent / "scaler.safetensors")


if __name__ == "__main__":
    main()
