"""`dubito map`: a page and a figure of a cache."""

from pathlib import Path

from .conftest import Run


def test_a_page_with_thumbnails_and_a_figure(run: Run, cache: Path, images: Path, tmp_path: Path) -> None:
    places = ("--to", tmp_path / "map.html", "--png", tmp_path / "map.png")
    found = run("map", cache, "--images", images, *places, "--score", "energy", "--json").json
    assert found["points"] == 12
    assert found["score"] == "energy"
    assert found["written"] == [str(tmp_path / "map.html"), str(tmp_path / "map.png")]
    assert "every image has a thumbnail" in (tmp_path / "map.html").read_text()
    assert (tmp_path / "map.png").stat().st_size > 1000


def test_wrong_wishes_are_refused_before_the_layout(run: Run, cache: Path, images: Path, tmp_path: Path) -> None:
    answer = run("map", cache, "--images", images, "--png", tmp_path / "map.png")
    assert (answer.code, "--images are for the thumbnails of the page. Give --to" in answer.err) == (2, True)
    answer = run("map", cache, "--to", tmp_path / "map.html", "--score", "energy", "--head", "auto")
    assert (answer.code, "Give --score energy or --head auto, not both" in answer.err) == (2, True)
    answer = run("map", cache, "--to", tmp_path / "map.html", "--colour", "label")
    assert answer.code == 1
    assert "colour must be one of prediction, uncertainty; got 'label'" in answer.err
    answer = run("map", cache, "--to", tmp_path / "map.html", "--images", tmp_path / "nowhere")
    assert answer.code == 1
    assert "nowhere" in answer.err
    assert not list(tmp_path.iterdir())


def test_somewhere_to_write_is_needed(run: Run, cache: Path) -> None:
    answer = run("map", cache)
    assert answer.code == 2
    assert "give --to map.html, --png map.png, or both" in answer.err
