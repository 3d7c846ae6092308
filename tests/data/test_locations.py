import multiprocessing
import pickle
import tarfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from zipfile import ZipFile

import fsspec
import numpy as np
import pandas
import pytest
import s3fs
import torch
from PIL import Image
from torch import nn

import dubito
from dubito.data import FileImages, TarImages, open_images
from dubito.data.decode import read_content
from dubito.data.open import one_or_many
from dubito.errors import BrokenImageError, ImagesError, LeftOutFilesWarning, MissingPackageError, StoreError
from dubito.storage.locations import RangeReader, RemotePath, expand, is_url

FILES = {"dog/2.png": "red", "cat/1.png": "lime", "cat/0.png": "blue"}
COLOURS = [(0, 0, 255), (0, 255, 0), (255, 0, 0)]


def colours(images) -> list[tuple[int, int, int]]:
    return [images.read(row).getpixel((0, 0)) for row in range(len(images))]


@pytest.fixture(params=["memory", "s3"])
def store(request, bucket):
    """The address of an empty folder."""
    if request.param == "s3":
        yield f"{bucket}/photos"
        return
    yield "memory://photos"
    fsspec.filesystem("memory").rm("/", recursive=True)


def put(folder: Path, store: str) -> str:
    """Copy a folder to a store."""
    files, root = fsspec.core.url_to_fs(store)
    for path in folder.rglob("*"):
        if path.is_file():
            files.pipe_file(f"{root}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    return store


def test_addresses():
    assert [
        is_url(text) for text in ("s3://b/a", "HF://datasets/a", "gs://b", "c:/x", "a/b://", "file:///x", Path())
    ] == [
        *(True, True, True),
        *(False, False, False, False),
    ]


def test_a_folder_in_a_store_is_the_folder_on_the_disk(folder, store):
    local = folder({**FILES, "a.txt": b"x"})
    put(local, store)
    with pytest.warns(LeftOutFilesWarning, match=r"photos': left out 1 \.txt"):
        images = open_images(f"{store}/")
    with pytest.warns(LeftOutFilesWarning):
        on_disk = open_images(local)
    assert isinstance(images, FileImages)
    assert (images.ids, images.classes, images.labels.tolist()) == (on_disk.ids, ("cat", "dog"), [0, 0, 1])
    assert images.digest() == on_disk.digest()
    assert colours(images) == COLOURS
    assert pickle.loads(pickle.dumps(images)).digest() == images.digest()  # noqa: S301 (our own bytes)


def test_archives_and_lists_in_a_store(folder, store, tmp_path):
    local = folder(FILES)
    with ZipFile(local / "all.zip", "w") as archive:
        for name in FILES:
            archive.write(local / name, name)
    (local / "lists").mkdir()
    (local / "lists" / "some.csv").write_text("path,label\n../dog/2.png,fox\n../cat/0.png,cat\n")
    np.savez(local / "both.npz", a_images=np.zeros((2, 4, 4, 3), np.uint8), b_images=np.ones((1, 4, 4, 3), np.uint8))
    put(local, store)
    zipped = open_images(f"{store}/all.zip")
    assert (zipped.ids, colours(zipped)) == (sorted(FILES), COLOURS)
    assert zipped.digest() == open_images(local / "all.zip").digest()
    listed = open_images(f"{store}/lists/some.csv")
    assert (listed.classes, listed.labels.tolist(), colours(listed)) == (("cat", "fox"), [1, 0], COLOURS[::-2])
    assert len(open_images(f"{store}/both.npz#b")) == 1
    labelled = open_images([f"{store}/dog/2.png"], labels=f"{store}/lists/some.csv")
    assert labelled.labels.tolist() == [1]


def test_lists_and_frames_of_addresses(folder, store):
    put(folder(FILES), store)
    addresses = [f"{store}/{name}" for name in FILES]
    expected = COLOURS[::-1]
    assert colours(open_images(addresses)) == expected
    frame = open_images(pandas.DataFrame({"url": addresses, "label": ["a", "b", "b"]}))
    assert (frame.ids, frame.labels.tolist(), colours(frame)) == (addresses, [0, 1, 1], expected)
    assert colours(open_images(f"{store}/cat/{{0,1}}.png")) == COLOURS[:2]
    assert colours(open_images(f"{store}/*/2.png")) == COLOURS[2:]
    assert [one_or_many(source)[1] for source in (addresses[0], store, f"{store}/cat/*.png")] == [True, False, False]


def test_what_is_missing_is_one_broken_image(folder, store):
    put(folder({**FILES, "cat/empty.png": b""}), store)
    images = open_images([f"{store}/cat/{name}.png" for name in ("1", "none", "empty")])
    assert images.read(0).getpixel((0, 0)) == COLOURS[1]
    with pytest.raises(BrokenImageError, match=r"reading it gave: there is no '.*none\.png'"):
        images.read(1)
    with pytest.raises(BrokenImageError, match="it has 0 bytes"):
        images.read(2)
    with pytest.raises(ImagesError, match=r"folder '.*nothing' (must hold images|cannot be read)"):
        open_images(f"{store}/nothing")
    with pytest.raises(ImagesError, match=r"archive '.*none\.tar' cannot be read \(.*there is no"):
        open_images(f"{store}/none.tar")


def test_images_of_a_store_are_bounded(folder, store, monkeypatch):
    put(folder(FILES), store)
    monkeypatch.setattr("dubito.data.decode.LIMIT", 50)
    content, _ = read_content(RemotePath(f"{store}/cat/1.png"))
    assert isinstance(content, OSError)
    assert "the most that is read of an image" in str(content)


def test_a_store_that_cannot_be_reached_stops_everything(monkeypatch, bucket):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    images = FileImages(Path(), ["s3://bucket/a.png"])
    with pytest.raises(StoreError, match=r"'s3://bucket/a\.png' cannot be accessed \(.*run the same call again"):
        images.read(0)
    s3fs.S3FileSystem.clear_instance_cache()


def test_schemes_without_a_package():
    with pytest.raises(
        MissingPackageError, match=r"'az://b/a' is accessed by another package: pip install 'dubito\[az\]'"
    ):
        open_images("az://b/a")
    with pytest.raises(StoreError, match=r"'nowhere://b' cannot be accessed \(ValueError: Protocol not known: nowhere"):
        open_images("nowhere://b")


def test_files_are_read_in_ranges(store):
    files, root = fsspec.core.url_to_fs(store)
    data = np.random.default_rng(0).bytes(3 << 20)
    files.pipe_file(f"{root}/data", data)
    place = RemotePath(f"{store}/data")
    assert place.parent.files_below() == ["data"]
    assert place.read_range(5, 10) == data[5:15]
    assert place.read_range(len(data) - 3, 10) == data[-3:]
    assert place.read_range(len(data), 10) == b""
    reader = RangeReader()
    for start in (0, 1000, 900, 2000, 1 << 20, (1 << 20) + 600, 3 << 20, 50, 700_000):
        assert reader.read(place, start, 700) == data[start : start + 700], start
    with place.open("rb") as file:
        file.seek(-7, 2)
        assert file.read() == data[-7:]
        file.seek(1)
        assert file.read(2 << 20) == data[1 : 1 + (2 << 20)]


def test_reading_forward_takes_few_requests(store, monkeypatch):
    files, root = fsspec.core.url_to_fs(store)
    files.pipe_file(f"{root}/data", bytes(4 << 20))
    requests = []
    read_range, place = RemotePath.read_range, RemotePath(f"{store}/data")
    monkeypatch.setattr(
        RemotePath, "read_range", lambda self, start, size: requests.append(size) or read_range(self, start, size)
    )
    reader = RangeReader()
    for start in range(0, 2 << 20, 1 << 15):
        reader.read(place, start, 1 << 14)
    assert requests == [1 << 14, 1 << 20, 1 << 20]
    reader.read(place, 3 << 20, 100)
    assert requests[3:] == [100]  # a jump fetches no more than it needs


def test_workers_read_after_the_parent_has(folder, bucket):
    images = open_images(put(folder(FILES), f"{bucket}/photos"))
    images.read(0)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        read = pool.map(images.read, range(3))
        assert colours(images) == COLOURS
    assert [image.getpixel((0, 0)) for image in read] == COLOURS


def test_an_extraction_from_a_store_is_that_from_the_disk(folder, bucket, tmp_path, one_thread):
    local = folder(FILES)
    put(local, f"{bucket}/photos")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
    model = dubito.wrap(network, transform=dubito.Preprocess(4), classes=["cat", "dog"])
    for source, name in ((local, "disk"), (f"{bucket}/photos", "store")):
        dubito.extract(model, source, tmp_path / name, workers=2, progress=False)
    (disk,), (store,) = ((tmp_path / name).glob("rows*") for name in ("disk", "store"))
    assert (disk.name, disk.read_bytes()) == (store.name, store.read_bytes())
    dubito.extract(model, local, tmp_path / "store", workers=0, progress=False)  # the same images: a finished cache


def test_a_server_that_ignores_ranges(folder, archive):
    """Python's own web server sends whole files."""
    pytest.importorskip("aiohttp")
    path = archive(FILES)

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args) -> None:
            super().__init__(*args, directory=str(path.parent))

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{web.server_port}/photos.zip"
        with pytest.raises(StoreError, match="must be on a server that sends ranges"):
            RemotePath(address).read_range(5, 10)
        web.shutdown()


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a{9..11}.tar", ["a9.tar", "a10.tar", "a11.tar"]),
        ("{x,yy}/{01..02}", ["x/01", "x/02", "yy/01", "yy/02"]),
        ("https://e.org/{1..2}.jpg?a=*", ["https://e.org/1.jpg?a=*", "https://e.org/2.jpg?a=*"]),
    ],
)
def test_patterns(pattern, names):
    assert expand(pattern) == names


@pytest.mark.parametrize("pattern", ["{1..x}.tar", "{5..1}.tar", "{0..99999999999}.tar", f"{{0..{'9' * 5000}}}.tar"])
def test_patterns_that_stand_for_nothing(pattern):
    with pytest.raises(ImagesError, match="must have braces such as"):
        expand(pattern)


def test_patterns_that_stand_for_too_much(tmp_path):
    with pytest.raises(ImagesError, match=r"at most 1,000,000 files"):
        expand("{0..9999}{0..9999}.tar")
    with pytest.raises(ImagesError, match="it matches none"):
        expand(f"{tmp_path}/*.tar")


def test_a_file_whose_name_is_a_pattern(tmp_path):
    Image.new("RGB", (4, 4), "red").save(tmp_path / "{1..2}.png")
    assert open_images(tmp_path / "{1..2}.png").ids == ["{1..2}.png"]


def test_shards_in_a_store(folder, store, tmp_path):
    local = folder(FILES)
    (tmp_path / "tars").mkdir()
    for number, name in enumerate(FILES):
        with tarfile.open(tmp_path / "tars" / f"{number}.tar", "w") as archive:
            archive.add(local / name, name)
    put(tmp_path / "tars", store)
    on_disk = open_images(tmp_path / "tars")
    for source in (store, f"{store}/{{0..2}}.tar", f"{store}/*.tar", [f"{store}/{number}.tar" for number in range(3)]):
        images = open_images(source)
        assert isinstance(images, TarImages)
        assert (images.ids, images.classes) == (on_disk.ids, ("cat", "dog"))
        assert images.digest() == on_disk.digest()
    assert colours(images) == COLOURS[::-1]
