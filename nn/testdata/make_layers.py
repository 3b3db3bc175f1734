"""Writes layers.safetensors and steps.safetensors: what PyTorch computes for the modules and losses of layers_test.go.

    python make_layers.py            (needs torch 2.11, safetensors, numpy; run beside this file)

Each module is made after torch.manual_seed(1), and computes after torch.manual_seed(4). The file holds, by the case's name: init/ its parameters and buffers, in
float32; x, its input; and, with 64 and 32 for the dtypes, its output y64, and of the scalar (y * weights(y)).sum() the
gradients dx64 (of x) and grad64/ (of its parameters); and buffer64/, its buffers after the forward pass. A case that ends in "_eval" is in evaluation mode. A loss has x, target, its value y64 and dx64.
init_ are tensors of shape [3 4 2 2] that torch.nn.init has filled after torch.manual_seed(1).

steps.safetensors has 20 steps of torch.optim.SGD on the parameters and on x, with 64, 32 and 16 for the dtypes, of which
16 is bfloat16, by the case's name: losses64, of modules the means of y * weights(y); after the steps x64, param64/ and
buffer64/. With 16 also y16, dx16 and grad16/ of the first step. A case without losses16 is one that CPUs cannot compute in
bfloat16.
"""
import copy
import pathlib

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class GPTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(11, 8)
        self.wpe = nn.Embedding(6, 8)
        self.ln_1 = nn.LayerNorm(8)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.ln_2 = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(approximate="tanh"), nn.Linear(32, 8))
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, tokens):
        n = tokens.shape[1]
        x = self.wte(tokens) + self.wpe(torch.arange(n))
        mask = torch.ones(n, n, dtype=torch.bool).triu(1)
        h = self.ln_1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        x = x + self.mlp(self.ln_2(x))
        return self.head(x)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())
        self.pool = nn.MaxPool2d(2)
        self.down2 = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU(0.2))
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.reduce = nn.ConvTranspose2d(8, 4, 3, padding=1)
        self.out = nn.Sequential(nn.Conv2d(8, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1))

    def forward(self, x):
        a = self.down1(x)
        b = self.reduce(self.up(self.down2(self.pool(a))))
        return self.out(torch.cat([a, b], 1))


def dcgan():
    return nn.Sequential(
        nn.ConvTranspose2d(5, 8, 4, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.ConvTranspose2d(4, 3, 4, stride=2, padding=1, bias=False), nn.Tanh(),
    )


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


class CrossAttention(nn.MultiheadAttention):
    """Queries are the first two positions; keys and values are all; the last key is masked."""

    def forward(self, x):
        mask = torch.zeros(2, x.shape[0], dtype=torch.bool)
        mask[:, -1] = True
        return super().forward(x[:2], x, x.flip(0), attn_mask=mask, need_weights=False)[0]


class Output(nn.Module):
    """The first result of a recurrent layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]

    def state_dict(self, **kwargs):
        return self.inner.state_dict(**kwargs)

    def named_parameters(self, *args, **kwargs):
        return self.inner.named_parameters(*args, **kwargs)

    def named_buffers(self, *args, **kwargs):
        return self.inner.named_buffers(*args, **kwargs)


class Unrolled(Output):
    """The hidden states of a cell for the sequences x [L N in]."""

    def forward(self, x):
        state, outputs = None, []
        for step in x:
            state = self.inner(step, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs)


class Lengths(Output):
    """The outputs and states of a recurrent layer for sequences of different lengths, joined in one vector."""

    def __init__(self, inner, lengths):
        super().__init__(inner)
        self.lengths = lengths

    def forward(self, x):
        packed = pack_padded_sequence(x, self.lengths, batch_first=self.inner.batch_first, enforce_sorted=False)
        y, states = self.inner(packed)
        y, _ = pad_packed_sequence(y, batch_first=self.inner.batch_first, total_length=x.shape[self.inner.batch_first])
        states = states if isinstance(states, tuple) else (states,)
        return torch.cat([t.flatten() for t in (y, *states)])


class Bags(nn.EmbeddingBag):
    """Bags of 3, 0 and 4 indices, with weights."""

    def __init__(self):
        super().__init__(7, 3, mode="sum")

    def forward(self, x):
        return super().forward(x, torch.tensor([0, 3, 3]), torch.arange(7).to(self.weight.dtype) / 4)


def encoder(**options):
    return nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.0, **options)


class MaskedEncoder(nn.TransformerEncoder):
    """The last position of the second sequence is padding."""

    def __init__(self):
        super().__init__(encoder(batch_first=True), 2, norm=nn.LayerNorm(8), enable_nested_tensor=False)

    def forward(self, x):
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[1, -1] = True
        return super().forward(x, src_key_padding_mask=padding)


class Decoder(nn.TransformerDecoder):
    """Decodes the first two positions, each without those after it, from all without the last."""

    def __init__(self, norm, **options):
        super().__init__(nn.TransformerDecoderLayer(8, 2, dim_feedforward=16, dropout=0.0, **options), 2, norm=norm)

    def forward(self, x):
        memory_mask = torch.zeros(2, x.shape[0], dtype=torch.bool)
        memory_mask[:, -1] = True
        return super().forward(x[:2], x, tgt_mask=torch.ones(2, 2, dtype=torch.bool).triu(1), memory_mask=memory_mask)


SEQUENCES, IMAGES, VOLUMES = (2, 4, 7), (2, 4, 6, 6), (1, 4, 4, 4, 4)

# The module and the shape of its input.
MODULES = {
    "linear": (lambda: nn.Linear(6, 3), (2, 5, 6)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), SEQUENCES),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=2, dilation=2), IMAGES),
    "conv2d_flat": (lambda: nn.Conv2d(4, 2, (1, 5), padding=(0, 2)), IMAGES),
    "conv1d_same": (lambda: nn.Conv1d(4, 6, 4, padding="same", dilation=3), SEQUENCES),
    "conv2d_sizes": (lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), IMAGES),
    "conv2d_reflect": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=(1, 2), padding_mode="reflect"), IMAGES),
    "conv2d_same_circular": (lambda: nn.Conv2d(4, 6, (2, 3), padding="same", padding_mode="circular", groups=2), IMAGES),
    "conv3d_same": (lambda: nn.Conv3d(4, 2, (3, 2, 1), padding="same"), VOLUMES),
    "conv3d": (lambda: nn.Conv3d(4, 2, 2, bias=False), VOLUMES),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(4, 3, 3, stride=2), SEQUENCES),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), IMAGES),
    "conv_transpose2d_sizes": (lambda: nn.ConvTranspose2d(4, 3, (3, 2), stride=(2, 1), padding=(1, 0), output_padding=(1, 0), dilation=(1, 2)), IMAGES),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(4, 2, 2, dilation=2), VOLUMES),
    "batch_norm1d": (lambda: nn.BatchNorm1d(4), SEQUENCES),
    "batch_norm1d_flat": (lambda: nn.BatchNorm1d(4, affine=False, momentum=0.3), (5, 4)),
    "batch_norm2d": (lambda: nn.BatchNorm2d(4, eps=1e-3), IMAGES),
    "batch_norm2d_eval": (lambda: nn.BatchNorm2d(4), IMAGES),
    "batch_norm2d_untracked_eval": (lambda: nn.BatchNorm2d(4, track_running_stats=False), IMAGES),
    "batch_norm3d": (lambda: nn.BatchNorm3d(4), VOLUMES),
    "instance_norm1d": (lambda: nn.InstanceNorm1d(4), SEQUENCES),
    "instance_norm2d": (lambda: nn.InstanceNorm2d(4, affine=True), IMAGES),
    "instance_norm2d_tracked": (lambda: nn.InstanceNorm2d(4, track_running_stats=True), IMAGES),
    "instance_norm2d_tracked_eval": (lambda: nn.InstanceNorm2d(4, track_running_stats=True), IMAGES),
    "instance_norm3d": (lambda: nn.InstanceNorm3d(4), VOLUMES),
    "layer_norm": (lambda: nn.LayerNorm(7), SEQUENCES),
    "layer_norm_two": (lambda: nn.LayerNorm([4, 7], eps=1e-3, bias=False), SEQUENCES),
    "rms_norm": (lambda: nn.RMSNorm(7), SEQUENCES),
    "rms_norm_eps": (lambda: nn.RMSNorm(7, eps=0.1, elementwise_affine=False), SEQUENCES),
    "group_norm": (lambda: nn.GroupNorm(2, 4), IMAGES),
    "embedding": (lambda: nn.Embedding(7, 3, padding_idx=2), None),
    "embedding_bag": (lambda: nn.EmbeddingBag(7, 3), None),
    "embedding_bag_sum": (lambda: nn.EmbeddingBag(7, 3, mode="sum", padding_idx=2), None),
    "embedding_bag_max": (lambda: nn.EmbeddingBag(7, 3, mode="max"), None),
    "embedding_bags": (Bags, None),
    "attention": (lambda: SelfAttention(8, 2), (3, 2, 8)),
    "attention_cross": (lambda: CrossAttention(8, 4), (3, 2, 8)),
    "attention_plain": (lambda: SelfAttention(8, 2, bias=False, batch_first=True), (2, 3, 8)),
    "encoder": (encoder, (3, 2, 8)),
    "encoder_first": (lambda: encoder(norm_first=True, activation="gelu", batch_first=True), (2, 3, 8)),
    "encoder_deep": (MaskedEncoder, (2, 3, 8)),
    "decoder": (lambda: Decoder(None), (3, 2, 8)),
    "decoder_first": (lambda: Decoder(nn.LayerNorm(8), norm_first=True, activation="gelu", bias=False), (3, 2, 8)),
    "lstm": (lambda: Output(nn.LSTM(4, 3)), (5, 2, 4)),
    "lstm_deep": (lambda: Output(nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True)), (2, 5, 4)),
    "gru": (lambda: Output(nn.GRU(4, 3, num_layers=2)), (5, 2, 4)),
    "gru_plain": (lambda: Output(nn.GRU(4, 3, bias=False, bidirectional=True)), (5, 2, 4)),
    "rnn": (lambda: Output(nn.RNN(4, 3)), (5, 2, 4)),
    "rnn_deep": (lambda: Output(nn.RNN(4, 3, num_layers=2, bidirectional=True, batch_first=True)), (2, 5, 4)),
    "rnn_relu": (lambda: Output(nn.RNN(4, 3, nonlinearity="relu", bias=False)), (5, 2, 4)),
    "lstm_lengths": (lambda: Lengths(nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True), [2, 5, 1]), (3, 5, 4)),
    "gru_lengths": (lambda: Lengths(nn.GRU(4, 3), [4, 2]), (5, 2, 4)),
    "rnn_lengths": (lambda: Lengths(nn.RNN(4, 3), [1, 5]), (5, 2, 4)),
    "rnn_relu_lengths": (lambda: Lengths(nn.RNN(4, 3, nonlinearity="relu"), [5, 2, 5]), (5, 3, 4)),
    "lstm_cell": (lambda: Unrolled(nn.LSTMCell(4, 3)), (5, 2, 4)),
    "lstm_cell_plain": (lambda: Output(nn.LSTMCell(4, 3, bias=False)), (2, 4)),
    "gru_cell": (lambda: Unrolled(nn.GRUCell(4, 3)), (5, 2, 4)),
    "gru_cell_plain": (lambda: nn.GRUCell(4, 3, bias=False), (2, 4)),
    "rnn_cell": (lambda: Unrolled(nn.RNNCell(4, 3)), (5, 2, 4)),
    "rnn_cell_relu": (lambda: nn.RNNCell(4, 3, nonlinearity="relu", bias=False), (2, 4)),
    "prelu": (lambda: nn.PReLU(4), IMAGES),
    "relu": (nn.ReLU, SEQUENCES),
    "relu6": (lambda: nn.ReLU6(), SEQUENCES),
    "leaky_relu": (nn.LeakyReLU, SEQUENCES),
    "gelu": (nn.GELU, SEQUENCES),
    "gelu_tanh": (lambda: nn.GELU(approximate="tanh"), SEQUENCES),
    "silu": (nn.SiLU, SEQUENCES),
    "mish": (nn.Mish, SEQUENCES),
    "hardswish": (nn.Hardswish, SEQUENCES),
    "hardsigmoid": (nn.Hardsigmoid, SEQUENCES),
    "sigmoid": (nn.Sigmoid, SEQUENCES),
    "tanh": (nn.Tanh, SEQUENCES),
    "softmax": (lambda: nn.Softmax(1), SEQUENCES),
    "log_softmax": (lambda: nn.LogSoftmax(-1), SEQUENCES),
    "elu": (lambda: nn.ELU(0.5), SEQUENCES),
    "selu": (nn.SELU, SEQUENCES),
    "softplus": (lambda: nn.Softplus(2, 1), SEQUENCES),
    "glu": (lambda: nn.GLU(1), SEQUENCES),
    "celu": (lambda: nn.CELU(0.5), SEQUENCES),
    "hardtanh": (nn.Hardtanh, SEQUENCES),
    "hardtanh_limits": (lambda: nn.Hardtanh(0, 2), SEQUENCES),
    "log_sigmoid": (nn.LogSigmoid, SEQUENCES),
    "softsign": (nn.Softsign, SEQUENCES),
    "max_pool1d": (lambda: nn.MaxPool1d(3, stride=2, padding=1), SEQUENCES),
    "max_pool2d": (lambda: nn.MaxPool2d(2, stride=1, dilation=2), IMAGES),
    "max_pool2d_sizes": (lambda: nn.MaxPool2d((3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), IMAGES),
    "max_pool3d": (lambda: nn.MaxPool3d(2), VOLUMES),
    "avg_pool1d": (lambda: nn.AvgPool1d(3, padding=1), SEQUENCES),
    "avg_pool2d": (lambda: nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False), IMAGES),
    "avg_pool2d_sizes": (lambda: nn.AvgPool2d((3, 2), stride=(1, 2), padding=(1, 0)), IMAGES),
    "avg_pool3d": (lambda: nn.AvgPool3d(3, stride=2, ceil_mode=True), VOLUMES),
    "adaptive_avg_pool1d": (lambda: nn.AdaptiveAvgPool1d(3), SEQUENCES),
    "adaptive_avg_pool2d": (lambda: nn.AdaptiveAvgPool2d(4), IMAGES),
    "adaptive_avg_pool3d": (lambda: nn.AdaptiveAvgPool3d(3), VOLUMES),
    "adaptive_max_pool1d": (lambda: nn.AdaptiveMaxPool1d(3), SEQUENCES),
    "adaptive_max_pool2d": (lambda: nn.AdaptiveMaxPool2d(4), IMAGES),
    "adaptive_max_pool3d": (lambda: nn.AdaptiveMaxPool3d(3), VOLUMES),
    "adaptive_avg_pool2d_sizes": (lambda: nn.AdaptiveAvgPool2d((1, 4)), IMAGES),
    "adaptive_avg_pool3d_sizes": (lambda: nn.AdaptiveAvgPool3d((1, 2, 3)), VOLUMES),
    "adaptive_max_pool2d_sizes": (lambda: nn.AdaptiveMaxPool2d((4, 1)), IMAGES),
    "adaptive_max_pool3d_sizes": (lambda: nn.AdaptiveMaxPool3d((3, 1, 2)), VOLUMES),
    "upsample_nearest1d": (lambda: nn.Upsample(scale_factor=2), SEQUENCES),
    "upsample_nearest2d": (lambda: nn.Upsample(size=(9, 5)), IMAGES),
    "upsample_nearest3d": (lambda: nn.Upsample(scale_factor=1.5), VOLUMES),
    "upsample_linear": (lambda: nn.Upsample(scale_factor=1.7, mode="linear"), SEQUENCES),
    "upsample_bilinear": (lambda: nn.Upsample(scale_factor=2.3, mode="bilinear"), IMAGES),
    "upsample_bilinear_corners": (lambda: nn.Upsample(size=(8, 8), mode="bilinear", align_corners=True), IMAGES),
    "upsample_bicubic": (lambda: nn.Upsample(scale_factor=2, mode="bicubic"), IMAGES),
    "upsample_trilinear": (lambda: nn.Upsample(scale_factor=2, mode="trilinear"), VOLUMES),
    "pixel_shuffle": (lambda: nn.PixelShuffle(2), IMAGES),
    "pixel_unshuffle": (lambda: nn.PixelUnshuffle(2), IMAGES),
    "pad_zero": (lambda: nn.ZeroPad2d((1, 2, 0, 3)), IMAGES),
    "pad_constant": (lambda: nn.ConstantPad1d((1, 2), 0.5), SEQUENCES),
    "pad_reflect": (lambda: nn.ReflectionPad2d((1, 2, 3, 0)), IMAGES),
    "pad_replicate": (lambda: nn.ReplicationPad3d((1, 2, 0, 1, 3, 0)), VOLUMES),
    "pad_circular": (lambda: nn.CircularPad2d((1, 2, 3, 0)), IMAGES),
    "dropout1d": (lambda: nn.Dropout1d(0.3), SEQUENCES),
    "dropout3d": (lambda: nn.Dropout3d(0.3), VOLUMES),
    "alpha_dropout": (lambda: nn.AlphaDropout(0.3), IMAGES),
    "alpha_dropout_eval": (lambda: nn.AlphaDropout(0.3), IMAGES),
    "dropout": (lambda: nn.Dropout(0.3), IMAGES),
    "dropout2d": (lambda: nn.Dropout2d(0.3), IMAGES),
    "dropout_eval": (lambda: nn.Dropout(0.5), IMAGES),
    "dropout2d_eval": (lambda: nn.Dropout2d(0.5), IMAGES),
    "flatten": (nn.Flatten, IMAGES),
    "unflatten": (lambda: nn.Unflatten(1, (2, -1)), IMAGES),
    "identity": (nn.Identity, IMAGES),
    "gpt": (GPTBlock, None),
    "unet": (UNet, (2, 2, 8, 8)),
    "dcgan": (dcgan, (3, 5, 1, 1)),
}

ROWS = [[1, 2, 6], [2, 0, 1]]
INDICES = {
    "embedding": ROWS, "embedding_bag": ROWS, "embedding_bag_sum": ROWS, "embedding_bag_max": ROWS,
    "embedding_bags": [1, 2, 6, 2, 0, 1, 1],
    "gpt": [[1, 2, 6, 10, 0, 3], [2, 0, 1, 1, 9, 4]],
}

INITS = {
    "normal": lambda t: nn.init.normal_(t, 0.5, 0.02),
    "uniform": lambda t: nn.init.uniform_(t, -2, 3),
    "constant": lambda t: nn.init.constant_(t, 0.25),
    "trunc_normal": lambda t: nn.init.trunc_normal_(t, 0.1, 0.5, -0.5, 1),
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "orthogonal": lambda t: nn.init.orthogonal_(t, 0.5),
    "kaiming_uniform": lambda t: nn.init.kaiming_uniform_(t, nonlinearity="relu"),
    "kaiming_normal": lambda t: nn.init.kaiming_normal_(t, nonlinearity="relu"),
    "kaiming_normal_fan_out": lambda t: nn.init.kaiming_normal_(t, mode="fan_out", nonlinearity="relu"),
}

STEPS, DTYPES = 20, {64: torch.float64, 32: torch.float32, 16: torch.bfloat16}

# The loss and the kind of its target.
LOSSES = {
    "l1": (F.l1_loss, "real"),
    "l1_sum": (lambda x, t: F.l1_loss(x, t, reduction="sum"), "real"),
    "mse": (F.mse_loss, "real"),
    "smooth_l1": (F.smooth_l1_loss, "real"),
    "smooth_l1_beta": (lambda x, t: F.smooth_l1_loss(x, t, beta=0.5), "real"),
    "huber": (F.huber_loss, "real"),
    "huber_delta": (lambda x, t: F.huber_loss(x, t, delta=0.5), "real"),
    "kl_div": (lambda x, t: F.kl_div(F.log_softmax(x, 1), t), "distribution"),
    "kl_div_batch": (lambda x, t: F.kl_div(F.log_softmax(x, 1), t.log(), reduction="batchmean", log_target=True), "distribution"),
    "bce": (lambda x, t: F.binary_cross_entropy(torch.sigmoid(x), t), "share"),
    "bce_logits": (F.binary_cross_entropy_with_logits, "share"),
    "bce_logits_weighted": (lambda x, t: F.binary_cross_entropy_with_logits(x, t, pos_weight=torch.full((6,), 3.0, dtype=x.dtype)), "share"),
    "cross_entropy": (F.cross_entropy, "class"),
    "cross_entropy_smooth": (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), "class"),
    "cross_entropy_soft": (F.cross_entropy, "distribution"),
    "nll": (lambda x, t: F.nll_loss(F.log_softmax(x, 1), t), "class"),
    "multi_margin": (F.multi_margin_loss, "class"),
    "poisson_nll": (F.poisson_nll_loss, "share"),
    "soft_margin": (F.soft_margin_loss, "sign"),
    "hinge_embedding": (F.hinge_embedding_loss, "sign"),
    "margin_ranking": (lambda x, t: F.margin_ranking_loss(x, x.flip(0), t, margin=0.5), "sign"),
    "multilabel_margin": (F.multilabel_margin_loss, "classes"),
    "cosine_embedding": (lambda x, t: F.cosine_embedding_loss(x, x.flip(1), t), "signs"),
    "triplet_margin": (lambda x, t: F.triplet_margin_loss(x, t, x.flip(0)), "real"),
    "ctc": (lambda x, t: F.ctc_loss(F.log_softmax(x, 1).unsqueeze(1), t[:1, :2], torch.tensor([4]), torch.tensor([2])), "classes"),
    "gaussian_nll": (lambda x, t: F.gaussian_nll_loss(x, t, x.flip(0).square()), "real"),
    "gaussian_nll_full": (lambda x, t: F.gaussian_nll_loss(x, t, x[:, :1].square(), full=True, eps=0.3, reduction="sum"), "real"),
}


def weights(y):
    """Numbers from -1.25 to 1.25 without a rounding error."""
    return ((torch.arange(y.numel()) * 7 % 11 - 5) / 4).reshape(y.shape)


def record(out, name, bits, module, x):
    module = copy.deepcopy(module).to(torch.float64 if bits == 64 else torch.float32)
    module.train(not name.endswith("_eval"))
    if x.is_floating_point():
        x = x.to(torch.float64 if bits == 64 else torch.float32, copy=True).requires_grad_()
    torch.manual_seed(4)  # for dropout
    y = module(x)
    (y * weights(y)).sum().backward()
    out[f"{name}/y{bits}"] = y.detach()
    if x.is_floating_point():
        out[f"{name}/dx{bits}"] = x.grad
    for key, p in module.named_parameters():
        out[f"{name}/grad{bits}/{key}"] = p.grad
    for key, b in module.named_buffers():
        out[f"{name}/buffer{bits}/{key}"] = b


def possible(bits, module, x):
    """Report whether there are kernels for the forward and backward pass of a module or function."""
    if isinstance(module, nn.Module):
        module = copy.deepcopy(module).to(DTYPES[bits])
    if x.is_floating_point():
        x = x.to(DTYPES[bits], copy=True).requires_grad_()
    try:
        module(x).sum().backward()
    except (NotImplementedError, RuntimeError) as e:
        if "not implemented for" in str(e) and bits == 16:
            return False
        raise
    return True


def train(out, name, bits, parameters, x, loss):
    """Take the steps on the parameters and, unless x has indices, on x."""
    opt = torch.optim.SGD([*parameters, *([x] if x.is_floating_point() else [])], lr=0.05, momentum=0.9, foreach=True)
    losses = []
    torch.manual_seed(4)  # for dropout
    for step in range(STEPS):
        opt.zero_grad()
        value = loss(step)
        value.backward()
        if bits == 16 and step == 0 and x.is_floating_point():
            out[f"{name}/dx16"] = x.grad.clone()
        yield step
        opt.step()
        losses.append(value.item())
    out[f"{name}/losses{bits}"] = torch.tensor(losses, dtype=torch.float64)
    if x.is_floating_point():
        out[f"{name}/x{bits}"] = x.detach()


def train_module(out, name, bits, module, x):
    module = copy.deepcopy(module).to(DTYPES[bits])
    module.train(not name.endswith("_eval"))
    if x.is_floating_point():
        x = x.to(DTYPES[bits], copy=True).requires_grad_()

    def loss(step):
        y = module(x)
        if bits == 16 and step == 0:
            out[f"{name}/y16"] = y.detach().clone()
        return (y * weights(y)).mean()

    for step in train(out, name, bits, module.parameters(), x, loss):
        if bits == 16 and step == 0:
            for key, p in module.named_parameters():
                out[f"{name}/grad16/{key}"] = p.grad.clone()
    for key, p in module.named_parameters():
        out[f"{name}/param{bits}/{key}"] = p.detach()
    for key, b in module.named_buffers():
        out[f"{name}/buffer{bits}/{key}"] = b


def train_loss(out, name, bits, loss, x, target):
    x = x.to(DTYPES[bits], copy=True).requires_grad_()
    target = target.to(DTYPES[bits]) if target.is_floating_point() else target
    for _ in train(out, name, bits, [], x, lambda _: loss(x, target)):
        pass


def save(out, name):
    path = pathlib.Path(__file__).with_name(name)
    save_file({k: v.contiguous() for k, v in out.items()}, path, metadata={"torch": torch.__version__.split("+")[0]})


def main():
    torch.set_num_threads(1)
    out, steps = {}, {}
    for name, (make, shape) in MODULES.items():
        torch.manual_seed(1)
        module = make()
        for key, t in module.state_dict().items():
            out[f"{name}/init/{key}"] = t.clone()
        torch.manual_seed(2)
        x = torch.tensor(INDICES[name]) if shape is None else torch.randn(shape, dtype=torch.float64) * 1.5
        out[f"{name}/x"] = x
        record(out, name, 64, module, x)
        record(out, name, 32, module, x)
        for bits in DTYPES:
            if possible(bits, module, x):
                train_module(steps, name, bits, module, x)
    torch.manual_seed(3)
    for name, (loss, kind) in LOSSES.items():
        x = torch.randn(4, 6, dtype=torch.float64)
        target = {
            "real": lambda: torch.randn(4, 6, dtype=torch.float64),
            "distribution": lambda: torch.softmax(torch.randn(4, 6, dtype=torch.float64), 1),
            "share": lambda: torch.rand(4, 6, dtype=torch.float64),
            "class": lambda: torch.randint(6, (4,)),
            "classes": lambda: torch.stack([torch.randperm(5)[:3] + 1 for _ in range(4)]).repeat(1, 2) * torch.tensor([1, 1, 0, 0, 0, 0]) - torch.tensor([0, 0, 1, 1, 1, 1]),
            "sign": lambda: torch.randint(2, (4, 6)).double() * 2 - 1,
            "signs": lambda: torch.randint(2, (4,)).double() * 2 - 1,
        }[kind]()
        out[f"loss_{name}/x"], out[f"loss_{name}/target"] = x, target
        for bits, dtype in ((64, torch.float64), (32, torch.float32)):
            leaf = x.to(dtype, copy=True).requires_grad_()
            y = loss(leaf, target.to(dtype) if target.is_floating_point() else target)
            y.backward()
            out[f"loss_{name}/y{bits}"], out[f"loss_{name}/dx{bits}"] = y.detach(), leaf.grad
        for bits in DTYPES:
            if possible(bits, lambda v: loss(v, target.to(v.dtype) if target.is_floating_point() else target), x):
                train_loss(steps, f"loss_{name}", bits, loss, x, target)
    for name, init in INITS.items():
        torch.manual_seed(1)
        out[f"init_{name}"] = init(torch.empty(3, 4, 2, 2))
    save(out, "layers.safetensors")
    save(steps, "steps.safetensors")


main()
