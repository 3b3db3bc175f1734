import os, torch
from safetensors.torch import load_file

def load_divided(path):
    c = torch.load(path, weights_only=True)
    s, folder = c.pop("shards"), os.path.dirname(path)
    n = len(s["bytes"])
    files = [load_file(os.path.join(folder, f"{s['base']}-{s['id']}-rank{r:05d}-of-{n:05d}.safetensors")) for r in range(n)]
    def put(x):
        if isinstance(x, list):
            return [put(v) for v in x]
        if not isinstance(x, dict):
            return x
        if set(x) == {"divided", "dtype", "shape", "strides", "parts"}:
            parts = [files[r][x["divided"]] for r in x["parts"][::3]]
            return (torch.cat(parts) if parts else torch.empty(0)).as_strided(x["shape"], x["strides"])
        return {k: put(v) for k, v in x.items()}
    return put(c)
