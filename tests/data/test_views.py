import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from dubito.data.arrays import ArrayImages
from dubito.data.views import Labelled, Subset
from dubito.errors import ImagesError
from dubito.types import Images

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), dtype=np.uint8)
NAMES = ["a", "b", "c", "d", "e"]


def whole(pixels=PIXELS, ids=NAMES) -> ArrayImages:
    return ArrayImages(images=pixels, ids=ids, labels=[0, 1, 0, 1, 2], classes=["x", "y", "z"])


class Foreign:
    """A user's own images, without our hash of parts."""

    name = "foreign"
    labels = None
    classes = None

    def __init__(self, digest: str = "0") -> None:
        self.ids = NAMES
        self._digest = digest

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, index: int) -> Image.Image:
        return Image.new("RGB", (1, 1), (index, 0, 0))

    def digest(self) -> str:
        return self._digest


def test_subset():
    part = Subset(whole(), [4, 1])
    assert isinstance(part, Images)
    assert (list(part.ids), part.classes, len(part)) == (["e", "b"], ("x", "y", "z"), 2)
    assert part.labels is not None
    assert part.labels.tolist() == [2, 1]
    np.testing.assert_array_equal(np.asarray(part.read(0)), PIXELS[4])


def test_subset_takes_a_range_and_a_permutation():
    assert list(Subset(whole(), range(2)).ids) == ["a", "b"]
    order = torch.randperm(5, generator=torch.Generator().manual_seed(0)).tolist()
    assert list(Subset(whole(), order).ids) == [NAMES[i] for i in order]


def test_subset_without_labels():
    assert Subset(Foreign(), [0]).labels is None


def test_a_subset_hashes_what_it_holds_and_nothing_else():
    digest = Subset(whole(), [1, 3]).digest()
    assert ArrayImages(images=PIXELS[[1, 3]], ids=["b", "d"]).digest() == digest
    other = PIXELS.copy()
    other[0] ^= 1
    assert Subset(whole(other), [1, 3]).digest() == digest
    other[3] ^= 1
    assert Subset(whole(other), [1, 3]).digest() != digest
    assert Subset(whole(), [3, 1]).digest() != digest


def test_subset_of_a_subset_and_of_labelled():
    part = Subset(Subset(whole(), [4, 3, 2]), [2, 0])
    assert list(part.ids) == ["c", "e"]
    assert part.digest() == Subset(whole(), [2, 4]).digest()
    labelled = Labelled(whole(), torch.tensor([1, 1, 1, 1, 1]))
    assert labelled.digest() == whole().digest()
    assert Subset(labelled, [2, 4]).digest() == part.digest()


def test_parts_of_a_users_own_images_are_hashed_by_the_whole_and_the_choice():
    digest = Subset(Foreign(), [0, 2]).digest()
    assert Subset(Foreign(), [0, 2]).digest() == digest
    assert Subset(Foreign(), [2, 0]).digest() != digest
    assert Subset(Foreign("1"), [0, 2]).digest() != digest


def test_indices_outside():
    for index in (5, -1):
        with pytest.raises(
            ImagesError,
            match=rf"indices of a subset of 'images in memory' must lie in 0\.\.4; got {index}\. Choose among",
        ):
            Subset(whole(), [0, index])


def test_repeated_and_no_indices():
    with pytest.raises(ImagesError, match="1 of 1 ids come more than once: 'a'"):
        Subset(whole(), [0, 0])
    with pytest.raises(ImagesError, match="must hold at least one image"):
        Subset(whole(), [])


def test_labelled():
    labelled = Labelled(Foreign(), torch.tensor([0, 1, 2, 3, 4]))
    assert isinstance(labelled, Images)
    assert (labelled.ids, labelled.classes) == (NAMES, None)
    assert labelled.read(3).getpixel((0, 0)) == (3, 0, 0)


def test_pickling():
    for view in (Subset(whole(), [4, 1]), Labelled(whole(), torch.tensor([0, 0, 0, 0, 0]))):
        copy = pickle.loads(pickle.dumps(view))  # noqa: S301 (our own bytes)
        assert copy.digest() == view.digest()
        assert list(copy.ids) == list(view.ids)
