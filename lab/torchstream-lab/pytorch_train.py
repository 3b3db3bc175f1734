"""Measures training steps of PyTorch for `torchstream-lab train`, which gives the argument and reads the JSON.

    python pytorch_train.py '{"device": "cuda:0", "size": 224, "context": 1024, "seconds": 0.7, "rows": [
        {"model": "resnet50", "batch": 32, "issue": true}], "one_step": false}'

Data are on the device. On a GPU the network is under autocast to bfloat16. ResNets have SGD with momentum, the others
PyTorch's fused AdamW; images are in channels_last. ResNets and the ViT are torchvision's if it is installed, else the
same networks of this file, as GPT-2 always is: Hugging Face's network with fewer layers of Python around it.

With "one_step" it makes one step of the first row with this file's network and prints a line. With "dist", one process
for each rank measures collectives, DistributedDataParallel, ZeroRedundancyOptimizer and fully_shard for
`torchstream-lab distributed`:

    "dist": {"collectives": [{"name": "all-reduce", "bytes": 1048576, "calls": 200}], "replays": 4, "steps": 40, "rounds": 3, "sharded": [{"model": "gpt2", "batch": 8}], "sharded_steps": 10}
"""
import gc
import json
import os
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    """torchvision's BasicBlock, or with wide its Bottleneck."""

    def __init__(self, cin, width, stride, wide):
        super().__init__()
        out = width * 4 if wide else width
        shapes = [(cin, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1)] if wide else [(cin, width, 3, stride), (width, width, 3, 1)]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, k, s, k // 2, bias=False) for a, b, k, s in shapes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in shapes)
        self.relu, self.down = nn.ReLU(inplace=True), None
        if stride > 1 or cin != out:
            self.down = nn.Sequential(nn.Conv2d(cin, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        y = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms)):
            y = norm(conv(y))
            if i + 1 < len(self.convs):
                y = self.relu(y)
        y += x if self.down is None else self.down(x)
        return self.relu(y)


def resnet(name):
    counts, wide = {"resnet18": ([2, 2, 2, 2], False), "resnet50": ([3, 4, 6, 3], True)}[name]
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    cin = 64
    for i, n in enumerate(counts):
        for k in range(n):
            layers.append(Block(cin, 64 << i, 2 if i and not k else 1, wide))
            cin = (64 << i) * (4 if wide else 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, 1000))


class Attend(nn.Module):
    """A block of ViT-B/16, as torchvision's EncoderBlock."""

    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        y = self.ln_1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class ViT(nn.Module):
    """torchvision's vit_b_16."""

    def __init__(self, size, width=768):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (size // 16) ** 2 + 1, width) * .02)
        self.blocks = nn.Sequential(*(Attend(width, 12) for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 1000)

    def forward(self, x):
        x = self.patches(x).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class Conv1D(nn.Module):
    """Hugging Face's Conv1D: a linear layer whose weight is transposed."""

    def __init__(self, cin, out):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(cin, out) * .02), nn.Parameter(torch.zeros(out))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class GPT2Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.p = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = Conv1D(width, 3 * width), Conv1D(width, width)
        self.up, self.act, self.down = Conv1D(width, 4 * width), nn.GELU(approximate="tanh"), Conv1D(4 * width, width)
        self.drop_1, self.drop_2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x):
        n, t, width = x.shape
        q, k, v = (part.view(n, t, self.heads, -1).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.p if self.training else 0.)
        x = self.drop_1(self.c_proj(y.transpose(1, 2).reshape(n, t, width))) + x
        return x + self.drop_2(self.down(self.act(self.up(self.ln_2(x)))))


class GPT2(nn.Module):
    """Hugging Face's GPT2LMHeadModel of the smallest size."""

    def __init__(self, layers=12, width=768, heads=12, dropout=.1, tokens=50257, positions=1024):
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(tokens, width), nn.Embedding(positions, width), nn.Dropout(dropout)
        nn.init.normal_(self.wte.weight, 0, .02)
        nn.init.normal_(self.wpe.weight, 0, .02)
        self.blocks = nn.Sequential(*(GPT2Block(width, heads, dropout) for _ in range(layers)))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, x):
        y = self.drop(self.wte(x) + self.wpe.weight[: x.shape[1]])
        return F.linear(self.ln_f(self.blocks(y)), self.wte.weight)


GPT2_SIZES = {"gpt2-tiny": dict(layers=2, width=64, heads=2), "gpt2": {}, "gpt2-medium": dict(layers=24, width=1024, heads=16), "gpt2-large": dict(layers=36, width=1280, heads=20),
              "gpt2-xl": dict(layers=48, width=1600, heads=25)}


def network(name, size, plain=False):
    if name in GPT2_SIZES:
        return GPT2(**GPT2_SIZES[name])
    if not plain:
        try:
            import torchvision
            return getattr(torchvision.models, name)(**({"image_size": size} if name.startswith("vit") else {}))
        except ImportError:
            pass
    return ViT(size) if name == "vit_b_16" else resnet(name)


class Trainee:
    """A network on the device, and what a step needs."""

    def __init__(self, job, model, plain=False):
        self.device, self.model = torch.device(job["device"]), model
        self.gpu, self.gpt = self.device.type == "cuda", model in GPT2_SIZES
        self.net = network(model, job["size"], plain).to(self.device)
        if not self.gpt:
            self.net = self.net.to(memory_format=torch.channels_last)
        self.opt = self.optimizer()
        self.loss = nn.CrossEntropyLoss()
        self.parts = [0., 0., 0.]

    def optimizer(self):
        if self.gpt or self.model.startswith("vit"):
            return torch.optim.AdamW(self.net.parameters(), lr=1e-4, fused=True, capturable=self.gpu)
        return torch.optim.SGD(self.net.parameters(), lr=.01, momentum=.9)

    def step(self, batch, size, context):
        """Return a function that makes a step on data of its own, and adds the seconds of its parts to self.parts."""
        device, net, opt, loss, gpt = self.device, self.net, self.opt, self.loss, self.gpt
        if gpt:
            x, y = (torch.randint(0, 50257, (batch, context), device=device) for _ in range(2))
        else:
            x = torch.randn(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
            y = torch.randint(0, 1000, (batch,), device=device)

        clock, parts = time.perf_counter, self.parts

        def step():
            begin = clock()
            opt.zero_grad(set_to_none=True)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.gpu):
                output = net(x)
                value = loss(output.flatten(0, 1), y.flatten()) if gpt else loss(output, y)
            forward = clock()
            value.backward()
            backward = clock()
            opt.step()
            parts[0] += forward - begin
            parts[1] += backward - forward
            parts[2] += clock() - backward

        return step


def divide(trainee, way, gpu, rank):
    """Make the trainee one of all ranks: `way` is as in bench_dist_sharded.go."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel
    if way.startswith("FullyShardedDataParallel"):
        mesh = init_device_mesh("cuda" if gpu else "cpu", (torch.distributed.get_world_size(),))
        kind = dict(mesh=mesh, **(dict(reshard_after_forward=False) if way.endswith("stage 2") else {}))
        if way.endswith("bfloat16"):
            kind["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in trainee.net.blocks:
            fully_shard(block, **kind)
        fully_shard(trainee.net, **kind)
        trainee.opt = trainee.optimizer()
        return
    if way == "ZeroRedundancyOptimizer":
        trainee.opt = ZeroRedundancyOptimizer(trainee.net.parameters(), torch.optim.AdamW, lr=1e-4, fused=True, capturable=gpu)
    trainee.net = DistributedDataParallel(trainee.net, device_ids=[rank] if gpu else None, gradient_as_bucket_view=True)


def distributed(job):
    """Print collectives, the images a second of a rank alone and with DistributedDataParallel, and divided steps."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    gpu, rank, options = job["device"] != "cpu", int(os.environ["LOCAL_RANK"]), job["dist"]
    job["device"] = f"cuda:{rank}" if gpu else "cpu"
    device = torch.device(job["device"])
    sync = torch.cuda.synchronize if gpu else lambda: None
    if gpu:
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    dist.init_process_group("nccl" if gpu else "gloo", **({"device_id": device} if gpu else {}))

    def free():
        gc.collect()
        if gpu:
            torch.cuda.empty_cache()

    begin = torch.zeros(1, device=device)

    def rounds(run, n):
        """Return the seconds of a call, and of the host for it: of the slowest rank, in the best round."""
        found = []
        for _ in range(options["rounds"]):
            sync()
            dist.barrier()
            dist.all_reduce(begin)  # from which the ranks return at the same time
            sync()
            start = time.perf_counter()
            for _ in range(n):
                run()
            issued = time.perf_counter() - start
            sync()
            took = torch.tensor([(time.perf_counter() - start) / n, issued / n], dtype=torch.float64, device=device)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            found.append(took.tolist())
        return min(found)

    def best(run, n):
        return rounds(run, n)[0]

    def collective(name, n):
        """Return a function that makes the collective on n bytes, with the tensors of bench_dist_collectives.go."""
        whole, other = (torch.zeros(n // 4, device=device) for _ in range(2))
        part = other[: n // 4 // dist.get_world_size()]
        return {
            "all-reduce": lambda: dist.all_reduce(whole),
            "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole),
            "all-gather": lambda: dist.all_gather_into_tensor(whole, part),
            "broadcast": lambda: dist.broadcast(whole, 0),
            "all-to-all": lambda: dist.all_to_all_single(other, whole),
        }[name]

    times, errors = [], []
    for r in options["collectives"]:
        try:
            call = collective(r["name"], r["bytes"])
            call()
            took, issued = rounds(call, r["calls"])
            times.append({"ms": took * 1e3, **({"issue_ms": issued * 1e3} if gpu else {})})
        except Exception as e:
            times.append(None)
            errors.append(f"{r['name']} of {r['bytes']} bytes: {type(e).__name__}: {e}")
        call = None
        free()

    rates = {}
    ways = {"alone": None, "ddp": {}, "ddp_static": dict(gradient_as_bucket_view=True, static_graph=True)}
    for r in job["rows"]:
        for way, kind in ways.items():
            try:
                trainee = Trainee(job, r["model"])
                if kind is not None:
                    trainee.net = DistributedDataParallel(trainee.net, device_ids=[rank] if gpu else None, **kind)
                step = trainee.step(r["batch"], job["size"], job["context"])
                for _ in range(12):  # plans, and the order of the buckets
                    step()
                rates[f"{r['model']}/{r['batch']}/{way}"] = r["batch"] / best(step, options["steps"])
            except Exception as e:
                errors.append(f"{r['model']}, batch {r['batch']}, {way}: {type(e).__name__}: {e}")
            trainee = step = None
            free()

    divided = {}
    for r in options["sharded"]:
        for way in r["ways"]:
            try:
                trainee = Trainee(job, r["model"])
                divide(trainee, way, gpu, rank)
                step = trainee.step(r["batch"], job["size"], job["context"])
                for _ in range(5):
                    step()
                if gpu:
                    sync()
                    torch.cuda.reset_peak_memory_stats()
                figure = {"step_ms": best(step, options["sharded_steps"]) * 1e3}
                if gpu:
                    trainee.opt.zero_grad(set_to_none=True)
                    held = torch.tensor([torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()], device=device)
                    dist.all_reduce(held, dist.ReduceOp.MAX)
                    figure |= dict(zip(("held_bytes", "peak_bytes", "reserved_bytes"), held.tolist()))
                divided[f"{r['model']}/{r['batch']}/{way}"] = figure
            except Exception as e:
                errors.append(f"{r['model']}, batch {r['batch']}, {way}: {type(e).__name__}: {e}")
            trainee = step = None
            free()
    if gpu:  # last, since a capture that fails leaves NCCL undefined
        try:
            for r, found in zip(options["collectives"], times):
                if not found:
                    continue
                call = collective(r["name"], r["bytes"])
                call()
                sync()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    for _ in range(r["calls"]):
                        call()
                graph.replay()
                found["graph_ms"] = best(graph.replay, options["replays"]) * 1e3 / r["calls"]
                del graph, call
        except Exception as e:
            errors.append(f"collectives in a graph: {type(e).__name__}: {e}")
    if dist.get_rank() == 0:
        print(json.dumps({"torch": torch.__version__, "collectives": times, "rates": rates, "sharded": divided, "errors": errors}))
    dist.destroy_process_group()


def main():
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    if job.get("dist"):
        distributed(job)
        return
    gpu, size, context = job["device"] != "cpu", job["size"], job["context"]
    sync = torch.cuda.synchronize if gpu else lambda: None
    if gpu:
        torch.cuda.set_device(job["device"])
    if job["one_step"]:
        row = job["rows"][0]
        Trainee(job, row["model"], plain=True).step(row["batch"], size, context)()
        sync()
        print("first step done", flush=True)
        return
    torch.backends.cudnn.benchmark = True

    def repeat(run, n):
        """Return the seconds until the device has made n steps."""
        sync()
        start = time.perf_counter()
        for _ in range(n):
            run()
        sync()
        return time.perf_counter() - start

    def measure(run):
        """Return the milliseconds of a step, and those of all threads' CPU time."""
        repeat(run, 3)
        n = max(5, int(job["seconds"] / max(1e-6, repeat(run, 3) / 3)))
        cpu = time.process_time()
        took = repeat(run, n)
        return {"ms": took / n * 1e3, "cpu_ms": (time.process_time() - cpu) / n * 1e3}

    def issue(run, n, parts=None):
        """Return the host's milliseconds for a step, in rounds of n, those that the device still needed afterwards, and the parts of the median round."""
        repeat(run, 3)
        issued, drained = [], []
        for _ in range(5):
            if parts:
                parts[:] = 0., 0., 0.
            start = time.perf_counter()
            for _ in range(n):
                run()
            queued = time.perf_counter()
            sync()
            issued.append(((queued - start) / n, [part / n * 1e3 for part in parts or ()]))
            drained.append(time.perf_counter() - queued)
        median, split = sorted(issued)[2]
        return {"issue_ms": median * 1e3, "drain_ms": sorted(drained)[2] * 1e3, **dict(zip(("forward_ms", "backward_ms", "optimizer_ms"), split))}

    steps, issues = {}, {}

    def row(model, batch, with_issue):
        trainee = Trainee(job, model)
        step = trainee.step(batch, size, context)
        steps[f"{model}/{batch}/eager"] = measure(step)
        if with_issue:
            small = size if model.startswith("vit") else min(size, 64)
            issues[f"{model}/eager"] = issue(trainee.step(2, small, min(context, 128)), 10, trainee.parts)
        if not gpu:
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        trainee.opt.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            step()
        steps[f"{model}/{batch}/graph"] = measure(graph.replay)
        if with_issue:
            issues[f"{model}/graph"] = issue(graph.replay, 1)

    errors = []
    for r in job["rows"]:
        try:
            row(r["model"], r["batch"], r["issue"])
        except Exception as e:
            errors.append(f"{r['model']}, batch {r['batch']}: {type(e).__name__}: {e}")
        if gpu:
            torch.cuda.empty_cache()
    print(json.dumps({"torch": torch.__version__, "steps": steps, "issue": issues, "errors": errors}))


main()
