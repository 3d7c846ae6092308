"""The twelve data sets, each in a tiny layout of its own."""

import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat
from torchvision import datasets

from dubito.data import ArrayImages, open_images
from dubito.errors import ImagesError, ValueRangeError
from dubito.protocols.benchmarks import BENCHMARKS, class_split, open_benchmark
from dubito.protocols.transfer import PUBLISHED
from dubito.types import Images

Folder = Callable[..., Path]


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def names(images: Images) -> list[str]:
    return [images.classes[label] for label in images.labels.tolist()]


def test_twelve_and_all_in_table_2():
    assert len(BENCHMARKS) == 12
    assert set(PUBLISHED) - set(BENCHMARKS) == {"imagenet21k"}


@pytest.mark.parametrize("prefix", ["CUB_200_2011/images/", "images/", ""])
def test_cub(folder: Folder, prefix: str):
    birds = ["001.Albatross", "002.Auklet", "003.Bunting", "004.Cardinal"]
    root = folder({f"{prefix}{bird}/{i}.jpg": "red" for bird in birds for i in (1, 2)})
    test = open_benchmark("cub200", root)
    assert test.ids == ["003.Bunting/1.jpg", "003.Bunting/2.jpg", "004.Cardinal/1.jpg", "004.Cardinal/2.jpg"]
    assert names(test) == ["003.Bunting"] * 2 + ["004.Cardinal"] * 2
    assert names(open_benchmark("cub200", root, split="train"))[::2] == ["001.Albatross", "002.Auklet"]
    assert len(open_benchmark("cub200", root, split="all")) == 8
    assert test.read(0).size == (8, 6)


def cars(folder: Folder) -> Path:
    root = folder({f"stanford_cars/cars_{part}/0000{i}.jpg": "red" for part in ("train", "test") for i in (1, 2, 3, 4)})
    base = root / "stanford_cars"
    (base / "devkit").mkdir()
    kinds = ["Audi", "BMW", "Fiat", "Volvo"]
    rows = [(f"0000{i}.jpg", i) for i in (1, 2, 3, 4)]
    kind = [("fname", "O"), ("class", "O")]
    savemat(base / "devkit" / "cars_meta.mat", {"class_names": np.array(kinds, dtype=object)})
    savemat(base / "devkit" / "cars_train_annos.mat", {"annotations": np.array(rows, dtype=kind)})
    savemat(base / "cars_test_annos_withlabels.mat", {"annotations": np.array(rows, dtype=kind)})
    return root


def test_cars_takes_the_second_half_of_the_classes_from_both_official_splits(folder: Folder):
    root = cars(folder)
    test = open_benchmark("cars196", root)
    assert test.ids == [f"stanford_cars/cars_{part}/0000{i}.jpg" for part in ("test", "train") for i in (3, 4)]
    assert names(test) == ["Fiat", "Volvo"] * 2
    assert test.read(0).size == (8, 6)


def test_cars_in_class_folders(folder: Folder):
    root = folder({"Audi/1.jpg": "red", "BMW/1.jpg": "red", "Fiat/1.jpg": "red", "Volvo/1.jpg": "red"})
    assert names(open_benchmark("cars196", root)) == ["Fiat", "Volvo"]


def products(folder: Folder, below: str) -> Path:
    lists = {
        "train": [(1, 1, 1, "bicycle_final/1_0.JPG"), (2, 2, 1, "bicycle_final/2_0.JPG")],
        "test": [
            (3, 11319, 1, "bicycle_final/3_0.JPG"),
            (4, 11320, 2, "chair_final/4_0.JPG"),
            (5, 11319, 1, "a/5.JPG"),
        ],
    }
    files = {below + row[3]: "red" for rows in lists.values() for row in rows}
    for part, rows in lists.items():
        text = "image_id class_id super_class_id path\n" + "".join(" ".join(map(str, row)) + "\n" for row in rows)
        files[f"{below}Ebay_{part}.txt"] = text.encode()
    return folder(files)


@pytest.mark.parametrize("below", ["Stanford_Online_Products/", ""])
def test_sop(folder: Folder, below: str):
    root = products(folder, below)
    test = open_benchmark("sop", root)
    assert test.ids == ["bicycle_final/3_0.JPG", "chair_final/4_0.JPG", "a/5.JPG"]
    assert names(test) == ["11319", "11320", "11319"]
    assert test.labels.tolist() == [0, 1, 0]
    assert test.read(2).size == (8, 6)
    assert len(open_benchmark("sop", root, split="all")) == 5


def test_sop_with_another_list(folder: Folder):
    root = folder({"Ebay_test.txt": b"id path\n1 a.jpg\n", "a.jpg": "red"})
    with pytest.raises(ImagesError, match="must begin with the line 'image_id class_id super_class_id path'"):
        open_benchmark("sop", root)


def test_sop_without_its_train_list(folder: Folder):
    root = products(folder, "")
    (root / "Ebay_train.txt").unlink()
    with pytest.raises(
        ImagesError, match=r"sop: .* must be complete; reading it failed: .*Ebay_train.txt.* Expected: Stanford"
    ):
        open_benchmark("sop", root, split="train")


@pytest.mark.parametrize("place", ["caltech101/101_ObjectCategories/", "101_ObjectCategories/"])
def test_caltech_without_its_background(folder: Folder, place: str):
    root = folder({place + name: "red" for name in ("BACKGROUND_Google/1.jpg", "ant/1.jpg", "crab/1.jpg")})
    images = open_benchmark("caltech101", root)
    assert images.ids == ["ant/1.jpg", "crab/1.jpg"]
    assert names(images) == ["ant", "crab"]


def test_pets(folder: Folder):
    root = folder(
        {
            **{f"oxford-iiit-pet/images/{name}.jpg": "red" for name in ("Bengal_2", "pug_1", "Bengal_1")},
            "oxford-iiit-pet/annotations/test.txt": b"pug_1 2 2 1\nBengal_2 1 1 1\n",
            "oxford-iiit-pet/annotations/trainval.txt": b"Bengal_1 1 1 1\n",
        }
    )
    images = open_benchmark("pets", root)
    assert images.ids == ["oxford-iiit-pet/images/Bengal_2.jpg", "oxford-iiit-pet/images/pug_1.jpg"]
    assert names(images) == ["Bengal", "Pug"]
    assert open_benchmark("pets", root, split="train").ids == ["oxford-iiit-pet/images/Bengal_1.jpg"]


def test_textures(folder: Folder):
    lists = {"test1": "dotted/1.jpg\nbraided/1.jpg\n", "train1": "dotted/2.jpg\n", "val1": "braided/3.jpg\n"}
    files = {f"dtd/dtd/images/{line}": "red" for text in lists.values() for line in text.split()}
    root = folder({**files, **{f"dtd/dtd/labels/{name}.txt": text.encode() for name, text in lists.items()}})
    images = open_benchmark("dtd", root)
    assert images.ids == ["dtd/dtd/images/braided/1.jpg", "dtd/dtd/images/dotted/1.jpg"]
    assert names(images) == ["braided", "dotted"]
    assert len(open_benchmark("dtd", root, split="all")) == 4


def test_textures_of_several_splits_number_their_classes_alike(folder: Folder):
    lists = {"test1": "b/1.jpg\n", "train1": "a/1.jpg\n", "val1": "c/1.jpg\n"}
    files = {f"dtd/dtd/images/{line}": "red" for text in lists.values() for line in text.split()}
    root = folder({**files, **{f"dtd/dtd/labels/{name}.txt": text.encode() for name, text in lists.items()}})
    assert names(open_benchmark("dtd", root, split="all")) == ["a", "b", "c"]


def test_scenes_in_folders_of_folders(folder: Folder):
    root = folder(
        {
            "SUN397/ClassName.txt": b"/a/abbey\n/c/church/indoor\n",
            "SUN397/a/abbey/sun_b.jpg": "red",
            "SUN397/c/church/indoor/sun_a.jpg": "red",
        }
    )
    images = open_benchmark("sun397", root)
    assert images.ids == ["SUN397/a/abbey/sun_b.jpg", "SUN397/c/church/indoor/sun_a.jpg"]
    assert names(images) == ["abbey", "church/indoor"]


def test_flowers(folder: Folder, monkeypatch: pytest.MonkeyPatch):
    root = folder({f"flowers-102/jpg/image_0000{i}.jpg": "red" for i in (1, 2, 3)})
    base = root / "flowers-102"
    savemat(base / "imagelabels.mat", {"labels": np.array([3, 1, 2])})
    savemat(base / "setid.mat", {"trnid": np.array([1, 1]), "valid": np.array([2, 2]), "tstid": np.array([3, 1])})
    files = {
        "label": ("imagelabels.mat", md5(base / "imagelabels.mat")),
        "setid": ("setid.mat", md5(base / "setid.mat")),
    }
    monkeypatch.setattr(datasets.Flowers102, "_file_dict", {**datasets.Flowers102._file_dict, **files})
    images = open_benchmark("flowers102", root)
    assert images.ids == ["flowers-102/jpg/image_00001.jpg", "flowers-102/jpg/image_00003.jpg"]
    assert images.labels.tolist() == [2, 1]


def cifar(root: Path, monkeypatch: pytest.MonkeyPatch, kind: type, key: str) -> np.ndarray:
    base = root / kind.base_folder
    base.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3072), dtype=np.uint8)

    def write(name: str, content: dict) -> list[str]:
        (base / name).write_bytes(pickle.dumps(content))
        return [name, md5(base / name)]

    monkeypatch.setattr(kind, "test_list", [write("test", {"data": pixels[:2], key: [1, 0]})])
    monkeypatch.setattr(kind, "train_list", [write("train", {"data": pixels[2:], key: [1]})])
    meta = write("meta", {kind.meta["key"]: ["plane", "ship"]})
    monkeypatch.setattr(kind, "meta", {"filename": "meta", "key": kind.meta["key"], "md5": meta[1]})
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


@pytest.mark.parametrize(
    ("name", "kind", "key"),
    [("cifar10", datasets.CIFAR10, "labels"), ("cifar100", datasets.CIFAR100, "fine_labels")],
)
def test_cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: type, key: str):
    pixels = cifar(tmp_path, monkeypatch, kind, key)
    test = open_benchmark(name, tmp_path)
    assert names(test) == ["ship", "plane"]
    assert (np.asarray(test.read(1)) == pixels[1]).all()
    assert (np.asarray(open_benchmark(name, tmp_path, split="train").read(0)) == pixels[2]).all()
    assert names(open_benchmark(name, tmp_path, split="all")) == ["ship", "ship", "plane"]


def test_a_pickle_of_unknown_origin_is_not_opened(tmp_path: Path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    base = tmp_path / "cifar-10-batches-py"
    base.mkdir()
    for name in ("test_batch", "batches.meta", *(f"data_batch_{i}" for i in range(1, 6))):
        (base / name).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ImagesError, match=r"cifar10: .*cifar-10-batches-py' must be complete; .*corrupted"):
        open_benchmark("cifar10", tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_house_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 3), dtype=np.uint8)
    savemat(tmp_path / "test_32x32.mat", {"X": pixels, "y": np.array([[10], [3], [1]])})
    result = {"test": ["", "test_32x32.mat", md5(tmp_path / "test_32x32.mat")]}
    monkeypatch.setattr(datasets.SVHN, "split_list", result)
    images = open_benchmark("svhn", tmp_path)
    assert names(images) == ["0", "3", "1"]
    assert (np.asarray(images.read(2)) == pixels[..., 2]).all()


def test_trees_and_any_other_in_class_folders(folder: Folder):
    root = folder({"bark/1.png": "red", "leaf/1.png": "blue"})
    assert names(open_benchmark("treeversity1", root)) == ["bark", "leaf"]
    assert names(open_benchmark("dtd", root)) == ["bark", "leaf"]


def test_a_folder_of_splits(folder: Folder):
    root = folder(
        {"train/bark/1.png": "red", "train/leaf/1.png": "red", "test/bark/2.png": "red", "test/leaf/2.png": "red"}
    )
    assert open_benchmark("pets", root).ids == ["bark/2.png", "leaf/2.png"]
    assert open_benchmark("pets", root, split="train").ids == ["bark/1.png", "leaf/1.png"]


def test_image_splits_are_no_class_split(folder: Folder):
    # Halving the classes of one official split would lose the images of the other.
    root = folder({f"{split}/{car}/1.png": "red" for split in ("train", "test") for car in ("Audi", "BMW")})
    with pytest.raises(ImagesError, match=r"cars196: .* must hold stanford_cars .*; it holds 'test', 'train'"):
        open_benchmark("cars196", root)


def test_a_split_that_a_plain_folder_cannot_have(folder: Folder):
    root = folder({"bark/1.png": "red", "leaf/1.png": "red"})
    with pytest.raises(ImagesError, match=r"pets: .* must hold oxford-iiit-pet with .*; it holds 'bark', 'leaf'"):
        open_benchmark("pets", root, split="train")


@pytest.mark.parametrize("files", [{"1.png": "red"}, {"readme.txt": b"x"}])
def test_another_layout(folder: Folder, files: dict):
    there = next(iter(files))
    with pytest.raises(ImagesError, match=rf"cub200: .* must hold CUB_200_2011/images/001.*; it holds '{there}'"):
        open_benchmark("cub200", folder(files))


def test_errors(tmp_path: Path):
    with pytest.raises(ImagesError, match=r"'.*no' must be an existing folder. Expected in it: cifar-10-batches-py"):
        open_benchmark("cifar10", tmp_path / "no")
    with pytest.raises(ValueRangeError, match=r"name must be one of cub200, .*; got 'cub'. Did you mean cub200"):
        open_benchmark("cub", tmp_path)
    with pytest.raises(ValueRangeError, match="split of caltech101 must be one of all; got 'test'"):
        open_benchmark("caltech101", tmp_path, split="test")


def test_class_split_parts_the_classes():
    images = ArrayImages(images=np.zeros((5, 4, 4), np.uint8), labels=[2, 0, 1, 2, 0])
    first, second = class_split(images, half="first"), class_split(images)
    assert (first.labels.tolist(), second.labels.tolist()) == (
        [0, 0],
        [2, 1, 2],
    )  # of three classes, 0 is the first half
    assert second.ids == ["000000", "000002", "000003"]


def test_class_split_counts_named_classes_without_images():
    images = ArrayImages(images=np.zeros((2, 4, 4), np.uint8), labels=[0, 1], classes=list("abcd"))
    assert class_split(images, half="first").labels.tolist() == [0, 1]


def test_class_split_errors():
    images = open_images(np.zeros((2, 4, 4), np.uint8))
    with pytest.raises(
        ImagesError, match="class_split needs labels of at least two classes; 'images in memory' has none"
    ):
        class_split(images)
    with pytest.raises(ValueRangeError, match="half must be one of first, second; got 'third'"):
        class_split(images, half="third")
    with pytest.raises(ImagesError, match="at least two classes; 'images in memory' has 1"):
        class_split(open_images(np.zeros((2, 4, 4), np.uint8), labels=torch.tensor([0, 0])))
