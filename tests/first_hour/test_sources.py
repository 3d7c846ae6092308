"""`extract` and a guard take what people have, and a table in memory needs no folder."""

import http.server
import io
import tarfile
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Subset
from torchvision.datasets import ImageFolder

import dubito

COUNT = 6


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    )
    return dubito.wrap(network.eval(), transform=dubito.Preprocess((16, 16), 16), classes=["cat", "dog"], name="small")


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Three cats and three dogs, and lists of them."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        path = root / ("cat" if number < 3 else "dog") / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(path)
    return root


@pytest.fixture(scope="module")
def expected(model, photos):
    return dubito.extract(model, photos, workers=0)


@pytest.fixture(scope="module")
def server(photos):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(photos))) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{web.server_port}"
        web.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def paths(photos: Path) -> list[Path]:
    return sorted(photos.glob("*/*.png"))


def names(photos: Path) -> list[str]:
    return [path.parent.name for path in paths(photos)]


def pictures(photos: Path) -> list[Image.Image]:
    return [Image.open(path).copy() for path in paths(photos)]


def pandas_frame(photos: Path):
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({"Path": paths(photos), "split": "x", "Label": names(photos)})


def pandas_pictures(photos: Path):
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({"label": names(photos), "image": pictures(photos)})


def polars_frame(photos: Path):
    polars = pytest.importorskip("polars")
    return polars.DataFrame({"file": [str(path) for path in paths(photos)], "class": names(photos), "size": 20})


def polars_bytes(photos: Path):
    polars = pytest.importorskip("polars")
    return polars.DataFrame({"image": [path.read_bytes() for path in paths(photos)], "label": [0, 0, 0, 1, 1, 1]})


def hugging_face(photos: Path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"img": datasets.Image(), "y": datasets.ClassLabel(names=["cat", "dog"])})
    rows = {"img": [str(path) for path in paths(photos)], "y": names(photos)}
    return datasets.Dataset.from_dict(rows, features=features)


def tsv(photos: Path):
    place = photos.parent / "list.tsv"
    lines = [f"{path}\t{label}" for path, label in zip(paths(photos), names(photos), strict=True)]
    place.write_text("\n".join(["path\tlabel", *lines]))
    return place


def tar(photos: Path, ending: str):
    place = photos.parent / f"photos.{ending}"
    with tarfile.open(place, f"w:{ending.removeprefix('tar').removeprefix('.')}") as archive:
        archive.add(photos, ".")
    return place


def web_dataset(photos: Path):
    place = photos.parent / "shard-0001.tar"
    with tarfile.open(place, "w") as archive:
        for number, path in enumerate(paths(photos)):
            for name, content in ((f"{number:04}.png", path.read_bytes()), (f"{number:04}.cls", b"%d" % (number // 3))):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return place


SOURCES = {
    "list of paths": lambda photos: [*paths(photos)[:3], *map(str, paths(photos)[3:])],
    "list of pairs": lambda photos: list(zip(paths(photos), names(photos), strict=True)),
    "pandas, paths": pandas_frame,
    "pandas, pictures": pandas_pictures,
    "polars, paths": polars_frame,
    "polars, bytes": polars_bytes,
    "Hugging Face": hugging_face,
    "ImageFolder": lambda photos: ImageFolder(str(photos)),
    "tsv": tsv,
    "tar": partial(tar, ending="tar"),
    "tar.gz": partial(tar, ending="tar.gz"),
    "WebDataset": web_dataset,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_extract_takes(kind: str, model, photos, expected):
    table = dubito.extract(model, SOURCES[kind](photos), workers=0)
    assert torch.equal(table.logit, expected.logit)
    if kind != "list of paths":
        assert table.label.tolist() == [0, 0, 0, 1, 1, 1]
        assert table.label_space == "model"


def test_image_folder_and_its_subsets_have_file_names(model, photos):
    dataset = ImageFolder(str(photos))
    assert dubito.extract(model, dataset, workers=0).id.tolist()[-1] == "dog/5.png"
    part = dubito.extract(model, Subset(dataset, [4, 0]), workers=0)
    assert (part.id.tolist(), part.label.tolist()) == (["dog/4.png", "cat/0.png"], [1, 0])


def test_urls(model, photos, expected, server):
    urls = [f"{server}/{path.relative_to(photos)}" for path in paths(photos)]
    table = dubito.extract(model, urls, workers=0)
    assert torch.equal(table.logit, expected.logit)
    assert table.id.tolist() == urls
    assert len(dubito.extract(model, urls[0], workers=0)) == 1
    with pytest.warns(dubito.errors.SkippedImagesWarning, match="404"):
        assert len(dubito.extract(model, [*urls, f"{server}/none.png"], workers=0)) == COUNT


def test_a_table_in_memory_is_the_one_on_the_disk(model, photos, expected, tmp_path):
    stored = dubito.extract(model, photos, tmp_path / "cache", workers=0)
    assert expected.columns == stored.columns
    assert expected.id.tolist() == stored.id.tolist()
    for column in ("feature", "logit", "label", "loss"):
        assert torch.equal(expected.whole(column), stored.whole(column))
    assert expected.provenance == stored.provenance
    own = dubito.extract(
        model,
        photos,
        labels=[5] * COUNT,
        label_space="own",
        probes=[dubito.probes.Views(views=["identity", "flip"])],
        workers=0,
    )
    assert (own.label_space, own.label.tolist()) == ("own", [5] * COUNT)
    assert "loss" not in own


def test_a_guard_takes_the_same(model, photos, expected, server):
    logit, label = torch.randn(200, 2, generator=torch.Generator().manual_seed(0)), torch.arange(200) % 2
    table = dubito.Table(logit=logit, label=label, classes=model.classes, provenance=expected.provenance)
    guard = dubito.Guard.fit(model, table, coverage=0.5, scores=["entropy"], novel=0.0)
    whole = guard(photos)
    for kind in ("list of paths", "pandas, paths", "polars, bytes", "Hugging Face", "ImageFolder", "tar", "tsv"):
        assert guard(SOURCES[kind](photos)).predicted.tolist() == whole.predicted.tolist()
    for single in (paths(photos)[0], pictures(photos)[0], f"{server}/cat/0.png"):
        assert guard(single).predicted == whole[0].predicted
