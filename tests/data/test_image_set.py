from collections.abc import Sequence

import pytest
import torch
from PIL import Image

from dubito.data.image_set import ImageSet, some
from dubito.errors import ImagesError
from dubito.types import Images


class Blank(ImageSet):
    def read(self, index: int) -> Image.Image:
        return Image.new("RGB", (1, 1))

    def digest_rows(self, rows: Sequence[int]) -> str:
        return " ".join(self.ids[row] for row in rows)


def test_it_is_an_image_set():
    images = Blank("blank", ["a", "b"], torch.tensor([1, 0]), ["x", "y"])
    assert isinstance(images, Images)
    assert len(images) == 2
    assert images.digest() == "a b"
    assert repr(images) == "Blank('blank': 2 images)"


def test_empty():
    with pytest.raises(ImagesError, match=r"blank must hold at least one image; got none\. Add"):
        Blank("blank", [])


def test_duplicate_ids():
    with pytest.raises(
        ImagesError,
        match=r"blank must give every image an id of its own; 2 of 3 ids come more than once: 'a', 'b'\. Remove",
    ):
        Blank("blank", ["a", "b", "a", "b", "c"])


def test_labels_of_another_length():
    with pytest.raises(ImagesError, match="labels of blank must be one an image; got 1 labels for 2 images"):
        Blank("blank", ["a", "b"], torch.tensor([0]))


def test_negative_labels():
    with pytest.raises(ImagesError, match=r"labels of blank must count classes from 0; got -1\. Leave images"):
        Blank("blank", ["a", "b"], torch.tensor([0, -1]))


def test_labels_beyond_the_class_names():
    with pytest.raises(ImagesError, match=r"labels of blank must be below the number of class names, 2; got 2\. Name"):
        Blank("blank", ["a", "b"], torch.tensor([0, 2]), ["x", "y"])


def test_some():
    assert some(["a"]) == "'a'"
    assert some(["a", "b", "c"]) == "'a', 'b', 'c'"
    assert some(["a", "b", "c", "d", "e"]) == "'a', 'b', 'c' and 2 more"
