"""Writes parity.safetensors and adamw_state.safetensors: what PyTorch computes for parity_test.go.

    python make_parity.py            (needs torch 2.11, safetensors, numpy; run beside this file)

parity.safetensors holds, by prefix:
  DTYPE/init/INDEX, DTYPE/x, DTYPE/y   parameters and data of the network in forward()
  DTYPE/NAME/...                       after 20 steps of the optimizer that NAME stands for: the parameters by INDEX,
                                       losses, and the optimizer's state as state.INDEX.NAME
  schedule/NAME                        40 learning rates (float64) of the schedule that NAME stands for
  clip/value                           gradients after clip_grad_value_(0.5)
adamw_state.safetensors holds the state_dict of torch.optim.AdamW after 10 of the 20 steps of float64/adamw, written as
the documentation of optim.Save says; parity.safetensors has the parameters at that step as resume/INDEX.

float64 and float32 use PyTorch's plain formulas (foreach=False, fused=False). bfloat16 uses the operators that package
optim uses, which round once per step where the plain formulas round after each operation.
"""
import json
import pathlib

import torch
from safetensors.torch import save_file
from torch.optim import lr_scheduler

HERE = pathlib.Path(__file__).parent
STEPS = 20


class LAMB(torch.optim.Optimizer):
    """The formula of the documentation of optim.LAMB, operation by operation."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                s["step"] += 1
                t, m, v = s["step"].item(), s["exp_avg"], s["exp_avg_sq"]
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                u = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + group["eps"]) + group["weight_decay"] * p
                a, b = p.norm(), u.norm()
                r = a / b if a > 0 and b > 0 else 1.0
                p.sub_(group["lr"] * r * u)


def muon(params, dtype, muon_options, adamw_options):
    matrices = [p for p in params if p.dim() == 2]
    others = [p for p in params if p.dim() != 2]
    return [torch.optim.Muon(matrices, **muon_options), torch.optim.AdamW(others, fused=dtype == torch.bfloat16, **adamw_options)]


def plain(cls, **options):
    def make(params, dtype):
        how = {}
        if cls in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
            how = dict(foreach=False, fused=dtype == torch.bfloat16)
        elif cls is not LAMB:
            how = dict(foreach=dtype == torch.bfloat16)
        return [cls(params, **options, **how)]

    return make


def grouped(params, dtype):
    groups = [dict(params=params[:2], lr=0.02), dict(params=params[2:], weight_decay=0.0)]
    return [torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, foreach=False, fused=dtype == torch.bfloat16)]


O = torch.optim
OPTIMIZERS = {
    "sgd": plain(O.SGD, lr=0.1),
    "sgd-nesterov": plain(O.SGD, lr=0.05, momentum=0.9, weight_decay=5e-2, nesterov=True),
    "sgd-maximize": plain(O.SGD, lr=0.0005, momentum=0.9, dampening=0.5, weight_decay=5e-2, maximize=True),
    "adam": plain(O.Adam, lr=0.01),
    "adam-decay": plain(O.Adam, lr=0.01, betas=(0.5, 0.9), eps=1e-6, weight_decay=0.1),
    "adam-amsgrad": plain(O.Adam, lr=0.05, betas=(0.8, 0.7), amsgrad=True),
    "adam-maximize": plain(O.Adam, lr=0.01, weight_decay=0.1, maximize=True),
    "adamw": plain(O.AdamW, lr=0.01),
    "adamw-amsgrad": plain(O.AdamW, lr=0.05, betas=(0.0, 0.7), weight_decay=0.2, amsgrad=True),
    "adamw-maximize": plain(O.AdamW, lr=0.01, weight_decay=0.0, maximize=True),
    "adamw-groups": grouped,
    "rmsprop": plain(O.RMSprop, lr=0.01),
    "rmsprop-centered": plain(O.RMSprop, lr=0.01, alpha=0.9, centered=True, weight_decay=0.1),
    "rmsprop-momentum": plain(O.RMSprop, lr=0.0005, momentum=0.9, eps=1e-4, maximize=True),
    "rmsprop-both": plain(O.RMSprop, lr=0.005, alpha=0.9, momentum=0.5, centered=True),
    "adagrad": plain(O.Adagrad, lr=0.1),
    "adagrad-decay": plain(O.Adagrad, lr=0.1, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.5, eps=1e-6),
    "adagrad-maximize": plain(O.Adagrad, lr=0.01, maximize=True),
    "lamb": plain(LAMB, lr=0.02),
    "lamb-plain": plain(LAMB, lr=0.02, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.0),
    "muon": lambda params, dtype: muon(params, dtype, dict(lr=0.02), dict(lr=0.01)),
    "muon-match": lambda params, dtype: muon(
        params,
        dtype,
        dict(lr=0.02, momentum=0.8, weight_decay=0.01, nesterov=False, ns_steps=3, adjust_lr_fn="match_rms_adamw"),
        dict(lr=0.01, weight_decay=0.0),
    ),
}


def forward(params, x, y, step):
    """A small network: two layers, a scalar, a parameter that never has a gradient and one that has from step 5 on."""
    w1, b1, w2, w3, scale, late, _ = params
    if x.dtype == torch.bfloat16:  # elementwise, so that no matrix product rounds otherwise on another processor
        parts = [p.square().sum() for p in (w1, b1, w2, w3, scale)]
        loss = parts[0] + parts[1] + parts[2] + parts[3] + parts[4]
        return loss + late.square().sum() if step >= 5 else loss
    out = torch.nn.functional.linear(torch.nn.functional.linear(x, w1, b1).tanh(), w2.matmul(w3)) * scale
    if step >= 5:
        out = out + late
    return torch.nn.functional.mse_loss(out, y)


def initial(dtype):
    torch.manual_seed(1)
    shapes = [(6, 5), (6,), (3, 8), (8, 6), (), (3,), (2,)]
    params = [(torch.randn(s, dtype=torch.float64) * 0.7 + 0.1).to(dtype) for s in shapes]
    return params, torch.randn(7, 5, dtype=torch.float64).to(dtype), torch.randn(7, 3, dtype=torch.float64).to(dtype)


def clone(params):
    return [p.clone().requires_grad_() for p in params]


def train(optimizers, params, x, y, steps):
    losses = []
    for step in steps:
        for o in optimizers:
            o.zero_grad()
        loss = forward(params, x, y, step)
        loss.backward()
        for o in optimizers:
            o.step()
        losses.append(loss.item())
    return losses


def optimizers(out):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        d = str(dtype).removeprefix("torch.")
        start, x, y = initial(dtype)
        out[f"{d}/x"], out[f"{d}/y"] = x, y
        for i, p in enumerate(start):
            out[f"{d}/init/{i}"] = p
        for name, make in OPTIMIZERS.items():
            params = clone(start)
            opts = make(params, dtype)
            losses = train(opts, params, x, y, range(STEPS))
            out[f"{d}/{name}/losses"] = torch.tensor(losses, dtype=torch.float64)
            for i, p in enumerate(params):
                out[f"{d}/{name}/{i}"] = p.detach()
            for o in opts:
                for p, state in o.state.items():
                    i = [q is p for q in params].index(True)
                    for k, v in state.items():
                        if v is not None:
                            out[f"{d}/{name}/state.{i}.{k}"] = v


def resume(out):
    start, x, y = initial(torch.float64)
    params = clone(start)
    optimizer = torch.optim.AdamW(params, lr=0.01)
    train([optimizer], params, x, y, range(10))
    for i, p in enumerate(params):
        out[f"resume/{i}"] = p.detach()
    sd = optimizer.state_dict()
    tensors = {f"state.{i}.{k}": v.contiguous() for i, s in sd["state"].items() for k, v in s.items() if v is not None}
    save_file(tensors, HERE / "adamw_state.safetensors", {"param_groups": json.dumps(sd["param_groups"])})


def rates(make, base=0.3, steps=40, metrics=None):
    p = torch.nn.Parameter(torch.zeros(1))
    o = torch.optim.SGD([p], lr=base)
    s = make(o)
    lrs = []
    for i in range(steps):
        lrs.append(o.param_groups[0]["lr"])
        o.step()
        s.step(metrics[i]) if metrics else s.step()
    return torch.tensor(lrs, dtype=torch.float64)


METRICS = [5, 4, 4, 4, 4, 3.9999, 3, 3, 3, 3, 3, 3, 3, 2.9, 3, 3, 3, 3, 3, 3] + [4 + i % 3 for i in range(20)]


def schedules(out):
    L = lr_scheduler
    table = {
        "step": lambda o: L.StepLR(o, 7, gamma=0.3),
        "multistep": lambda o: L.MultiStepLR(o, [5, 5, 12, 30], gamma=0.5),
        "exponential": lambda o: L.ExponentialLR(o, 0.9),
        "cosine": lambda o: L.CosineAnnealingLR(o, 30, eta_min=0.01),
        "cosine-long": lambda o: L.CosineAnnealingLR(o, 9, eta_min=0.02),
        "restarts": lambda o: L.CosineAnnealingWarmRestarts(o, 5, T_mult=2, eta_min=0.01),
        "restarts-even": lambda o: L.CosineAnnealingWarmRestarts(o, 6),
        "onecycle": lambda o: L.OneCycleLR(o, 0.3, total_steps=40, cycle_momentum=False),
        "onecycle-three": lambda o: L.OneCycleLR(
            o, 0.3, total_steps=45, pct_start=0.25, anneal_strategy="linear", div_factor=10, final_div_factor=100,
            three_phase=True, cycle_momentum=False),
        "warmup": lambda o: L.LinearLR(o, total_iters=10),
        "warmup-options": lambda o: L.LinearLR(o, start_factor=0.01, end_factor=0.5, total_iters=8),
        "sequential": lambda o: L.SequentialLR(
            o, [L.LinearLR(o, start_factor=0.1, total_iters=6), L.CosineAnnealingLR(o, 20, eta_min=0.001),
                L.StepLR(o, 3, gamma=0.5)], [6, 26]),
        "chained": lambda o: L.ChainedScheduler(
            [L.LinearLR(o, start_factor=0.5, total_iters=4), L.StepLR(o, 10, gamma=0.2), L.ExponentialLR(o, 0.95)]),
    }
    for name, make in table.items():
        out[f"schedule/{name}"] = rates(make)
    out["schedule/metrics"] = torch.tensor(METRICS, dtype=torch.float64)
    out["schedule/plateau"] = rates(lambda o: L.ReduceLROnPlateau(o, patience=2, factor=0.5), metrics=METRICS)
    out["schedule/plateau-max"] = rates(
        lambda o: L.ReduceLROnPlateau(o, mode="max", patience=0, factor=0.3, threshold=0.1, threshold_mode="abs",
                                      cooldown=3, min_lr=0.001), metrics=METRICS)


def clip(out):
    p = torch.zeros(5, requires_grad=True)
    p.grad = torch.tensor([-2.0, -0.5, 0.1, 0.6, float("nan")])
    torch.nn.utils.clip_grad_value_([p], 0.5)
    out["clip/value"] = p.grad


def main():
    torch.set_num_threads(1)
    out = {}
    optimizers(out)
    resume(out)
    schedules(out)
    clip(out)
    out = {k: v.detach().clone().contiguous() for k, v in out.items()}
    save_file(out, HERE / "parity.safetensors", {"torch": torch.__version__.split("+")[0]})


main()
