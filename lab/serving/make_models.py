#!/usr/bin/env python3
"""Make the same network for torchstream serve and its peers, from an archive of photographs.

  make_models.py FOLDER ARCHIVE [--model resnet18] [--batch 1:8] [--device cpu] [--dtype float32] [--no-onnx]

FOLDER gets MODEL.pt2 (tools/export.py), MODEL.safetensors (PyTorch) and MODEL.onnx; with --replaceable also
MODEL-other.safetensors, weights with which each photograph has the next class. Pretrained weights are not needed: the network
is random, its batch normalisations are calibrated on the photographs, and its last layer is a ridge regression that tells the
archive's folders apart. So the answers of two servers differ if one of them computes another thing.
"""

import argparse
import io
import json
import os
import sys
import tarfile

import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file
from torchvision import transforms

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tools"))
from export import export, export_fastest  # noqa: E402

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
TRANSFORM = transforms.Compose(
    [transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
)


def photographs(archive, most):
    """The first photographs of an archive as a tensor, their classes as numbers, and the names of the classes."""
    images, classes, names = [], [], {}
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and member.name.endswith(".jpg") and len(images) < most:
                image = Image.open(io.BytesIO(tar.extractfile(member).read())).convert("RGB")
                images.append(TRANSFORM(image))
                name = os.path.basename(os.path.dirname(member.name))
                classes.append(names.setdefault(name, len(names)))
    return torch.stack(images), torch.tensor(classes), list(names)


def head_of(net):
    """The last layer of a network of torchvision, and the module that has it as the given attribute."""
    if hasattr(net, "fc"):
        return net, "fc"
    if hasattr(net, "heads"):
        return net.heads, "head"
    return net.classifier, str(len(net.classifier) - 1)


@torch.no_grad()
def calibrate(net, images, classes):
    """Give the batch normalisations the photographs' statistics, and fit the last layer to the classes."""
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None  # the average of all batches
            module.reset_running_stats()
    net.train()
    for _ in range(2):
        for part in images.split(32):
            net(part)
    net.eval()
    parent, name = head_of(net)
    head = getattr(parent, name)
    setattr(parent, name, torch.nn.Identity())
    features = torch.cat([net(part) for part in images.split(32)]).double()
    setattr(parent, name, head)
    mean = features.mean(0)
    centred = features - mean
    wanted = torch.nn.functional.one_hot(classes, len(classes.unique())).double()
    gram = centred @ centred.T
    ridge = 1e-2 * gram.diagonal().mean()
    weight = centred.T @ torch.linalg.solve(gram + ridge * torch.eye(len(gram), device=gram.device), 10 * wanted)
    head.weight.zero_()
    head.bias.fill_(-10)
    count = weight.shape[1]
    head.weight[:count] = weight.T
    head.bias[:count] = -(mean @ weight)


def next_classes(net):
    """The state of a network whose answers are the next classes."""
    state, (parent, name) = net.state_dict(), head_of(net)
    head = getattr(parent, name)
    for key, value in net.named_parameters():
        if value is head.weight or value is head.bias:
            state[key] = value.detach().roll(1, 0)
    return state


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder")
    p.add_argument("archive")
    p.add_argument("--model", default="resnet18", help="a classifier of torchvision")
    p.add_argument("--batch", default="1:8", help="the batch of the package, as of export.py; several with commas")
    p.add_argument("--device", default="cpu")
    p.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    p.add_argument("--channels-last", action="store_true")
    p.add_argument("--no-onnx", action="store_true")
    p.add_argument("--replaceable", action="store_true", help="on a CPU: do not freeze the weights, so that they can be replaced")
    a = p.parse_args()

    torch.manual_seed(1)
    net = torchvision.models.get_model(a.model, weights=None).to(a.device)
    images, classes, names = photographs(a.archive, 192)
    images, classes = images.to(a.device), classes.to(a.device)
    calibrate(net, images, classes)
    right = (torch.cat([net(part).argmax(1) for part in images.split(32)]) == classes).double().mean()
    print(f"{a.model}: {100 * right:.1f} % of {len(images)} photographs, {len(names)} classes")
    path = os.path.join(a.folder, a.model)
    save_file(net.state_dict(), path + ".part")
    os.replace(path + ".part", path + ".safetensors")  # others may wait for it
    if a.replaceable:
        save_file(next_classes(net), path + "-other.safetensors")
    if not a.no_onnx:
        dynamic = ({0: torch.export.Dim("batch", min=1, max=64)},)
        torch.onnx.export(net, (images[:2],), path + ".onnx", dynamic_shapes=dynamic, input_names=["x"], external_data=False)

    dtype = getattr(torch, a.dtype)
    net, images = net.to(a.device, dtype), images.to(a.device, dtype)
    if a.channels_last:
        net, images = (v.to(memory_format=torch.channels_last) for v in (net, images))
    about = {"images": {"resize": 256, "interpolation": "bilinear", "mean": MEAN, "std": STD}}
    about["classes"] = names + [f"class {i}" for i in range(len(names), 1000)]
    metadata = {key: json.dumps(value) for key, value in about.items()}
    os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"
    for batch in filter(None, a.batch.split(",")):
        least, _, most = batch.partition(":")
        dynamic = ({0: torch.export.Dim("batch", min=int(least), max=int(most) + 1)},) if most else None
        write = export_fastest if a.device == "cpu" and not a.replaceable else export
        out = f"{path}-{batch.replace(':', '-')}.pt2"
        write(net, (images[: int(most or least)],), path=out, dynamic_shapes=dynamic, metadata=metadata, spare=int(bool(most)))
        print(out)


if __name__ == "__main__":
    main()
