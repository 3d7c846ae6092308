"""A view of a set of images, each made worse in one way at one severity: a step of the ladder of `deteriorate`."""

from collections.abc import Sequence
from typing import final

import numpy as np
from PIL import Image
from torch import Tensor

from dubito.data.deteriorate import deteriorate
from dubito.data.digest import encode, hash_array, hash_parts
from dubito.data.image_set import ImageSet
from dubito.data.views import Subset
from dubito.errors import ImagesError
from dubito.types import Images


@final
class Deteriorated(ImageSet):
    """The same images under the same ids and labels, made worse when they are read.

    The place of a box and the noise depend on `seed` and the image's id alone. So they are the same at every severity,
    and the same whichever other images are in the set. The digest covers the images, the kind, what it does to a
    picture at this severity, and the seed.

    Args:
        images: RGB images; finished model inputs cannot be made worse.
        kind: One of `deteriorate.DETERIORATIONS`: blur, box, zoom, noise.
        severity: 0 (unchanged) to 5.
        seed: Another seed, other places and other noise.
    """

    def __init__(self, images: Images, kind: str, severity: int, *, seed: int = 0) -> None:
        # Runs here once, so that a wrong kind or severity is told now and not by a worker.
        self._mark = hash_array(np.asarray(deteriorate(_sample(), kind, severity)))
        super().__init__(f"{images.name} ({kind} {severity})", images.ids, images.labels, images.classes)
        self.images = images
        self.kind = kind
        self.severity = severity
        self.seed = seed

    def read(self, index: int) -> Image.Image | Tensor:
        """The image, made worse."""
        image = self.images.read(index)
        if isinstance(image, Tensor):
            raise ImagesError(
                f"images of '{self.images.name}' must be RGB images to be made worse; '{self.ids[index]}' is a model "
                f"input already. Give pixels (images=...), or a data set without a transform."
            )
        return deteriorate(image, self.kind, self.severity, self._seed_of(index))

    def digest_rows(self, rows: Sequence[int]) -> str:
        """A hash of the ids and contents of some images, and of how they are made worse."""
        how = f"{self.kind} {self.severity} {self.seed}"
        return hash_parts(encode(Subset(self.images, rows).digest()), encode(how), self._mark).hex()

    def _seed_of(self, index: int) -> int:
        return int.from_bytes(hash_parts(encode(self.ids[index]), encode(str(self.seed)))[:8], "little")


def _sample() -> Image.Image:
    """A fixed picture of many colours; what becomes of it tells one definition of a severity from another."""
    return Image.fromarray(np.arange(32 * 32 * 3, dtype=np.uint32).reshape(32, 32, 3).astype(np.uint8))
