"""The demo: pictures, cache and numbers, with a tiny model and with the real one."""

from pathlib import Path

import pytest
import torch

import dubito
from dubito.data import photos as photos_module
from dubito.data.photos import photos
from dubito.errors import MissingPackageError
from dubito.report.demo_job import SCORES, Demo, Group, run_demo
from dubito.scores.softmax import entropy
from dubito.types import Classifier


@pytest.fixture(scope="module")
def tiny() -> Classifier:
    torch.manual_seed(0)
    return dubito.load("timm:test_resnet", weights=None)


@pytest.mark.parametrize("count", [1, 2])
def test_pictures_are_scored_and_ordered(tmp_path: Path, tiny: Classifier, count: int) -> None:
    found = run_demo(tmp_path, model=tiny, photographs=photos()[:count], progress=False)
    assert len(found.pictures) == 9 * count  # clean, and four kinds at two severities
    u = [picture.scores["entropy"] for picture in found.pictures]
    assert u == sorted(u, reverse=True)
    table = dubito.open(tmp_path / "cache")
    expected = dict(zip(table.id.tolist(), entropy(table.logit).tolist(), strict=True))
    assert {picture.id: picture.scores["entropy"] for picture in found.pictures} == expected
    assert all(list(picture.scores) == list(SCORES) for picture in found.pictures)
    assert all(picture.kept for picture in found.pictures if picture.kind == "clean")
    assert sorted(path.name for path in (tmp_path / "pictures" / "astronaut").iterdir())[:3] == [
        "blur-2.jpg",
        "blur-4.jpg",
        "box-2.jpg",
    ]


def test_groups_are_means(tmp_path: Path, tiny: Classifier) -> None:
    found = run_demo(tmp_path, model=tiny, photographs=photos()[:2], progress=False)
    assert [(group.kind, group.severity) for group in found.groups[:3]] == [("clean", 0), ("blur", 2), ("blur", 4)]
    members = [picture for picture in found.pictures if (picture.kind, picture.severity) == ("noise", 4)]
    group = found.groups[-1]
    assert group.uncertainty == pytest.approx(sum(one.scores["entropy"] for one in members) / 2)
    assert (group.pictures, group.kept) == (2, sum(one.kept for one in members))
    assert found.to_json()["groups"][-1]["uncertainty"] == group.uncertainty


def test_a_second_run_does_nothing_twice(tmp_path: Path, tiny: Classifier) -> None:
    def run() -> tuple[Demo, dict[Path, int]]:
        found = run_demo(tmp_path, model=tiny, photographs=photos()[:1], progress=False)
        files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]
        return found, {path: path.stat().st_mtime_ns for path in files}

    (first, written), (second, after) = run(), run()
    assert first == second
    assert written == after


def test_findings_name_the_blind_spots() -> None:
    groups = (
        Group("clean", 0, 10, 3.0, 10),
        Group("blur", 2, 10, 4.0, 1),  # answers changed, and it knows
        Group("noise", 2, 10, 2.5, 5),  # half of the answers stand
        Group("noise", 4, 10, 2.0, 4),  # changed, and more sure than ever
    )
    assert Demo("m", Path(), (), groups).findings() == [
        "Mean entropy: 3.00 on the clean photographs, 3.25 at severity 2, 2.00 at severity 4.",
        "Look out for noise 4: 6 of 10 answers changed, yet the mean entropy is 2.00, no higher than on the clean "
        "photographs. Here it gives no warning.",
    ]


def test_the_real_model_knows_an_espresso_and_doubts_a_blurred_one(tmp_path: Path) -> None:
    coffee = [photo for photo in photos() if photo[0] == "coffee"]
    found = run_demo(tmp_path, photographs=coffee, progress=False)
    by_name = {picture.made_worse: picture for picture in found.pictures}
    assert by_name["clean"].answer == "espresso"
    assert by_name["clean"].probability > 0.8
    assert by_name["blur 4"].scores["entropy"] > by_name["clean"].scores["entropy"] + 1


def test_missing_photographs_give_the_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photos_module, "_FILES", (("x", "no_such_package", "x.png"),))
    with pytest.raises(MissingPackageError, match=r'pip install "dubito\[demo\]"'):
        run_demo(tmp_path)
