import io
import pickle
import zipfile
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from dubito.data import image_set
from dubito.data.arrays import ArrayImages, open_npz
from dubito.data.image_set import PositionIds
from dubito.errors import ImagesError
from dubito.types import Images

PIXELS = np.random.default_rng(0).integers(0, 256, (3, 4, 5, 3), dtype=np.uint8)


def test_pixels_are_read_as_rgb_images():
    images = ArrayImages(images=PIXELS, labels=[2, 0, 1])
    assert isinstance(images, Images)
    assert images.ids == ("000000", "000001", "000002")
    assert images.labels is not None
    assert images.labels.tolist() == [2, 0, 1]
    for i in range(3):
        image = images.read(i)
        assert isinstance(image, Image.Image)
        np.testing.assert_array_equal(np.asarray(image), PIXELS[i])


def test_grey_pixels_become_rgb():
    image = ArrayImages(images=torch.from_numpy(PIXELS[..., 0])).read(2)
    assert isinstance(image, Image.Image)
    np.testing.assert_array_equal(np.asarray(image), np.repeat(PIXELS[2, :, :, :1], 3, 2))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_float_inputs_are_read_as_they_are(dtype):
    inputs = np.random.default_rng(0).normal(size=(3, 3, 4, 4)).astype(dtype)
    read = ArrayImages(inputs=inputs).read(1)
    assert isinstance(read, Tensor)
    np.testing.assert_array_equal(read.numpy(), inputs[1])
    assert read.numpy().dtype == dtype


def test_uint8_inputs_stay_uint8_with_channels_last():
    read = ArrayImages(inputs=PIXELS).read(1)
    assert isinstance(read, Tensor)
    assert (read.dtype, tuple(read.shape)) == (torch.uint8, (4, 5, 3))


def test_reading_gives_a_copy():
    inputs = torch.zeros(2, 3)
    read = ArrayImages(inputs=inputs).read(0)
    assert isinstance(read, Tensor)
    read += 1
    assert inputs.sum() == 0


def test_a_tensor_with_a_graph_is_taken():
    read = ArrayImages(inputs=torch.ones(2, 3, requires_grad=True)).read(0)
    assert isinstance(read, Tensor)
    assert not read.requires_grad


def test_class_names_as_labels():
    images = ArrayImages(images=PIXELS, labels=["b", "a", "b"])
    assert images.labels is not None
    assert (images.labels.tolist(), images.classes) == ([1, 0, 1], ("a", "b"))


def test_class_names_as_labels_follow_the_given_order():
    images = ArrayImages(images=PIXELS, labels=["b", "a", "b"], classes=["b", "c", "a"])
    assert images.labels is not None
    assert (images.labels.tolist(), images.classes) == ([0, 2, 0], ("b", "c", "a"))


@pytest.mark.parametrize(
    ("shape", "repair"),
    [
        ((2, 3, 8, 8), r"Pass images\.transpose\(0, 2, 3, 1\)\."),
        ((2, 8, 8, 1), r"Pass images\[\.\.\., 0\]\."),
        ((2, 8, 8, 4), r"Pass images\[\.\.\., :3\]\."),
        ((2, 8, 8, 5), r"Put channels last\."),
    ],
)
def test_pixels_of_another_shape(shape, repair):
    with pytest.raises(
        ImagesError,
        match=rf"must be uint8 pixels of shape \(n,h,w,3\) or \(n,h,w\); got uint8 of shape .*\. {repair}",
    ):
        ArrayImages(images=np.zeros(shape, np.uint8))


def test_float_pixels():
    with pytest.raises(
        ImagesError, match=r"got float32 of shape \(2, 8, 8, 3\)\. Convert to uint8 0\.\.255, or pass model"
    ):
        ArrayImages(images=np.zeros((2, 8, 8, 3), np.float32))


@pytest.mark.parametrize("bad", [np.zeros((2, 3, 8, 8), np.uint8), np.zeros((2, 3), np.int64), np.zeros(2)])
def test_inputs_of_another_kind(bad):
    with pytest.raises(
        ImagesError,
        match=r"inputs of images in memory must be floats of shape \(n,\.\.\.\) or uint8 of shape \(n,h,w,3\); ",
    ):
        ArrayImages(inputs=bad)


def test_bfloat16_has_no_numpy_form():
    with pytest.raises(
        ImagesError,
        match=r"inputs of images in memory must .*; got torch\.bfloat16\. Pass inputs\.float\(\)",
    ):
        ArrayImages(inputs=torch.zeros(2, 3, dtype=torch.bfloat16))


def test_neither_or_both():
    with pytest.raises(ImagesError, match=r"must be images \(.*\) or inputs \(.*\); got neither\. Pass one of the two"):
        ArrayImages()
    with pytest.raises(ImagesError, match="got both"):
        ArrayImages(images=PIXELS, inputs=PIXELS)


def test_ids_of_another_length():
    with pytest.raises(
        ImagesError, match=r"ids of images in memory must be one per image; got 2 ids for 3 images. Pass them in"
    ):
        ArrayImages(images=PIXELS, ids=["a", "b"])


def test_no_images():
    with pytest.raises(ImagesError, match="must hold at least one image; got none"):
        ArrayImages(images=PIXELS[:0])


def test_digest():
    digest = ArrayImages(images=PIXELS).digest()
    assert ArrayImages(images=torch.from_numpy(PIXELS), name="other", labels=[0, 1, 2]).digest() == digest
    changed = PIXELS.copy()
    changed[1, 2, 3, 0] ^= 1
    assert ArrayImages(images=changed).digest() != digest
    assert ArrayImages(images=PIXELS[::-1]).digest() != digest
    assert ArrayImages(images=PIXELS, ids=["a", "b", "c"]).digest() != digest


def test_pickling():
    for images in (
        ArrayImages(images=PIXELS),
        ArrayImages(images=PIXELS[::-1]),
        ArrayImages(inputs=torch.ones(3, 2)),
    ):
        copy = pickle.loads(pickle.dumps(images))  # noqa: S301 (our own bytes)
        assert copy.digest() == images.digest()


def test_a_read_only_array_is_taken_and_pickled():
    frozen = PIXELS.copy()
    frozen.setflags(write=False)
    images = ArrayImages(images=frozen)
    assert pickle.loads(pickle.dumps(images)).digest() == images.digest()  # noqa: S301 (our own bytes)


def test_workers_get_large_arrays_through_shared_memory():
    images = ArrayImages(images=np.zeros((100, 100, 100, 3), np.uint8))
    buffer = io.BytesIO()
    ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(images)
    assert buffer.tell() < 10_000


def test_position_ids_sort_as_numbers():
    ids = PositionIds(1_000_001)
    assert ids[:2] == ("0000000", "0000001")
    around = [*ids[:12], *ids[99_995:100_005], *ids[-12:]]
    assert sorted(around) == around
    assert (ids[-1], len(ids), len(pickle.dumps(ids)) < 200) == ("1000000", 1_000_001, True)
    assert PositionIds(1) == ("000000",)
    assert PositionIds(2) == ["000000", "000001"]
    assert PositionIds(2) != PositionIds(3)
    with pytest.raises(IndexError):
        PositionIds(2)[2]


def test_a_digest_is_the_same_whatever_is_hashed_at_once(monkeypatch):
    images = ArrayImages(images=np.arange(7 * 48, dtype=np.uint8).reshape(7, 4, 4, 3))
    whole = images.digest()
    monkeypatch.setattr(image_set, "_HASHED", 3)
    assert images.digest() == whole == image_set.hash_images(images.ids, images.contents(range(7)))


def test_digest_reports_pixels_from_inputs_of_the_same_bytes():
    pixels = np.zeros((2, 4, 4, 3), np.uint8)
    assert ArrayImages(images=pixels).digest() != ArrayImages(inputs=pixels).digest()


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
        match=r"cannot be read \(.*allow_pickle=False.*\)\. Write plain arrays with numpy",
    ):
        open_npz(path)
    with pytest.raises(ImagesError, match="allow_pickle=False"):
        open_npz(npz(tmp_path, images=np.array([None, TEST], dtype=object)))


@pytest.mark.parametrize("content", [b"", b"no zip at all", b"PK\x03\x04 cut"])
def test_broken_files(tmp_path: Path, content: bytes):
    path = tmp_path / "a.npz"
    path.write_bytes(content)
    with pytest.raises(ImagesError, match=r"a\.npz' cannot be read \(.*\)\. Write plain arrays"):
        open_npz(path)


def test_a_single_array_under_the_wrong_name(tmp_path: Path):
    np.save(tmp_path / "a.npy", TEST)
    (tmp_path / "a.npy").rename(tmp_path / "a.npz")
    with pytest.raises(ImagesError, match="File is not a zip file"):
        open_npz(tmp_path / "a.npz")


def test_an_empty_array(tmp_path: Path):
    with pytest.raises(ImagesError, match="must hold at least one image; got none"):
        open_npz(npz(tmp_path, images=TEST[:0]))


@pytest.mark.parametrize("compressed", [False, True])
def test_a_header_that_declares_what_is_not_there(tmp_path: Path, compressed: bool):
    header = io.BytesIO()
    shape = {"descr": "|u1", "fortran_order": False, "shape": (10**12, 4, 4, 3)}
    np.lib.format.write_array_header_1_0(header, shape)
    with zipfile.ZipFile(
        tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    ) as archive:
        archive.writestr("images.npy", header.getvalue() + bytes(48))
    with pytest.raises(
        ImagesError, match=r"x\.npz' cannot be read \('images\.npy' declares 48000000000\d+ bytes, shape"
    ):
        open_npz(tmp_path / "x.npz")


def test_a_mapped_row_that_changes_has_the_hash_of_what_was_read(tmp_path: Path):
    np.savez(tmp_path / "x.npz", images=np.zeros((1, 2, 2, 3), np.uint8))
    images = open_npz(tmp_path / "x.npz")
    before = images.contents([0])
    content = (tmp_path / "x.npz").read_bytes()
    place = content.index(bytes(12), content.index(b"shape"))
    with (tmp_path / "x.npz").open("r+b") as file:
        file.seek(place)
        file.write(b"\1" * 12)
    image, hashed = images.read_hashed(0)
    assert [hashed] == images.contents([0]) != before
    assert image.getpixel((0, 0)) == (1, 1, 1)
