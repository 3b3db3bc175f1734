"""Writes parity.safetensors: the results of PyTorch for the network of parity_test.go.

    python make_parity.py            (needs torch 2.11, safetensors, numpy; writes beside this file)

The file holds, by prefix: init/ the parameters and buffers after torch.manual_seed(1); input, labels; output, loss and
grad/ of the first forward and backward in training mode; NAME/ the state after five steps of torch.optim.SGD with the
options of that NAME, NAME/losses, and NAME/evaluated, the output in evaluation mode after the five steps.
"""
import copy
import pathlib

import torch
from safetensors.torch import save_file
from torch import nn

OPTIONS = {
    "plain": dict(lr=0.1),
    "decay": dict(lr=0.1, weight_decay=0.05),
    "momentum": dict(lr=0.05, momentum=0.9, weight_decay=5e-4),
    "dampened": dict(lr=0.05, momentum=0.9, dampening=0.5),
    "nesterov": dict(lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True),
}


def main():
    torch.set_num_threads(1)
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2, stride=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
    )
    out = {"init/" + k: v.clone() for k, v in net.state_dict().items()}
    x, y = torch.randn(8, 3, 8, 8), torch.arange(8) % 5
    out["input"], out["labels"] = x, y
    criterion = nn.CrossEntropyLoss()

    first = copy.deepcopy(net)
    output = first(x)
    loss = criterion(output, y)
    loss.backward()
    out["output"], out["loss"] = output.detach(), loss.detach()
    for k, p in first.named_parameters():
        out["grad/" + k] = p.grad

    for name, options in OPTIONS.items():
        trained = copy.deepcopy(net)
        opt = torch.optim.SGD(trained.parameters(), **options)
        losses = []
        for _ in range(5):
            opt.zero_grad()
            loss = criterion(trained(x), y)
            loss.backward()
            opt.step()
            losses.append(loss.item())
        out[name + "/losses"] = torch.tensor(losses)
        for k, v in trained.state_dict().items():
            out[f"{name}/{k}"] = v
        trained.eval()
        with torch.no_grad():
            out[name + "/evaluated"] = trained(x)
    path = pathlib.Path(__file__).with_name("parity.safetensors")
    save_file({k: v.contiguous() for k, v in out.items()}, path, metadata={"torch": torch.__version__.split("+")[0]})


main()
