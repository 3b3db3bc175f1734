"""Writes operators.json: the results of PyTorch for the typed operators of TestOperatorsEqualPyTorch.

    python make_operators.py           (needs torch 2.11; reads ../ops.txt, writes beside this file)

Every operator of ops.txt that ../values_test.go does not call has a case, but for those in NOT_HERE. A case calls the
operator with the arguments of CASES, or with DEFAULTS by the names of the schema. "@x" is the tensor x of TENSORS. The file has the tensors, and for
each case the Go method, its arguments in Go's order, its options, and dtype, shape and values of each result.
"""
import json
import math
import pathlib
import re

import torch

HERE = pathlib.Path(__file__).parent
t = torch.tensor

TENSORS = {
    "x": t([[1.5, -2.0, 0.5], [-0.25, 3.0, -1.0]]), "y": t([[2.0, 4.0, 0.5], [1.0, -0.5, 8.0]]), "u": t([[0.1, 0.25, 0.5], [0.75, 0.9, 0.3]]), "big": t([[1.5, 2.0, 4.0], [7.5, 1.0, 3.25]]),
    "row": t([1.0, -2.0, 3.0]), "row2": t([0.5, 4.0, -1.0]), "col": t([2.0, -1.0]), "one": t(2.5), "zero": t(0.0), "nan": t([math.nan, math.inf, -math.inf, 2.0]), "special": t([-math.inf, -1.0, -0.0, 0.0, 2.0]),
    "sq": t([[4.0, 1.0, 0.5], [1.0, 3.0, -0.25], [0.5, -0.25, 2.0]]), "low": t([[2.0, 0, 0], [0.5, 1.5, 0], [1, -1, 3]]), "b": t([[1.0, 2.0], [0.0, -1.0], [3.0, 0.5]]), "tall": t([[1.0, 1], [1, 2], [1, 3], [1, 5]]),
    "mask": t([[True, False, True], [False, False, True]]), "mask2": t([[True, True, False], [False, True, False]]), "n": t([[12, 18, 7], [0, 5, 30]]), "m": t([[8, 27, 14], [3, 10, 45]]), "small": t([2, 0, 1]),
    "idx": t([[0, 1, 1], [1, 0, 0]]), "perm": t([1, 0]), "vec4": t([4.0, 1.0, 1.0, -3.0]), "rep": t([2, 0, 1]), "words": t([3, 3, 1, 1, 1, 3]), "z": t([1 + 2j, -0.5j, 3.0]), "z2": t([[1 + 1j, 2 - 1j], [0.5j, -1.0]]),
    "pairs": t([[1.0, 2.0], [0.5, -1.0]]), "img": torch.arange(16.0).view(1, 1, 4, 4) / 4, "img2": torch.arange(32.0).view(1, 2, 4, 4) - 7.5, "seq": t([[[1.0, 2, 4, 8]]]), "vol": torch.arange(8.0).view(1, 1, 2, 2, 2),
    "w": t([[[[1.0, 0, -1], [2, 0.5, 0], [0, 1, -2]]]]), "bm": torch.arange(12.0).view(2, 2, 3) / 6 - 1, "bn": torch.arange(12.0).view(2, 3, 2) / 5 - 0.5, "mat22": t([[1.0, 2.0], [3.0, 5.0]]), "signal": torch.sin(torch.arange(16.0)) + 0.1 * torch.arange(16.0),
    "half": t([1 + 0j, 2 - 1j, 0.5j, -1.0 + 0j]), "logits": t([[1.0, 2.0, 0.5, -1.0], [0.0, -1.0, 3.0, 0.25]]), "cls": t([2, 0]), "signs": t([1.0, -1.0]), "signs23": t([[1.0, -1.0, 1.0], [-1.0, 1.0, 1.0]]), "multi": t([[2, 0, -1, 1], [1, -1, 0, 2]]),
    "logp": torch.log_softmax(torch.arange(24.0).view(4, 2, 3) % 5, 2), "targets": t([[1, 2], [2, 1]]), "in_len": t([4, 4]), "tgt_len": t([2, 1]), "theta": t([[[1.0, 0.0, 0.25], [0.0, 0.5, -0.5]]]), "grid": t([[[[-1.0, -1.0], [0.3, 0.1]], [[0.0, 0.9], [1.0, -0.5]]]]),
    "table": t([[1.0, 2.0], [3.0, 4.0], [-5.0, 0.5]]), "bag": t([0, 2, 1, 1]), "offsets": t([0, 3]), "sorted": t([-1.0, 0.5, 2.0, 4.0]), "samples": t([[[0.3, 0.7]]]), "count": t([10.0, 4.0]), "prob": t([0.5, 1.0]),
    "h0": t([[[0.5, -0.5]]]), "c0": t([[[0.25, 1.0]]]), "xs": t([[[1.0, -1.0, 0.5]], [[0.0, 2.0, -0.5]]]), "wi": torch.arange(6.0).view(2, 3) / 8 - 0.3, "wh": t([[0.5, -0.25], [0.125, 0.75]]), "b2": t([0.1, -0.2]), "x1": t([[1.0, -1.0, 0.5]]), "h1": t([[0.5, -0.5]]),
    "c1": t([[0.25, 1.0]]), "wi8": torch.arange(24.0).view(8, 3) / 24 - 0.4, "wh8": torch.arange(16.0).view(8, 2) / 16 - 0.5, "b8": torch.arange(8.0) / 8, "wi6": torch.arange(18.0).view(6, 3) / 18 - 0.4, "wh6": torch.arange(12.0).view(6, 2) / 12 - 0.5, "b6": torch.arange(6.0) / 6,
    "bil": torch.arange(12.0).view(2, 2, 3) / 10, "g": t([[1.0, 2.0], [3.0, 4.0]]), "gw": t([1.0, 2.0]), "ln": t([[1.0, 2.0, 4.0]]), "i32": t([1, 2, 3], dtype=torch.int32), "lu": torch.linalg.lu_factor(t([[4.0, 1.0], [2.0, 3.0]]))[0],
    "pivots": torch.linalg.lu_factor(t([[4.0, 1.0], [2.0, 3.0]]))[1], "rhs": t([[1.0], [2.0]]), "weights": t([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]), "four": torch.eye(6).view(2, 3, 6) + 0.25, "t6": torch.arange(6.0).view(2, 3), "means": t([1.0, -1.0]), "stds": t([0.5, 2.0]),
    "winds": t([0.5, 1.0, 1.0, 0.5]), "spec": torch.stft(torch.sin(torch.arange(16.0)), 4, window=t([0.5, 1.0, 1.0, 0.5]), return_complex=True), "flat": t([5.0, 6.0, 7.0, 8.0, 9.0, 10.0]),
}

# Arguments that are not in a case, by name; by the receiver's or operand's place in the schema.
DEFAULTS = {
    "self": "@x", "other": "@y", "input": "@x", "A": "@sq", "B": "@b", "tensor1": "@y", "tensor2": "@u", "end": "@y", "tensors": ["@x", "@y"], "mask": "@mask", "index": "@idx", "src": "@y", "weight": 0.25, "value": 2.5, "alpha": 2.0, "dim": 0, "keepdim": True,
    "dim0": 0, "dim1": 1, "p": 2.0, "min": -0.5, "max": 2.0, "diagonal": 0, "offset": 0, "exponent": 2.0, "test_elements": "@y", "condition": "@mask", "descending": True, "input2": "@y", "target": "@y", "x2": "@y", "source": "@y", "eps": 1e-6, "negative_slope": 0.5,
}

BINARY_INTS = {"self": "@n", "other": "@m"}
MATS = {"self": "@g", "mat1": "@bm0", "mat2": "@bn0"}
TENSORS["bm0"], TENSORS["bn0"] = TENSORS["bm"][0].clone(), TENSORS["bn"][0].clone()
UNIT = {"self": "@u"}
POS = {"self": "@big"}
SQ = {"self": "@sq"}
SIG = {"self": "@signal"}

# By Go method: keyword arguments, or a list of them.
CASES = {
    "AddScaled": {"alpha": 0.5}, "RSubScalar": {"other": 3.0}, "SubInt": {"self": "@n", "other": 3}, "DivScalarMode": [{"other": 2.0, "rounding_mode": "floor"}, {"other": 2.0, "rounding_mode": "trunc"}], "RemainderScalar": {"other": 0.75}, "FModScalar": {"other": 0.75},
    "Addcmul": {"value": 0.5}, "Addcdiv": {"value": 0.5}, "Lerp": {"weight": "@u"}, "PowOf": {"self": 2.0, "exponent": "@x"}, "FloatPowerScalar": {"self": "@n", "exponent": 2.0}, "XLogY": {"self": "@special", "other": "@one"}, "ClampTensor": [{"min": "@u", "max": "@big"}, {"min": None, "max": "@u"}],
    "ClampMinTensor": {"min": "@u"}, "ClampMaxTensor": {"max": "@u"}, "GCD": BINARY_INTS, "LCM": BINARY_INTS, "Heaviside": {"self": "@special", "values": "@one"}, "NaNToNum": [{"self": "@nan"}, {"self": "@nan", "nan": 1.0, "posinf": 2.0, "neginf": 0.0}], "FMax": {"self": "@nan", "other": "@one"}, "FMin": {"self": "@nan", "other": "@one"},
    "Ldexp": {"other": "@row"}, "Frexp": POS, "Asin": UNIT, "Acos": UNIT, "Acosh": POS, "Atanh": UNIT, "Erfinv": UNIT, "Erfinv_": UNIT, "Logit": [UNIT, {"self": "@u", "eps": 0.2}], "Ndtri": UNIT, "Polygamma": {"n": 1, "self": "@big"}, "MVLgamma": {"self": "@big", "p": 1}, "Igamma": {"self": "@big", "other": "@u"},
    "Igammac": {"self": "@big", "other": "@u"}, "Digamma": POS, "Lgamma": POS, "RoundTo": {"self": "@u", "decimals": 1}, "XLog1pY": {"self": "@special", "other": "@one"}, "Zeta": {"self": "@big", "other": "@u"}, "Sgn": {"self": "@z"}, "SignBit": {"self": "@special"}, "Log2": POS, "Log10": POS, "Log_": POS, "Rsqrt_": POS,
    "PowScalar_": {"exponent": 2.0}, "SubScalar_": {"other": 1.5}, "Lerp_": {"weight": "@u"}, "AddMM_": [MATS, {**MATS, "beta": 0.0, "alpha": 2.0}], "AddMM": [MATS, {**MATS, "beta": 0.0, "alpha": 2.0}], "ELU_": {"alpha": 1.5}, "HardTanh_": {"min_val": -1.0, "max_val": 0.75}, "MaskedScatter_": {"source": "@flat"}, "MaskedScatter": {"source": "@flat"},
    "FillTensor_": {"value": "@one"}, "FillDiagonal_": {"fill_value": 7.0}, "IndexAdd_": {"dim": 0, "index": "@perm", "source": "@y", "alpha": 0.5}, "IndexAdd": {"dim": 0, "index": "@perm", "source": "@y"}, "IndexFill_": {"dim": 1, "index": "@perm"}, "IndexFill": {"dim": 1, "index": "@perm"},
    "Random_": {"from": 0, "to": 100}, "Exponential_": {"lambd": 2.0}, "Geometric_": {"p": 0.25}, "LogNormal_": {"mean": 0.0, "std": 1.0}, "Cauchy_": {"median": 0.0, "sigma": 1.0}, "IsInf": {"self": "@nan"}, "IsPosInf": {"self": "@nan"}, "IsNegInf": {"self": "@nan"}, "IsReal": {"self": "@z"}, "IsClose": [{"other": "@x"}, {"self": "@nan", "other": "@nan", "equal_nan": True}, {"rtol": 3.0}],
    "IsIn": [{"elements": "@x", "test_elements": "@row"}, {"elements": "@x", "test_elements": "@row", "invert": True}], "LogicalAnd": {"self": "@mask", "other": "@mask2"}, "LogicalOr": {"self": "@mask", "other": "@mask2"}, "LogicalXor": {"self": "@mask", "other": "@mask2"}, "WhereScalar": {"other": 9.0}, "WhereScalars": {"self": 1.0, "other": 9.0}, "MaskedFillTensor": {"value": "@one"},
    "BitwiseNot": {"self": "@n"}, "BitwiseAnd": BINARY_INTS, "BitwiseOr": BINARY_INTS, "BitwiseXor": BINARY_INTS, "BitwiseAndInt": {"self": "@n", "other": 6}, "BitwiseOrInt": {"self": "@n", "other": 6}, "ShiftLeft": {"self": "@n", "other": 2}, "ShiftRight": {"self": "@n", "other": 1},
    "Complex": {"real": "@x", "imag": "@y"}, "Polar": {"abs": "@u", "angle": "@x"}, "Real": {"self": "@z"}, "Imag": {"self": "@z"}, "Conj": {"self": "@z"}, "ResolveConj": {"self": "@z"}, "Angle": {"self": "@z"}, "ViewAsReal": {"self": "@z"}, "ViewAsComplex": {"self": "@pairs"},
    "Dot": {"self": "@row", "tensor": "@row2"}, "VDot": {"self": "@z", "other": "@z"}, "MV": {"vec": "@row"}, "Outer": {"self": "@col", "vec2": "@row"}, "Kron": {"self": "@mat22", "other": "@x"}, "AddMV": {"self": "@col", "mat": "@x", "vec": "@row", "beta": 2.0}, "AddR": {"self": "@x", "vec1": "@col", "vec2": "@row", "alpha": 0.5},
    "AddBMM": {"self": "@g", "batch1": "@bm", "batch2": "@bn"}, "Einsum": {"equation": "ij,kj->ik", "tensors": ["@x", "@y"]}, "TensorDot": {"self": "@bm", "other": "@bn", "dims_self": [2], "dims_other": [1]}, "Bilinear": {"input1": "@mat22", "input2": "@x", "weight": "@bil", "bias": "@b2"}, "MultiDot": {"tensors": ["@x", "@sq", "@b"]}, "MatrixPower": {"self": "@sq", "n": 3}, "MatrixExp": SQ, "Trace": SQ,
    "Diagonal": {"self": "@sq", "offset": 1, "dim1": 0, "dim2": 1}, "Diag": [{"self": "@sq"}, {"self": "@row", "diagonal": 1}], "DiagEmbed": {"self": "@row", "dim1": -2, "dim2": -1}, "Adjoint": {"self": "@z2"}, "Cross": {"dim": 1}, "CDist": {"p": 2.0}, "PDist": {"p": 1.0}, "CosineSimilarity": {"x1": "@x", "dim": 1}, "PairwiseDistance": {"x1": "@x", "keepdim": False}, "CDist": {"x1": "@x"}, "Cov": [{}, {"correction": 0}], "CorrCoef": {},
    "LinalgPInv": {"self": "@b", "rcond": 1e-6}, "LinalgSolve": {}, "LinalgSolveTriangular": {"self": "@low", "B": "@b", "upper": False}, "LinalgCholesky": [SQ, {"self": "@sq", "upper": True}], "CholeskySolve": {"self": "@b", "input2": "@low"}, "CholeskyInverse": {"self": "@low"}, "LinalgQR": [{"A": "@b"}, {"A": "@b", "mode": "complete"}],
    "LinalgSVD": [{"A": "@b"}, {"A": "@b", "full_matrices": False}], "LinalgEig": SQ, "LinalgEigVals": SQ, "LinalgEigH": SQ, "LinalgEigValsH": SQ, "LinalgLUSolve": {"LU": "@lu", "pivots": "@pivots", "B": "@rhs"}, "LinalgLU": [{}, {"pivot": True}], "LinalgMatrixNorm": [{"self": "@sq", "ord": "fro"}, {"self": "@sq", "ord": "nuc", "keepdim": True}], "LinalgMatrixRank": {"self": "@sq", "tol": 0.1}, "LinalgCond": [SQ, {"self": "@sq", "p": 1.0}],
    "LinalgVecDot": [{"x": "@x", "y": "@y"}, {"x": "@x", "y": "@y", "dim": 1}], "LinalgTensorInv": {"self": "@sq", "ind": 1}, "LinalgTensorSolve": {"self": "@sq", "other": "@row"}, "LinalgLstSq": {"self": "@tall", "b": "@vec4c", "driver": "gelsd"}, "LinalgDet": {}, "LinalgInv": {}, "LinalgSLogDet": {},
    "FFT": [SIG, {"self": "@x", "dim": 0, "norm": "ortho"}, {"self": "@signal", "n": 5}], "IFFT": {"self": "@z"}, "RFFT": SIG, "IRFFT": {"self": "@half", "n": 7}, "HFFT": {"self": "@half"}, "IHFFT": SIG, "FFT2": {"norm": "forward"}, "IFFT2": {"self": "@z2"}, "IRFFT2": {"self": "@z2", "s": [2, 3]}, "FFTN": [{}, {"dim": [0]}], "IFFTN": {"self": "@z2"}, "IRFFTN": {"self": "@z2"}, "FFTShift": {"dim": [1]}, "IFFTShift": {},
    "STFT": {"self": "@signal", "n_fft": 4, "window": "@winds", "return_complex": True}, "ISTFT": {"self": "@spec", "n_fft": 4, "window": "@winds", "length": 16}, "Conv2dSame": [{"input": "@img", "weight": "@w", "bias": None, "padding": "same"}, {"input": "@img", "weight": "@w", "bias": None}], "PixelUnshuffle": {"self": "@img", "downscale_factor": 2}, "ChannelShuffle": {"self": "@img2", "groups": 2},
    "AlphaDropout": {"p": 0.5, "train": True}, "SoftShrink": {"lambd": 0.5}, "HardShrink": {"lambd": 0.5}, "Threshold": {"threshold": 0.0, "value": -7.0}, "RReLU": [{}, {"lower": 0.1, "upper": 0.2, "training": True}], "NativeLayerNorm": {"normalized_shape": [3], "weight": None, "bias": None}, "NativeGroupNorm": {"input": "@img2", "weight": "@gw", "bias": None, "N": 1, "C": 2, "HxW": 16, "group": 1},
    "MaxPool2dIndices": {"self": "@img", "kernel_size": [2]}, "MaxUnpool2d": {"self": "@pool", "indices": "@poolidx", "output_size": [4, 4]}, "FractionalMaxPool2d": {"self": "@img", "kernel_size": [2, 2], "output_size": [2, 2], "random_samples": "@samples"}, "Im2Col": {"self": "@img", "kernel_size": [2, 2], "dilation": [1, 1], "padding": [0, 0], "stride": [2, 2]},
    "Col2Im": {"self": "@cols", "output_size": [4, 4], "kernel_size": [2, 2], "dilation": [1, 1], "padding": [0, 0], "stride": [2, 2]}, "Pad": [{"self": "@x", "pad": [1, 0, 0, 1], "value": 9.0}, {"self": "@img", "pad": [1, 1, 2, 0], "mode": "reflect"}, {"self": "@seq", "pad": [1, 2], "mode": "circular"}], "AffineGrid": {"theta": "@theta", "size": [1, 1, 2, 2], "align_corners": False},
    "GridSampler": [{"input": "@img", "grid": "@grid", "interpolation_mode": 0, "padding_mode": 0, "align_corners": False}, {"input": "@img", "grid": "@grid", "interpolation_mode": 1, "padding_mode": 1, "align_corners": True}], "UpsampleNearest2dScale": {"input": "@img", "scale_factors": [0.5, 1.5]}, "UpsampleBilinear2dScale": {"input": "@img", "align_corners": False, "scale_factors": [0.5, 1.5]},
    "UpsampleBicubic2dScale": {"input": "@img", "align_corners": False, "scale_factors": [1.5, 1.0]}, "UpsampleLinear1dScale": {"input": "@seq", "align_corners": True, "scale_factors": [1.75]}, "UpsampleTrilinear3dScale": {"input": "@vol", "align_corners": False, "scale_factors": [1.5, 1.0, 2.0]}, "OneHot": [{"self": "@small", "num_classes": 4}, {"self": "@small", "num_classes": -1}],
    "EmbeddingBag": [{"weight": "@table", "indices": "@bag", "offsets": "@offsets"}, {"weight": "@table", "indices": "@bag", "offsets": "@offsets", "mode": 2}], "EmbeddingRenorm_": {"self": "@table", "indices": "@bag", "max_norm": 1.0, "norm_type": 2.0},
    "RNNTanh": {"input": "@xs", "hx": "@h0", "params": ["@wi", "@wh", "@b2", "@b2"], "has_biases": True, "num_layers": 1, "dropout": 0.0, "train": False, "bidirectional": False, "batch_first": False}, "RNNReLU": {"input": "@xs", "hx": "@h0", "params": ["@wi", "@wh"], "has_biases": False, "num_layers": 1, "dropout": 0.0, "train": False, "bidirectional": False, "batch_first": False},
    "LSTMCell": {"input": "@x1", "hx": ["@h1", "@c1"], "w_ih": "@wi8", "w_hh": "@wh8", "b_ih": "@b8", "b_hh": "@b8"}, "GRUCell": {"input": "@x1", "hx": "@h1", "w_ih": "@wi6", "w_hh": "@wh6", "b_ih": "@b6", "b_hh": None}, "MarginRankingLoss": [{"input1": "@x", "target": "@signs23"}, {"input1": "@x", "target": "@signs23", "margin": 0.5, "reduction": 2}],
    "CosineEmbeddingLoss": {"input1": "@x", "target": "@signs", "margin": 0.2, "reduction": 0}, "HingeEmbeddingLoss": {"target": "@signs23", "margin": 0.5}, "TripletMarginLoss": [{"anchor": "@x", "positive": "@y", "negative": "@u"}, {"anchor": "@x", "positive": "@y", "negative": "@u", "margin": 9.0, "p": 1.0, "swap": True, "reduction": 0}], "MultiMarginLoss": [{"self": "@logits", "target": "@cls"}, {"self": "@logits", "target": "@cls", "margin": 0.5, "reduction": 0}],
    "MultilabelMarginLoss": {"self": "@logits", "target": "@multi"}, "SoftMarginLoss": {"target": "@signs23"}, "PoissonNLLLoss": {"target": "@big", "log_input": True, "full": True, "reduction": 1}, "CTCLoss": {"log_probs": "@logp", "targets": "@targets", "input_lengths": "@in_len", "target_lengths": "@tgt_len"}, "NLLLoss2d": {"self": "@logp2d", "target": "@cls2d"},
    "Unflatten": {"self": "@flat", "dim": 0, "sizes": [2, -1]}, "MoveDim": {"self": "@bm", "source": 0, "destination": 2}, "SwapAxes": {"axis0": 0, "axis1": 1}, "ViewDType": {"self": "@row", "dtype": "int32"}, "BroadcastTo": {"self": "@row", "size": [2, 3]}, "BroadcastTensors": {"tensors": ["@x", "@row"]}, "ExpandAs": {"self": "@row", "other": "@x"}, "Repeat": {"self": "@row", "repeats": [2, 2]}, "Tile": {"dims": [1, 2]},
    "RepeatInterleave": [{"repeats": 2}, {"repeats": 2, "dim": 1}], "RepeatInterleaveTensor": {"repeats": "@rep", "dim": 1}, "Flip": {"dims": [0, 1]}, "Roll": {"shifts": [1], "dims": [1]}, "Rot90": {"k": 1, "dims": [0, 1]}, "SqueezeDims": {"self": "@img", "dim": [0, 1]}, "AtLeast2d": {"self": "@row"}, "Unfold": {"self": "@signal", "dimension": 0, "size": 4, "step": 6}, "AsStrided": [{"self": "@row", "size": [2, 2], "stride": [1, 1]}, {"self": "@signal", "size": [2], "stride": [3], "storage_offset": 4}],
    "SplitSizes": {"self": "@signal", "split_sizes": [10, 6], "dim": 0}, "TensorSplit": {"self": "@signal", "sections": 3, "dim": 0}, "BlockDiag": {"tensors": ["@mat22", "@row"]}, "MeshGrid": {"tensors": ["@row", "@col"], "indexing": "xy"}, "CartesianProd": {"tensors": ["@row", "@col"]}, "Combinations": [{"self": "@row", "r": 2}, {"self": "@row", "r": 2, "with_replacement": True}],
    "PadSequence": [{"sequences": ["@row", "@col"], "batch_first": True, "padding_value": -1.0}, {"sequences": ["@row", "@col"], "padding_side": "left"}], "SliceScatter": {"src": "@b2row", "dim": 1, "start": 0, "end": 2, "step": 2}, "SelectScatter": {"src": "@row", "dim": 0, "index": 1}, "Vander": [{"x": "@row"}, {"x": "@row", "N": 2, "increasing": True}], "Slice": {"dim": 1, "start": 0, "end": 3, "step": 2},
    "Take": {"index": "@small"}, "TakeAlongDim": {"indices": "@idx", "dim": 0}, "MaskedSelect": {}, "NonZero": {"self": "@mask"}, "ArgWhere": {"self": "@mask"}, "ScatterReduce": [{"reduce": "sum"}, {"reduce": "amax", "include_self": False}],
    "SearchSorted": [{"sorted_sequence": "@sorted", "self": "@x"}, {"sorted_sequence": "@sorted", "self": "@x", "right": True, "out_int32": True}], "Bucketize": {"boundaries": "@sorted"}, "IndexTensors": {"indices": ["@perm", None]}, "IndexPut": {"indices": [None, "@perm"], "values": "@one"}, "IndexPut_": {"indices": [None, "@dups"], "values": "@one", "accumulate": True}, "Alias": {},
    "SumTo": {"dim": [1], "keepdim": False, "dtype": "float64"}, "ProdDim": {}, "AMax": {"dim": [0, 1]}, "AMin": {"dim": [1]}, "AMinMax": [{}, {"dim": 1}], "LogSumExp": {"dim": [1]}, "NaNMedian": {"self": "@nan"}, "NaNMean": {"self": "@nan4"}, "NaNSum": {"self": "@nan4", "dim": [0]}, "Mode": {"self": "@words"}, "KthValue": {"k": 2, "dim": 1}, "Quantile": [{"q": 0.4}, {"q": 0.4, "dim": 1, "keepdim": True, "interpolation": "lower"}],
    "QuantileTensor": {"q": "@quant", "dim": 1}, "NaNQuantile": {"self": "@nan4", "q": 0.5}, "VarMean": [{}, {"dim": [1], "correction": 0.0}], "StdMean": {"dim": [0], "keepdim": True}, "CountNonZero": [{"self": "@n"}, {"self": "@n", "dim": 1}], "AllDim": {"self": "@mask"}, "AnyDim": {"self": "@mask", "keepdim": False}, "CumMax": {"dim": 1}, "Diff": [{}, {"n": 2}, {"dim": 0, "append": "@x1row"}], "Trapezoid": {"y": "@signal", "dx": 0.5}, "CumulativeTrapezoid": {"y": "@signal", "dx": 0.5},
    "HistC": {"bins": 4, "min": -2.0, "max": 3.0}, "Histogram": [{"bins": 3}, {"bins": 2, "range": [-1.0, 1.0], "density": True}], "BinCount": [{"self": "@words"}, {"self": "@words", "weights": "@flat", "minlength": 6}], "Renorm": {"maxnorm": 1.0}, "SegmentReduce": {"data": "@signal", "reduce": "max", "lengths": "@lens"},
    "Sort": {"dim": 1}, "SortStable": {"dim": 0, "self": "@words"}, "ArgSort": {"dim": 1}, "TopKWith": {"k": 2, "largest": False}, "UniqueConsecutive": {"self": "@words", "return_inverse": True, "return_counts": True}, "Unique": {"self": "@words", "return_inverse": True, "return_counts": True}, "UniqueDim": {"self": "@n", "dim": 0, "return_counts": True},
    "Bernoulli": UNIT, "Multinomial": [{"self": "@u", "num_samples": 2}, {"self": "@weights", "num_samples": 3, "replacement": True}], "Poisson": POS, "Binomial": {"count": "@count", "prob": "@prob"}, "NormalOf": {"mean": "@means", "std": "@stds"}, "RandIntLike": {"low": 0, "high": 50}, "FullLike": {"fill_value": 3.0}, "NewZeros": {"size": [2]}, "NewOnes": {"size": []}, "NewFull": {"size": [2, 1], "fill_value": 4.0}, "NewEmpty": {"size": [3, 0, 2]}, "TypeAs": {"other": "@n"},
    "Trapezoid": {"y": "@signal", "dx": 0.5, "dim": 0}, "CumulativeTrapezoid": {"y": "@signal", "dx": 0.5, "dim": 0}, "ScatterScalar": {"value": 7.0}, "ScatterScalar_": {"value": 7.0}, "MaskedFill_": {"value": 7.0}, "Clamp_": {}, "TensorDot": {"self": "@bm", "other": "@bn", "dims_self": [2], "dims_other": [1]}, "NormOrd": {"ord": 1.0}, "NormDim": {"ord": 1.0, "dim": [0], "keepdim": False}, "BCELoss": {"self": "@u", "target": "@u"}, "Median": {"self": "@vec4"}, "MedianDim": {"dim": 1},
}
TENSORS |= {
    "vec4c": TENSORS["vec4"].view(4, 1).clone(), "pool": torch.max_pool2d(TENSORS["img"], 2), "poolidx": torch.nn.functional.max_pool2d(TENSORS["img"], 2, return_indices=True)[1], "cols": torch.arange(16.0).view(1, 4, 4), "logp2d": torch.log_softmax(torch.arange(6.0).view(1, 3, 1, 2) % 4, 1), "cls2d": t([[[2, 0]]]),
    "b2row": t([[5.0], [6.0]]), "dups": t([1, 1]), "nan4": t([1.0, math.nan, 4.0]), "quant": t([0.25, 0.75]), "x1row": t([[1.0, -1.0, 0.5]]), "lens": t([10, 6]),
}
# Undefined values; and operators that tests of foreach operators, packages nn and optim compare with PyTorch.
NOT_HERE = set(
    "EmptyLike BAddBMM Conv1d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d GroupNorm InstanceNorm RMSNorm Softplus MaxPool1d MaxPool3d AvgPool1d AvgPool3d AdaptiveAvgPool1d"
    " AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d UpsampleNearest1d UpsampleNearest2d UpsampleNearest3d UpsampleLinear1d UpsampleBilinear2d UpsampleBicubic2d UpsampleTrilinear3d"
    " PixelShuffle FeatureDropout EmbeddingWith ScaledDotProductAttention LSTM GRU".split()
)


def operators():
    """Yield schema name, Go method, whether it is a function, parameters and fields of each line."""
    for line in (HERE.parent / "ops.txt").read_text().splitlines():
        found = re.match(r"([\w.]+)\s+(func )?(\w+)\((.*?)\)\s+-- ", line)
        if not found or line.startswith("#"):
            continue
        name, function, method, args = found.groups()
        params, _, fields = args.partition("{")
        split = lambda text: [a.strip() for a in text.rstrip("}").split(",") if a.strip()]
        yield name, method, bool(function), split(params), split(fields)


def plain(value):
    if isinstance(value, torch.Tensor):
        value = value.resolve_conj()
        flat = torch.view_as_real(value) if value.is_complex() else value
        values = [v if isinstance(v, (int, bool)) or math.isfinite(v) else str(v) for v in flat.reshape(-1).tolist()]
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "values": values}
    return value


def resolve(value):
    if isinstance(value, str) and value.startswith("@"):
        return TENSORS[value[1:]].clone()
    if isinstance(value, list):
        return [resolve(v) for v in value]
    return value


def case(name, method, function, params, fields, given):
    base, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, base), overload or "default")
    schema = op._schema
    names = [re.sub(r"(=.*|\?|\.\.\.| int)$", "", p) for p in params + fields]
    receiver = None if function else next(a.name for a in schema.arguments if str(a.type) == "Tensor")
    kwargs = {}
    for a in schema.arguments:
        if a.name in given:
            kwargs[a.name] = given[a.name]
        elif a.name == receiver or a.name in names[: len(params)]:
            index = None if a.name == receiver else names.index(a.name)
            fixed = None if index is None else re.search("=(.*)$", params[index])
            kwargs[a.name] = {"none": None, "true": True}[fixed.group(1)] if fixed else DEFAULTS["self" if a.name == receiver and a.name not in DEFAULTS else a.name]
    unknown = set(given) - {a.name for a in schema.arguments}
    assert not unknown, (method, unknown)
    torch.manual_seed(3)
    real = {k: getattr(torch, v) if k == "dtype" else resolve(v) for k, v in kwargs.items()}
    results = op(**real)
    if results is None:
        results = []
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    found = {"method": method, "args": [kwargs[n] for n, p in zip(names, params) if "=" not in p], "results": [plain(r) for r in results]}
    if receiver:
        found["self"] = kwargs[receiver]
    options = {n: kwargs[n] for n in names[len(params) :] if n in kwargs}
    if fields:
        found["options"] = options
    return found


def main():
    elsewhere = (HERE.parent / "values_test.go").read_text()
    cases, methods = [], set()
    for name, method, function, params, fields in operators():
        methods.add(method)
        if method in NOT_HERE or method.startswith(("Foreach", "Fused")) or method not in CASES and re.search(rf"\.{method}\(", elsewhere):
            continue
        given = CASES.get(method, {})
        for one in given if isinstance(given, list) else [given]:
            cases.append(case(name, method, function, params, fields, one))
    used = set(re.findall(r'"@(\w+)"', json.dumps(cases)))
    tensors = {k: plain(v) for k, v in TENSORS.items() if k in used}
    lines = ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases)
    (HERE / "operators.json").write_text('{"tensors":' + json.dumps(tensors, separators=(",", ":")) + ',\n"cases":[\n' + lines + "\n]}\n")
    assert set(CASES) <= methods, set(CASES) - methods


main()
