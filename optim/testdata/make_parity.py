"""Writes what PyTorch computes, for the tests of package optim. Needs torch 2.11.

    python make_parity.py                              parity.safetensors and adamw_state.safetensors beside this
                                                       file, on the CPU (needs the packages safetensors and numpy)
    python make_parity.py --device cuda --out FILE.pt  the 20 steps again on this device, for a test that compares
                                                       with them in the same run (torch alone; --device cpu too)

parity.safetensors holds, by prefix:
  DTYPE/init/INDEX, DTYPE/x, DTYPE/y   parameters and data of the network in forward()
  DTYPE/NAME/...                       after 20 steps of the optimizer that NAME stands for: the parameters by INDEX,
                                       losses, and the optimizer's state as state.INDEX.NAME
  schedule/NAME                        40 learning rates (float64) of the schedule that NAME stands for
  clip/value                           gradients after clip_grad_value_(0.5)
adamw_state.safetensors holds the state_dict of torch.optim.AdamW after 10 of the 20 steps of float64/adamw, written as
the documentation of optim.Save says; parity.safetensors has the parameters at that step as resume/INDEX.
FILE.pt holds the first two prefixes, and DTYPE/NAME/capturable/... for package optim's option Capturable.

In parity.safetensors, float64 and float32 use PyTorch's plain formulas (foreach=False, fused=False). bfloat16 uses the
operators that package optim uses, which round once per step where the plain formulas round after each operation.

Another torch than 2.11 writes parity-RELEASE.safetensors, with what it computes otherwise than parity.safetensors has.

FILE.pt uses the operators that package optim uses wherever PyTorch offers them, since a GPU rounds differently from a
CPU. For example, the fused Adam of a GPU computes 1-beta2 from a float32 beta2: for 0.999 exp_avg_sq is 1.3e-5 smaller.

The exit status is 77 if this Python has no torch, or torch has no such device.
"""
import argparse
import collections
import json
import pathlib
import sys

SKIP = 77
try:
    import torch
    from torch.optim import lr_scheduler
except ImportError as e:
    print(e, file=sys.stderr)
    sys.exit(SKIP)

HERE = pathlib.Path(__file__).parent
STEPS = 20

# How an optimizer runs. device is None for parity.safetensors.
Run = collections.namedtuple("Run", "dtype device capturable")


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


def operators(cls, run):
    """The options that choose the operators of one of PyTorch's optimizers."""
    O, half = torch.optim, run.dtype == torch.bfloat16
    if cls is LAMB or cls is O.Muon:
        return {}
    if run.device is None:
        return dict(foreach=False, fused=half) if cls in (O.Adam, O.AdamW, O.Adagrad) else dict(foreach=half)
    gpu = run.device != "cpu"
    if cls in (O.Adam, O.AdamW):
        return dict(fused=True)
    if cls is O.Adagrad and not gpu:  # torch.optim.Adagrad refuses fused=True on a GPU
        return dict(fused=True)
    if cls is O.SGD and run.capturable and (gpu or not half):  # on a CPU, it does not change parameters of 16 bits
        return dict(fused=True)
    if cls is O.RMSprop and run.capturable and gpu:
        return dict(foreach=True, capturable=True)
    return dict(foreach=True)


def optimizer(cls, params, run, **options):
    how = operators(cls, run)

    def rate(lr):
        if not run.capturable:
            return lr
        lr = torch.tensor(lr, dtype=torch.float32, device=run.device)  # as package optim keeps it
        return lr if how.get("fused") or how.get("capturable") else lr.item()

    groups = params if isinstance(params[0], dict) else [dict(params=params)]
    if cls is torch.optim.SGD and how.get("fused"):
        # In a group, all velocities start in the same step, and parameter 5 starts late.
        groups = [dict(params=params[:5] + params[6:]), dict(params=params[5:6])]
    for g in groups:
        if "lr" in g:
            g["lr"] = rate(g["lr"])
    return cls(groups, lr=rate(options.pop("lr")), **options, **how)


def muon(params, run, muon_options, adamw_options):
    matrices = [p for p in params if p.dim() == 2]
    others = [p for p in params if p.dim() != 2]
    return [optimizer(torch.optim.Muon, matrices, run, **muon_options), optimizer(torch.optim.AdamW, others, run, **adamw_options)]


def plain(cls, **options):
    return lambda params, run: [optimizer(cls, params, run, **options)]


def grouped(params, run):
    groups = [dict(params=params[:2], lr=0.02), dict(params=params[2:], weight_decay=0.0)]
    return [optimizer(torch.optim.AdamW, groups, run, lr=0.01, weight_decay=0.1)]


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
    "muon": lambda params, run: muon(params, run, dict(lr=0.02), dict(lr=0.01)),
    "muon-match": lambda params, run: muon(
        params,
        run,
        dict(lr=0.02, momentum=0.8, weight_decay=0.01, nesterov=False, ns_steps=3, adjust_lr_fn="match_rms_adamw"),
        dict(lr=0.01, weight_decay=0.0),
    ),
}

# These cases of FILE.pt take the loss of bfloat16 for all dtypes, because the network magnifies roundings for them.
# The gradient of its third matrix has rank 3 of 6, and Muon's iteration blows up the rounding errors in the other
# directions: relative errors of 1e-6 in its products change a parameter by 9e-3 in 20 steps, with this loss by 9e-4.
# For rmsprop-momentum, the last bit of the first parameters changes a velocity by 3e-5, with this loss by 3e-7.
WELL_CONDITIONED = ("muon", "muon-match", "rmsprop-momentum")


def forward(params, x, y, step, elementwise):
    """A small network: two layers, a scalar, a parameter that never has a gradient and one that has from step 5 on."""
    w1, b1, w2, w3, scale, late, _ = params
    if elementwise:  # no matrix product rounds otherwise on another processor
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


def train(optimizers, params, x, y, steps, elementwise=False):
    losses = []
    for step in steps:
        for o in optimizers:
            o.zero_grad()
        loss = forward(params, x, y, step, elementwise)
        loss.backward()
        for o in optimizers:
            o.step()
        losses.append(loss.item())
    return losses


def optimizers(out, device=None):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        d = str(dtype).removeprefix("torch.")
        start, x, y = initial(dtype)
        out[f"{d}/x"], out[f"{d}/y"] = x, y
        for i, p in enumerate(start):
            out[f"{d}/init/{i}"] = p
        if device:
            start, x, y = [p.to(device) for p in start], x.to(device), y.to(device)
        for name, make in OPTIMIZERS.items():
            elementwise = dtype == torch.bfloat16 or device is not None and name in WELL_CONDITIONED
            for capturable in (False, True) if device else (False,):
                params = clone(start)
                opts = make(params, Run(dtype, device, capturable))
                losses = train(opts, params, x, y, range(STEPS), elementwise)
                prefix = f"{d}/{name}/capturable" if capturable else f"{d}/{name}"
                record(out, prefix, losses, params, opts)


def record(out, prefix, losses, params, opts):
    out[f"{prefix}/losses"] = torch.tensor(losses, dtype=torch.float64)
    for i, p in enumerate(params):
        out[f"{prefix}/{i}"] = p.detach()
    for o in opts:
        for p, state in o.state.items():
            i = [q is p for q in params].index(True)
            for k, v in state.items():
                if v is not None:
                    out[f"{prefix}/state.{i}.{k}"] = v


def resume(out):
    start, x, y = initial(torch.float64)
    params = clone(start)
    optimizer = torch.optim.AdamW(params, lr=0.01)
    train([optimizer], params, x, y, range(10))
    for i, p in enumerate(params):
        out[f"resume/{i}"] = p.detach()
    sd = optimizer.state_dict()
    tensors = {f"state.{i}.{k}": v.contiguous() for i, s in sd["state"].items() for k, v in s.items() if v is not None}
    from safetensors.torch import save_file

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
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--out", help="a .pt file")
    arguments = arguments.parse_args()
    torch.set_num_threads(1)
    version = torch.__version__.split("+")[0]
    out = {}
    if arguments.out:
        if arguments.device != "cpu" and not torch.cuda.is_available():
            print(f"torch {torch.__version__} has no GPU", file=sys.stderr)
            sys.exit(SKIP)
        optimizers(out, arguments.device)
        out = {k: v.detach().cpu().clone().contiguous() for k, v in out.items()}
        torch.save(dict(state_dict=out, metadata=dict(torch=version)), arguments.out)
        return
    from safetensors.torch import load_file, save_file

    optimizers(out)
    schedules(out)
    clip(out)
    release = ".".join(version.split(".")[:2])
    if release == "2.11":
        resume(out)
    out = {k: v.detach().clone().contiguous() for k, v in out.items()}
    name = "parity.safetensors"
    if release != "2.11":
        known = load_file(HERE / name)
        out = {k: v for k, v in out.items() if not torch.equal(v, known[k])}
        name = f"parity-{release}.safetensors"
    save_file(out, HERE / name, {"torch": version})


if __name__ == "__main__":
    main()
