"""Images in the order of trust: ranks, ties, readings, what a guard changes, the curve, and what is written."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image
from tests.page.test_render import Reader

import dubito
from dubito.errors import MissingColumnError, TableError, ValueRangeError
from dubito.report.trust import least_trusted

EVIL = """<script>alert("x")</script>&'.png"""


def probabilities(*rows, **more) -> dubito.Table:
    """A table of the probabilities of three classes."""
    classes = ["ant, emmet", "bee", "cat"]
    return dubito.Table(logit=torch.tensor(rows, dtype=torch.float64).log(), classes=classes, **more)


@pytest.mark.parametrize(
    ("row", "verdict", "reason"),
    [
        ((0.48, 0.41, 0.11), "look at it", "ambiguous between ant (48 %) and bee (41 %)"),
        ((0.34, 0.33, 0.33), "look at it", "ambiguous between ant (34 %) and bee (33 %)"),
        ((0.89, 0.1, 0.01), "fairly confident", "89 % ant; more certain than 0 % of the other images"),
        ((0.04, 0.92, 0.04), "confident", "92.0 % bee; more certain than 0 % of the other images"),
    ],
)
def test_readings_without_a_guard(row, verdict, reason):
    first, _ = least_trusted(probabilities(row, (0.98, 0.01, 0.01))).images
    assert (first.verdict, first.reason) == (verdict, reason)


def test_one_likely_class_among_many_is_not_enough():
    logit = torch.tensor([0.4, *[0.6 / 9] * 9]).log()[None]
    (only,) = least_trusted(dubito.Table(logit=logit)).images
    assert (only.verdict, only.reason) == ("look at it", "the likeliest class, class 0, has only 40 %")


def test_equal_images_are_ordered_by_name_and_ranks_do_not_depend_on_the_order_of_rows():
    rows = [(0.6, 0.3, 0.1)] * 3 + [(0.9, 0.05, 0.05)]
    names = ["c", "a", "b", "d"]
    for turn in range(4):
        table = probabilities(*(rows[turn:] + rows[:turn]), id=names[turn:] + names[:turn])
        report = least_trusted(table, top=None)
        assert [(one.id, round(one.rank, 3)) for one in report.images] == [
            ("a", 0.333),  # one of the three others is less uncertain
            ("b", 0.333),
            ("c", 0.333),
            ("d", 0.0),
        ]


def test_an_image_unlike_the_others_is_moved_up_however_confident_the_model_is():
    draw = torch.Generator().manual_seed(0)
    feature = torch.tensor([[1.0, 0.0, 0.0]]) + 0.1 * torch.randn(40, 3, generator=draw)
    feature[7] = torch.tensor([0.0, 0.0, 5.0])
    logit = torch.randn(40, 3, generator=draw)
    logit[7] = torch.tensor([30.0, 0.0, 0.0])  # the most certain of all
    report = least_trusted(dubito.Table(logit=logit, feature=feature), top=2)
    first = report.images[1]  # after the one of the highest entropy, whose rank is the same
    assert (first.id, first.verdict, first.rank, first.ranks["entropy"]) == ("7", "look at it", 1.0, 0.0)
    assert first.reason == "unlike the other images: density below all of them"
    alike = least_trusted(dubito.Table(logit=logit[:19], feature=feature[:19]))
    assert not [one for one in alike.images if "unlike" in one.reason]  # too few to say


def test_features_without_a_direction_are_no_reason_to_fail():
    report = least_trusted(dubito.Table(logit=torch.randn(30, 3), feature=torch.zeros(30, 2)))
    assert len(report) == 20


def test_a_guard_decides_and_what_it_refuses_comes_first():
    draw = torch.Generator().manual_seed(0)
    logit = 4 * torch.randn(400, 3, generator=draw)
    label = torch.where(logit.softmax(1).amax(1) > 0.8, logit.argmax(1), 0)  # what is uncertain is often wrong
    table = dubito.Table(logit=logit, label=label)
    guard = dubito.Guard.fit(None, table, risk=0.05)
    decisions, report = guard.decide(table), least_trusted(table, top=None, guard=guard)
    verdicts = [one.verdict for one in report.images]
    assert verdicts == sorted(verdicts)  # "abstain" before "accept"
    assert report.verdicts == {"abstain": verdicts.count("abstain"), "accept": int(decisions.accept.sum())}
    first = report.images[0]
    assert first.reason == decisions[int(first.id)].reason
    assert first.scores["guard"] == float(decisions.uncertainty.max())
    # The guarantee as the guard states it, and that it is kept on these images.
    assert report.findings()[1:] == decisions.findings()
    others = dubito.Table(logit=torch.tensor([[9.0, 0.0, 0.0]]).repeat(50, 1))
    assert "These images are not like those: the guarantee says nothing about them." in (
        least_trusted(others, guard=guard).findings()
    )


def test_the_curve_accepts_the_most_trusted_first():
    table = probabilities((0.4, 0.3, 0.3), (0.6, 0.3, 0.1), (0.8, 0.1, 0.1), (0.97, 0.02, 0.01), label=[1, 0, 1, 0])
    report = least_trusted(table, top=1)
    # From the most certain on: right, wrong, right, wrong.
    assert report.curve.risk.tolist() == pytest.approx([0, 1 / 2, 1 / 3, 1 / 2])
    assert report.curve.coverage.tolist() == [0.25, 0.5, 0.75, 1.0]
    # Four fifths are 3.2 images: (0 + 1 + 0 + 0.2) / 3.2.
    assert report.facts()["at 80 % coverage"] == "37.5 % errors, by entropy"
    assert (report.images[0].label, report.images[0].label_class) == (1, "bee")
    assert least_trusted(probabilities((0.98, 0.01, 0.01))).curve is None


def test_scores_of_ones_own_order_the_images():
    table = probabilities((0.4, 0.3, 0.3), (0.97, 0.02, 0.01))
    report = least_trusted(table, scores={"mine": [0.0, 1.0]})
    assert [(one.id, one.scores) for one in report.images] == [("1", {"mine": 1.0}), ("0", {"mine": 0.0})]
    assert report.order_by == "mine"


def test_a_report_as_csv_json_pandas_and_text(tmp_path):
    table = probabilities((0.48, 0.41, 0.11), (0.7, 0.2, 0.1), (0.1, 0.1, 0.8), id=["a", "b", "c"])
    report = least_trusted(table, top=2)
    with report.to_csv(tmp_path / "r.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["id"], first["predicted_class"], first["rank_percent"]) == ("a", "ant, emmet", "100.0")
    assert float(second["entropy"]) == report.images[1].scores["entropy"]
    assert second["entropy_rank_percent"] == "50.0"
    assert json.loads(report.to_json())["images"][0]["id"] == "a"
    assert report.to_pandas()["verdict"].tolist() == ["look at it", "fairly confident"]
    text = str(report)
    assert text.startswith("table in memory: the 2 least trusted of 3 images, by entropy\n")
    assert "look at it        ant        48 %  100 %  ambiguous between ant (48 %) and bee (41 %)" in text
    assert "Of 3 images: 1 look at it, 2 fairly confident." in text
    assert repr(report) == "TrustReport(table in memory: the 2 least trusted of 3 images, by entropy)"


def test_the_page_has_pictures_where_images_are_and_names_stay_text(tmp_path):
    (tmp_path / "photos").mkdir()
    for name in (EVIL.replace("/", ""), "b.png"):
        Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(tmp_path / "photos" / name)
    names = [EVIL.replace("/", ""), "b.png", "gone.png"]
    table = probabilities((0.5, 0.4, 0.1), (0.5, 0.3, 0.2), (0.92, 0.04, 0.04), id=names)
    report = least_trusted(table, tmp_path / "photos", top=None)
    page = Reader(report.to_html(tmp_path / "new" / "r.html").read_text())
    assert page.open == []
    assert (len(page.all("article")), len(page.all("img")), len(page.all("script"))) == (3, 2, 1)
    assert sorted(str(one["data-group"]) for one in page.all("article")) == ["confident", "look at it", "look at it"]
    assert len(Reader(report.top(1).to_html(tmp_path / "r.html").read_text()).all("article")) == 1
    html = report._repr_html_()
    assert html.count('<img src="data:') == 2
    assert "<script" not in html


def test_wrong_arguments_are_refused(tmp_path):
    table = probabilities((0.5, 0.4, 0.1))
    with pytest.raises(MissingColumnError, match="least_trusted needs column 'logit'"):
        least_trusted(dubito.Table(feature=[[1.0]]))
    with pytest.raises(ValueRangeError, match="top must be a whole number, at least 1; got 0"):
        least_trusted(table, top=0)
    with pytest.raises(TableError, match="score 'mine' must have one value per row"):
        least_trusted(table, scores={"mine": [1.0, 2.0]})
    with pytest.raises(TableError, match=r"ids must be images of .* none of which is"):
        least_trusted(table, np.zeros((2, 8, 8, 3), np.uint8))
