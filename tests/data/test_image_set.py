import hashlib
import pickle
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from PIL import Image

from dubito.data.arrays import ArrayImages
from dubito.data.corruptions import Corrupted
from dubito.data.dataset import DatasetImages
from dubito.data.image_set import (
    ImageSet,
    Labelled,
    Subset,
    hash_array,
    hash_bytes,
    hash_images,
    hash_parts,
    in_threads,
    some,
)
from dubito.errors import ImagesError
from dubito.storage import encode
from dubito.types import Images


class Blank(ImageSet):
    def read(self, index: int) -> Image.Image:
        return Image.new("RGB", (1, 1))

    def contents(self, rows: Sequence[int]) -> list[bytes]:
        return [self.ids[row].encode() for row in rows]


def test_it_is_an_image_set():
    images = Blank("blank", ["a", "b"], torch.tensor([1, 0]), ["x", "y"])
    assert isinstance(images, Images)
    assert len(images) == 2
    assert images.digest() == hash_images("ab", [b"a", b"b"])
    assert Subset(images, [1]).digest() == hash_images("b", [b"b"])
    assert repr(images) == "Blank('blank': 2 images)"


def test_empty():
    with pytest.raises(ImagesError, match=r"blank must hold at least one image; got none\. Add"):
        Blank("blank", [])


def test_duplicate_ids():
    with pytest.raises(
        ImagesError,
        match=r"blank must give every image an id of its own; 2 of 3 ids occur more than once: 'a', 'b'\. Remove",
    ):
        Blank("blank", ["a", "b", "a", "b", "c"])


def test_labels_of_another_length():
    with pytest.raises(
        ImagesError, match=r"labels of blank must be one per image; got 1 labels for 2 images. Pass them in"
    ):
        Blank("blank", ["a", "b"], torch.tensor([0]))


def test_negative_labels():
    with pytest.raises(ImagesError, match=r"labels of blank must count classes from 0; got -1\. Leave out images"):
        Blank("blank", ["a", "b"], torch.tensor([0, -1]))


def test_labels_beyond_the_class_names():
    with pytest.raises(ImagesError, match=r"labels of blank must count classes from 0 to 1, .*; got 2\. Name every"):
        Blank("blank", ["a", "b"], torch.tensor([0, 2]), ["x", "y"])


def test_some():
    assert some(["a"]) == "'a'"
    assert some(["a", "b", "c"]) == "'a', 'b', 'c'"
    assert some(["a", "b", "c", "d", "e"]) == "'a', 'b', 'c' and 2 more"


PIXELS = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), dtype=np.uint8)
NAMES = ["a", "b", "c", "d", "e"]


def whole(pixels=PIXELS, ids=NAMES) -> ArrayImages:
    return ArrayImages(images=pixels, ids=ids, labels=[0, 1, 0, 1, 2], classes=["x", "y", "z"])


class UserImages:
    """A user's own images, without our hash of parts."""

    name = "user"
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
    assert Subset(UserImages(), [0]).labels is None


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
    digest = Subset(UserImages(), [0, 2]).digest()
    assert Subset(UserImages(), [0, 2]).digest() == digest
    assert Subset(UserImages(), [2, 0]).digest() != digest
    assert Subset(UserImages("1"), [0, 2]).digest() != digest


def test_indices_outside():
    for index in (5, -1):
        with pytest.raises(
            ImagesError,
            match=rf"indices of a subset of 'images in memory' must lie in 0\.\.4; got {index}\. Choose among",
        ):
            Subset(whole(), [0, index])


def test_repeated_and_no_indices():
    with pytest.raises(ImagesError, match="1 of 1 ids occur more than once: 'a'"):
        Subset(whole(), [0, 0])
    with pytest.raises(ImagesError, match="must hold at least one image"):
        Subset(whole(), [])


def test_labelled():
    labelled = Labelled(UserImages(), torch.tensor([0, 1, 2, 3, 4]))
    assert isinstance(labelled, Images)
    assert (labelled.ids, labelled.classes) == (NAMES, None)
    assert labelled.read(3).getpixel((0, 0)) == (3, 0, 0)


def test_pickling():
    for view in (Subset(whole(), [4, 1]), Labelled(whole(), torch.tensor([0, 0, 0, 0, 0]))):
        copy = pickle.loads(pickle.dumps(view))  # noqa: S301 (our own bytes)
        assert copy.digest() == view.digest()
        assert list(copy.ids) == list(view.ids)


@pytest.mark.parametrize(
    "images",
    [
        whole(),
        Subset(whole(), [4, 1]),
        Labelled(Subset(whole(), [4, 1, 0]), torch.tensor([0, 0, 0])),
        Corrupted(Subset(whole(), [4, 1]), "noise", 2),
        DatasetImages(list(PIXELS)),
        ArrayImages(inputs=PIXELS),
    ],
)
def test_hashed_reads_give_what_read_and_the_digest_give(images: ImageSet):
    assert images.hashed_reads
    result = [images.read_hashed(index) for index in range(len(images))]
    assert hash_images(images.ids, [content for _, content in result]) == images.digest()
    for index, (image, _) in enumerate(result):
        np.testing.assert_array_equal(np.asarray(image), np.asarray(images.read(index)))


def test_a_users_own_images_have_no_hashed_reads():
    assert not Subset(UserImages(), [0]).hashed_reads
    assert not Corrupted(Labelled(UserImages(), torch.tensor([0] * 5)), "blur", 1).hashed_reads


def test_parts_are_distinguished_by_their_borders():
    assert hash_parts(b"ab", b"c") != hash_parts(b"a", b"bc")
    assert hash_parts(b"") != hash_parts()


def test_blocks_are_joined():
    assert hash_bytes(b"ab", b"c") == hashlib.blake2b(b"abc", digest_size=16).digest()


def test_arrays_differ_by_type_shape_and_values():
    zeros = np.zeros((2, 3), np.uint8)
    others = [zeros.reshape(3, 2), zeros.astype(np.int8), zeros + np.uint8(1)]
    assert len({hash_array(array) for array in [zeros, *others]}) == 4
    assert hash_array(np.asfortranarray(zeros)) == hash_array(zeros)


@pytest.mark.parametrize("n", [1, 127, 128, 129, 1000])
def test_images_are_hashed_in_order_whatever_the_threads_do(n: int):
    ids = [f"{i}.png" for i in range(n)]
    expected = hash_bytes(*(hash_parts(key.encode(), b"%d" % i) for i, key in enumerate(ids))).hex()
    assert hash_images(ids, in_threads(lambda row: b"%d" % row, range(n))) == expected


def test_an_error_in_a_thread_reaches_the_caller():
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda row: b"%d" % (1 // row), range(129))


def test_names_that_are_no_utf8_have_bytes():
    assert encode(b"caf\xe9.jpg".decode("utf-8", "surrogateescape")) == b"caf\xe9.jpg"
