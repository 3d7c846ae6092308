"""From a decoded image to a model input: the settings of timm, torchvision and others as one small value.

    x = (crop(resize(image)) / 255 - mean) / std

Resizing and cropping are torchvision's own on a Pillow image, so they give the pixels that the models were evaluated
with. They run in worker processes and hand over uint8; scaling and normalisation run on the batch, on the device.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral, Real
from typing import Any, Literal, final

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from dubito.errors import BrokenImageError, ModelError, ValueRangeError
from dubito.threads import RandomStates, one_at_a_time
from dubito.types import Json, Transform
from dubito.validate import check_choice

_REPEATS = 10
_LARGEST = 89 * 10**6
"""Pixels of a resized image, as many as Pillow decodes without a warning."""
INTERPOLATIONS = ("nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos")
"""Those of torchvision, which is imported where images are resized: it is slow to import."""
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
NewTransform = Transform | Callable[[Image.Image], Tensor] | Mapping[str, Any]
"""Another transform than a model's own, or by name the settings in which it differs."""


@final
@dataclass(frozen=True, init=False)
class Preprocess:
    """Resize, centre crop, scale, normalise.

    Attributes:
        size: Height and width of the model's input; one number is a square.
        resize: The short side before the crop, an exact (height, width), or None to leave the size alone.
        interpolation: "nearest", "bilinear", "bicubic" or "lanczos", with antialiasing.
        mean: Subtracted from pixels in 0..1, in the order of `channels`.
        std: Divides what is left.
        channels: The order that the model expects.
    """

    draws = False
    size: tuple[int, int]
    resize: int | tuple[int, int] | None = None
    interpolation: str = "bicubic"
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    channels: Literal["RGB", "BGR"] = "RGB"

    def __init__(
        self,
        size: int | Sequence[int],
        resize: int | Sequence[int] | None = None,
        interpolation: str = "bicubic",
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        channels: Literal["RGB", "BGR"] = "RGB",
    ) -> None:
        sides = _pixels(size, "size must be (height, width), or one number for a square")
        if resize is not None:
            resize = _pixels(resize, "resize must be the short side, (height, width) or None")
        check_choice(interpolation, INTERPOLATIONS, by="Preprocess", what="interpolation")
        check_choice(channels, ["RGB", "BGR"], by="Preprocess", what="channels")
        sides = (sides, sides) if isinstance(sides, int) else sides
        vars(self).update(size=sides, resize=resize, interpolation=interpolation, channels=channels)  # frozen
        vars(self).update(mean=_per_channel(mean, "mean"), std=_per_channel(std, "std"))

    def prepare(self, image: Image.Image) -> Tensor:
        """An RGB image to uint8 (h, w, 3)."""
        from torchvision.transforms import InterpolationMode  # noqa: PLC0415 (slow to import)
        from torchvision.transforms import functional as pixels  # noqa: PLC0415

        if self.resize is not None:
            target = self.resize if isinstance(self.resize, int) else list(self.resize)
            if isinstance(target, int) and target**2 * max(image.size) > _LARGEST * min(image.size):
                raise BrokenImageError(
                    f"an image of {image.width}x{image.height} pixels is too long and thin: with {target} pixels on "
                    f"its short side, as the model needs, it would have more than {_LARGEST // 10**6} million. Crop it."
                )
            image = pixels.resize(image, target, InterpolationMode(self.interpolation))
        if (image.height, image.width) != self.size:
            image = pixels.center_crop(image, list(self.size))
        return torch.from_numpy(np.array(image))

    def finish(self, batch: Tensor) -> Float[Tensor, "n ..."]:
        """Pixels (n, h, w, 3) to normalised (n, 3, h, w) in channels_last memory; a float batch is left as it is."""
        if batch.is_floating_point():
            return batch
        if self.channels == "BGR":
            batch = batch.flip(-1)
        n, h, w, _ = batch.shape
        if (h, w) != self.size:
            raise ModelError(
                f"pixels must come as {self.size[0]}x{self.size[1]}, the model's input size; got {h}x{w}. "
                f"Pass them as images, which are resized, and not as ready inputs."
            )
        # Whole rows of pixels at once: three channels alone are too few for the processor's vector units.
        mean, std = (torch.tensor(value, device=batch.device).repeat(w) for value in (self.mean, self.std))
        rows = batch.reshape(n, h, 3 * w).float().div_(255).sub_(mean).div_(std)
        return rows.view(n, h, w, 3).permute(0, 3, 1, 2)

    def describe(self) -> Json:
        """The settings themselves."""
        return {"kind": "preprocess", **asdict(self)}


@final
@dataclass(frozen=True)
class FunctionTransform:
    """Any callable from a Pillow image to a float tensor: a torchvision Compose, a processor of transformers.

    Attributes:
        function: The callable.
        draws: Whether it may draw random numbers, without using them: until `describe` has seen that it does not.
    """

    function: Callable[[Image.Image], Tensor]
    draws: bool = field(default=True, init=False, repr=False, compare=False)

    def prepare(self, image: Image.Image) -> Tensor:
        """The callable on one image."""
        out = self.function(image)
        if not isinstance(out, Tensor):
            raise ModelError(
                f"transform must turn an image into a tensor; got {type(out).__name__}. "
                f"End it with torchvision.transforms.ToTensor()."
            )
        return out

    def finish(self, batch: Tensor) -> Float[Tensor, "n ..."]:
        """The batch as it is; the callable has done the rest."""
        return _ready(batch, "a callable")

    def describe(self) -> Json:
        """A hash of what it does to a fixed image."""
        y, x = np.mgrid[0:301, 0:413]  # a fixed picture with all colours and fine texture, not square
        card = Image.fromarray(np.stack([x % 256, y % 256, (x * y) % 251], axis=-1).astype(np.uint8))
        with one_at_a_time:
            random = RandomStates()
            try:
                first = self.prepare(card.copy())
                # Many times, because a random flip does nothing half of the time.
                same = all(torch.equal(first, self.prepare(card.copy())) for _ in range(_REPEATS))
            finally:
                drew = bool(random.restore())
        vars(self).update(draws=drew)  # frozen
        if not same:
            raise ModelError(
                "transform gives two different tensors for one image, so nothing computed from it could be reproduced. "
                "Leave random augmentation out of it."
            )
        acts = hashlib.blake2b(first.contiguous().numpy().tobytes(), digest_size=16).hexdigest()
        return {"kind": "function", "acts": acts}


@final
@dataclass(frozen=True)
class NoTransform:
    """For models whose inputs come ready as tensors: an image file is refused, a tensor passes."""

    draws = False

    def prepare(self, image: Image.Image) -> Tensor:
        """Refuse: the model was wrapped without a transform."""
        raise ModelError(
            f"this model was wrapped without a transform; got an image of {image.width}x{image.height} pixels. "
            f"Pass transform=... to dubito.wrap, or ready tensors as images."
        )

    def finish(self, batch: Tensor) -> Float[Tensor, "n ..."]:
        """The batch as it is."""
        return _ready(batch, "no transform")

    def describe(self) -> Json:
        """Nothing but its kind."""
        return {"kind": "none"}


def changed_transform(own: Any, change: NewTransform | None, name: str) -> Any:
    """A model's own transform, another one, or its own with other settings; its crop stays in ratio.

    >>> changed_transform(Preprocess(224, 256), {"size": 448, "interpolation": "bilinear"}, "timm:resnet50").resize
    512
    """
    if not isinstance(change, Mapping):
        return own if change is None else change
    if not isinstance(own, Preprocess):
        if "size" in change:
            return Preprocess(**change)
        raise ModelError(
            f"load: the transform of '{name}' has no settings that could be changed one by one. Pass all of them, "
            f"transform=dubito.Preprocess(size=..., mean=..., std=...)."
        )
    settings = dict(change)
    if "size" in settings and "resize" not in settings and own.resize is not None:
        (height, width), sides = Preprocess(settings["size"]).size, own.resize
        ratios = (height / own.size[0], width / own.size[1])
        settings["resize"] = (
            round(sides * min(ratios))
            if isinstance(sides, int)
            else tuple(round(side * ratio) for side, ratio in zip(sides, ratios, strict=True))
        )
    for key in settings:
        check_choice(key, list(asdict(own)), by="load", what="a setting of transform")
    return replace(own, **settings)


def input_size(change: NewTransform | None) -> tuple[int, int] | None:
    """Height and width of the inputs that another transform gives, if it says."""
    size = change.get("size") if isinstance(change, Mapping) else getattr(change, "size", None)
    return None if size is None else Preprocess(size).size


def _pixels(value: object, expected: str) -> int | tuple[int, int]:
    """One whole number, or two."""
    sides: Sequence[Any] = value if isinstance(value, tuple | list) and len(value) == 2 else [value]
    if not all(type(side) is not bool and isinstance(side, Integral) and int(side) > 0 for side in sides):
        raise ValueRangeError(
            f"Preprocess: {expected}, in whole pixels from 1 on; got {value!r}. "
            f"Say Preprocess(size=(224, 224), resize=256)."
        )
    return int(sides[0]) if len(sides) == 1 else (int(sides[0]), int(sides[1]))


def _per_channel(value: object, name: str) -> tuple[float, ...]:
    """Three numbers; a std of zero would divide by it."""
    three = value if isinstance(value, tuple | list) and len(value) == 3 else [None]
    if not all(isinstance(one, Real) and math.isfinite(one) and (one != 0 or name == "mean") for one in three):
        what = f"three numbers{'' if name == 'mean' else ' other than zero'}, one per channel"
        raise ValueRangeError(f"Preprocess: {name} must be {what}; got {value!r}. Say {name}=(0.5, 0.5, 0.5).")
    return tuple(three)


def _ready(batch: Tensor, transform: str) -> Float[Tensor, "n ..."]:
    if not batch.is_floating_point():
        raise ModelError(
            f"inputs must be floats for a model with {transform}; got {batch.dtype} of shape {tuple(batch.shape)}. "
            f"Only dubito.Preprocess knows how to scale and normalise pixels: use it, or pass finished inputs."
        )
    return batch
