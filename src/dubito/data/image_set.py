"""What all sets of images here share: checked ids and labels, and a hash that also works for a part."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

from jaxtyping import Int
from PIL import Image
from torch import Tensor

from dubito.errors import ImagesError


class ImageSet(ABC):
    """An ordered set of images with unique ids: the `Images` contract, plus `digest_rows`.

    Attributes:
        name: How errors call it: usually its path.
        ids: One name an image.
        labels: One class index an image, or None.
        classes: The names of the classes, or None.
        ready: Images are inputs in memory: there is nothing to decode, so no worker processes are needed.
    """

    name: str
    ids: Sequence[str]
    labels: Int[Tensor, "n"] | None
    classes: Sequence[str] | None
    ready: bool = False

    def __init__(
        self,
        name: str,
        ids: Sequence[str],
        labels: Int[Tensor, "n"] | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        self.name = name
        self.ids = ids
        self.labels = labels
        self.classes = classes
        check_unique(ids, name)
        check_labels(labels, len(ids), classes, name)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}: {len(self)} images)"

    @abstractmethod
    def read(self, index: int) -> Image.Image | Tensor:
        """The image as RGB, or a tensor that is a model input already."""

    @abstractmethod
    def digest_rows(self, rows: Sequence[int]) -> str:
        """A hash of the ids and contents of some images, in this order."""

    def digest(self) -> str:
        """A hash of the ordered ids and of every image's content; neither the place nor labels count."""
        return self.digest_rows(range(len(self)))


def check_unique(ids: Sequence[str], name: str) -> None:
    """Raise ImagesError when there are no images or two have the same id."""
    if not len(ids):
        raise ImagesError(f"{name} must hold at least one image; got none. Add images or give another source.")
    if len(set(ids)) < len(ids):
        twice = [key for key, count in Counter(ids).items() if count > 1]
        raise ImagesError(
            f"{name} must give every image an id of its own; {len(twice)} of {len(set(ids))} ids come more "
            f"than once: {some(twice)}. Remove or rename the repeated ones."
        )


def check_labels(labels: Tensor | None, n: int, classes: Sequence[str] | None, name: str) -> None:
    """Raise ImagesError unless there is one label an image, 0 or more, and named if classes have names."""
    if labels is None:
        return
    if len(labels) != n:
        raise ImagesError(f"labels of {name} must be one an image; got {len(labels)} labels for {n} images.")
    low, high = int(labels.min()), int(labels.max())
    if low < 0:
        raise ImagesError(
            f"labels of {name} must count classes from 0; got {low}. "
            f"Leave images without a label out, or give no labels."
        )
    if classes is not None and high >= len(classes):
        raise ImagesError(
            f"labels of {name} must be below the number of class names, {len(classes)}; got {high}. "
            f"Name every class, or give no names."
        )


def some(names: Sequence[str], most: int = 3) -> str:
    """The first few names for an error message: 'a', 'b', 'c' and 4 more."""
    shown = ", ".join(f"'{name}'" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
