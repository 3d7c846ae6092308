import sys

import pytest
from PIL import Image

from dubito.data import DatasetImages, FileImages, Subset, open_images
from dubito.errors import BrokenImageError, ImagesError, MissingPackageError

pandas = pytest.importorskip("pandas")
FILES = {"1.png": "red", "2.png": "lime"}
COLOURS = [(255, 0, 0), (0, 255, 0)]


def colours(images) -> list[tuple[int, int, int]]:
    return [images.read(row).getpixel((0, 0)) for row in range(len(images))]


def test_paths_start_at_the_working_folder(folder, monkeypatch):
    monkeypatch.chdir(folder(FILES))
    images = open_images(pandas.DataFrame({"n": [1, 2], "IMG": ["1.png", "2.png"], "Target": [7, 8]}))
    assert isinstance(images, FileImages)
    assert (images.ids, images.labels.tolist(), colours(images)) == (["1.png", "2.png"], [7, 8], COLOURS)
    with pytest.raises(
        ImagesError, match=r"column 'path' of the DataFrame must list files .* 1 of 1 do not: 'no\.png'"
    ):
        open_images(pandas.DataFrame({"path": ["no.png"]}))


def test_pictures_take_their_ids_from_a_column_that_names_them(folder):
    pictures = [Image.new("RGB", (4, 4), colour) for colour in FILES.values()]
    images = open_images(pandas.DataFrame({"id": ["a", "b"], "image": pictures, "class": ["dog", "cat"]}))
    assert isinstance(images, DatasetImages)
    assert (images.ids, images.classes, images.labels.tolist()) == (["a", "b"], ("cat", "dog"), [1, 0])
    assert colours(images) == COLOURS
    unnamed = open_images(pandas.DataFrame({"picture": pictures}))
    assert (unnamed.ids, unnamed.labels) == (("000000", "000001"), None)


def test_the_bytes_of_files(folder):
    root = folder({**FILES, "3.png": b"broken"})
    cells = [(root / name).read_bytes() for name in ("1.png", "2.png", "3.png")]
    images = open_images(pandas.DataFrame({"image": [{"bytes": cell, "path": None} for cell in cells]}))
    assert colours(open_images(pandas.DataFrame({"image": cells[:2]}))) == COLOURS
    assert images.read(1).getpixel((0, 0)) == COLOURS[1]
    with pytest.raises(BrokenImageError, match="000002 of the DataFrame"):
        images.read(2)


def test_series_and_frames_of_labels(folder):
    root = folder(FILES)
    frame = pandas.DataFrame({"file_name": ["2.png", "1.png"], "class": ["dog", "cat"]})
    assert open_images(root, labels=frame).labels.tolist() == [0, 1]
    assert open_images(root, labels=frame["class"]).labels.tolist() == [1, 0]
    assert len(open_images(pandas.Series([str(root / name) for name in FILES]))) == 2


def test_an_empty_frame():
    with pytest.raises(ImagesError, match=r"a DataFrame must have columns and rows; got shape \(0, 1\)"):
        open_images(pandas.DataFrame({"path": []}))


def test_hugging_face(folder):
    datasets = pytest.importorskip("datasets")
    root = folder(FILES)
    paths = [str(root / name) for name in FILES]
    features = datasets.Features({"coarse": datasets.Value("string"), "photo": datasets.Image()})
    pictures = datasets.Dataset.from_dict({"coarse": ["x", "y"], "photo": paths}, features=features)
    images = open_images(pictures.with_format("numpy"))
    assert (colours(images), images.labels) == (COLOURS, None)
    unlabelled = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    test = datasets.Dataset.from_dict({"image": paths, "label": [-1, -1]}, features=unlabelled)
    assert (open_images(test).labels, open_images(test).classes) == (None, ("cat", "dog"))
    listed = open_images(datasets.Dataset.from_dict({"file_name": paths, "label": ["dog", "cat"]}))
    assert (listed.ids, listed.labels.tolist()) == (paths, [1, 0])
    with pytest.raises(ImagesError, match=r"must be one split; this has the splits 'train', 'test'"):
        open_images(datasets.DatasetDict({"train": pictures, "test": pictures}))


def test_hugging_face_on_disk(folder, tmp_path):
    datasets = pytest.importorskip("datasets")
    root = folder({"cat/1.png": "red", "dog/2.png": "lime", "dog/3.png": b"broken"})
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    cells = [{"bytes": path.read_bytes(), "path": None} for path in sorted(root.rglob("*.png"))]
    data = datasets.Dataset.from_dict({"image": cells, "label": [0, 1, 1]}, features=features)
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "train-0.parquet")
    loaded = datasets.load_from_disk(tmp_path / "saved")
    for source in (loaded, tmp_path / "saved", str(tmp_path / "train-*.parquet")):
        images = open_images(source)
        assert (colours(Subset(images, [0, 1])), images.classes) == (COLOURS, ("cat", "dog"))
        assert images.labels.tolist() == [0, 1, 1]
        with pytest.raises(BrokenImageError, match="000002 of"):
            images.read(2)
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "splits")
    assert len(open_images(tmp_path / "splits" / "test")) == 3
    with pytest.raises(ImagesError, match=r"splits' has the splits 'train', 'test'. Open one of them, .*splits/train'"):
        open_images(tmp_path / "splits")
    next((tmp_path / "saved").glob("*.arrow")).write_bytes(b"damaged")
    with pytest.raises(ImagesError, match=r"data set '.*saved' cannot be read"):
        open_images(tmp_path / "saved")


def test_a_saved_data_set_without_its_package(tmp_path, monkeypatch):
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPackageError, match="pip install datasets"):
        open_images(tmp_path)


def test_an_own_module_called_datasets():
    class Own(list):
        pass

    Own.__module__ = "datasets.own"
    assert isinstance(open_images(Own([Image.new("RGB", (4, 4))])), DatasetImages)
