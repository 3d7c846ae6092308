"""Whatever a collection comes in: one broken member costs one image, and every other image has its row."""

import io
import tarfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from zipfile import ZipFile

import pytest
from tests.cache.conftest import image_folder, small_network

import dubito
from dubito.errors import ImagesError, SkippedImagesWarning

COUNT, BROKEN = 21, 8


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    """Image files, of which one is cut off."""
    paths = sorted(image_folder(tmp_path / "photos", count=COUNT).rglob("*.png"))
    paths[BROKEN].write_bytes(paths[BROKEN].read_bytes()[:100])
    return paths


@pytest.fixture
def served(photos: list[Path]) -> Iterator[list[str]]:
    """The addresses of the same files on a web server."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    root = photos[0].parents[1]
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(root))) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        yield [f"http://127.0.0.1:{web.server_port}/{path.relative_to(root)}" for path in photos]
        web.shutdown()
        thread.join()


def in_tars(photos: list[Path], place: Path) -> str:
    for shard in range(3):
        with tarfile.open(place / f"train-{shard}.tar", "w") as archive:
            for path in photos[shard * 7 : (shard + 1) * 7]:
                member = tarfile.TarInfo(path.name)
                member.size = path.stat().st_size
                archive.addfile(member, io.BytesIO(path.read_bytes()))
    return str(place / "train-{0..2}.tar")


def in_zip(photos: list[Path], place: Path) -> Path:
    with ZipFile(place / "photos.zip", "w") as archive:
        for path in photos:
            archive.write(path, path.relative_to(photos[0].parents[1]))
    return place / "photos.zip"


def in_parquet(column: str, cells: list[object], place: Path) -> Path:
    frame = pytest.importorskip("pandas").DataFrame({column: cells})
    frame.to_parquet(place / "photos.parquet", row_group_size=5)
    return place / "photos.parquet"


def hugging_face(photos: list[Path]):
    datasets = pytest.importorskip("datasets")
    cells = [{"bytes": path.read_bytes(), "path": None} for path in photos]
    return datasets.Dataset.from_dict({"image": cells}, features=datasets.Features({"image": datasets.Image()}))


def saved(photos: list[Path], place: Path) -> Path:
    hugging_face(photos).save_to_disk(place / "saved", num_shards=3)
    return place / "saved"


def frame_of(package: str, column: str, cells: list[object]):
    return pytest.importorskip(package).DataFrame({column: cells})


LOCAL: dict[str, Callable[[list[Path], Path], object]] = {
    "folder": lambda photos, _: photos[0].parents[1],
    "list of paths": lambda photos, _: photos,
    "tar shards": in_tars,
    "zip": in_zip,
    "Parquet of bytes": lambda photos, place: in_parquet("image", [path.read_bytes() for path in photos], place),
    "Parquet of paths": lambda photos, place: in_parquet("path", list(map(str, photos)), place),
    "pandas, paths": lambda photos, _: frame_of("pandas", "path", list(map(str, photos))),
    "polars, paths": lambda photos, _: frame_of("polars", "path", list(map(str, photos))),
    "polars, bytes": lambda photos, _: frame_of("polars", "image", [path.read_bytes() for path in photos]),
    "Hugging Face, in memory": lambda photos, _: hugging_face(photos),
    "Hugging Face, on disk": saved,
    "Hugging Face, streaming": lambda photos, _: hugging_face(photos).to_iterable_dataset(num_shards=3),
}


def check(source: object) -> None:
    model = dubito.wrap(small_network(), transform=dubito.Preprocess((16, 16), 16), name="small")
    images = dubito.open_images(source)
    with pytest.warns(SkippedImagesWarning, match=f"1 of {COUNT} images could not be decoded"):
        table = dubito.extract(model, images, label_space="own", workers=0, batch_size=4, progress=False)
    whole = [row for row in range(COUNT) if row != BROKEN]
    assert table.id.tolist() == [images.ids[row] for row in whole]
    assert [name for name, _ in table.skipped] == [images.ids[BROKEN]]


@pytest.mark.parametrize("kind", LOCAL)
def test_one_broken_member_costs_one_image(kind, photos, tmp_path):
    check(LOCAL[kind](photos, tmp_path))


def test_one_broken_address_costs_one_image(served, tmp_path):
    check(served)
    check(in_parquet("url", served, tmp_path))
    check([*served[:BROKEN], f"{served[BROKEN]}.none", *served[BROKEN + 1 :]])


def without_one(photos: list[Path]) -> list[bytes | None]:
    return [None if row == BROKEN else path.read_bytes() for row, path in enumerate(photos)]


def test_an_empty_cell_costs_one_image(photos, tmp_path):
    cells = without_one(photos)
    datasets = pytest.importorskip("datasets")
    check(frame_of("pandas", "image", cells))
    check(frame_of("polars", "image", cells))
    check(in_parquet("image", cells, tmp_path))
    data = datasets.Dataset.from_dict({"image": cells}, features=datasets.Features({"image": datasets.Image()}))
    check(data)
    check(data.to_iterable_dataset())


@pytest.mark.parametrize("row", [0, BROKEN])
def test_rows_without_a_path_are_refused_before_any_work(row, photos, tmp_path):
    paths: list[object] = list(map(str, photos))
    paths[row] = None
    expected = rf"column 'path' of .* must name an image in every row; 1 of {COUNT} rows name none, .*: '{row}'\."
    for source in (
        frame_of("pandas", "path", paths),
        frame_of("pandas", "path", [float("nan") if path is None else path for path in paths]),
        frame_of("polars", "path", paths),
        in_parquet("path", paths, tmp_path),
    ):
        with pytest.raises(ImagesError, match=expected):
            dubito.open_images(source)
