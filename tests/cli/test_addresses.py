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


def test_what_must_be_on_this_machine_is_no_address(run: Run, cache: Path) -> None:
    answer = run("score", cache, "--to", "s3://bucket/scores.csv")
    assert answer.code == 2
    assert "it must be on this machine; got 's3://bucket/scores.csv'. Pass a path." in answer.err
    assert not Path("s3:").exists()
