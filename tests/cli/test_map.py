"""`dubito map`: a page and a figure of a cache."""

from pathlib import Path

from .conftest import Run


def test_a_page_with_thumbnails_and_a_figure(run: Run, cache: Path, images: Path, tmp_path: Path) -> None:
    places = ("--to", tmp_path / "map.html", "--png", tmp_path / "map.png")
    found = run("map", cache, "--images", images, *places, "--score", "energy", "--json").json
    assert found["points"] == 12
    assert found["score"] == "energy"
    assert found["written"] == [str(tmp_path / "map.html"), str(tmp_path / "map.png")]
    assert "12 thumbnails" in (tmp_path / "map.html").read_text()
    assert (tmp_path / "map.png").stat().st_size > 1000


def test_somewhere_to_write_is_needed(run: Run, cache: Path) -> None:
    answer = run("map", cache)
    assert answer.code == 2
    assert "give --to map.html, --png map.png, or both" in answer.err
