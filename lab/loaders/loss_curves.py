#!/usr/bin/env python3
"""Compares the loss curves of `torchstream train` and of PyTorch: one network, archive and seed in both, each with its own loader.

    torchstream train -archive FILE -model resnet18 -size 32 -batch 32 -epochs 12 -optimizer sgd -device cpu -seed 1 -o go1
    python3 loss_curves.py train --archive FILE --size 32 --batch 32 --epochs 12 --seed 1 --out pytorch1.csv
    python3 loss_curves.py draw --out resnet18-loss.svg --go go1/log.csv go2/log.csv ... --pytorch pytorch1.csv ...

The seed gives both the same parameters to begin with, bit for bit. The order of the images and their crops differ, so
that the curves can be the same only within what they differ by from seed to seed. It needs torch 2.11 and torchvision 0.26.
"""
import argparse
import csv
import io
import math
import statistics
import tarfile


def train(o):
    import torch
    import torchvision
    from PIL import Image
    from torchvision.transforms import v2

    torch.manual_seed(o.seed)
    with tarfile.open(o.archive) as tar:
        files = [(m.name.split("/")[-2], tar.extractfile(m).read()) for m in tar if m.isfile()]
    classes = sorted({name for name, _ in files})
    net = torchvision.models.resnet18(num_classes=len(classes))
    opt = torch.optim.SGD(net.parameters(), lr=.05, momentum=.9, weight_decay=1e-4)
    pipeline = v2.Compose([v2.RandomResizedCrop(o.size, antialias=True), v2.RandomHorizontalFlip(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True),
                           v2.Normalize([.485, .456, .406], [.229, .224, .225])])
    images = [(Image.open(io.BytesIO(data)).convert("RGB"), classes.index(name)) for name, data in files]
    batches = math.ceil(len(images) / o.batch)
    steps = o.epochs * batches
    warmup = min(batches, steps // 10)

    def rate(step):  # that of torchstream train: from a tenth up for an epoch, then to 0 along a cosine
        if step < warmup:
            return .1 + .9 * step / warmup
        return (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(opt, rate)
    with open(o.out, "w", newline="") as f:
        table = csv.writer(f)
        table.writerow(["epoch", "train_loss", "train_top1"])
        for epoch in range(o.epochs):
            order, total, right = torch.randperm(len(images)).tolist(), 0., 0
            for i in range(batches):
                picked = [images[k] for k in order[i * o.batch:(i + 1) * o.batch]]
                x, y = torch.stack([pipeline(image) for image, _ in picked]), torch.tensor([label for _, label in picked])
                output = net(x)
                loss = torch.nn.functional.cross_entropy(output, y)
                opt.zero_grad()
                loss.backward()
                opt.step()
                schedule.step()
                total += loss.item() * len(y)
                right += (output.argmax(1) == y).sum().item()
            table.writerow([epoch + 1, total / len(images), right / len(images)])
            f.flush()


def read(path):
    with open(path, newline="") as f:
        return [float(row["train_loss"]) for row in csv.DictReader(f)]


WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 400, 56, 40, 16, 44
COLOURS = {"torchstream": "#1f77b4", "PyTorch": "#d95f02"}


def draw(o):
    sides = {"torchstream": [read(p) for p in o.go], "PyTorch": [read(p) for p in o.pytorch]}
    epochs = min(len(c) for curves in sides.values() for c in curves)
    top = max(max(c) for curves in sides.values() for c in curves) * 1.05
    x = lambda e: LEFT + (WIDTH - LEFT - RIGHT) * e / max(1, epochs - 1)
    y = lambda loss: HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * loss / top
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
           f'<text x="{LEFT}" y="18" font-size="14">{o.title}</text>']
    for tick in range(0, math.ceil(top * 2)):
        loss = tick / 2
        if loss <= top:
            out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" stroke="#ddd"/>')
            out.append(f'<text x="{LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:g}</text>')
    for e in range(epochs):
        out.append(f'<text x="{x(e):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{e + 1}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">epoch</text>')
    out.append(f'<text x="14" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 14 {HEIGHT / 2})">loss in training</text>')
    for i, (side, curves) in enumerate(sides.items()):
        colour = COLOURS[side]
        for c in curves:
            points = " ".join(f"{x(e):.1f},{y(c[e]):.1f}" for e in range(epochs))
            out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1" opacity="0.45"/>')
        mean = [statistics.mean(c[e] for c in curves) for e in range(epochs)]
        points = " ".join(f"{x(e):.1f},{y(m):.1f}" for e, m in enumerate(mean))
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        at = WIDTH - RIGHT - 250
        out.append(f'<line x1="{at}" x2="{at + 24}" y1="{TOP + 18 * i}" y2="{TOP + 18 * i}" stroke="{colour}" stroke-width="2.5"/>')
        out.append(f'<text x="{at + 30}" y="{TOP + 18 * i + 4}">{side}: {len(curves)} seeds and their mean</text>')
    out.append("</svg>")
    with open(o.out, "w") as f:
        f.write("\n".join(out) + "\n")
    go, python = sides["torchstream"], sides["PyTorch"]
    inside, worst = 0, 0.
    for e in range(epochs):
        a, b = [c[e] for c in go], [c[e] for c in python]
        difference = statistics.mean(a) - statistics.mean(b)
        spread = math.sqrt((statistics.variance(a) / len(a) + statistics.variance(b) / len(b)))
        inside += abs(difference) <= 2 * spread
        worst = max(worst, abs(difference))
        print(f"epoch {e + 1}: torchstream {statistics.mean(a):.4f}, PyTorch {statistics.mean(b):.4f}, difference {difference:+.4f}, its standard error {spread:.4f}")
    print(f"{inside} of {epochs} epochs within two standard errors; the largest difference is {worst:.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("train")
    one.add_argument("--archive", required=True)
    one.add_argument("--out", required=True)
    for name, value in ("size", 32), ("batch", 32), ("epochs", 12), ("seed", 1):
        one.add_argument(f"--{name}", type=int, default=value)
    two = commands.add_parser("draw")
    two.add_argument("--out", required=True)
    two.add_argument("--title", default="ResNet-18, the same archive, parameters and schedule")
    two.add_argument("--go", nargs="+", required=True)
    two.add_argument("--pytorch", nargs="+", required=True)
    o = parser.parse_args()
    {"train": train, "draw": draw}[o.command](o)


main()
