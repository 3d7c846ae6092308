"""Corruptions of increasing severity, under which an uncertainty should grow; and those that stand in for OOD images.

Kirchhof et al., Pretrained Visual Uncertainties (2024), Figure 6, corrupt images in these four ways.
Their levels were never released (OPEN); ours are these five, and severity 0 is the image unchanged:

| severity | 1 | 2 | 3 | 4 | 5 | unit |
|---|---|---|---|---|---|---|
| blur | 0.005 | 0.01 | 0.02 | 0.04 | 0.08 | standard deviation, in short sides of the image |
| box | 0.1 | 0.25 | 0.4 | 0.6 | 0.8 | share of the area that is covered |
| zoom | 1.25 | 1.75 | 2.5 | 4 | 6 | magnification |
| noise | 0.04 | 0.08 | 0.16 | 0.32 | 0.64 | standard deviation, in full scales 0..255 |

Two more, ours, leave an image's fine detail or its spectrum, and nothing in its place:

| severity | 1 | 2 | 3 | 4 | 5 | unit |
|---|---|---|---|---|---|---|
| jigsaw | 2 | 3 | 4 | 6 | 8 | pieces along each side, which are shuffled |
| scramble | 0.2 | 0.4 | 0.6 | 0.8 | 1 | share of the phases of noise that is added to those of the image |

`STAND_INS` are those that change the whole image. The grey box is not one of them: at severity 5, it leaves a fifth of
the photograph as it was.

A seed fixes the noise, its phases, and the place of box and zoom for all severities: there, the levels of an image
differ in strength only.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, final

import numpy as np
from PIL import Image, ImageFilter
from torch import Tensor

from dubito.data.image_set import View, hash_array, hash_parts
from dubito.data.open import open_images
from dubito.errors import BrokenImageError
from dubito.storage import encode
from dubito.validate import check_choice, check_number

Corruption = Callable[[Image.Image, int, int], Image.Image]
"""An RGB image, a severity 0..5 and a seed to an image of the same size."""

_BLUR = (0.0, 0.005, 0.01, 0.02, 0.04, 0.08)
_BOX = (0.0, 0.1, 0.25, 0.4, 0.6, 0.8)
_ZOOM = (1.0, 1.25, 1.75, 2.5, 4.0, 6.0)
_NOISE = (0.0, 0.04, 0.08, 0.16, 0.32, 0.64)
_JIGSAW = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
_SCRAMBLE = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def corrupt(image: Image.Image, kind: str, severity: int, seed: int = 0) -> Image.Image:
    """An RGB image under one of `CORRUPTIONS` or `STAND_INS`.

    >>> corrupt(Image.new("RGB", (10, 10), "white"), "box", 5).getpixel((5, 5))
    (128, 128, 128)
    """
    check_choice(kind, _KINDS, by="corrupt", what="kind")
    return _KINDS[kind](image, severity, seed)


def blur(image: Image.Image, severity: int, seed: int = 0) -> Image.Image:  # noqa: ARG001 (nothing random here)
    """Gaussian blur."""
    return image.filter(ImageFilter.GaussianBlur(_level(_BLUR, severity) * min(image.size)))


def box(image: Image.Image, severity: int, seed: int = 0) -> Image.Image:
    """A grey box of the image's own proportions over a part of it."""
    covered = _level(_BOX, severity)
    corrupted = image.copy()
    if severity:
        corrupted.paste((128, 128, 128), _window(image.size, covered**0.5, seed))
    return corrupted


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


def jigsaw(image: Image.Image, severity: int, seed: int = 0) -> Image.Image:
    """A grid of pieces of the image, shuffled; where they differ in size by a pixel, they are stretched."""
    pieces = int(_level(_JIGSAW, severity))
    across, down = (min(pieces, side) for side in image.size)
    columns, rows = (
        [round(side * i / count) for i in range(count + 1)]
        for side, count in zip(image.size, (across, down), strict=True)
    )
    places = [(columns[i], rows[j], columns[i + 1], rows[j + 1]) for j in range(down) for i in range(across)]
    corrupted = image.copy()
    for to, piece in zip(places, np.random.default_rng(seed).permutation(len(places)).tolist(), strict=True):
        size = (to[2] - to[0], to[3] - to[1])
        corrupted.paste(image.crop(places[piece]).resize(size), to)
    return corrupted


def scramble(image: Image.Image, severity: int, seed: int = 0) -> Image.Image:
    """The phases of white noise, added to those of the image in all channels alike; mean and amplitudes stay."""
    share = _level(_SCRAMBLE, severity)
    pixels = np.asarray(image, dtype=np.float64)
    phases = np.angle(np.fft.rfft2(np.random.default_rng(seed).standard_normal(pixels.shape[:2])))
    phases[0, 0] = 0.0  # a negative mean of the noise would invert the image's own
    spectrum = np.fft.rfft2(pixels, axes=(0, 1)) * np.exp(1j * share * phases)[..., None]
    scrambled = np.fft.irfft2(spectrum, pixels.shape[:2], axes=(0, 1))
    return Image.fromarray(np.rint(scrambled.clip(0, 255)).astype(np.uint8))


CORRUPTIONS: Mapping[str, Corruption] = MappingProxyType({"blur": blur, "box": box, "zoom": zoom, "noise": noise})
"""The four of the paper by name."""
STAND_INS: Mapping[str, Corruption] = MappingProxyType(
    {"blur": blur, "zoom": zoom, "noise": noise, "jigsaw": jigsaw, "scramble": scramble}
)
"""The five of `CorruptedCopies` by name."""
_KINDS = {**CORRUPTIONS, **STAND_INS}


@final
class Corrupted(View):
    """The same images under the same ids and labels, corrupted when they are read.

    What is random depends on `seed` and the image's id alone, and is the same in every set. The digest covers the
    images, the kind, its effect at this severity, and the seed.

    Args:
        images: RGB images, or whatever `open_images` takes; finished model inputs cannot be corrupted.
        kind: One of blur, box, zoom, noise, jigsaw, scramble.
        severity: 0 (unchanged) to 5.
        seed: Seed of the places and the noise.
    """

    def __init__(self, images: Any, kind: str, severity: int, *, seed: int = 0) -> None:
        images = open_images(images)
        # Runs here once, so that a wrong kind or severity is reported now and not by a worker. What becomes of a fixed
        # picture distinguishes one definition of a severity from another.
        colours = np.arange(32 * 32 * 3, dtype=np.uint32).reshape(32, 32, 3).astype(np.uint8)
        effect = hash_array(np.asarray(corrupt(Image.fromarray(colours), kind, severity)))
        super().__init__(images, images.ids, images.labels, images.classes)
        self.name = f"{images.name} ({kind} {severity})"
        self.ready = False
        self.kind, self.severity, self.seed = kind, severity, seed
        self._mark = hash_parts(encode(f"{kind} {severity} {seed}"), effect)

    def contents(self, rows: Sequence[int]) -> list[bytes]:
        """A hash of each image and of how it is corrupted."""
        return [hash_parts(content, self._mark) for content in super().contents(rows)]

    def read_hashed(self, index: int) -> tuple[Image.Image | Tensor | BrokenImageError, bytes]:
        """The image, corrupted, or why it is broken, and its hash."""
        image, content = super().read_hashed(index)
        return image, hash_parts(content, self._mark)

    def change(self, index: int, image: Image.Image | Tensor) -> Image.Image:
        """The image, corrupted."""
        own = int.from_bytes(hash_parts(encode(self.ids[index]), encode(str(self.seed)))[:8], "little")
        return corrupt(self.pixels_of(index, image, "corruption"), self.kind, self.severity, own)


@final
class CorruptedCopies(View):
    """Every image once under each of `STAND_INS`, all at one severity: what a model sees when images leave its domain.

    Ids are `blur-5/ID` and so on, labels those of the images. All copies by one corruption stand together, in the order
    of the images.

    Args:
        images: RGB images, or whatever `open_images` takes; finished model inputs cannot be corrupted.
        severity: 1 to 5.
        seed: Seed of the places and the noise.

    >>> copies = CorruptedCopies(np.zeros((2, 8, 8, 3), np.uint8))
    >>> len(copies), copies.ids[0], copies.ids[-1]
    (10, 'blur-5/000000', 'scramble-5/000001')
    """

    def __init__(self, images: Any, *, severity: int = 5, seed: int = 0) -> None:
        images = open_images(images)
        check_number(severity, "[1, 5]", by="CorruptedCopies", what="severity", whole=True, hint="5 is the strongest.")
        self.levels = [Corrupted(images, kind, severity, seed=seed) for kind in STAND_INS]
        ids = [f"{kind}-{severity}/{name}" for kind in STAND_INS for name in images.ids]
        labels = None if images.labels is None else images.labels.repeat(len(STAND_INS))
        super().__init__(images, ids, labels, images.classes)
        self.name, self.ready = f"{images.name} (corrupted, severity {severity})", False

    def row_of(self, index: int) -> int:
        """The position of the image that is copied."""
        return index % len(self.images)

    def contents(self, rows: Sequence[int]) -> list[bytes]:
        """A hash of each image and of how it is corrupted."""
        return [self._level(row).contents([self.row_of(row)])[0] for row in rows]

    def read_hashed(self, index: int) -> tuple[Image.Image | Tensor | BrokenImageError, bytes]:
        """The corrupted image, or why it is broken, and its hash."""
        return self._level(index).read_hashed(self.row_of(index))

    def change(self, index: int, image: Image.Image | Tensor) -> Image.Image:
        """The image, corrupted."""
        return self._level(index).change(self.row_of(index), image)

    def _level(self, index: int) -> Corrupted:
        return self.levels[index // len(self.images)]


def is_corrupted_copy(name: str) -> bool:
    """Whether an id is that of a copy: the corruption, its severity, and the id of the image.

    >>> is_corrupted_copy("blur-5/000000"), is_corrupted_copy("cats/000000")
    (True, False)
    """
    return re.fullmatch(r"[^/]+-\d+/.+", name, re.DOTALL) is not None


def _level(levels: tuple[float, ...], severity: int) -> float:
    check_number(severity, "[0, 5]", by="corrupt", what="severity", whole=True, hint="0 leaves images unchanged.")
    return levels[severity]


def _window(size: tuple[int, int], scale: float, seed: int) -> tuple[int, int, int, int]:
    """A box of `scale` times the image's sides, at least one pixel, at a place that the seed chooses."""
    places = np.random.default_rng(seed).random(2)
    sides = [max(1, round(side * scale)) for side in size]
    left, top = (round(float(place) * (side - part)) for place, side, part in zip(places, size, sides, strict=True))
    return left, top, left + sides[0], top + sides[1]
