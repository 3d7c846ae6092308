"""The demo: images, cache, numbers and page, with a tiny model and with the real one."""

from pathlib import Path

import pytest
import torch

import dubito
from dubito.data import photos as photos_module
from dubito.data.photos import photos
from dubito.errors import MissingPackageError
from dubito.report.demo import CorruptionGroup, Demo, run_demo, write_demo_page
from dubito.report.trust import SCORES, least_trusted
from dubito.scores.softmax import entropy
from dubito.types import Classifier


@pytest.fixture(scope="module")
def tiny() -> Classifier:
    torch.manual_seed(0)
    return dubito.load("timm:test_resnet", weights=None)


@pytest.mark.parametrize("count", [1, 2])
def test_images_are_scored_and_ordered(tmp_path: Path, tiny: Classifier, count: int) -> None:
    result = run_demo(tmp_path, model=tiny, photographs=photos()[:count], progress=False)
    assert len(result.images) == 9 * count  # clean, and four kinds at two severities
    ranks = [image.ranked.rank for image in result.images]
    assert ranks == sorted(ranks, reverse=True)
    table = dubito.open(tmp_path / "cache")
    expected = dict(zip(table.id.tolist(), entropy(table.logit).tolist(), strict=True))
    assert {image.ranked.id: image.ranked.scores["entropy"] for image in result.images} == expected
    assert all(list(image.ranked.scores) == list(SCORES) for image in result.images)
    assert all(image.unchanged for image in result.images if image.kind == "clean")
    assert sorted(path.name for path in (tmp_path / "images" / "astronaut").iterdir())[:3] == [
        "blur-2.jpg",
        "blur-4.jpg",
        "box-2.jpg",
    ]


def test_groups_are_means(tmp_path: Path, tiny: Classifier) -> None:
    result = run_demo(tmp_path, model=tiny, photographs=photos()[:2], progress=False)
    assert [(group.kind, group.severity) for group in result.groups[:3]] == [("clean", 0), ("blur", 2), ("blur", 4)]
    members = [image for image in result.images if (image.kind, image.severity) == ("noise", 4)]
    group = result.groups[-1]
    assert group.ranks["margin"] == pytest.approx(sum(one.ranked.ranks["margin"] for one in members) / 2)
    assert (group.images, group.unchanged) == (2, sum(one.unchanged for one in members))
    assert result.to_dict()["groups"][-1]["ranks"] == group.ranks


def test_a_second_run_does_nothing_twice(tmp_path: Path, tiny: Classifier) -> None:
    def run() -> tuple[Demo, dict[Path, int]]:
        result = run_demo(tmp_path, model=tiny, photographs=photos()[:1], progress=False)
        files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]
        return result, {path: path.stat().st_mtime_ns for path in files}

    (first, written), (second, after) = run(), run()
    assert first == second
    assert written == after


def test_findings_name_the_blind_spots() -> None:
    groups = (
        CorruptionGroup("clean", 0, 10, {"entropy": 0.4}, 10),
        CorruptionGroup("blur", 2, 10, {"entropy": 0.7}, 1),  # predictions changed, and it is uncertain
        CorruptionGroup("noise", 2, 10, {"entropy": 0.3}, 5),  # half of the predictions stand
        CorruptionGroup("noise", 4, 10, {"entropy": 0.2}, 4),  # changed, and more certain than ever
    )
    report = least_trusted(dubito.Table(logit=[[1.0, 0.0]]))
    assert Demo("m", Path(), (), groups, report).findings() == [
        "Mean rank by entropy: 40 % clean, 50 % at severity 2, 20 % at severity 4.",
        "Watch out for noise 4: 6 of 10 predictions changed, yet the mean rank is 20 %, no higher than that of the "
        "clean photographs. Here entropy gives no warning.",
    ]


def test_the_real_model_is_certain_of_an_espresso_and_uncertain_of_a_blurred_one(tmp_path: Path) -> None:
    coffee = [photo for photo in photos() if photo[0] == "coffee"]
    result = run_demo(tmp_path, photographs=coffee, progress=False)
    by_name = {image.corruption: image.ranked for image in result.images}
    assert by_name["clean"].short_prediction == "espresso"
    assert by_name["clean"].probability > 0.8
    assert by_name["blur 4"].scores["entropy"] > by_name["clean"].scores["entropy"] + 1


def test_missing_photographs_give_the_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photos_module, "_FILES", (("x", "no_such_package", "x.png"),))
    with pytest.raises(MissingPackageError, match=r'pip install "dubito\[demo\]"'):
        run_demo(tmp_path)


def test_the_page_is_that_of_the_report_with_the_corruptions_beside_it(tmp_path: Path, tiny: Classifier) -> None:
    demo = run_demo(tmp_path, model=tiny, photographs=photos()[:1], progress=False)
    text = write_demo_page(demo, tmp_path / "demo.html").read_text()
    assert text.count("<article") == 9
    places = [text.index(f'alt="astronaut, {image.corruption}"') for image in demo.images]
    assert places == sorted(places)
    assert "How far can test_resnet be trusted, image by image?" in text
    assert text.count('<span class="mark">prediction changed') == sum(not image.unchanged for image in demo.images)
    shown = text.replace("\N{NO-BREAK SPACE}", " ")
    assert all(f"</b> {image.ranked.reason}" in shown for image in demo.images)
    assert '<th scope="row">blur</th>' in text
    assert "/1 stay</small>" in text
    assert "Mean rank by entropy: " in text
