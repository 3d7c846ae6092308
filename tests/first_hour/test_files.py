"""Whatever lies in a folder is read, or named with the reason: odd names, odd formats, odd files."""

import csv
import os
import subprocess
import sys
import tracemalloc
import warnings
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import dubito
from dubito.cli import main
from dubito.data import open_images
from dubito.errors import ImagesError, LeftOutFilesWarning, SkippedImagesWarning

ODD = os.fsdecode(b"caf\xe9")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    )
    return dubito.wrap(network.eval(), transform=dubito.Preprocess((16, 16), 16), classes=["cat", "dog"], name="small")


def photograph(path: Path, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def photos(tmp_path) -> Path:
    for number in range(4):
        photograph(tmp_path / "photos" / ("cat", "dog")[number % 2] / f"{number}.png", number)
    return tmp_path / "photos"


def test_names_that_are_not_utf8_go_everywhere(model, tmp_path, capfdbinary):
    try:
        for number in range(20):
            photograph(tmp_path / "photos" / ("cat", "dog")[number % 2] / f"{ODD}{number}.png", number)
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    table = dubito.extract(model, tmp_path / "photos", tmp_path / "cache", workers=0)
    guard = dubito.Guard.fit(model, table, coverage=0.5, scores=["entropy"], novel=0.0)
    decisions = guard(tmp_path / "photos")
    written = decisions.to_csv(tmp_path / "photos" / "decisions.csv").read_bytes()
    assert b"cat/caf\xe90.png" in written
    assert ODD in decisions.to_json() or "caf\\udce9" in decisions.to_json()
    print(decisions, decisions[0], guard)  # noqa: T201 (to a terminal that takes UTF-8 only)
    lines = [b"path,label", *(b"cat/caf\xe9%d.png,0" % number for number in range(0, 20, 2))]
    (tmp_path / "photos" / "list.csv").write_bytes(b"\n".join(lines))
    listed = dubito.extract(model, tmp_path / "photos" / "list.csv", tmp_path / "listed", workers=0)
    assert sorted(listed.id.tolist()) == [name for name in table.id.tolist() if name.startswith("cat")]
    picks = dubito.Acquire("top").pick(table, 2)
    assert b"caf\xe9" in picks.to_csv(tmp_path / "picks.csv").read_bytes()
    capfdbinary.readouterr()
    cache, index = tmp_path / "cache", tmp_path / "index"
    commands = (
        ["score", cache],
        ["score", cache, "--json"],
        ["search", "build", cache, "--to", index],
        ["search", "query", index, cache, "-k", "2"],
        ["search", "query", index, cache, "-k", "2", "--json"],
    )
    for command in commands:
        assert main([str(part) for part in command]) == 0
        assert b"caf" in capfdbinary.readouterr().out or command[1] == "build"


def test_names_that_are_not_utf8_are_rows_of_a_frame():
    table = dubito.Table(logit=[[0.0, 4.0], [1.0, 0.0]], id=[f"{ODD}.jpg", "b.jpg"])
    frame = dubito.report.least_trusted(table).to_pandas()
    assert set(frame["id"]) == {f"{ODD}.jpg", "b.jpg"}


def test_formats_with_a_plug_in_are_read_or_listed_with_the_pip_line(model, photos, monkeypatch):
    heif = pytest.importorskip("pillow_heif")
    image = Image.open(photos / "cat" / "0.png")
    heif.from_pillow(image).save(photos / "cat" / "phone.HEIC", quality=90)
    assert len(dubito.extract(model, photos, workers=0)) == 5
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    monkeypatch.delitem(Image.OPEN, "HEIF")
    with pytest.warns(SkippedImagesWarning, match="pip install pillow-heif"):
        table = dubito.extract(model, photos, workers=0)
    assert [name for name, _ in table.skipped] == ["cat/phone.HEIC"]


def test_nothing_in_a_folder_disappears_without_a_line(photos):
    for name in ("a.txt", "b.txt", "clip.mov", ".hidden.png", "README", ".DS_Store"):
        (photos / name).write_bytes(b"x")
    with pytest.warns(LeftOutFilesWarning, match=r": left out 2 \.txt, 1 \.mov, 1 without an ending, 1 hidden\.$"):
        assert len(open_images(photos)) == 4


def test_pipes_devices_and_links_that_lead_nowhere_are_skipped(model, photos):
    os.mkfifo(photos / "cat" / "pipe.png")
    (photos / "cat" / "zero.png").symlink_to("/dev/zero")
    (photos / "cat" / "self.png").symlink_to("self.png")
    (photos / "cat" / "gone.png").symlink_to("nowhere.png")
    (photos / "dog" / "self").symlink_to("self")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        table = dubito.extract(model, photos, workers=0)
    assert len(table) == 4
    reasons = dict(table.skipped)
    assert sorted(reasons) == [f"cat/{name}.png" for name in ("gone", "pipe", "self", "zero")]
    assert "not a regular file" in reasons["cat/pipe.png"]
    assert "left out 1 without an ending" in str(caught[0].message)


def test_a_zip_bomb_is_one_skipped_image(model, photos, tmp_path, monkeypatch):
    monkeypatch.setattr("dubito.data.archives.LIMIT", 1 << 20)
    with zipfile.ZipFile(tmp_path / "photos.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(photos / "cat" / "0.png", "0.png")
        archive.writestr("bomb.png", bytes(2 << 20))
    with pytest.warns(SkippedImagesWarning, match=r"bomb\.png.* the most that is read of an image"):
        assert dubito.extract(model, tmp_path / "photos.zip", workers=0).id.tolist() == ["0.png"]


def test_a_zip_that_states_a_smaller_size_is_read_no_further(model, photos, tmp_path):
    path = tmp_path / "photos.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(photos / "cat" / "0.png", "0.png")
        archive.writestr("bomb.png", bytes(64 << 20))
    path.write_bytes(path.read_bytes().replace((64 << 20).to_bytes(4, "little"), (1000).to_bytes(4, "little")))
    tracemalloc.start()
    with pytest.warns(SkippedImagesWarning, match=r"bomb\.png"):
        assert dubito.extract(model, path, workers=0).id.tolist() == ["0.png"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20  # not the 64 MB that the member unpacks to


def test_an_npz_that_declares_more_than_it_has(tmp_path):
    header = io_header((10**12, 4, 4, 3))
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", header + bytes(100))
    with pytest.raises(ImagesError, match=r"x\.npz' cannot be read \('images\.npy' declares 48000000000"):
        open_images(tmp_path / "x.npz")


def io_header(shape: tuple[int, ...]) -> bytes:
    buffer = BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def test_an_archive_that_changes_during_the_run_is_stored_under_its_new_hash(model, photos, tmp_path):
    def pack(source: Path) -> Path:
        with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
            archive.write(source, "0.png")
        return tmp_path / "photos.zip"

    images = open_images(pack(photos / "cat" / "0.png"))
    pack(photos / "dog" / "1.png")  # before the first reading
    table = dubito.extract(model, images, tmp_path / "cache", workers=0)
    again = dubito.extract(model, tmp_path / "photos.zip", tmp_path / "cache", workers=0)
    assert torch.equal(again.logit, table.logit)
    pack(photos / "cat" / "0.png")
    with pytest.raises(dubito.errors.StaleCacheError):
        dubito.extract(model, tmp_path / "photos.zip", tmp_path / "cache", workers=0)


def test_csv_columns_are_found_by_any_usual_name(photos):
    with (photos / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["x", "File_Name", "Class"], [1, "cat/0.png", "cat"], [2, "dog/1.png", "dog"]])
    images = open_images(photos / "list.csv")
    assert (images.ids, images.labels.tolist(), images.classes) == (["cat/0.png", "dog/1.png"], [0, 1], ("cat", "dog"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes here")
def test_a_pipe_on_a_list_is_skipped_as_in_a_folder(model, photos, tmp_path):
    os.mkfifo(photos / "pipe.png")
    (tmp_path / "list.csv").write_text("path\nphotos/cat/0.png\nphotos/pipe.png\nphotos/dog/1.png")
    with pytest.warns(SkippedImagesWarning, match="1 of 3 images could not be decoded"):
        table = dubito.extract(model, tmp_path / "list.csv", workers=0, progress=False)
    assert [name for name, _ in table.skipped] == ["photos/pipe.png"]


def test_warnings_point_at_the_line_of_the_user(photos, tmp_path):
    (photos / "notes.txt").write_text("")
    script = tmp_path / "mine.py"
    script.write_text(f"import dubito\n\ndubito.open_images({str(photos)!r})\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert f"{script}:3: LeftOutFilesWarning" in done.stderr
