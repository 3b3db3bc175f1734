"""Writes a small GPT-2 as two tools of its library write it, and gpt2-logits.json: the logits of the tokens 0 to 5.

    python make_gpt2_files.py        (needs torch 2.11, safetensors, transformers; run beside this file)

gpt2-tied.safetensors is of safetensors.torch.save_model, which keeps one of the tied tensors under the name of the head.
gpt2-base.safetensors is of save_pretrained of the model without its head, whose names lack "transformer.".
"""
import json
import pathlib
import tempfile

import safetensors.torch
import torch
from transformers import GPT2Config, GPT2LMHeadModel

here = pathlib.Path(__file__).parent
torch.manual_seed(0)
config = GPT2Config(vocab_size=11, n_positions=8, n_embd=4, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config).eval()
with torch.no_grad():
    for p in model.parameters():
        p.mul_(3).add_(0.1)
safetensors.torch.save_model(model, here / "gpt2-tied.safetensors")
with tempfile.TemporaryDirectory() as folder:
    model.transformer.save_pretrained(folder)
    (here / "gpt2-base.safetensors").write_bytes((pathlib.Path(folder) / "model.safetensors").read_bytes())
with torch.no_grad():
    logits = model(torch.arange(6)[None]).logits.reshape(-1).tolist()
(here / "gpt2-logits.json").write_text(json.dumps(logits) + "\n")
