"""`dubito report`, `dubito map` and `dubito demo`: pages, figures, text and JSON."""

from functools import partial
from pathlib import Path

import pytest

import dubito
from dubito import report
from dubito.data.photos import photos

from .conftest import COUNT, MODEL, Run


def test_a_page_with_thumbnails_and_a_figure(run: Run, cache: Path, images: Path, tmp_path: Path) -> None:
    places = ("--to", tmp_path / "map.html", "--png", tmp_path / "map.png")
    result = run("map", cache, "--images", images, *places, "--score", "energy", "--json").json
    assert (result["images"], result["shown"], "points" in result) == (12, 12, False)
    assert result["score"] == "energy"
    assert (result["page"], result["figure"]) == (str(tmp_path / "map.html"), str(tmp_path / "map.png"))
    assert f"{COUNT} of {COUNT} images have a thumbnail" in (tmp_path / "map.html").read_text()
    assert (tmp_path / "map.png").stat().st_size > 1000


def test_wrong_options_are_refused_before_the_layout(run: Run, cache: Path, images: Path, tmp_path: Path) -> None:
    answer = run("map", cache, "--images", images, "--png", tmp_path / "map.png")
    assert (answer.code, "images are for the thumbnails of the page" in answer.err) == (2, True)
    assert "Pass --to map.html" in answer.err
    answer = run("map", cache, "--to", tmp_path / "map.html", "--score", "energy", "--head", "auto")
    assert (answer.code, "Pass --score energy or --head auto." in answer.err) == (2, True)
    answer = run("map", cache, "--to", tmp_path / "map.html", "--colour", "label")
    assert answer.code == 1
    assert "colour must be one of predicted, uncertainty; got 'label'" in answer.err
    answer = run("map", cache, "--to", tmp_path / "map.html", "--images", tmp_path / "nowhere")
    assert answer.code == 1
    assert "nowhere" in answer.err
    assert not list(tmp_path.iterdir())


def test_somewhere_to_write_is_needed(run: Run, cache: Path) -> None:
    answer = run("map", cache)
    assert answer.code == 2
    assert "give --to map.html, --png map.png, or both" in answer.err


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, weights: Path) -> None:
    model = dubito.load("timm:test_resnet", weights=weights)
    monkeypatch.setattr(report, "run_demo", partial(report.run_demo, model=model, photographs=photos()[:2]))


@pytest.mark.usefixtures("small")
def test_demo_as_text(run: Run, tmp_path: Path) -> None:
    answer = run("demo", "--to", tmp_path)
    assert (answer.code, answer.err) == (0, "")
    assert "18 images by timm:test_resnet, the least trusted first" in answer.out
    assert "predictions as on the clean photographs" in answer.out
    assert "and 8 more" in answer.out  # ten rows are shown
    page = tmp_path / "demo.html"
    *_, written, address, guarantee, look = answer.out.splitlines()
    assert (written, address) == (f"written: {page}", f"open {page.as_uri()}")
    assert guarantee.endswith("these have no labels")
    assert look.endswith(f"-m dubito explore {tmp_path / 'cache'} --images {tmp_path / 'images'}")
    assert page.is_file()


@pytest.mark.usefixtures("small")
def test_demo_as_json(run: Run, tmp_path: Path) -> None:
    result = run("demo", "--to", tmp_path, "--json").json
    assert result["page"] == str(tmp_path / "demo.html")
    assert (result["model"], result["order_by"], len(result["images"]), len(result["groups"])) == (
        "timm:test_resnet",
        "entropy",
        18,
        9,
    )


def test_a_report_of_a_cache(run: Run, cache: Path, images: Path, tmp_path: Path) -> None:
    result = run(
        "report", cache, "--images", images, "--to", tmp_path / "r.html", "--top", 3, "--most", 5, "--json"
    ).json
    assert (result["total"], len(result["images"]), result["order_by"]) == (COUNT, 3, "entropy")
    assert (result["page"], result["csv"]) == (str(tmp_path / "r.html"), str(tmp_path / "r.csv"))
    page = (tmp_path / "r.html").read_text()
    assert page.count('src="data:image/jpeg') == 10  # five of either end; without labels, no other gallery
    assert f"dubito label {cache} labels.csv" in page
    assert f"dubito report {cache} OOD_CACHE" in page
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 1 + COUNT


def test_a_report_with_labels_and_other_caches(run: Run, labelled: Path, cache: Path, tmp_path: Path) -> None:
    answer = run("report", labelled, cache, "--learn-from", cache, "--to", tmp_path / "r.html")
    assert answer.code == 0, answer.err
    assert "of 12 images are predicted correctly" in answer.out
    page = (tmp_path / "r.html").read_text()
    assert page.count("wrong: ") >= COUNT // 3
    for key in ("scores", "calibration", "risk", "histograms"):
        assert f'<section class="part" id="{key}"' in page
    again = f"dubito report {labelled} --ood {cache} --learn-from {cache} --most 12 --to {tmp_path / 'r.html'}"
    assert f"dubito extract {MODEL} IMAGES --to {labelled} --weights " in page  # a checkpoint of one's own
    assert f"\n{again}" in page
    # The same caches by options.
    options = ("--ood", cache, "--learn-from", cache)
    assert run("report", labelled, *options, "--to", tmp_path / "r.html").code == 0
    assert again in (tmp_path / "r.html").read_text()


def test_a_report_of_a_model_has_the_corruption_curve(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    options = ("--weights", weights, "--workers", 0, "--corrupted", 2)
    answer = run("report", MODEL, images, "--to", tmp_path / "r.html", *options)
    assert answer.code == 0, answer.err
    page = (tmp_path / "r.html").read_text()
    assert "Measured on 2 of the images" in page
    assert f"dubito report {MODEL} {images} --workers 0 --weights {weights} --corrupted 2" in page
    assert run("report", MODEL, images, "--to", tmp_path / "r.html", *options[:-1], 0).code == 0
    assert "The model and its images would add this section" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{images}"], "pass a model and images"),
        (["{cache}", "{images}"], "pass a model and images"),
        (["timm:test_resnet", "{images}", "{cache}"], "pass a model and images"),
        (["timm:test_resnet", "{images}", "--images", "x"], "--images belong to a CACHE"),
        (["{cache}", "--labels", "labels.csv"], "have no effect on it"),
        (["{cache}", "--weights", "none"], "have no effect on it"),
        (["{cache}", "--to", "r.csv"], "--to takes a file that ends in .html; got 'r.csv'"),
    ],
)
def test_a_report_of_what_it_cannot_be(run: Run, cache: Path, images: Path, arguments: list[str], text: str) -> None:
    answer = run("report", *(one.format(cache=cache, images=images) for one in arguments))
    assert (answer.code, text in answer.err) == (2, True), answer.err
