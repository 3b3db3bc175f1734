#!/usr/bin/env python3
"""Compile a PyTorch model to a package (.pt2) that Go programs run with package aoti.

  export.py torchvision:resnet50 --weights DEFAULT --batch 1:64 --dtype bfloat16 -o resnet50.pt2
  export.py timm:vit_base_patch16_224 --image 3,224,224 -o vit.pt2
  export.py huggingface:google/vit-base-patch16-224 -o vit.pt2
  export.py my_models.py:make_network --device cuda -o network.pt2

The last form calls a function of a file. It returns a module, or a module and the tuple of its example arguments. A model
that takes other arguments than one batch of images needs the second form, or a program that calls export() below.

It needs PyTorch 2.11 or newer, a C++ compiler, and for a GPU the GPU for which it compiles. The package runs with the
LibTorch of the same version, on the same kind of GPU or a CPU with the same instructions. Whoever loads the package runs
its native code.
"""

import argparse
import importlib.util
import json
import math
import os
import sys
import time

import torch
from torch.utils import _pytree

def ranges(value, constraints, spare):
    """The smallest and largest size of each dimension; the largest is None without a bound. See export for spare."""
    out = []
    for size in value.shape:
        if isinstance(size, int):
            out.append([size, size])
            continue
        found = constraints[size.node.expr]
        upper = int(found.upper) - spare if found.upper < 2**62 else None
        out.append([max(int(found.lower), 0), upper])
    return out


def memory_format(value):
    """The memory format that the compiled code expects, or None for other strides."""
    if value.is_contiguous():
        return "contiguous"
    if value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last):
        return "channels_last"
    return None


def weights(program):
    """The state_dict: each name, whether the program uses it, and the first name of the same tensor if there are several."""
    signature, first, found = program.graph_signature, {}, []
    targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    used = {targets[node.name] for node in program.graph.nodes if node.name in targets and node.users}
    for name, value in program.state_dict.items():
        place = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype)
        key = place if value.numel() else name
        root = first.setdefault(key, name)
        found.append({"name": name, "used": name in used, **({"tied": root} if root != name else {})})
    return found


def written_buffers(program):
    """The buffers that the program changes, by name."""
    if not any(getattr(getattr(n.target, "_schema", None), "is_mutable", False) for n in program.graph.nodes):
        return []
    return sorted(program.run_decompositions({}).graph_signature.buffers_to_mutate.values())


def describe(program, spare):
    """The JSON that package aoti reads: names, dtypes, ranges and memory formats of the inputs and outputs, and the weights."""
    values = {node.name: node.meta["val"] for node in program.graph.nodes if "val" in node.meta}
    constraints = program.range_constraints

    def one(name, value):
        return {
            "name": name,
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": ranges(value, constraints, spare),
            "memory_format": memory_format(value),
        }

    signature = program.graph_signature
    outputs = list(signature.user_outputs)
    paths, _ = _pytree.tree_flatten_with_path(_pytree.tree_unflatten(outputs, program.call_spec.out_spec))
    names = [".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path) for path, _ in paths]
    return json.dumps(
        {
            "torch": torch.__version__.split("+")[0],
            "inputs": [one(name, values[name]) for name in signature.user_inputs],
            "outputs": [one(name or "output", values[value]) for name, value in zip(names, outputs)],
            "weights": weights(program),
        }
    )


# Keeps all weights apart from the compiled code. Inductor otherwise writes small tensors into the code.
REPLACEABLE = {"freezing": False, "always_keep_tensor_constants": True}


def export(module, arguments, keywords=None, *, path, dynamic_shapes=None, config=None, metadata=None, spare=0):
    """Compile the module for the device and dtype of its parameters and arguments, and write the package.

    metadata adds strings to the package's. torchstream embed and serve read "images" and "classes", as JSON:
    {"resize": 256, "interpolation": "bilinear", "mean": [...], "std": [...]}, and a list of names.

    The largest sizes that the package describes are smaller by spare than those of dynamic_shapes. Inductor compares
    sizes with thresholds: an example of the threshold's size, which is also the largest, would become the only size.

    A program can replace the weights of the package if config has the settings of REPLACEABLE.
    """
    module = module.eval()
    with torch.no_grad():
        program = torch.export.export(module, arguments, keywords or {}, dynamic_shapes=dynamic_shapes)
        if written := written_buffers(program):
            raise ValueError(
                f"the module writes its buffers {', '.join(written)}, and concurrent runs of a package share them: return their "
                "new values as outputs instead"
            )
        metadata = {"torchstream": describe(program, spare), **(metadata or {})}
        # Package aoti checks the ranges of the description. The check of the compiled code refuses a batch of 1.
        options = {"aot_inductor.metadata": metadata, "aot_inductor.check_lowerbound": False, **(config or {})}
        return torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=options)


# What export_fastest tries on a CPU. Freezing folds batch normalisations into convolutions, and packs the weights of a
# fixed batch for oneDNN.
CONFIGS = {"default": {}, "freezing": {"freezing": True}}


def export_fastest(module, arguments, *, path, config=None, **options):
    """Compile the module with each of CONFIGS, and write the package that takes the least time on the arguments."""
    packages, runs = {}, {}
    for name, more in CONFIGS.items():
        packages[name] = path.removesuffix(".pt2") + f".{name}.pt2"
        export(module, arguments, path=packages[name], config={**(config or {}), **more}, **options)
        runs[name] = torch._inductor.aoti_load_package(packages[name])
    best = dict.fromkeys(runs, math.inf)
    for _ in range(25):  # in turns, so that other load on the machine slows all of them
        for name, run in runs.items():
            begin = time.perf_counter()
            run(*arguments)
            best[name] = min(best[name], time.perf_counter() - begin)
    fastest = min(best, key=best.get)
    shown = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in best.items())
    print(f"a call with the largest batch: {shown}; kept {fastest}", file=sys.stderr)
    os.replace(packages.pop(fastest), path)
    for other in packages.values():
        os.remove(other)
    return path


def check(path, module, images, sizes):
    """Compare the package with the module for batches of these sizes."""
    run = torch._inductor.aoti_load_package(path)
    allowed = 1e-3 if images.dtype == torch.float32 else 5e-2
    for n in sizes:
        problem = difference(run, module, images[:n], allowed)
        if problem:
            largest = sizes[-1]
            raise SystemExit(
                f"export.py: {path}: with a batch of {n} the package {problem}: it was removed. Export with another "
                f"--batch, such as {sizes[0]}:{2 * largest}, or with one size, such as {largest}"
            )
    print(f"batches of {' and '.join(map(str, sizes))} equal the module's", file=sys.stderr)


def difference(run, module, images, allowed):
    """How the results of a package differ from the module's, or None if they do not."""
    with torch.no_grad():
        wanted = _pytree.tree_leaves(module(images))
        try:
            results = _pytree.tree_leaves(run(images))
        except RuntimeError as error:
            return f"fails ({str(error).splitlines()[0]})"
    for want, got in zip(wanted, results, strict=True):
        if want.shape != got.shape:
            return f"returns {list(got.shape)}, and the module {list(want.shape)}"
        differs = (want - got).abs().max().item() / max(want.abs().max().item(), 1e-6)
        if not differs <= allowed:
            return f"differs by {differs:.2g} from the module"
    return None


def torchvision_metadata(which, weights):
    """The transform and the classes of torchvision's weights."""
    import torchvision

    weights = torchvision.models.get_model_weights(which)[weights.rpartition(".")[2]]
    t = weights.transforms()
    images = {"size": t.crop_size[0], "resize": t.resize_size[0], "interpolation": t.interpolation.value}
    return images | {"mean": t.mean, "std": t.std}, weights.meta.get("categories")


def timm_metadata(module):
    """The transform of timm's weights, and the classes if they are ImageNet's."""
    import timm.data

    c = timm.data.resolve_model_data_config(module)
    size = c["input_size"][1]
    images = {"size": size, "resize": int(size / c["crop_pct"]), "interpolation": c["interpolation"]}
    images |= {"mean": c["mean"], "std": c["std"]}
    subset = timm.data.infer_imagenet_subset(module)
    if not subset:
        return images, None
    info = timm.data.ImageNetInfo(subset)
    return images, [info.index_to_description(i) for i in range(info.num_classes())]


def huggingface_metadata(which, module):
    """The transform and the classes of a model of Hugging Face."""
    from transformers import AutoImageProcessor

    p = AutoImageProcessor.from_pretrained(which)
    resize = p.size["shortest_edge"] if "shortest_edge" in p.size else p.size["height"]
    crop = p.crop_size["height"] if getattr(p, "do_center_crop", False) and p.crop_size else resize
    resample = ["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"][int(p.resample)]  # Pillow's numbers
    images = {"size": crop, "resize": resize, "interpolation": resample}
    images |= {"mean": p.image_mean, "std": p.image_std} if p.do_normalize else {"mean": [0] * 3, "std": [1] * 3}
    return images, [module.config.id2label[i] for i in range(module.config.num_labels)]


def load(name, weights):
    """The module that a command line names, its example arguments or None, and its transform and classes or None."""
    source, _, which = name.partition(":")
    if source == "torchvision":
        import torchvision

        about = torchvision_metadata(which, weights) if weights else (None, None)
        return torchvision.models.get_model(which, weights=weights), None, about
    if source == "timm":
        import timm

        module = timm.create_model(which, pretrained=weights is not None)
        return module, None, timm_metadata(module)
    if source == "huggingface":
        from transformers import AutoModelForImageClassification

        module = AutoModelForImageClassification.from_pretrained(which)
        return module, None, huggingface_metadata(which, module)
    spec = importlib.util.spec_from_file_location("exported", source)
    if spec is None or not which:
        raise SystemExit(f"export.py: {name}: write torchvision:NAME, timm:NAME, huggingface:NAME or FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = getattr(module, which)()
    module, arguments = made if isinstance(made, tuple) else (made, None)
    return module, arguments, (None, None)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", help="torchvision:NAME, timm:NAME, huggingface:NAME or FILE.py:FUNCTION")
    p.add_argument("-o", dest="path", required=True, help="the package to write")
    p.add_argument("--weights", help="for torchvision and timm: the pretrained weights, such as DEFAULT")
    p.add_argument("--batch", default="1:64", help="the smallest and largest batch, or one fixed size (%(default)s)")
    p.add_argument("--image", help="channels, height and width (default: the weights', or 3,224,224)")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                   help="cuda or cpu (default: cuda if PyTorch has a GPU, otherwise cpu; here %(default)s)")
    p.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    p.add_argument("--no-measure", action="store_true", help="on a CPU: do not compile in two ways to keep the faster")
    p.add_argument("--replaceable", action="store_true", help="a program can replace the weights (Model.ReplaceWeights); on a CPU this may be slower")
    p.add_argument("--channels-last", action="store_true", help="the images are in this memory format")
    a = p.parse_args()

    dtype = getattr(torch, a.dtype)
    module, arguments, (images, classes) = load(a.model, a.weights)
    shape = [int(n) for n in a.image.split(",")] if a.image else [3] + 2 * [images["size"] if images else 224]
    if images:
        images["resize"] = images["resize"] * shape[1] // images.pop("size")
    metadata = {k: json.dumps(v) for k, v in {"images": images, "classes": classes}.items() if v}
    module = module.to(a.device, dtype)
    least, _, most = a.batch.partition(":")
    dynamic, spare = None, 0
    images_only = arguments is None
    if images_only:
        x = torch.rand(int(most or least), *shape, device=a.device, dtype=dtype)
        if a.channels_last:
            module, x = (v.to(memory_format=torch.channels_last) for v in (module, x))
        arguments = (x,)
        if most and most != least:
            spare = 1
            dynamic = ({0: torch.export.Dim("batch", min=int(least), max=int(most) + spare)},)
    write = export_fastest if a.device == "cpu" and not (a.no_measure or a.replaceable) else export
    os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"  # as in package aoti: a wrong size is an error
    write(module, arguments, path=a.path, dynamic_shapes=dynamic, metadata=metadata, spare=spare,
          config=REPLACEABLE if a.replaceable else None)
    try:
        if images_only:
            check(a.path, module, *arguments, sorted({int(least), int(most or least)}))
    except BaseException:
        os.remove(a.path)
        raise
    print(a.path)


if __name__ == "__main__":
    main()
