import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dubito.data.npz import open_npz
from dubito.errors import ImagesError

RNG = np.random.default_rng(0)
TRAIN = RNG.integers(0, 256, (5, 4, 6, 3), dtype=np.uint8)
TEST = RNG.integers(0, 256, (3, 4, 6, 3), dtype=np.uint8)


def npz(path: Path, compress: bool = False, **arrays) -> Path:
    (np.savez_compressed if compress else np.savez)(path / "a.npz", **arrays)
    return path / "a.npz"


@pytest.mark.parametrize("compress", [False, True])
def test_images_with_everything(tmp_path: Path, compress: bool):
    labels, ids, classes = np.array([1, 0, 1], np.uint8), np.array(["x", "y", "z"]), np.array(["cat", "dog"])
    path = npz(tmp_path, compress, images=TEST, labels=labels, ids=ids, classes=classes)
    images = open_npz(path)
    assert (images.ids, images.classes, images.name) == (("x", "y", "z"), ("cat", "dog"), str(path))
    assert images.labels is not None
    assert (images.labels.dtype, images.labels.tolist()) == (torch.int64, [1, 0, 1])
    for i in range(3):
        np.testing.assert_array_equal(np.asarray(images.read(i)), TEST[i])


def test_stored_and_compressed_have_one_digest(tmp_path: Path):
    stored = open_npz(npz(tmp_path, False, images=TEST)).digest()
    assert open_npz(npz(tmp_path, True, images=TEST)).digest() == stored


@pytest.mark.parametrize("array", [TEST, np.asfortranarray(TEST)])
def test_stored_arrays_are_mapped_and_pickle_as_a_path(tmp_path: Path, array):
    images = open_npz(npz(tmp_path, first=np.zeros(7), images=array, labels=np.zeros(3, int)))
    assert isinstance(images._rows, np.memmap)
    large = open_npz(npz(tmp_path, images=np.zeros((100, 50, 50, 3), np.uint8)))
    data = pickle.dumps(large)
    assert len(data) < 5_000
    copy = pickle.loads(data)  # noqa: S301 (our own bytes)
    assert isinstance(copy._rows, np.memmap)
    assert copy.digest() == large.digest()


def test_compressed_arrays_are_in_memory(tmp_path: Path):
    images = open_npz(npz(tmp_path, True, images=TEST))
    assert not isinstance(images._rows, np.memmap)


def test_parts(tmp_path: Path):
    path = npz(tmp_path, train_images=TRAIN, train_labels=np.arange(5), test_images=TEST, test_labels=np.arange(3))
    test = open_npz(path, "test")
    assert (len(test), test.name) == (3, f"{path}#test")
    assert test.labels is not None
    assert test.labels.tolist() == [0, 1, 2]
    assert len(open_npz(path, "train")) == 5
    with pytest.raises(
        ImagesError,
        match=r"must have one key images or inputs; it has the keys 'train_images', .*\. "
        r"Say which part: '.*a\.npz#test', '.*a\.npz#train'\.",
    ):
        open_npz(path)
    with pytest.raises(ImagesError, match=r"a\.npz#val' must have one key val_images or val_inputs; .* Say which part"):
        open_npz(path, "val")


def test_the_only_part_needs_no_name(tmp_path: Path):
    images = open_npz(npz(tmp_path, test_images=TEST, test_labels=np.arange(3)))
    assert images.labels is not None
    assert images.labels.tolist() == [0, 1, 2]


def test_plain_keys_go_before_parts(tmp_path: Path):
    assert len(open_npz(npz(tmp_path, images=TEST, extra_images=TRAIN))) == 3


def test_inputs(tmp_path: Path):
    inputs = RNG.normal(size=(3, 3, 4, 4)).astype(np.float32)
    read = open_npz(npz(tmp_path, inputs=inputs)).read(1)
    assert isinstance(read, Tensor)
    np.testing.assert_array_equal(read.numpy(), inputs[1])


def test_images_and_inputs_together_are_ambiguous(tmp_path: Path):
    with pytest.raises(
        ImagesError, match=r"must have one key images or inputs; it has the keys 'images', 'inputs'\. Rename"
    ):
        open_npz(npz(tmp_path, images=TEST, inputs=TEST))


def test_other_keys(tmp_path: Path):
    with pytest.raises(ImagesError, match=r"must have one key images or inputs; it has the keys 'x', 'y'\. Rename"):
        open_npz(npz(tmp_path, x=TEST, y=np.arange(3)))


def test_pickled_objects_are_refused(tmp_path: Path):
    path = npz(tmp_path, images=TEST, labels=np.array([1, "a", None], dtype=object))
    with pytest.raises(
        ImagesError,
        match=r"must be an \.npz file of plain arrays; .*allow_pickle=False.* Write it with numpy",
    ):
        open_npz(path)
    with pytest.raises(ImagesError, match="allow_pickle=False"):
        open_npz(npz(tmp_path, images=np.array([None, TEST], dtype=object)))


@pytest.mark.parametrize("content", [b"", b"no zip at all", b"PK\x03\x04 cut"])
def test_broken_files(tmp_path: Path, content: bytes):
    path = tmp_path / "a.npz"
    path.write_bytes(content)
    with pytest.raises(
        ImagesError, match=r"a\.npz' must be an \.npz file of plain arrays; opening it gave: .* Write it"
    ):
        open_npz(path)


def test_a_single_array_under_the_wrong_name(tmp_path: Path):
    np.save(tmp_path / "a.npy", TEST)
    (tmp_path / "a.npy").rename(tmp_path / "a.npz")
    with pytest.raises(ImagesError, match="File is not a zip file"):
        open_npz(tmp_path / "a.npz")


def test_an_empty_array(tmp_path: Path):
    with pytest.raises(ImagesError, match="must hold at least one image; got none"):
        open_npz(npz(tmp_path, images=TEST[:0]))
