"""`dubito demo`: text, JSON and the page, on two photographs and a tiny model."""

from functools import partial
from pathlib import Path

import pytest

import dubito
from dubito.data.photos import photos
from dubito.report import demo

from .conftest import Run


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, weights: Path) -> None:
    model = dubito.load("timm:test_resnet", weights=weights)
    monkeypatch.setattr(demo, "run_demo", partial(demo.run_demo, model=model, photographs=photos()[:2]))


def test_text_ends_with_the_page(run: Run, tmp_path: Path) -> None:
    answer = run("demo", "--to", tmp_path)
    assert (answer.code, answer.err) == (0, "")
    assert "18 images by timm:test_resnet, the most uncertain first" in answer.out
    assert "Does uncertainty rise with the severity of the corruption?" in answer.out
    assert answer.out.endswith(f"The page with the images: {tmp_path / 'demo.html'}\n")
    assert (tmp_path / "demo.html").is_file()


def test_json(run: Run, tmp_path: Path) -> None:
    found = run("demo", "--to", tmp_path, "--json").json
    assert found["page"] == str(tmp_path / "demo.html")
    assert (found["model"], found["order_by"], len(found["images"]), len(found["groups"])) == (
        "timm:test_resnet",
        "entropy",
        18,
        9,
    )
