"""A small classifier of colours, its pictures, and an audit of them."""

import numpy as np
import torch
from torch import Tensor, nn

import dubito
from dubito.audit.audit import Audit, audit

HALF = dubito.Preprocess((8, 8), mean=(0.5,) * 3, std=(0.5,) * 3)


NORMALISED = "wrong normalisation or channel order"


COUNT = 120


class Colours(nn.Module):
    """Eight classes, whether red, green and blue are above one half: 4 r + 2 g + b. Inputs (v - 0.5) / 0.5."""

    def __init__(self, sharpness: float = 6.0, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.middle = middle or nn.Identity()
        self.fc = nn.Linear(3, 8)
        bits = torch.tensor([[k >> 2 & 1, k >> 1 & 1, k & 1] for k in range(8)])
        with torch.no_grad():
            self.fc.weight.copy_(sharpness * (2.0 * bits - 1))
            self.fc.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.middle(x.mean((2, 3))))


class Batched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.5)

    def forward(self, z: Tensor) -> Tensor:
        return self.drop(self.norm(z))


def pictures(n: int = COUNT, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Pixels (n, 8, 8, 3) around 0.4 or 0.6 in each colour, with much noise from pixel to pixel; and the classes."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 8, n)
    bits = np.stack([labels >> 2 & 1, labels >> 1 & 1, labels & 1], -1)
    colour = 0.4 + 0.2 * bits + 0.04 * rng.standard_normal((n, 3))
    pixels = colour[:, None, None] + 0.15 * rng.uniform(-1, 1, (n, 8, 8, 3))
    return (255 * pixels.clip(0, 1)).round().astype(np.uint8), labels


PIXELS, LABELS = pictures()


def look(module: nn.Module, images=PIXELS, labels=LABELS, transform=HALF, **options) -> Audit:
    model = dubito.wrap(module.eval() if options.pop("eval", True) else module, transform=transform, name="colours")
    return audit(model, images, labels=labels, workers=0, progress=False, **options)


def only(result: Audit):
    """The one finding."""
    assert len(result.issues) == 1, str(result)
    return result.issues[0]
