"""Writes states of PyTorch's random generators, and the numbers that follow them, for TestGenerators.

    python make_generators.py generators.pt          # after manual_seed(11) and five numbers, on the CPU
    python make_generators.py OUT IN DEVICE          # from the states of a train.Checkpoint IN

It needs torch 2.11.
"""
import sys

import torch


def main():
    out, device = sys.argv[1], torch.device(sys.argv[3] if len(sys.argv) > 3 else "cpu")
    if len(sys.argv) > 2:
        states = torch.load(sys.argv[2], weights_only=True)["generators"]
        torch.set_rng_state(states["cpu"])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states[str(device)], device)
    else:
        torch.manual_seed(11)
    file = {"first": torch.randn(5, device=device).cpu(), "generators": {"cpu": torch.get_rng_state()}}
    if device.type == "cuda":
        file["generators"][str(device)] = torch.cuda.get_rng_state(device)
    file["next"] = torch.randn(7, device=device).cpu()
    torch.save(file, out)


main()
