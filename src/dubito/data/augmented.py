"""Several augmented epochs of a set of images as one longer set: row = epoch * n + photo.

Kirchhof et al., Pretrained Visual Uncertainties (2024), section 3.2, cache the representations of the whole training,
"all epochs, including random augmentations"; this set is what their model would have seen, in the order of the epochs.
"""

import json
from collections.abc import Sequence
from typing import final, overload

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor

from dubito.data.augment import Augment, Size
from dubito.data.digest import encode, hash_parts
from dubito.data.image_set import ImageSet
from dubito.data.views import Subset
from dubito.errors import ImagesError
from dubito.types import Images, Json


@final
class Augmented(ImageSet):
    """Every photo once an epoch, augmented anew. Ids are `photo@epoch`; labels repeat.

    A row is the same however often, in whatever order and by whichever process it is read. Of a row that is mixed
    from two photos the id and label are the first one's; it counts as broken if either is. Choose photos and labels
    first, then augment: a `Subset` of augmented rows knows neither epochs nor partners any more.

    Args:
        images: Images to augment; ready model inputs cannot be.
        epochs: How often every photo comes.
        augment: The settings.
        size: Height and width of the model's input: `read` gives uint8 pixels (h,w,3) of this size, which only have
            to be normalised. None for a model with a transform of its own: `read` gives an image of the photo's size.

    >>> from dubito.data.arrays import ArrayImages
    >>> photos = ArrayImages(images=np.zeros((2, 8, 8, 3), np.uint8), ids=["a", "b"], labels=[0, 1])
    >>> rows = Augmented(photos, 2, Augment(), (4, 4))
    >>> list(rows.ids), rows.labels.tolist(), tuple(rows.read(3).shape)
    (['a@0', 'b@0', 'a@1', 'b@1'], [0, 1, 0, 1], (4, 4, 3))
    """

    def __init__(self, images: Images, epochs: int, augment: Augment, size: Size | None = None) -> None:
        if epochs < 1:
            raise ImagesError(f"epochs must be at least 1; got {epochs}. Say how often every image is to come.")
        if isinstance(images, ImageSet) and images.ready:
            raise _not_an_image(images.name)
        self.images, self.epochs, self.augment, self.size = images, epochs, augment, size
        self.name = images.name
        self.ids = _Ids(images.ids, epochs)  # unique, as the photos' ids are
        self.labels = None if images.labels is None else images.labels.repeat(epochs)
        self.classes = images.classes

    @property
    def epoch(self) -> Int[Tensor, "n"]:
        """The epoch of every row, from 0."""
        return self.place(range(len(self)))[0]

    @property
    def photo(self) -> Int[Tensor, "n"]:
        """The photo of every row, as its position in `images`: split by this, never by row."""
        return self.place(range(len(self)))[1]

    def place(self, rows: Sequence[int]) -> tuple[Int[Tensor, "n"], Int[Tensor, "n"]]:
        """Epoch and photo of some rows."""
        index = torch.tensor(rows, dtype=torch.long)
        return index // len(self.images), index % len(self.images)

    def mixing(self, rows: Sequence[int]) -> tuple[Int[Tensor, "n"], Float[Tensor, "n"]]:
        """The partner's photo and the own weight of some rows: themselves and 1 where nothing is mixed.

        With y the photo's label and y' the partner's, the task loss of such a row is weight L(y) + (1 - weight) L(y').
        """
        n = len(self.images)
        partners, weights = [], []
        for epoch, photo in (divmod(row, n) for row in rows):
            mix = self.augment.mix(epoch=epoch, photo=photo, n=n)
            partners.append(photo if mix is None else mix.partner)
            weights.append(1.0 if mix is None else mix.weight)
        return torch.tensor(partners, dtype=torch.long), torch.tensor(weights, dtype=torch.float64)

    def read(self, index: int) -> Image.Image | Tensor:
        """The augmented pixels, or the augmented image where the model's input size is not known."""
        epoch, photo = divmod(index, len(self.images))
        image = self._plain(epoch, photo, self.size)
        mix = self.augment.mix(epoch=epoch, photo=photo, n=len(self.images))
        if mix is None:
            image = self.augment.strengthen(image, epoch=epoch, photo=photo)
        else:
            image = mix.blend(image, self._plain(epoch, mix.partner, (image.height, image.width)))
        return image if self.size is None else torch.from_numpy(np.array(image))

    def digest_rows(self, rows: Sequence[int]) -> str:
        """A hash of the photos behind some rows, of the settings, and of the rows' epochs and places."""
        photos = range(len(self.images)) if self.augment.mixes else sorted({row % len(self.images) for row in rows})
        whole = len(photos) == len(self.images)
        content = self.images.digest() if whole else Subset(self.images, photos).digest()
        settings = json.dumps({**self.describe(), "size": self.size}, sort_keys=True)
        places = np.stack(np.divmod(np.asarray(rows, dtype=np.int64), len(self.images)))
        return hash_parts(encode(content), encode(settings), places.tobytes()).hex()

    def describe(self) -> Json:
        """The number of epochs and the settings of the augmentation, as JSON."""
        described: Json = json.loads(json.dumps({"epochs": self.epochs, **self.augment.describe()}))
        return described

    def _plain(self, epoch: int, photo: int, size: Size | None) -> Image.Image:
        image = self.images.read(photo)
        if isinstance(image, Tensor):
            raise _not_an_image(f"'{self.images.ids[photo]}' of {self.name}")
        return self.augment.plain(image, size or (image.height, image.width), epoch=epoch, photo=photo)


@final
class _Ids(Sequence[str]):
    """`photo@epoch` of every row, made when asked for: a hundred epochs need no hundred copies of the names."""

    def __init__(self, photos: Sequence[str], epochs: int) -> None:
        self.photos, self.epochs = photos, epochs

    def __len__(self) -> int:
        return self.epochs * len(self.photos)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        epoch, photo = divmod(range(len(self))[index], len(self.photos))
        return f"{self.photos[photo]}@{epoch}"


def _not_an_image(what: str) -> ImagesError:
    return ImagesError(
        f"augmentation needs images; {what} is a model input already, and nobody knows how to crop that. "
        f"Give files or uint8 pixels as images, or leave out epochs and augment."
    )
