import multiprocessing
import pickle
import sys
from pathlib import Path

import fsspec
import pytest
from tests.data.conftest import png

from dubito.data import FileImages, ParquetImages, open_images
from dubito.data.cells import Cursor
from dubito.data.parquet import _cells
from dubito.errors import BrokenImageError, ImagesError, MissingPackageError, StoreError
from dubito.storage import RemotePath
from dubito.types import Images

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
NAMES = ["red", "lime", "blue"]
COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]


def colours(images) -> list[tuple[int, int, int]]:
    return [images.read(row).getpixel((0, 0)) for row in range(len(images))]


def write(path: Path, columns: dict[str, list], rows: int = 2) -> Path:
    """A Parquet file with some rows in a group."""
    parquet.write_table(pyarrow.table(columns), path, row_group_size=rows)
    return path


@pytest.fixture
def cells() -> list[bytes]:
    return [png(name) for name in NAMES]


def test_bytes_of_image_files(cells, tmp_path):
    images = open_images(write(tmp_path / "a.parquet", {"image": cells, "label": ["dog", "cat", "dog"]}))
    assert isinstance(images, ParquetImages)
    assert isinstance(images, Images)
    assert (images.ids, images.labels.tolist(), images.classes) == (
        ("000000", "000001", "000002"),
        [1, 0, 1],
        ("cat", "dog"),
    )
    assert colours(images) == COLOURS
    assert [images.read(row).getpixel((0, 0)) for row in (2, 0, 1)] == [COLOURS[2], COLOURS[0], COLOURS[1]]
    copy = pickle.loads(pickle.dumps(images))  # noqa: S301 (our own bytes)
    assert copy.digest() == images.digest()
    assert [images.read_hashed(row)[1] for row in range(3)] == images.contents(range(3))


def test_names_are_ids_if_each_image_has_its_own(cells, tmp_path):
    columns = {"url": ["x", "x", "x"], "id": ["a", "b", "c"], "picture": cells}
    assert open_images(write(tmp_path / "a.parquet", columns)).ids == ["a", "b", "c"]
    repeated = open_images(write(tmp_path / "b.parquet", {**columns, "id": ["a", "a", None]}))
    assert (repeated.ids, repeated.labels) == (("000000", "000001", "000002"), None)


def test_images_as_hugging_face_writes_them(cells, tmp_path):
    (tmp_path / "2.png").write_bytes(cells[2])
    structs = [
        {"bytes": cells[0], "path": "x.png"},
        {"bytes": cells[1], "path": None},
        {"bytes": None, "path": "2.png"},
    ]
    structs += [{"bytes": None, "path": None}]
    images = open_images(write(tmp_path / "a.parquet", {"photo": structs, "caption": ["a", "b", "c", "d"]}))
    assert images.labels is None
    assert [images.read(row).getpixel((0, 0)) for row in range(3)] == COLOURS
    with pytest.raises(BrokenImageError, match="it has neither bytes nor a path"):
        images.read(3)


def test_several_files_are_one_set(cells, tmp_path):
    write(tmp_path / "train-0.parquet", {"image": cells[:2], "label": ["dog", "cat"]})
    write(tmp_path / "train-1.parquet", {"image": cells[2:], "label": ["ant"]})
    images = open_images(tmp_path)
    assert images.ids == ["train-0.parquet/000000", "train-0.parquet/000001", "train-1.parquet/000000"]
    assert (images.labels.tolist(), images.classes, colours(images)) == ([2, 1, 0], ("ant", "cat", "dog"), COLOURS)
    assert open_images(f"{tmp_path}/train-{{0..1}}.parquet").digest() == images.digest()
    write(tmp_path / "train-1.parquet", {"picture": cells[2:]})
    with pytest.raises(ImagesError, match=r"must have the same columns; .* has 'image', 'label', .* has 'picture'"):
        open_images(tmp_path)


def test_paths_and_addresses(folder, cells):
    root = folder({"photos/1.png": "red"})
    files = fsspec.filesystem("memory")
    files.pipe_file("/some/2.png", cells[1])
    path = write(
        root / "list.parquet", {"width": [8, 8], "path": ["photos/1.png", "memory://some/2.png"], "Label": [3, 4]}
    )
    images = open_images(path)
    assert isinstance(images, FileImages)
    assert (images.ids, images.labels.tolist()) == (["photos/1.png", "memory://some/2.png"], [3, 4])
    assert colours(images) == COLOURS[:2]
    with pytest.raises(ImagesError, match=r"1 of 1 do not: 'gone\.png'\. Paths are relative to"):
        open_images(write(root / "gone.parquet", {"path": ["gone.png"]}))
    with pytest.raises(ImagesError, match=r"must have a column of image bytes, paths or addresses; .* 'a', 'b'"):
        open_images(write(root / "none.parquet", {"a": [1], "b": [2]}))


def test_in_a_store(cells, bucket, tmp_path):
    path = write(tmp_path / "a.parquet", {"image": cells})
    fsspec.filesystem("s3").put_file(str(path), "bucket/data/a.parquet")
    images = open_images(f"{bucket}/data/*.parquet")
    images.read(0)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        read = pool.map(images.read, range(3))
    assert [image.getpixel((0, 0)) for image in read] == colours(images) == COLOURS


def test_a_store_that_goes_away_is_no_broken_image(cells, tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", {"image": cells})
    fsspec.filesystem("memory").put_file(str(path), "/data/a.parquet")
    images = open_images("memory://data/a.parquet")

    def refuse(self: RemotePath, start: int, size: int) -> bytes:
        raise StoreError("the store cannot be reached")

    monkeypatch.setattr(RemotePath, "read_range", refuse)
    with pytest.raises(StoreError, match="the store cannot be reached"):
        images.read(0)


def test_a_damaged_row_group_costs_its_own_images(cells, tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(
        pyarrow.table({"image": cells * 2}), path, row_group_size=2, compression="zstd", use_dictionary=False
    )
    place = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    start = place.data_page_offset
    data[start : start + place.total_compressed_size] = bytes(place.total_compressed_size)
    path.write_bytes(data)
    images = open_images(path)
    for row in (2, 3):
        with pytest.raises(BrokenImageError, match="must be a readable file; reading it gave:"):
            images.read(row)
    assert [images.read(row).getpixel((0, 0)) for row in (0, 1, 4, 5)] == [COLOURS[i] for i in (0, 1, 1, 2)]


def test_a_row_group_is_read_a_few_rows_at_a_time(cells, tmp_path):
    path = write(tmp_path / "a.parquet", {"image": cells * 40}, rows=120)
    cursor = Cursor(_cells(path, 0, "image"))
    assert cursor.cell(20) == cells[20 % 3]
    assert (cursor.first, len(cursor._cells)) == (16, 16)
    images = open_images(path)
    assert [images.read(row).getpixel((0, 0)) for row in (119, 0, 60)] == [COLOURS[row % 3] for row in (119, 0, 60)]


@pytest.mark.parametrize("content", [b"", b"PAR1 but not really PAR1", b"PAR1" + bytes(100) + b"PAR1"])
def test_other_files(tmp_path, content):
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(ImagesError, match=r"Parquet file '.*a\.parquet' cannot be read"):
        open_images(tmp_path / "a.parquet")


def test_no_rows(tmp_path):
    with pytest.raises(ImagesError, match="must have rows; it has none"):
        open_images(write(tmp_path / "a.parquet", {"image": pyarrow.array([], pyarrow.binary())}))


def test_without_pyarrow(cells, tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", {"image": cells})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'dubito\[parquet\]'"):
        open_images(path)
