"""Random augmentation, fixed by a seed, an epoch and a position, and several augmented epochs as one longer set.

Kirchhof et al., Pretrained Visual Uncertainties (2024), appendix A, in this order:

    crop    a part of 0.08..1 of the area, sides 3/4..4/3, resized bilinearly or bicubically at random
    flip    left to right, with probability 0.5
    jitter  brightness, contrast and saturation by factors in 0.6..1.4, in random order, with probability 0.4; no hue

Their Table 3 puts a strong augmentation on top of half of the rows. How strong was never published (OPEN); ours:

| strong | what is done |
|---|---|
| augmix | torchvision's AugMix with its defaults (severity 3, three chains), after the jitter |
| cutmix | a box of another image is pasted in; its area is 1 - Beta(1, 1) before the border cuts it, as in CutMix |
| mixup | the weighted mean with another image, weight Beta(0.8, 0.8), as DeiT's recipe has it |
| blur | `corruptions.blur`, severity 1 to 5 at random |
| crop | a small crop, 0.08..0.25 of the area, instead of the usual one |
| box | `corruptions.box`, severity 1 to 5 at random |
| noise | `corruptions.noise`, severity 1 to 5 at random; not in their table |

What is drawn depends on (seed, epoch, position) alone, and nobody else's random numbers are changed. torchvision draws
from torch's global generator, so its state is set aside for that moment (`dubito.threads`).

Section 3.2 of the paper caches the representations of the whole training, "all epochs, including random augmentations";
`Augmented` is what their model would have seen, in the order of the epochs: row = epoch * n + image.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, cast, final, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor

from dubito.choices import Strong
from dubito.data.corruptions import corrupt
from dubito.data.image_set import View, hash_parts
from dubito.errors import ValueRangeError
from dubito.storage import encode
from dubito.threads import seeded
from dubito.types import Images, Json
from dubito.validate import check_choice, check_number

Size = tuple[int, int]
"""Height and width."""

_SMALL = (0.08, 0.25)
_ALPHA = {"cutmix": 1.0, "mixup": 0.8}
_PIXELS, _STRONG = 1, 2  # two streams of random numbers, so that mixing is known without an image
_SEEDS = 2**32


@final
@dataclass(frozen=True)
class Mix:
    """With which image another is mixed, and how much of the first stays.

    Attributes:
        partner: The other image's position.
        weight: The first image's share of the picture, and of the task loss.
        box: Where the other is pasted in, as shares: left, top, right, bottom; None blends the whole pictures.
    """

    partner: int
    weight: float
    box: tuple[float, float, float, float] | None

    def blend(self, image: Image.Image, other: Image.Image) -> Image.Image:
        """The mixed picture of two of one size; a box's edges are rounded to pixels."""
        if self.box is None:
            mean = self.weight * np.asarray(image, np.float64) + (1 - self.weight) * np.asarray(other, np.float64)
            return Image.fromarray(np.rint(mean).astype(np.uint8))
        (left, top, right, bottom), (w, h) = self.box, image.size
        edges = (round(left * w), round(top * h), round(right * w), round(bottom * h))
        mixed = image.copy()
        mixed.paste(other.crop(edges), edges)
        return mixed


@final
@dataclass(frozen=True)
class Augment:
    """The settings of random augmentation; the defaults are the paper's.

    Attributes:
        scale: The least and the greatest share of the area that a crop keeps.
        ratio: The least and the greatest width over height of a crop.
        flip: The probability of a flip.
        jitter: The probability of a colour jitter.
        brightness: The least and the greatest factor; likewise contrast and saturation.
        strong: A strong augmentation for some rows, or None.
        strong_share: The probability that a row gets it.
        seed: Another seed gives other crops, flips, jitters and partners.

    >>> Augment().strong, Augment(strong="mixup").mix(epoch=0, index=0, n=1)  # nothing to mix with
    (None, None)
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    jitter: float = 0.4
    brightness: tuple[float, float] = (0.6, 1.4)
    contrast: tuple[float, float] = (0.6, 1.4)
    saturation: tuple[float, float] = (0.6, 1.4)
    strong: Strong | None = None
    strong_share: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("flip", "jitter", "strong_share"):
            check_number(getattr(self, name), "[0, 1]", by="augment", what=name)
        for name in ("scale", "ratio", "brightness", "contrast", "saturation"):
            low, high = getattr(self, name)
            if not 0 <= low <= high or (name in ("scale", "ratio") and low == 0) or (name == "scale" and high > 1):
                most = " up to 1" if name == "scale" else ""
                raise ValueRangeError(
                    f"augment: {name} must be two growing positive numbers{most}; got ({low}, {high}). "
                    f"The default is {type(self).__dataclass_fields__[name].default}."
                )
        if self.strong is not None:
            check_choice(self.strong, get_args(Strong), by="augment", what="strong")
        check_number(self.seed, f"[0, {_SEEDS - 1}]", by="augment", what="seed", whole=True, hint="0 is usual.")

    @property
    def mixes(self) -> bool:
        """Some rows are made of two images."""
        return self.strong in _ALPHA

    def plain(self, image: Image.Image, size: Size, *, epoch: int, index: int) -> Image.Image:
        """Crop, flip and jitter an RGB image to exactly this height and width."""
        from torchvision import transforms  # noqa: PLC0415 (slow to import; reading a cache does not need it)

        small = self.strong == "crop" and self._chance(epoch, index).random() < self.strong_share
        modes = (transforms.InterpolationMode.BILINEAR, transforms.InterpolationMode.BICUBIC)
        jitter = transforms.ColorJitter()  # its constructor would draw nothing for a range of one number
        jitter.brightness, jitter.contrast, jitter.saturation = self.brightness, self.contrast, self.saturation
        with _drawing(_PIXELS, self.seed, epoch, index):
            scale = list(_SMALL if small else self.scale)
            crop = transforms.RandomResizedCrop.get_params(image, scale, list(self.ratio))
            mode = modes[int(torch.randint(2, ()))]
            cropped: Image.Image = transforms.functional.resized_crop(image, *crop, list(size), mode)
            if torch.rand(()) < self.flip:
                cropped = cropped.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            return jitter(cropped) if torch.rand(()) < self.jitter else cropped

    def strengthen(self, image: Image.Image, *, epoch: int, index: int) -> Image.Image:
        """The strong augmentation of one augmented image, where it is its turn and no other image is needed."""
        chance = self._chance(epoch, index)
        if self.strong not in ("augmix", "blur", "box", "noise") or not chance.random() < self.strong_share:
            return image
        if self.strong == "augmix":
            from torchvision.transforms import v2  # noqa: PLC0415 (slow to import, and few need it)

            with _drawing(_STRONG, self.seed, epoch, index):
                return cast("Image.Image", v2.AugMix()(image))
        return corrupt(image, self.strong, int(chance.integers(1, 6)), int(chance.integers(_SEEDS)))

    def mix(self, *, epoch: int, index: int, n: int) -> Mix | None:
        """What an image of n is mixed with in an epoch: any other, augmented as in its own row; None for nothing."""
        chance = self._chance(epoch, index)
        if not self.mixes or n < 2 or not chance.random() < self.strong_share:
            return None
        partner = (index + 1 + int(chance.integers(n - 1))) % n
        alpha = _ALPHA[str(self.strong)]
        weight = float(chance.beta(alpha, alpha))
        if self.strong == "mixup":
            return Mix(partner, weight, None)
        half = (1 - weight) ** 0.5 / 2
        x, y = chance.random(2).tolist()
        left, top, right, bottom = max(0.0, x - half), max(0.0, y - half), min(1.0, x + half), min(1.0, y + half)
        return Mix(partner, 1 - (right - left) * (bottom - top), (left, top, right, bottom))

    def _chance(self, epoch: int, index: int) -> np.random.Generator:
        return np.random.default_rng([_STRONG, self.seed, epoch, index])


@final
class Augmented(View):
    """Every image once per epoch, augmented anew. Ids are `id@epoch`; labels repeat.

    A row is the same whenever and by whichever process it is read. Of a row that is mixed from two images the id and
    label are the first one's; it counts as broken if either is. Choose images and labels first, then augment: a
    `Subset` of augmented rows knows neither epochs nor partners any more.

    Args:
        images: Images to augment; ready model inputs cannot be.
        epochs: Number of augmented copies of each image.
        augment: The settings.
        size: Height and width of the model's input, for uint8 pixels (h,w,3) that only have to be normalised. None
            for a model with a transform of its own: `read` returns an image of its own size.

    >>> from dubito.data.arrays import ArrayImages
    >>> images = ArrayImages(images=np.zeros((2, 8, 8, 3), np.uint8), ids=["a", "b"], labels=[0, 1])
    >>> rows = Augmented(images, 2, Augment(), (4, 4))
    >>> list(rows.ids), rows.labels.tolist(), tuple(rows.read(3).shape)
    (['a@0', 'b@0', 'a@1', 'b@1'], [0, 1, 0, 1], (4, 4, 3))
    """

    def __init__(self, images: Images, epochs: int, augment: Augment, size: Size | None = None) -> None:
        check_number(epochs, "[1, inf)", by="Augmented", what="epochs", whole=True, hint="1 is for each image once.")
        self._look_at(images)
        if self.ready:
            self.pixels_of(0, images.read(0), "augmentation")
        self.name, self.epochs, self.augment, self.size = images.name, epochs, augment, size
        self.ids = _Ids(images.ids, epochs)  # unique, as the images' ids are
        self.labels = None if images.labels is None else images.labels.repeat(epochs)
        self.classes = images.classes

    @property
    def epoch(self) -> Int[Tensor, "n"]:
        """The epoch of every row, from 0."""
        return self.place(range(len(self)))[0]

    @property
    def image_index(self) -> Int[Tensor, "n"]:
        """The position in `images` of every row's image: split by this, never by row."""
        return self.place(range(len(self)))[1]

    def place(self, rows: Sequence[int]) -> tuple[Int[Tensor, "n"], Int[Tensor, "n"]]:
        """Epoch and image index of some rows."""
        index = torch.tensor(rows, dtype=torch.long)
        return index // len(self.images), index % len(self.images)

    def mixing(self, rows: Sequence[int]) -> tuple[Int[Tensor, "n"], Float[Tensor, "n"]]:
        """The partner's image and the own weight of some rows: themselves and 1 where nothing is mixed.

        With y the image's label and y' the partner's, the task loss of such a row is weight L(y) + (1 - weight) L(y').
        """
        n = len(self.images)
        mixes = [self.augment.mix(epoch=row // n, index=row % n, n=n) or Mix(row % n, 1.0, None) for row in rows]
        weights = torch.tensor([mix.weight for mix in mixes], dtype=torch.float64)
        return torch.tensor([mix.partner for mix in mixes], dtype=torch.long), weights

    def row_of(self, index: int) -> int:
        """The position in `images` of the image behind a row."""
        return index % len(self.images)

    def contents(self, rows: Sequence[int]) -> list[bytes]:
        """A hash of the images behind each row, of the settings, and of the row's epoch and place."""
        n = len(self.images)
        settings = encode(json.dumps({**self.describe(), "size": self.size, "of": n}, sort_keys=True))
        behind = list(zip(rows, (row % n for row in rows), self.mixing(rows)[0].tolist(), strict=True))
        needed = sorted({image for _, *pair in behind for image in pair})
        content = dict(zip(needed, self._below.contents(needed), strict=True))
        return [hash_parts(content[one], content[other], settings, b"%d" % row) for row, one, other in behind]

    def describe(self) -> Json:
        """The number of epochs and the settings of the augmentation, as JSON."""
        return cast("Json", json.loads(json.dumps({"epochs": self.epochs, **asdict(self.augment)})))

    def change(self, index: int, image: Image.Image | Tensor) -> Image.Image | Tensor:
        """The augmented pixels, or the augmented image where the model's input size is not known."""
        epoch, position = divmod(index, len(self.images))
        pixels = self._plain(epoch, position, image, self.size)
        mix = self.augment.mix(epoch=epoch, index=position, n=len(self.images))
        if mix is None:
            pixels = self.augment.strengthen(pixels, epoch=epoch, index=position)
        else:
            other = self.images.read(mix.partner)
            pixels = mix.blend(pixels, self._plain(epoch, mix.partner, other, (pixels.height, pixels.width)))
        return pixels if self.size is None else torch.from_numpy(np.array(pixels))

    def _plain(self, epoch: int, position: int, image: Image.Image | Tensor, size: Size | None) -> Image.Image:
        picture = self.pixels_of(position, image, "augmentation")
        return self.augment.plain(picture, size or (picture.height, picture.width), epoch=epoch, index=position)


@final
class _Ids(Sequence[str]):
    """`id@epoch` of every row, made on access: a hundred epochs need no hundred copies of the names."""

    def __init__(self, names: Sequence[str], epochs: int) -> None:
        self.names, self.epochs = names, epochs

    def __len__(self) -> int:
        return self.epochs * len(self.names)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        epoch, place = divmod(range(len(self))[index], len(self.names))
        return f"{self.names[place]}@{epoch}"


@contextmanager
def _drawing(stream: int, seed: int, epoch: int, index: int) -> Iterator[None]:
    """Seed the CPU generator of torch, which is global, for this image; afterwards it is as it was."""
    state = int(np.random.SeedSequence([stream, seed, epoch, index]).generate_state(1)[0])
    with seeded(state):
        yield
