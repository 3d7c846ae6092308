"""Streaming data sets of Hugging Face: read from front to back, and yet by position, in any process."""

import io
import pickle
import sys
import tarfile
import threading
import time
import zipfile
from multiprocessing import get_context

import numpy as np
import pytest
import s3fs
import torch
from PIL import Image
from tests.cache.conftest import contents, small_network
from tests.engines.conftest import FakeRay
from torch.utils.data import IterableDataset

import dubito
from dubito.cache.runner import default_workers
from dubito.data import FileImages, Subset, open_images
from dubito.data.streams import StreamImages
from dubito.errors import BrokenImageError, ImagesError, SkippedImagesWarning, StaleCacheError

from .conftest import png

datasets = pytest.importorskip("datasets")
NAMES = ("cat", "dog", "cow")
ROWS = 50
BROKEN = 17
SETTINGS = {"batch_size": 4, "shard_size": 8, "threads": 1, "progress": False}
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def colour(row):
    return (5 * row, 255 - 5 * row, 7)


def cell(row):
    return {"bytes": b"not an image" if row == BROKEN else png(colour(row)), "path": None}


def in_memory(rows=ROWS, **columns):
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(NAMES))}
    features |= {name: datasets.Value("string") for name in columns}
    data = {"image": [cell(row) for row in range(rows)], "label": [row % 3 for row in range(rows)], **columns}
    return datasets.Dataset.from_dict(data, features=datasets.Features(features))


@pytest.fixture
def stream(tmp_path):
    """Of four Parquet files, as it comes from a hub."""
    for shard in range(4):
        in_memory().shard(4, shard, contiguous=True).to_parquet(tmp_path / f"train-{shard}.parquet")
    files = str(tmp_path / "train-*.parquet")
    return datasets.load_dataset(
        "parquet", data_files=files, split="train", streaming=True, cache_dir=str(tmp_path / "hub")
    )


def pixels(images, row):
    return images.read(row).getpixel((0, 0))


def model():
    return dubito.wrap(small_network(), transform=dubito.Preprocess((16, 16), 16), name="small", classes=NAMES)


def extract(images, to, **options):
    with pytest.warns(SkippedImagesWarning):
        return dubito.extract(model(), images, to, **{**SETTINGS, **options})


def test_rows_are_read_in_any_order(stream):
    images = open_images(stream)
    assert isinstance(images, StreamImages)
    assert (len(images), images.classes, images.labels.tolist()) == (ROWS, NAMES, [row % 3 for row in range(ROWS)])
    assert images.ids[:2] == ("000000", "000001")
    for row in (0, 1, 20, 19, 49, 3, 3, 48):
        assert pixels(images, row) == colour(row)


def test_a_broken_member_is_one_broken_image(stream):
    images = open_images(stream)
    with pytest.raises(BrokenImageError, match=r"'000017 of streaming data set of Hugging Face' must be an image file"):
        images.read(BROKEN)
    assert pixels(images, BROKEN + 1) == colour(BROKEN + 1)


def test_hashes_are_those_of_the_bytes_in_any_process(stream):
    images, expected = (
        open_images(stream),
        [dubito.data.image_set.hash_bytes(cell(row)["bytes"]) for row in range(ROWS)],
    )
    assert images.contents(range(ROWS)) == expected
    assert [images.read_hashed(row)[1] for row in range(ROWS)] == expected
    again = pickle.loads(pickle.dumps(images))  # noqa: S301
    assert (again.digest(), pixels(again, 30)) == (images.digest(), colour(30))


def test_threads_have_cursors_of_their_own(stream):
    images, wrong = open_images(stream), []

    def read(rows):
        wrong.extend(row for row in rows if row != BROKEN and pixels(images, row) != colour(row))

    threads = [threading.Thread(target=read, args=(range(first, ROWS, 3),)) for first in range(3)]
    for thread in threads:
        thread.start()
    next(iter(stream))  # nor does the user's own iteration disturb them
    for thread in threads:
        thread.join()
    assert wrong == []


def test_one_process_decodes_by_default_and_several_see_every_row(stream, tmp_path):
    images = open_images(stream)
    assert [default_workers(one) for one in (images, Subset(images, [1, 2]))] == [1, 1]
    table = extract(images, tmp_path / "one")
    assert (len(table), table.skipped[0][0], table.label.tolist()[:4]) == (ROWS - 1, "000017", [0, 1, 2, 0])
    extract(images, tmp_path / "none", workers=0)
    extract(images, tmp_path / "two", workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "none") == contents(tmp_path / "two")


def test_a_stopped_extraction_resumes_with_the_same_bytes(stream, tmp_path, monkeypatch):
    expected = tmp_path / "undisturbed"
    extract(open_images(stream), expected)
    read, seen = StreamImages.read_hashed, []

    def stopped(self, index):
        if index == 30:
            raise KeyboardInterrupt
        return read(self, index)

    def noted(self, index):
        seen.append(index)
        return read(self, index)

    monkeypatch.setattr(StreamImages, "read_hashed", stopped)
    with pytest.raises(KeyboardInterrupt):
        dubito.extract(model(), stream, tmp_path / "stopped", workers=0, **SETTINGS)
    monkeypatch.setattr(StreamImages, "read_hashed", noted)
    extract(stream, tmp_path / "stopped", workers=0)
    assert contents(tmp_path / "stopped") == contents(expected)
    assert seen == list(range(24, ROWS))  # from the first shard that was not whole


def test_a_killed_extraction_resumes_with_the_same_bytes(stream, tmp_path, monkeypatch):
    extract(stream, tmp_path / "undisturbed", workers=0)
    read, killed = StreamImages.read_hashed, tmp_path / "killed"

    def slow(self, index):
        time.sleep(0.02)
        return read(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(StreamImages, "read_hashed", slow)
        process = get_context("fork").Process(target=extract, args=(stream, killed), kwargs={"workers": 0})
        process.start()
        while process.is_alive() and len(list(killed.glob("forward-*.safetensors"))) < 2:
            time.sleep(0.01)
        process.kill()
        process.join()
    assert 2 <= len(list(killed.glob("forward-*.safetensors"))) < 7
    extract(stream, killed)
    assert contents(killed) == contents(tmp_path / "undisturbed")


def test_a_finished_cache_is_not_read_again_and_another_stream_is_refused(stream, tmp_path):
    extract(stream, tmp_path / "cache")
    before = contents(tmp_path / "cache")
    extract(stream, tmp_path / "cache")
    assert contents(tmp_path / "cache") == before
    reversed_rows = in_memory().select(range(ROWS - 1, -1, -1)).to_iterable_dataset()
    labels = [row % 3 for row in range(ROWS)]
    with pytest.raises(StaleCacheError, match="the contents of the images"):
        dubito.extract(model(), reversed_rows, tmp_path / "cache", labels=labels, **SETTINGS)


def test_the_workers_of_ray_get_a_copy(stream, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", FakeRay())
    extract(stream, tmp_path / "local", workers=0)
    extract(stream, tmp_path / "ray", workers=0, engine="ray")
    assert contents(tmp_path / "local") == contents(tmp_path / "ray")


def test_an_order_that_changes_is_an_error():
    random = np.random.default_rng(0)

    def rows():
        for row in random.permutation(8):
            yield {"image": Image.new("RGB", (8, 6), colour(int(row))), "label": int(row)}

    images = open_images(datasets.IterableDataset.from_generator(rows))
    with pytest.raises(ImagesError, match=r"row \d of a streaming data set .* another image than when it was opened"):
        list(map(images.read, range(8)))


def test_a_shuffled_stream_keeps_its_labels(stream, monkeypatch):
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)
    images = open_images(stream.shuffle(seed=0, buffer_size=20))
    seen = {row: pixels(images, row)[0] // 5 for row in range(ROWS) if is_whole(images, row)}
    assert len(seen) == ROWS - 1
    assert list(seen.values()) != sorted(seen.values())
    assert [number % 3 for number in seen.values()] == images.labels[list(seen)].tolist()


def is_whole(images, row):
    return not isinstance(images.read_hashed(row)[0], BrokenImageError)


def test_a_stream_that_fails_or_ends_early_stops_everything():
    left = [12]

    def rows():
        for row in range(left[0]):
            yield {"image": cell(row), "label": row}
        if left[0] == 5:
            raise ConnectionError("the hub is away")

    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    images = open_images(datasets.IterableDataset.from_generator(rows, features=features))
    left[0] = 3
    with pytest.raises(ImagesError, match=r"row 7 .* cannot be read \(OSError: the column has ended before it\)"):
        images.read(7)
    left[0] = 5
    with pytest.raises(ImagesError, match=r"row 7 .* \(ConnectionError: the hub is away\)"):
        images.read(7)
    with pytest.raises(ImagesError, match=r"streaming data set of Hugging Face cannot be read \(ConnectionError"):
        open_images(datasets.IterableDataset.from_generator(rows, features=features))
    left[0] = 12
    assert pixels(images, 7) == colour(7)


def test_a_column_that_names_images_gives_ids():
    names = [f"photo {row}" for row in range(4)]
    assert open_images(in_memory(4, file_name=names).to_iterable_dataset()).ids == names
    repeated = in_memory(4, file_name=["same"] * 4).to_iterable_dataset()
    assert open_images(repeated).ids == ("000000", "000001", "000002", "000003")


def test_labels_of_minus_one_are_none():
    data = in_memory(3)
    data = data.remove_columns("label").add_column("label", [-1] * 3).cast(data.features)
    images = open_images(data.to_iterable_dataset())
    assert (images.labels, images.classes) == (None, NAMES)


def test_bytes_without_a_type_of_their_own_and_missing_cells():
    features = datasets.Features({"image": datasets.Value("binary"), "class": datasets.Value("string")})
    data = {"image": [png("red"), None], "class": ["dog", "cat"]}
    images = open_images(datasets.Dataset.from_dict(data, features=features).to_iterable_dataset())
    assert (pixels(images, 0), images.labels.tolist(), images.classes) == ((255, 0, 0), [1, 0], ("cat", "dog"))
    with pytest.raises(BrokenImageError, match="neither bytes nor a path"):
        images.read(1)


def load(kind, tmp_path, **files):
    return datasets.load_dataset(kind, split="train", streaming=True, cache_dir=str(tmp_path / "hub"), **files)


def test_folders_and_zips_of_files(folder, tmp_path):
    root = folder({"cat/1.png": "red", "dog/2.png": "lime", "dog/3.png": b"broken"})
    images = open_images(load("imagefolder", tmp_path, data_dir=str(root)))
    assert (images.classes, images.labels.tolist()) == (("cat", "dog"), [0, 1, 1])
    assert [pixels(images, row) for row in (0, 1)] == [(255, 0, 0), (0, 255, 0)]
    files = open_images(root)
    assert images.contents([0, 1, 2]) == files.contents([0, 1, 2])
    with pytest.raises(BrokenImageError):
        images.read(2)
    (root / "dog/2.png").unlink()
    assert [pixels(images, 0), is_whole(images, 1)] == [(255, 0, 0), False]
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        archive.writestr("1.png", png("red"))
    zipped = open_images(load("imagefolder", tmp_path, data_files=str(tmp_path / "photos.zip")))
    assert pixels(zipped, 0) == (255, 0, 0)


def test_tar_shards(tmp_path):
    with tarfile.open(tmp_path / "0.tar", "w") as archive:
        for key, content, label in (("a", png("red"), 1), ("b", b"broken", 0), ("c", png("lime"), 1)):
            for ending, data in (("png", content), ("cls", str(label).encode())):
                member = tarfile.TarInfo(f"{key}.{ending}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    images = open_images(load("webdataset", tmp_path, data_files=str(tmp_path / "*.tar")))
    assert (images.ids, images.labels.tolist()) == (["a", "b", "c"], [1, 0, 1])
    assert [pixels(images, row) for row in (0, 2)] == [(255, 0, 0), (0, 255, 0)]


def test_a_stream_of_paths(folder):
    root = folder({"1.png": "red", "2.png": "lime"})
    rows = {"note": ["x", "y"], "file_name": [str(root / name) for name in ("2.png", "1.png")], "label": ["dog", "cat"]}
    images = open_images(datasets.Dataset.from_dict(rows).to_iterable_dataset())
    assert isinstance(images, FileImages)
    assert (images.ids, images.labels.tolist(), pixels(images, 0)) == (rows["file_name"], [1, 0], (0, 255, 0))


def test_what_is_refused():
    with pytest.raises(ImagesError, match="must hold at least one image; got none"):
        open_images(in_memory(1).to_iterable_dataset().take(0))
    with pytest.raises(ImagesError, match="must have rows; it has none"):
        open_images(datasets.Dataset.from_dict({"path": ["a"]}).to_iterable_dataset().take(0))
    with pytest.raises(ImagesError, match="must be one split; this has the splits 'train', 'test'"):
        open_images(datasets.IterableDatasetDict(dict.fromkeys(("train", "test"), in_memory(1).to_iterable_dataset())))

    class OfTorch(IterableDataset):
        def __iter__(self):
            yield torch.zeros(3, 8, 8)

    with pytest.raises(ImagesError, match=r"readable in any order; got OfTorch, an IterableDataset"):
        open_images(OfTorch())


def test_a_stream_from_an_object_store_in_a_forked_process(bucket, tmp_path):
    in_memory().to_parquet(tmp_path / "train.parquet")
    s3fs.S3FileSystem().put(str(tmp_path / "train.parquet"), f"{bucket}/train.parquet")
    stream = load("parquet", tmp_path, data_files=f"{bucket}/train.parquet")
    images = open_images(stream)
    assert pixels(images, 3) == colour(3)  # so that this process has a connection and a cursor of its own
    extract(images, tmp_path / "forked", workers=1)
    extract(images, tmp_path / "here", workers=0)
    assert contents(tmp_path / "forked") == contents(tmp_path / "here")
