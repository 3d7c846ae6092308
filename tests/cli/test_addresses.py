"""Addresses of an object store in the place of folders, from images to decisions."""

from pathlib import Path

import dubito
from dubito.storage import RemotePath, sizes_in

from .conftest import COUNT, MODEL, Run, write_images


def test_everything_lies_in_a_store(run: Run, bucket: str, tmp_path: Path) -> None:
    write_images(tmp_path / "photos", COUNT)
    for path in (tmp_path / "photos").rglob("*.png"):
        RemotePath(f"{bucket}/photos/{path.relative_to(tmp_path / 'photos').as_posix()}").upload(path)
    cache, guard, index = (f"{bucket}/{name}" for name in ("cache", "guard", "index"))
    extracted = run("extract", MODEL, f"{bucket}/photos", "--weights", "none", "--to", cache, "--workers", 0)
    assert extracted.code == 0, extracted.err
    fitted = run("guard", "fit", cache, "--coverage", 0.5, "--confidence", 0.5, "--to", guard, "--json")
    assert (fitted.code, fitted.json["guard"]) == (0, guard), fitted.err
    decided = run("guard", "run", guard, cache, "--json")
    assert decided.code == 0, decided.err
    built = run("search", "build", cache, "--to", index, "--json")
    assert (built.code, built.json["items"]) == (0, COUNT), built.err
    asked = run("search", "query", index, cache, "--k", 1, "--json")
    assert len(asked.json["queries"]) == COUNT, asked.err
    assert len(dubito.open(cache)) == COUNT
    assert {"guard.json"} < {*sizes_in(RemotePath(guard))}


def test_labels_lie_in_a_store(run: Run, bucket: str, images: Path, tmp_path: Path) -> None:
    names = sorted(path.relative_to(images).as_posix() for path in images.rglob("*.png"))
    for file, shift in (("first", 0), ("second", 1)):
        rows = [f"{name},{(place + shift) % 1000}" for place, name in enumerate(names)]
        (tmp_path / "labels.csv").write_text("\n".join(["path,label", *rows]))
        RemotePath(f"{bucket}/{file}.csv").upload(tmp_path / "labels.csv")
    cache = tmp_path / "cache"
    options = ("--weights", "none", "--to", cache, "--workers", 0, "--labels", f"{bucket}/first.csv")
    assert run("extract", MODEL, images, *options).code == 0
    assert dict(zip(dubito.open(cache).whole("id"), dubito.open(cache).label.tolist(), strict=True))[names[3]] == 3
    assert run("label", cache, f"{bucket}/second.csv").code == 0
    assert dict(zip(dubito.open(cache).whole("id"), dubito.open(cache).label.tolist(), strict=True))[names[3]] == 4
    absent = run("label", cache, f"{bucket}/third.csv")
    assert absent.code != 0
    assert f"{bucket}/third.csv" in absent.err


def test_what_must_be_on_this_machine_is_no_address(run: Run, cache: Path) -> None:
    answer = run("score", cache, "--to", "s3://bucket/scores.csv")
    assert answer.code == 2
    assert "it must be on this machine; got 's3://bucket/scores.csv'. Pass a path." in answer.err
    assert not Path("s3:").exists()
