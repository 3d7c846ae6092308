"""Images made worse step by step, to watch an uncertainty grow: blur, a grey box, zoom and noise.

Kirchhof et al., Pretrained Visual Uncertainties (2024), Figure 6, deteriorate images in these four ways.
Their levels were never released (OPEN); ours are these five, and severity 0 is the image unchanged:

| severity | 1 | 2 | 3 | 4 | 5 | unit |
|---|---|---|---|---|---|---|
| blur | 0.005 | 0.01 | 0.02 | 0.04 | 0.08 | standard deviation, in short sides of the image |
| box | 0.1 | 0.25 | 0.4 | 0.6 | 0.8 | share of the area that is covered |
| zoom | 1.25 | 1.75 | 2.5 | 4 | 6 | magnification |
| noise | 0.04 | 0.08 | 0.16 | 0.32 | 0.64 | standard deviation, in full scales 0..255 |

A seed fixes where the box and the zoom lie and the noise, for all severities alike: the steps of one image
differ in strength only.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from PIL import Image, ImageFilter

from dubito.errors import ValueRangeError

Deterioration = Callable[[Image.Image, int, int], Image.Image]
"""An RGB image, a severity 0..5 and a seed to an image of the same size."""

_BLUR = (0.0, 0.005, 0.01, 0.02, 0.04, 0.08)
_BOX = (0.0, 0.1, 0.25, 0.4, 0.6, 0.8)
_ZOOM = (1.0, 1.25, 1.75, 2.5, 4.0, 6.0)
_NOISE = (0.0, 0.04, 0.08, 0.16, 0.32, 0.64)
_GREY = (128, 128, 128)


def deteriorate(image: Image.Image, kind: str, severity: int, seed: int = 0) -> Image.Image:
    """An RGB image made worse in one of the ways of `DETERIORATIONS`.

    >>> deteriorate(Image.new("RGB", (10, 10), "white"), "box", 5).getpixel((5, 5))
    (128, 128, 128)
    """
    if kind not in DETERIORATIONS:
        raise ValueRangeError(f"kind must be one of {', '.join(DETERIORATIONS)}; got '{kind}'. Choose one.")
    return DETERIORATIONS[kind](image, severity, seed)


def blur(image: Image.Image, severity: int, seed: int = 0) -> Image.Image:  # noqa: ARG001 (nothing random here)
    """Gaussian blur."""
    sigma = _level(_BLUR, severity) * min(image.size)
    return image.filter(ImageFilter.GaussianBlur(sigma)) if severity else image.copy()


def box(image: Image.Image, severity: int, seed: int = 0) -> Image.Image:
    """A grey box of the image's own proportions over a part of it."""
    covered = _level(_BOX, severity)
    worse = image.copy()
    if severity:
        worse.paste(_GREY, _window(image.size, covered**0.5, seed))
    return worse


def zoom(image: Image.Image, severity: int, seed: int = 0) -> Image.Image:
    """A part of the image, magnified to the full size."""
    magnification = _level(_ZOOM, severity)
    window = _window(image.size, 1 / magnification, seed)
    return image.resize(image.size, Image.Resampling.BICUBIC, box=window) if severity else image.copy()


def noise(image: Image.Image, severity: int, seed: int = 0) -> Image.Image:
    """Independent Gaussian noise on every pixel and channel, clipped to 0..255."""
    sigma = 255 * _level(_NOISE, severity)
    pixels = np.asarray(image, dtype=np.float64)
    noisy = pixels + sigma * np.random.default_rng(seed).standard_normal(pixels.shape)
    return Image.fromarray(np.rint(noisy.clip(0, 255)).astype(np.uint8))


DETERIORATIONS: Mapping[str, Deterioration] = MappingProxyType({"blur": blur, "box": box, "zoom": zoom, "noise": noise})
"""The four ways by name."""


def _level(ladder: tuple[float, ...], severity: int) -> float:
    if severity not in range(len(ladder)):
        raise ValueRangeError(
            f"severity must be an integer from 0 (unchanged) to {len(ladder) - 1}; got {severity}. Choose one of those."
        )
    return ladder[severity]


def _window(size: tuple[int, int], scale: float, seed: int) -> tuple[int, int, int, int]:
    """A box of `scale` times the image's sides, at least one pixel, at a place that the seed chooses."""
    places = np.random.default_rng(seed).random(2)
    sides = [max(1, round(side * scale)) for side in size]
    left, top = (round(float(place) * (side - part)) for place, side, part in zip(places, size, sides, strict=True))
    return left, top, left + sides[0], top + sides[1]
