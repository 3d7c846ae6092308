import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from dubito.errors import ArtefactError
from dubito.guard.shift import Shift
from dubito.guard.verdict import Decisions, top_two


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def decisions(**changes: Any) -> Decisions:
    """One image, of which the threshold lies at half of the known ones."""
    plain: dict[str, Any] = {
        "ids": ["a.png"],
        "classes": ["ant, emmet", "bee", "cat"],
        "predicted": torch.tensor([[0, 2]]),
        "probability": torch.tensor([[0.9, 0.05]], dtype=torch.float64),
        "uncertainty": column(0.1),
        "rank": column(0.2),
        "accept": torch.tensor([True]),
        "novel": torch.tensor([False]),
        "aleatoric": column(0.5),
        "epistemic": column(0.5),
        "density_rank": column(0.5),
        "sets": [(0, 2)],
        "threshold_rank": 0.5,
        "guarantee": "Of images like these, all is well.",
        "shift": Shift(1, 10, 0.01, ()),
    }
    return Decisions(**plain | changes)


REFUSED = {"accept": torch.tensor([False]), "rank": column(0.8)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "clear: more certain than 80 % of the reference images"),
        (
            {"probability": torch.tensor([[0.51, 0.2]], dtype=torch.float64)},
            "certain enough: more certain than 80 % of the reference images",
        ),
        (
            {"rank": column(0.75), "threshold_rank": 0.9},
            "certain enough: more certain than 25 % of the reference images",
        ),
        ({"rank": column(0.49)}, "clear: more certain than 51 % of the reference images; close to the threshold"),
        (REFUSED, "more uncertain than 80 % of the reference images; accepted up to 50 %"),
        (
            REFUSED | {"rank": column(1.0), "threshold_rank": 0.99},
            "more uncertain than 100 % of the reference images; accepted up to 99.0 %",
        ),
        (REFUSED | {"density_rank": column(0.003)}, "unlike the reference images: density below all but 0.3 % of them"),
        (REFUSED | {"density_rank": column(0.0)}, "unlike the reference images: density below all of them"),
        ({"rank": column(0.0002)}, "clear: more certain than 99.9 % of the reference images"),
        (
            REFUSED | {"novel": torch.tensor([True]), "density_rank": column(0.1), "rank": column(0.51)},
            "unlike the reference images: density below all but 10 % of them",
        ),
        (
            REFUSED | {"probability": torch.tensor([[0.48, 0.41]], dtype=torch.float64)},
            "ambiguous between ant (48 %) and cat (41 %)",
        ),
        (
            REFUSED | {"probability": torch.tensor([[0.08, 0.07]], dtype=torch.float64)},
            "no class stands out: ant has 8.0 % and cat 7.0 %",
        ),
        (
            REFUSED | {"epistemic": column(0.99)},
            "new to the model: epistemic uncertainty above 99.0 % of the reference images",
        ),
        (
            REFUSED | {"aleatoric": column(0.97), "epistemic": None},
            "ambiguous image: aleatoric uncertainty above 97.0 % of the reference images",
        ),
        (
            REFUSED | {"aleatoric": column(0.96), "epistemic": column(0.96)},  # as high as each other: novelty first
            "new to the model: epistemic uncertainty above 96.0 % of the reference images; also ambiguous image: "
            "aleatoric uncertainty above 96.0 % of the reference images",
        ),
        (
            REFUSED | {"density_rank": column(0.0), "probability": torch.tensor([[0.48, 0.41]], dtype=torch.float64)},
            "unlike the reference images: density below all of them; also ambiguous between ant (48 %) and cat (41 %)",
        ),
        (
            REFUSED | {"epistemic": column(0.99), "probability": torch.tensor([[0.48, 0.41]], dtype=torch.float64)},
            "ambiguous between ant (48 %) and cat (41 %); also new to the model: epistemic uncertainty above 99.0 % of "
            "the reference images",
        ),
        (
            REFUSED | {"rank": column(0.51), "density_rank": None},
            "more uncertain than 51 % of the reference images; close to the threshold",
        ),
    ],
)
def test_reasons(changes: dict[str, Any], reason: str) -> None:
    assert decisions(**changes)[0].reason == reason


def test_classes_without_names_are_reported_by_number() -> None:
    unnamed = decisions(**REFUSED, classes=None, probability=torch.tensor([[0.4, 0.3]], dtype=torch.float64))
    assert unnamed[-1].reason == "ambiguous between class 0 (40 %) and class 2 (30 %)"
    assert str(unnamed[0]).startswith("a.png: abstain class 0 (0.400, aleatoric 0.50, epistemic 0.50): ambiguous")
    with pytest.raises(IndexError):
        unnamed[1]


def test_verdicts_as_csv_and_json(tmp_path: Path) -> None:
    result = decisions()
    path = result.to_csv(tmp_path / "new" / "verdicts.csv")
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["predicted_class"] == "ant, emmet"
    assert row["prediction_set"] == "0 2"
    assert row["accept"] == "True"
    assert float(row["probability"]) == result[0].to_dict()["probability"] == 0.9
    with pytest.raises(ArtefactError, match="cannot be saved"):
        result.to_csv(tmp_path)


def test_the_two_most_likely_classes() -> None:
    p, predicted = top_two(torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 0.0]]))
    assert predicted.tolist() == [[1, 2], [0, 1]]
    assert p[0].tolist() == pytest.approx(torch.tensor([3.0, 2.0]).sub(3.4076).exp().tolist(), abs=1e-4)


def test_a_slice_is_a_list_of_verdicts() -> None:
    result = decisions()
    assert result[:5] == [result[0]]
    assert result[1:] == []
    assert result[::-1] == [result[0]]
    assert result != decisions()  # columns are not compared


def test_the_main_reasons_are_counted_most_frequent_first() -> None:
    five = decisions(
        ids=list("abcde"),
        predicted=torch.tensor([[0, 2]] * 5),
        probability=torch.tensor([[0.5, 0.4], [0.9, 0.05], [0.9, 0.05], [0.9, 0.05], [0.9, 0.05]], dtype=torch.float64),
        uncertainty=torch.ones(5).double(),
        rank=column(0.8, 0.8, 0.8, 0.8, 0.2),
        accept=torch.tensor([False] * 4 + [True]),
        novel=torch.tensor([False, True, True, False, False]),
        aleatoric=None,
        epistemic=None,
        density_rank=column(0.5, 0.0, 0.0, 0.5, 0.5),
        sets=None,
    )
    assert five.facts() == {
        "refused": "2 unlike the reference images; 1 ambiguous between two classes; 1 more uncertain than the threshold"
    }
    assert decisions().facts() == {}


def test_of_many_images_the_first_ten_are_printed() -> None:
    n = 1234
    one = decisions()
    columns = {name: getattr(one, name).repeat_interleave(n, 0) for name in ("predicted", "probability", "accept")}
    columns |= {name: getattr(one, name).repeat(n) for name in ("uncertainty", "rank", "novel", "density_rank")}
    many = decisions(
        ids=[f"{row}.png" for row in range(n)], **columns, aleatoric=None, epistemic=None, sets=None, shift=one.shift
    )
    lines = str(many).splitlines()
    assert lines[0] == "1234 of 1234 images accepted"
    assert lines[1:11] == [str(verdict) for verdict in many[:10]]
    assert lines[11:] == ["and 1,224 more", *many.findings()]
    assert len(str(many.limited(None)).splitlines()) == n + 2
    assert len(many.to_dict()["verdicts"]) == n
