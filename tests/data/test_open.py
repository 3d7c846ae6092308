from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from dubito.data import ArchiveImages, ArrayImages, DatasetImages, FileImages, Labelled, Subset, open_images
from dubito.errors import ImagesError
from dubito.types import Images

PIXELS = np.random.default_rng(0).integers(0, 256, (3, 4, 4, 3), dtype=np.uint8)
FILES = {"cat/1.png": "red", "dog/2.png": "lime"}


def labels(images: Images) -> list[int] | None:
    return None if images.labels is None else images.labels.tolist()


def test_folder_as_text_and_path(folder):
    root = folder(FILES)
    for source in (root, str(root)):
        images = open_images(source)
        assert isinstance(images, FileImages)
        assert labels(images) == [0, 1]


def test_home_folder(folder, monkeypatch):
    root = folder(FILES)
    monkeypatch.setenv("HOME", str(root.parent))
    assert len(open_images("~/photos")) == 2


def test_one_image(folder):
    images = open_images(folder(FILES) / "cat" / "1.png")
    assert (images.ids, labels(images)) == (["1.png"], None)
    image = images.read(0)
    assert isinstance(image, Image.Image)
    assert image.getpixel((0, 0)) == (255, 0, 0)


def test_csv(folder):
    path = folder(FILES) / "list.csv"
    path.write_text("path,label\ndog/2.png,4\n")
    assert labels(open_images(path)) == [4]


def test_zip(archive):
    images = open_images(archive(FILES))
    assert isinstance(images, ArchiveImages)
    assert labels(images) == [0, 1]


def test_npz_and_its_parts(tmp_path: Path):
    path = tmp_path / "cifar.npz"
    np.savez(path, train_images=PIXELS, train_labels=[0, 1, 2], test_images=PIXELS[:2], test_labels=[3, 4])
    assert labels(open_images(f"{path}#test")) == [3, 4]
    assert labels(open_images(f"{path}#train")) == [0, 1, 2]
    with pytest.raises(ImagesError, match="Say which part"):
        open_images(path)


def test_a_file_whose_name_has_a_hash(tmp_path: Path):
    path = tmp_path / "a.npz#b.npz"
    with path.open("wb") as file:
        np.savez(file, images=PIXELS)
    assert len(open_images(path)) == 3


@pytest.mark.parametrize("source", [PIXELS, torch.from_numpy(PIXELS), PIXELS[..., 0]])
def test_uint8_arrays_are_pixels(source):
    images = open_images(source)
    assert isinstance(images, ArrayImages)
    assert isinstance(images.read(0), Image.Image)


@pytest.mark.parametrize("source", [np.zeros((2, 3, 4, 4), np.float32), torch.zeros(2, 3, 4, 4)])
def test_float_arrays_are_inputs(source):
    assert isinstance(open_images(source).read(0), Tensor)


def test_integer_arrays_that_are_no_pixels():
    with pytest.raises(ImagesError, match=r"must be uint8 pixels .*; got int64 of shape \(2, 4, 4, 3\)"):
        open_images(np.zeros((2, 4, 4, 3), np.int64))


def test_dataset_and_sequence():
    images = open_images(TensorDataset(torch.zeros(3, 2), torch.tensor([1, 2, 3])))
    assert isinstance(images, DatasetImages)
    assert labels(images) == [1, 2, 3]
    assert len(open_images([Image.fromarray(pixels) for pixels in PIXELS])) == 3


def test_images_pass_through():
    images = ArrayImages(images=PIXELS)
    assert open_images(images) is images
    part = Subset(images, [0])
    assert open_images(part) is part

    class Own:
        name, ids, labels, classes = "own", ("a",), None, None

        def __len__(self) -> int:
            return 1

        def read(self, index: int) -> Image.Image:
            return Image.new("RGB", (1, 1))

        def digest(self) -> str:
            return "0"

    own = Own()
    assert open_images(own) is own


def test_labels_for_any_source(folder, archive, tmp_path: Path):
    csv = tmp_path / "labels.csv"
    csv.write_text("file,label\n1.png,7\n2.png,8\n3.png,9\n")
    for source in (folder(FILES), archive(FILES)):
        images = open_images(source, labels=csv)
        assert isinstance(images, Labelled)
        assert labels(images) == [7, 8]
        assert images.classes is None
        assert images.digest() == open_images(source).digest()
    assert labels(open_images(PIXELS, labels={"0": 5, "1": 6, "2": 7})) == [5, 6, 7]
    assert labels(open_images(folder(FILES), labels=[1, 0])) == [1, 0]


def test_labels_of_a_flat_archive_as_imagenet_comes(archive, tmp_path: Path):
    path = archive({f"{i:08}.jpg": b"x" for i in (1, 2, 293)}, "images256.zip")
    (tmp_path / "labels.csv").write_text(
        "val_id,label,wnid,name,real_labels\n293,65,n01,sea_snake,\n1,970,n09,alp,970 795\n2,230,n02,dog,230\n"
    )
    assert labels(open_images(path, labels=str(tmp_path / "labels.csv"))) == [970, 230, 65]


def test_missing_path_names_its_neighbours(folder):
    root = folder(FILES)
    with pytest.raises(
        ImagesError,
        match=rf"images must be an existing folder or file; '{root}s' does not exist\. Did you mean '{root}'\?",
    ):
        open_images(f"{root}s")
    with pytest.raises(ImagesError, match=rf"does not exist\. Did you mean '{root}/cat'\?"):
        open_images(root / "caat" / "1.png")
    with pytest.raises(ImagesError, match=rf"does not exist\. Look in '{root}'"):
        open_images(root / "zzzzzz")


def test_a_missing_part_of_a_missing_file(tmp_path: Path):
    with pytest.raises(ImagesError, match=r"'.*cifar\.npz' does not exist"):
        open_images(f"{tmp_path}/cifar.npz#test")


def test_other_files(folder):
    root = folder({"a.txt": b"x"})
    with pytest.raises(
        ImagesError, match=r"images must come from a folder, .*; got '.*a\.txt'\. Image files end in \.avif"
    ):
        open_images(root / "a.txt")


def test_empty_text():
    with pytest.raises(ImagesError, match=r"images must be a folder or file; got an empty text\. Pass its path"):
        open_images("")


class Stream(IterableDataset[Tensor]):
    def __iter__(self):
        yield torch.zeros(3)


def test_iterable_dataset():
    with pytest.raises(
        ImagesError,
        match=r"must be readable in any order; got Stream, an IterableDataset, which is read .* Pass a map-style",
    ):
        open_images(Stream())


@pytest.mark.parametrize("source", [3, None, {"a": 1}, b"bytes", iter([1])])
def test_other_objects(source):
    with pytest.raises(ImagesError, match=rf"images must come from a folder, .*; got {type(source).__name__}"):
        open_images(source)
