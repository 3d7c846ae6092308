"""Other ways from pixels to inputs: what people take for one another, as affine maps of finished inputs.

A transform that normalises is  x = a v + b  in every channel, with v the pixel in 0..1. `measured` finds a and b from
the outside, by giving it plain black, white, grey and red pictures. Then any other normalisation is an affine map of
its inputs, and nothing has to be decoded twice.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from dubito.models.transform import IMAGENET_MEAN, IMAGENET_STD
from dubito.types import Transform

OWN = "its own transform"
SWAPPED = "its own, red and blue swapped"
_SIDE = 512
_GREY = 128

_KNOWN: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "ImageNet mean and std": (IMAGENET_MEAN, IMAGENET_STD),
    "mean 0.5 and std 0.5": ((0.5,) * 3, (0.5,) * 3),
    "(x - 127) / 128": ((127 / 255,) * 3, (128 / 255,) * 3),
    "pixels 0..1": ((0.0,) * 3, (1.0,) * 3),
    "pixels 0..255": ((0.0,) * 3, (1 / 255,) * 3),
}
"""Mean and std of pixels in 0..1, red first."""


@final
@dataclass(frozen=True)
class Scale:
    """Inputs are `slope * v + start`, v in 0..1; `bgr` if blue comes first."""

    slope: Float[Tensor, "3"]
    start: Float[Tensor, "3"]
    bgr: bool


@final
@dataclass(frozen=True)
class Alternative:
    """Another input in place of x: `x * slope + start`, after the channels have been turned round if `swap`.

    Attributes:
        name: How findings call it.
        repair: What to write to get it.
    """

    name: str
    repair: str
    slope: Float[Tensor, "3"] | None = None
    start: Float[Tensor, "3"] | None = None
    swap: bool = False

    def __call__(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """The inputs that the model would have got."""
        if self.swap:
            x = x.flip(1)
        if self.slope is None or self.start is None:
            return x
        slope, start = (value.to(x.device, x.dtype).view(1, 3, 1, 1) for value in (self.slope, self.start))
        return x * slope + start


def alternatives(x: Float[Tensor, "n ..."], scale: Scale | None) -> list[Alternative]:
    """Its own transform first, then others that differ from it; only the first for inputs that are no colour images."""
    own = Alternative(OWN, "")
    if x.dim() != 4 or x.shape[1] != 3:
        return [own]
    others = [] if scale is None else [_normalised(name, scale) for name in _KNOWN]
    differing = [other for other in others if not _same(other)]
    return [own, *differing, _swapped(scale)]


def measured(transform: Transform) -> Scale | None:
    """The scale of a transform; None if it does not treat every channel of a plain picture alike and by itself."""
    try:
        black, white, grey, red = (
            _plain(transform, colour) for colour in ((0, 0, 0), (255,) * 3, (_GREY,) * 3, (255, 0, 0))
        )
    except Exception:  # a user's transform may raise anything on a picture that it was not made for
        return None
    slope = white - black
    if any(value.shape != (3,) for value in (black, white, grey, red)) or bool((slope.abs() < 1e-6).any()):
        return None
    if bool(((grey - black) / slope - _GREY / 255).abs().max() > 0.01):
        return None
    share = (red - black) / slope
    for bgr in (False, True):
        if bool((share - torch.eye(3)[2 if bgr else 0]).abs().max() < 0.01):
            return Scale(slope, black, bgr)
    return None


def guessed(x: Float[Tensor, "n ..."]) -> Scale | None:
    """The scale of inputs that came ready: known only where they look like bare pixels, 0..1 or 0..255."""
    known = x[x.isfinite()]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
    if low < 0 or high > 255 or high == 0:
        return None
    return Scale(torch.full((3,), 1.0 if high <= 1 else 255.0), torch.zeros(3), bgr=False)


def _normalised(name: str, scale: Scale) -> Alternative:
    """Back to v = (x - start) / slope, and from there to (v - mean) / std."""
    mean, std = (torch.tensor(values[::-1] if scale.bgr else values) for values in _KNOWN[name])
    numbers = f"mean={_tuple(mean)}, std={_tuple(std)}"
    repair = f"Normalise with {name}: transform=dubito.Preprocess(..., {numbers}), on pixels in 0..1."
    return Alternative(name, repair, 1 / (scale.slope * std), -(scale.start / scale.slope + mean) / std)


def _tuple(values: Float[Tensor, "3"]) -> str:
    return f"({', '.join(f'{value:.4g}' for value in values.tolist())})"


def _swapped(scale: Scale | None) -> Alternative:
    """The channels of the picture turned round, each then scaled as its new place is."""
    order = "" if scale is None else f'channels="{"RGB" if scale.bgr else "BGR"}" in dubito.Preprocess, or '
    repair = f"Turn the channels round: {order}image[..., ::-1] where images are read (OpenCV reads BGR)."
    if scale is None:
        return Alternative(SWAPPED, repair, swap=True)
    slope = scale.slope / scale.slope.flip(0)
    return Alternative(SWAPPED, repair, slope, scale.start - scale.start.flip(0) * slope, swap=True)


def _same(other: Alternative) -> bool:
    """Whether the alternative leaves inputs as they are, up to a thousandth of a normalised unit."""
    if other.slope is None or other.start is None:
        return True
    return bool((other.slope - 1).abs().max() < 1e-3) and bool(other.start.abs().max() < 1e-3)


def _plain(transform: Transform, colour: tuple[int, ...]) -> Float[Tensor, "c"]:
    """What a picture of one colour becomes: the median, because a crop may add a border."""
    picture = Image.new("RGB", (_SIDE, _SIDE), colour)
    x = transform.finish(transform.prepare(picture)[None]).detach().float().cpu()
    return x[0].flatten(1).median(1).values
