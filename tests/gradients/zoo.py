"""Small networks, of which each uses its weights in another way."""

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

C = 4
"""Classes."""


class Tokens(nn.Module):
    """Pixels as tokens, an encoder of torch's own, and a readout."""

    def __init__(self, *, batch_first: bool, pick: int | None) -> None:
        super().__init__()
        self.batch_first, self.pick = batch_first, pick
        self.embed = nn.Linear(3, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 12, batch_first=batch_first)
        self.head = nn.Linear(8, C)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).permute((0, 2, 1) if self.batch_first else (2, 0, 1)).contiguous()
        output = self.encoder(self.embed(tokens))
        output = output if self.batch_first else output.transpose(0, 1)
        return self.head(output.mean(1) if self.pick is None else output[:, self.pick])


class Attention(nn.Module):
    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.attention = nn.MultiheadAttention(6, 2, batch_first=batch_first, kdim=3, vdim=3)
        self.embed = nn.Linear(3, 6, bias=False)
        self.head = nn.Linear(6, C)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).permute((0, 2, 1) if self.batch_first else (2, 0, 1))
        output, _ = self.attention(self.embed(tokens), tokens, tokens)
        return self.head(output.mean(1 if self.batch_first else 0))


class Pixels(nn.Module):
    """Pixels are words; their places are words too."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.word = nn.Embedding(6, 5, padding_idx=padding)
        self.place = nn.Embedding(16, 5)
        self.mix = nn.Linear(5, 5)
        self.head = nn.Linear(5, C)

    def forward(self, x: Tensor) -> Tensor:
        index = (x[:, 0] * 2).long().clamp(0, 5).flatten(1)
        places = torch.arange(index.shape[1], device=x.device)
        return self.head(torch.tanh(self.mix(self.word(index) + self.place(places))).mean(1))


class Scaled(nn.Module):
    """A class token, a position parameter, a layer scale, a shift, a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.place = nn.Parameter(torch.randn(1, 17, 6))
        self.embed = nn.Conv2d(3, 6, 1)
        self.norm = nn.LayerNorm(6)
        self.gamma = nn.Parameter(torch.rand(6))
        self.shift = nn.Parameter(torch.rand(6))
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, C)
        self.heat = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + self.place
        tokens = tokens + self.gamma * torch.tanh(self.mix(self.norm(tokens)) - self.shift)
        weights = (tokens @ tokens[:, :1].transpose(1, 2)).softmax(1)
        return self.head((weights * tokens).sum(1)) * self.heat


class Shared(nn.Module):
    """One layer three times, once transposed; two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)
        self.b.weight = self.a.weight
        self.again = nn.Conv2d(3, 3, 3, padding=1)
        self.head = nn.Linear(12, C)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.again(torch.tanh(self.again(x))))
        z = F.adaptive_avg_pool2d(x, 2).flatten(1)
        z = torch.tanh(self.b(torch.tanh(self.a(z))))
        return self.head(torch.tanh(self.a(z)) @ self.a.weight)


class Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-3)
        return F.conv2d(x, w, self.bias, self.stride, self.padding)


class Relative(nn.Module):
    """Attention with a table of biases by distance, as Swin has it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(3, 12, bias=False)
        self.table = nn.Parameter(torch.randn(7, 1))
        self.head = nn.Linear(4, C)
        place = torch.arange(16) // 4
        self.register_buffer("index", (place[:, None] - place[None]) + 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.flatten(2).transpose(1, 2)).chunk(3, -1)
        weights = (q @ k.transpose(1, 2) + self.table[self.index.flatten()].view(16, 16)).softmax(-1)
        return self.head((weights @ v).mean(1))


class Windows(nn.Module):
    """Windows of an image as rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.conv, self.norm = nn.Linear(12, 12), nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm1d(12)
        self.head = nn.Linear(12, C)

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        windows = x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).reshape(n * 4, 3, 2, 2)
        rows = self.norm(self.mix(torch.tanh(self.conv(windows)).flatten(1)))
        return self.head(torch.tanh(rows).view(n, 4, 12).sum(1))


class RMS(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm, self.head = nn.Linear(3, 8), nn.RMSNorm(8), nn.Linear(8, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.mix(x.flatten(2).transpose(1, 2))).tanh().mean(1))


def convolution(*layers: nn.Module) -> nn.Module:
    """Layers on images of three channels, a pool and a head for what they give."""
    body = nn.Sequential(*layers, nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    with torch.no_grad():
        width = body.eval()(torch.zeros(2, 3, 8, 8)).shape[1]
    return nn.Sequential(*body.train(), nn.Linear(width, C))


def rows(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *layers)


def timm_model(name: str, **options) -> nn.Module:
    return timm.create_model(name, num_classes=C, **options)


class Lines(nn.Module):
    """Of one dimension, and of three."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Conv1d(3, 5, 5, stride=2, padding=2, groups=1)
        self.up = nn.ConvTranspose1d(5, 4, 3, stride=2)
        self.norm = nn.BatchNorm1d(4)
        self.cube = nn.Conv3d(1, 3, (2, 3, 3), stride=(1, 2, 1), padding=1)
        self.head = nn.Linear(7, C)

    def forward(self, x: Tensor) -> Tensor:
        line = self.norm(self.up(torch.tanh(self.line(x.flatten(2))))).tanh().mean(2)
        return self.head(torch.cat([line, self.cube(x[:, None]).tanh().mean((2, 3, 4))], 1))


CONVOLUTIONS = {
    "conv": lambda: convolution(nn.Conv2d(3, 6, 3)),
    "conv_stride_padding": lambda: convolution(nn.Conv2d(3, 6, 3, stride=2, padding=1, bias=False)),
    "conv_dilation": lambda: convolution(nn.Conv2d(3, 6, (3, 2), dilation=2, padding=(2, 1))),
    "conv_groups": lambda: convolution(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 8, 3, groups=2, padding=1, stride=(2, 1))),
    "conv_wide": lambda: convolution(nn.Conv2d(3, 40, 3, stride=4), nn.Tanh(), nn.Conv2d(40, 40, 2)),
    "conv_wide_groups": lambda: convolution(nn.Conv2d(3, 64, 3, stride=4), nn.Tanh(), nn.Conv2d(64, 64, 2, groups=2)),
    "depthwise_3": lambda: convolution(nn.Conv2d(3, 3, 3, padding=1, groups=3), nn.Conv2d(3, 6, 1)),
    "depthwise_multiplied": lambda: convolution(nn.Conv2d(3, 6, 5, padding=2, groups=3)),
    "depthwise_5": lambda: convolution(nn.Conv2d(3, 3, 5, padding=2, groups=3)),
    "depthwise_5_stride": lambda: convolution(nn.Conv2d(3, 3, 5, padding=2, stride=2, groups=3)),
    "depthwise_7_dilation": lambda: convolution(nn.Conv2d(3, 3, (7, 5), padding=(6, 3), dilation=(2, 1), groups=3)),
    "depthwise_7_stride_3": lambda: convolution(nn.Conv2d(3, 3, 7, padding=(3, 2), stride=(3, 2), groups=3)),
    "conv_1": lambda: convolution(nn.Conv2d(3, 6, 1, stride=2), nn.Conv2d(6, 5, 1, padding=1, bias=False)),
    "conv_same": lambda: convolution(nn.Conv2d(3, 4, (3, 5), padding="same", dilation=(1, 2))),
    "conv_reflect": lambda: convolution(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")),
    "conv_transposed": lambda: convolution(
        nn.ConvTranspose2d(3, 5, 3, stride=2, padding=1, output_padding=1), nn.ConvTranspose2d(5, 4, 1)
    ),
    "conv_transposed_groups": lambda: convolution(
        nn.Conv2d(3, 6, 1), nn.ConvTranspose2d(6, 4, (2, 3), groups=2, dilation=2)
    ),
}
"""On (3, 8, 8)."""

NORMS = {
    "batch_norm": lambda: convolution(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.BatchNorm2d(6)),
    "batch_norm_of_rows": lambda: rows(nn.Linear(48, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, C)),
    "layer_norm": lambda: rows(nn.Linear(48, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, C, bias=False)),
    "layer_norm_of_images": lambda: rows(
        nn.Unflatten(1, (3, 4, 4)), nn.LayerNorm([3, 4, 4]), nn.Flatten(), nn.Linear(48, C)
    ),
    "group_norm": lambda: convolution(nn.Conv2d(3, 6, 3), nn.GroupNorm(3, 6)),
    "instance_norm": lambda: convolution(nn.Conv2d(3, 6, 2), nn.InstanceNorm2d(6, affine=True)),
    "rms_norm": RMS,
    "prelu": lambda: convolution(nn.Conv2d(3, 6, 3), nn.PReLU(6), nn.PReLU()),
}
"""On (3, 4, 4), but for those of convolutions, which take any size."""

OTHERS = {
    "linear": lambda: rows(nn.Linear(48, 9), nn.GELU(), nn.Linear(9, 9, bias=False), nn.GELU(), nn.Linear(9, C)),
    "attention": lambda: Attention(batch_first=True),
    "attention_tokens_first": lambda: Attention(batch_first=False),
    "encoder": lambda: Tokens(batch_first=True, pick=None),
    "encoder_tokens_first": lambda: Tokens(batch_first=False, pick=None),
    "encoder_class_token": lambda: Tokens(batch_first=True, pick=0),
    "encoder_class_token_first": lambda: Tokens(batch_first=False, pick=0),
    "encoder_token_in_the_middle": lambda: Tokens(batch_first=False, pick=7),
    "pixels": Pixels,
    "pixels_padding": lambda: Pixels(padding=0),
    "scaled": Scaled,
    "shared": Shared,
    "weight_norm": lambda: rows(weight_norm(nn.Linear(48, 6)), nn.Tanh(), weight_norm(nn.Linear(6, C, bias=False))),
    "spectral_norm": lambda: rows(spectral_norm(nn.Linear(48, 6)), nn.Tanh(), nn.Linear(6, C)),
    "standardised": lambda: convolution(Standardised(3, 6, 3, padding=1), Standardised(6, 5, 1)),
    "relative": Relative,
    "windows": Windows,
    "lines": Lines,
}
"""On (3, 4, 4)."""

TIMM = {
    "test_vit": lambda: timm_model("test_vit", img_size=32),
    "test_resnet": lambda: timm_model("test_resnet"),
    "test_efficientnet": lambda: timm_model("test_efficientnet"),
    "test_convnext": lambda: timm_model("test_convnext"),
    "test_mambaout": lambda: timm_model("test_mambaout"),
    "test_byobnet": lambda: timm_model("test_byobnet"),
}
"""On (3, 32, 32)."""

SIZES = {
    **dict.fromkeys(CONVOLUTIONS, 8),
    **dict.fromkeys(NORMS, 4),
    **dict.fromkeys(OTHERS, 4),
    "group_norm": 6,
    "batch_norm": 6,
    "prelu": 6,
}
KINDS = {**CONVOLUTIONS, **NORMS, **OTHERS}


def made(kind: str) -> nn.Module:
    """A network with fixed weights."""
    torch.manual_seed(0)
    return (KINDS | TIMM)[kind]()
