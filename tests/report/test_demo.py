"""The demo: images, cache, numbers and page, with a tiny model and with the real one."""

from pathlib import Path

import pytest
import torch
from PIL import Image

import dubito
from dubito.data import photos as photos_module
from dubito.data.photos import photos
from dubito.errors import MissingPackageError
from dubito.report.demo import SCORES, CorruptionGroup, Demo, DemoImage, run_demo, write_demo_page
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
    u = [image.scores["entropy"] for image in result.images]
    assert u == sorted(u, reverse=True)
    table = dubito.open(tmp_path / "cache")
    expected = dict(zip(table.id.tolist(), entropy(table.logit).tolist(), strict=True))
    assert {image.id: image.scores["entropy"] for image in result.images} == expected
    assert all(list(image.scores) == list(SCORES) for image in result.images)
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
    assert group.uncertainty == pytest.approx(sum(one.scores["entropy"] for one in members) / 2)
    assert (group.images, group.unchanged) == (2, sum(one.unchanged for one in members))
    assert result.to_dict()["groups"][-1]["uncertainty"] == group.uncertainty


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
        CorruptionGroup("clean", 0, 10, 3.0, 10),
        CorruptionGroup("blur", 2, 10, 4.0, 1),  # predictions changed, and it is uncertain
        CorruptionGroup("noise", 2, 10, 2.5, 5),  # half of the predictions stand
        CorruptionGroup("noise", 4, 10, 2.0, 4),  # changed, and more certain than ever
    )
    assert Demo("m", Path(), (), groups).findings() == [
        "Mean entropy: 3.00 on the clean photographs, 3.25 at severity 2, 2.00 at severity 4.",
        "Watch out for noise 4: 6 of 10 predictions changed, yet the mean entropy is 2.00, no higher than on the clean "
        "photographs. Here it gives no warning.",
    ]


def test_the_real_model_is_certain_of_an_espresso_and_uncertain_of_a_blurred_one(tmp_path: Path) -> None:
    coffee = [photo for photo in photos() if photo[0] == "coffee"]
    result = run_demo(tmp_path, photographs=coffee, progress=False)
    by_name = {image.corruption: image for image in result.images}
    assert by_name["clean"].short_name == "espresso"
    assert by_name["clean"].probability > 0.8
    assert by_name["blur 4"].scores["entropy"] > by_name["clean"].scores["entropy"] + 1


def test_missing_photographs_give_the_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photos_module, "_FILES", (("x", "no_such_package", "x.png"),))
    with pytest.raises(MissingPackageError, match=r'pip install "dubito\[demo\]"'):
        run_demo(tmp_path)


def an_image(kind: str, severity: int, u: float, unchanged: bool) -> DemoImage:
    scores = {"entropy": u, "max_probability": -0.5, "margin": -0.1, "energy": -3.0}
    return DemoImage(f"cat/{kind}-{severity}.jpg", "cat", kind, severity, "tabby, tabby cat", 0.5, unchanged, scores)


def test_every_image_is_a_card_below_the_means(tmp_path: Path) -> None:
    (tmp_path / "images" / "cat").mkdir(parents=True)
    images = (an_image("blur", 4, 3.0, False), an_image("blur", 2, 2.0, True), an_image("clean", 0, 1.0, True))
    for one in images:
        Image.new("RGB", (20, 20)).save(tmp_path / "images" / one.id)
    groups = (
        CorruptionGroup("clean", 0, 1, 1.0, 1),
        CorruptionGroup("blur", 2, 1, 2.0, 1),
        CorruptionGroup("blur", 4, 1, 3.0, 0),
    )
    page = write_demo_page(Demo("timm:tiny", tmp_path, images, groups), tmp_path / "demo.html")
    text = page.read_text()
    assert text.count("<article") == 3
    assert text.index("cat, blur 4") < text.index("cat, blur 2") < text.index("cat, clean")
    assert "How certain is tiny, image by image?" in text
    assert text.count("prediction changed") == 1
    assert "<span>tabby</span> <small>50%</small>" in text
    assert '<th scope="row">blur</th>' in text
    assert "<b>3.00</b> <small>0/1 unchanged</small>" in text
    assert "Mean entropy: 1.00 on the clean photographs, 2.00 at severity 2, 3.00 at severity 4." in text
