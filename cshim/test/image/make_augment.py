#!/usr/bin/env python3
"""Write torchvision's results on pictures, for augment_test.cc and for the Go tests of imageloader.

Needs torch 2.11, torchvision 0.26 and numpy; the tests need none of them. Run it in this folder.

data/augment.txt has one line for each result: the result of one operation of ts_augmenter_run on a picture that both sides
make from a seed (see picture):
    exact SEED WIDTH HEIGHT KIND INTEGERS... VALUES... CRC    (9 integers, 8 values, the result's CRC-32)
    near SEED WIDTH HEIGHT KIND INTEGERS... VALUES... BYTES   (the result as hexadecimal digits: 1 level of difference
                                                               is allowed, in one byte of a thousand)
../../imageloader/transform/testdata/augment.json has results of whole steps of the policies, by torchvision's own names, and
quantiles.json in the same folder has the distributions of parameters.
"""
import itertools
import json
import math
import os
import random
import zlib

import numpy as np
import torch
import torchvision
import torchvision.transforms.v2 as v2
import torchvision.transforms.v2.functional as F
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import _get_perspective_coeffs
from torchvision.transforms.v2.functional._geometry import _get_inverse_affine_matrix

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # cshim/test
SIZES = [(61, 47), (48, 64), (40, 40)]
MODES = {1: InterpolationMode.NEAREST, 2: InterpolationMode.BILINEAR}
random_numbers = random.Random(1)
uniform, integer = random_numbers.uniform, random_numbers.randint


def picture(seed, width, height):
    """Return slopes with noise. Every fourth seed gives noise alone, and every fourth seed little contrast."""
    out = np.empty((height, width, 3), np.uint8)
    state = seed
    for y in range(height):
        for x in range(width):
            for c in range(3):
                state = (state * 6364136223846793005 + 1442695040888963407) & (1 << 64) - 1
                noise = state >> 56
                slope = (x * 7 + y * 5 + c * 40) % 256
                slope = 2 * slope if slope < 128 else 510 - 2 * slope
                out[y, x, c] = (slope * 7 // 8 + noise // 8, noise, 100 + noise // 16, slope * 7 // 8 + noise // 8)[seed % 4]
    return out


def tensor(pixels):
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous()


def pixels(image):
    return np.ascontiguousarray(image.permute(1, 2, 0).numpy())


def color():
    return [integer(0, 255) for _ in range(3)]


def affine(width, height, mode, fill, angle, translate, scale, shear, center=None):
    from_center = [0.0, 0.0] if center is None else [c - s * 0.5 for c, s in zip(center, [width, height])]
    matrix = _get_inverse_affine_matrix(from_center, angle, [float(t) for t in translate], scale, shear)
    return (
        (18, [mode, int(fill is not None), *(fill or [])], matrix),
        lambda t: F.affine(t, angle, translate, scale, shear, MODES[mode], fill, center),
    )


def perspective(width, height, mode, fill):
    across, down = width // 4 + 1, height // 4 + 1
    start = [[0, 0], [width - 1, 0], [width - 1, height - 1], [0, height - 1]]
    end = [[integer(0, across - 1) + (width - across) * (x > 0), integer(0, down - 1) + (height - down) * (y > 0)] for x, y in start]
    coefficients = _get_perspective_coeffs(start, end)
    return (
        (19, [mode, int(fill is not None), *(fill or [])], coefficients),
        lambda t: F.perspective(t, None, None, MODES[mode], fill, coefficients),
    )


def crop(width, height, mode, fill):
    names = ["constant", "edge", "reflect", "symmetric"]
    left, top, right, bottom = (integer(0, 12) for _ in range(4))
    w, h = width + left + right, height + top + bottom
    x, y = integer(0, w - width), integer(0, h - height)

    def torchvision_does(t):
        if mode == 0:
            padded = F.pad(t, [left, top, right, bottom], fill=fill)
        else:
            padded = F.pad(t, [left, top, right, bottom], padding_mode=names[mode])
        return F.crop(padded, y, x, height, width)

    return (4, [x - left, y - top, width, height, mode, *(fill if mode == 0 else [])], []), torchvision_does


def operations(width, height):
    """Yield ((kind, integers, values), torchvision's function) and whether its result is defined to the bit."""
    f = uniform(0, 2)
    yield (1, [], []), F.horizontal_flip, True
    yield (2, [], []), F.vertical_flip, True
    turns = integer(0, 3) if width == height else 2
    yield (3, [turns], []), lambda t: torch.rot90(t, turns, (-2, -1)), True
    for mode in range(4):
        yield *crop(width, height, mode, color()), True
    yield (5, [], [f]), lambda t: F.adjust_brightness(t, f), True
    yield (6, [], [f]), lambda t: F.adjust_contrast(t, f), True
    yield (7, [], [f]), lambda t: F.adjust_saturation(t, f), True
    yield (8, [], [f]), lambda t: F.adjust_sharpness(t, f), True
    hue = uniform(-0.5, 0.5)
    yield (9, [], [hue]), lambda t: F.adjust_hue(t, hue), False
    yield (10, [], []), lambda t: F.rgb_to_grayscale(t, 3), True
    yield (11, [], []), F.invert, True
    for threshold in (uniform(0, 255), 170.0, 255.0):
        yield (12, [], [threshold]), lambda t: F.solarize(t, threshold), True
    bits = integer(0, 8)
    yield (13, [bits], []), lambda t: F.posterize(t, bits), True
    yield (14, [], []), F.autocontrast, True
    yield (15, [], []), F.equalize, True
    kernel, sigma = [random_numbers.choice([3, 5, 9, 23]), random_numbers.choice([1, 3, 9])], uniform(0.1, 2)
    yield (16, kernel, [sigma, sigma]), lambda t: F.gaussian_blur(t, kernel, [sigma, sigma]), False
    w, h = integer(0, width), integer(0, height)
    x, y, value = integer(0, width - w), integer(0, height - h), color()
    yield (17, [x, y, w, h, *value], []), lambda t: F.erase(t, y, x, h, w, torch.tensor(value, dtype=torch.uint8)[:, None, None]), True
    for mode in (1, 2):
        for fill in (None, color()):
            yield *affine(width, height, mode, fill, uniform(-180, 180), [integer(-9, 9), integer(-9, 9)], uniform(0.5, 1.5), [uniform(-30, 30), uniform(-30, 30)]), True
            yield *affine(width, height, mode, fill, 0.0, [0, 0], 1.0, [math.degrees(math.atan(uniform(-0.3, 0.3))), 0.0], [0, 0]), True
            yield *affine(width, height, mode, fill, 0.0, [integer(-9, 9), 0], 1.0, [0.0, 0.0]), True
            yield *affine(width, height, mode, fill, uniform(-30, 30), [0, 0], 1.0, [0.0, 0.0]), True
            yield *perspective(width, height, mode, fill), True


def write_operations():
    lines = [f"# torch {torch.__version__}, torchvision {torchvision.__version__}; make_augment.py"]
    for seed in range(12):
        width, height = SIZES[seed % 3]
        source = picture(seed, width, height)
        for (kind, integers, values), torchvision_does, exact in operations(width, height):
            if not exact and seed >= 4:
                continue
            result = pixels(torchvision_does(tensor(source)))
            integers = [int(i) for i in integers] + [0] * (9 - len(integers))
            values = [float(v) for v in values] + [0.0] * (8 - len(values))
            word = f"{zlib.crc32(result.tobytes()):08x}" if exact else result.tobytes().hex()
            numbers = " ".join(map(str, integers)) + " " + " ".join(repr(v) for v in values)
            lines.append(f"{'exact' if exact else 'near'} {seed} {width} {height} {kind} {numbers} {word}")
    orders = list(itertools.permutations(range(3)))
    for seed in range(12):
        width, height = SIZES[seed % 3]
        result = pixels(F.permute_channels(tensor(picture(seed, width, height)), list(orders[seed % 6])))
        integers = " ".join(map(str, [*orders[seed % 6]] + [0] * 6))
        lines.append(f"exact {seed} {width} {height} 20 {integers} {' '.join(['0.0'] * 8)} {zlib.crc32(result.tobytes()):08x}")
    for seed in range(12):  # a mixture of the image, its inverse and its mirror image, as AugMix adds them
        width, height = SIZES[seed % 3]
        source = tensor(picture(seed, width, height))
        weights = torch.tensor([1.0, 0.0, 0.0]) if seed == 0 else torch._sample_dirichlet(torch.ones(3), torch.Generator().manual_seed(seed))
        mix = weights[0] * source
        mix.add_(weights[1] * F.invert(source))
        mix.add_(weights[2] * F.horizontal_flip(source))
        values = " ".join(repr(float(w)) for w in weights)
        lines.append(f"exact {seed} {width} {height} 21 {' '.join(['0'] * 9)} {values} {' '.join(['0.0'] * 5)} {zlib.crc32(pixels(mix.to(torch.uint8)).tobytes()):08x}")
    with open(os.path.join(HERE, "data", "augment.txt"), "w") as file:
        file.write("\n".join(lines) + "\n")
    print(f"{len(lines) - 1} operations")


def augmix(seed, source, **options):
    """Run AugMix and return what it has drawn, and the result: weights, and for each chain its [operation, bin, sign]."""
    transform = v2.AugMix(**options)
    weights, chains = [], []
    sample, pick, randint, rand = transform._sample_dirichlet, transform._get_random_item, torch.randint, torch.rand

    def draw_dirichlet(params):
        weights.append(sample(params)[0])
        return weights[-1][None]

    def draw_operation(space):
        key, item = pick(space)
        chains[-1].append([key, 0, 1])
        return key, item

    def draw_integer(*args, **kwargs):
        out = randint(*args, **kwargs)
        if "low" in kwargs:  # the depth of a chain
            chains.append([])
        elif chains and len(args) == 2 and args[0] == transform.severity:
            chains[-1][-1][1] = int(out)
        return out

    def draw_sign(*args, **kwargs):
        out = rand(*args, **kwargs)
        chains[-1][-1][2] = -1 if out <= 0.5 else 1
        return out

    torch.manual_seed(seed)
    transform._sample_dirichlet, transform._get_random_item = draw_dirichlet, draw_operation
    torch.randint, torch.rand = draw_integer, draw_sign
    # The number of operations must not be taken for a bin: _get_random_item draws it with torch.randint too.
    transform._get_random_item = lambda space: undrawn(draw_operation, space)

    def undrawn(draw, space):
        torch.randint = randint
        try:
            return draw(space)
        finally:
            torch.randint = draw_integer

    try:
        result = transform(source)
    finally:
        torch.randint, torch.rand = randint, rand
    numbers = [float(weights[0][0]), *(float(w) for w in weights[1] * weights[0][1])]
    return [numbers, chains, f"{zlib.crc32(pixels(result).tobytes()):08x}"]


def write_steps():
    """Write whole steps of the policies: every operation at every magnitude, with both signs."""
    steps = []
    width, height = SIZES[0]
    source = tensor(picture(4, width, height))
    spaces = [("RandAugment", v2.RandAugment(), 31), ("TrivialAugmentWide", v2.TrivialAugmentWide(), 31), ("AutoAugment", v2.AutoAugment(), 10)]
    for policy, transform, bins in spaces:
        for name, (magnitudes_of, signed) in transform._AUGMENTATION_SPACE.items():
            magnitudes = magnitudes_of(bins, height, width)
            for bin in range(bins) if magnitudes is not None else [0]:
                magnitude = 0.0 if magnitudes is None else float(magnitudes[bin])
                for sign in (1, -1) if signed else (1,):
                    if bins == 31 and (bin + (sign < 0)) % 3 != 0:
                        continue  # a third of the combinations is enough
                    result = transform._apply_image_or_video_transform(source, name, sign * magnitude, InterpolationMode.NEAREST, {torch.Tensor: None})
                    steps.append([policy, name, bin, sign, magnitude, f"{zlib.crc32(pixels(result).tobytes()):08x}"])
    policies = {p.value: v2.AutoAugment(p)._policies for p in v2.AutoAugmentPolicy}
    rotations = []
    for angle in (0, 90, 180, 270, -90, 33.5, 360, -450.25):
        for side in SIZES[0], SIZES[2]:
            image = tensor(picture(8, *side))
            for mode, fill in ((1, None), (2, [9, 99, 199])):
                # fill 0 is RandomRotation's default; None is not reachable from it.
                result = F.rotate(image, angle, MODES[mode], fill=fill or [0, 0, 0])
                rotations.append([angle, *side, mode, fill or [0, 0, 0], f"{zlib.crc32(pixels(result).tobytes()):08x}"])
    # Turns about another centre, by rotate and by affine. Also expands the image, and then crops its upper left corner to the
    # old size.
    centres, expansions = [], []
    for angle in (0, 90, 180, 30, -75.5):
        for side in SIZES[0], SIZES[2]:
            image = tensor(picture(8, *side))
            for mode, fill in ((1, [0, 0, 0]), (2, [9, 99, 199])):
                for center in ([0, 0], [10.5, 31]):
                    if angle == 90 and mode == 2:
                        continue  # the last bit of cos(90 degrees) decides how source positions half-way between two pixels round
                    turned = F.rotate(image, angle, MODES[mode], center=center, fill=fill)
                    moved = F.affine(image, angle, [3, -2], 0.8, [5.0, -7.0], MODES[mode], fill, center)
                    centres.append([angle, *side, mode, fill, center, *(f"{zlib.crc32(pixels(x).tobytes()):08x}" for x in (turned, moved))])
    for angle in (0, 90, 180, 270, 1, 45, 30, -75.5, 89.999):
        for side in SIZES:
            image = tensor(picture(8, *side))
            for mode, fill in ((1, [0, 0, 0]), (2, [9, 99, 199])):
                turned = F.rotate(image, angle, MODES[mode], expand=True, fill=fill)
                height_, width_ = turned.shape[-2:]
                cut = F.crop(turned, 0, 0, side[1], side[0])
                expansions.append([angle, *side, mode, fill, width_, height_, f"{zlib.crc32(pixels(cut).tobytes()):08x}"])
    # Without shears, whose source positions half-way between two pixels depend on the processor. The steps have shears.
    augmixes = [augmix(seed, source, all_ops=seed % 3 != 0, severity=1 + seed % 10, mixture_width=1 + seed % 4) for seed in range(200)]
    augmixes = [m for m in augmixes if not any(step[0].startswith("Shear") for chain in m[1] for step in chain)][:40]
    with open(os.path.join(HERE, "..", "..", "imageloader", "transform", "testdata", "augment.json"), "w") as file:
        rows = lambda list: "[\n" + ",\n".join(json.dumps(row) for row in list) + "\n]"
        parts = [f'"made with": "torchvision {torchvision.__version__}, cshim/test/image/make_augment.py"', f'"width": {width}, "height": {height}, "seed": 4']
        parts += [f'"steps": {rows(steps)}', f'"rotations": {rows(rotations)}', f'"centres": {rows(centres)}', f'"expansions": {rows(expansions)}', f'"policies": {json.dumps(policies)}', f'"augmixes": {rows(augmixes)}']
        file.write("{\n" + ",\n".join(parts) + "\n}\n")
    print(f"{len(steps)} steps of policies, {len(rotations)} rotations")


def write_quantiles():
    """Write the 999 permilles, over many draws, of parameters whose distribution has no simple formula."""
    values = {}
    torch.manual_seed(1)
    image = torch.zeros(3, 224, 224, dtype=torch.uint8)
    erasing = v2.RandomErasing(p=1)
    boxes = np.array([[p["i"], p["j"], p["h"], p["w"]] for p in (erasing.make_params([image]) for _ in range(250_000)) if p["v"] is not None])
    values["erase area"] = boxes[:, 2] * boxes[:, 3]
    values["erase log ratio"] = np.log(boxes[:, 2] / boxes[:, 3])
    values["erase x"], values["erase y"] = boxes[:, 1], boxes[:, 0]
    image = torch.zeros(3, 160, 224, dtype=torch.uint8)
    perspective = v2.RandomPerspective(p=1)
    coefficients = np.array([perspective.make_params([image])["coefficients"] for _ in range(100_000)])
    for i in (0, 5, 7):
        values[f"perspective {i}"] = coefficients[:, i]
    quantiles = {}
    for name, list in values.items():
        list = np.sort(list)
        quantiles[name] = [float(f"{list[min(len(list) - 1, len(list) * i // 1000)]:.7g}") for i in range(1, 1000)]
    with open(os.path.join(HERE, "..", "..", "imageloader", "transform", "testdata", "quantiles.json"), "w") as file:
        json.dump(quantiles, file, separators=(",", ":"))
        file.write("\n")
    print(f"quantiles of {', '.join(quantiles)}")


write_operations()
write_steps()
write_quantiles()
