"""Wrong labels that were planted are found; what is right or ambiguous is left alone."""

import csv
import json

import numpy as np
import pytest
import torch

from dubito import Table, find_label_issues
from dubito.active.label_issues import _neighbours
from dubito.errors import MissingColumnError, TableError, ValueRangeError


def planted(n: int = 400, wrong: int = 20, seed: int = 0) -> tuple[Table, set[int]]:
    """Four clusters; some labels are turned, among clear images and among those between clusters."""
    draw = torch.Generator().manual_seed(seed)
    label = torch.arange(n) % 4
    hard = torch.arange(n) % 5 == 0
    clear = torch.where(hard, 0.3, 4.0)[:, None]
    feature = clear * torch.eye(4, 8)[label] + 0.6 * torch.randn(n, 8, generator=draw)
    chosen = torch.randperm(n, generator=draw)[:wrong]
    chosen = chosen[~hard[chosen]]
    original = label.clone()
    original[chosen] = (original[chosen] + 1) % 4
    return Table(feature=feature, logit=3 * feature[:, :4], label=original), set(chosen.tolist())


def test_planted_labels_are_found_with_the_right_suggestion():
    table, wrong = planted()
    result = find_label_issues(table, share=0.8)
    assert set(result.rows.tolist()) == wrong
    assert (result.suggested == (table.label.numpy()[result.rows] - 1) % 4).all()
    assert (np.diff(result.margin) <= 0).all()
    assert result.margin.min() >= 0.5


def test_uncertain_images_are_not_examined():
    table, wrong = planted()
    everywhere = find_label_issues(table, share=1.0)
    assert wrong < set(everywhere.rows.tolist())  # images between clusters disagree with their neighbours, too
    subset = find_label_issues(table, share=0.4)
    assert subset.examined == 160
    assert set(subset.rows.tolist()) <= wrong
    assert subset.u.max() <= find_label_issues(table, share=0.8).u.max()


def test_sureness_by_hand():
    feature = [[1.0, 0.0]] * 3 + [[1.0, 0.01]] * 2 + [[0.0, 1.0]] * 2
    table = Table(feature=feature, label=[0, 0, 1, 0, 2, 3, 3], id=list("abcdefg"))
    result = find_label_issues(table, [0.0] * 7, k=4, share=1.0, least=0.5)
    # c sees a, b, d, e: labels 0, 0, 0, 2, so 3/4 - 0; e sees a, b, c, d: 0, 0, 1, 0, the same.
    assert result.ids == ["c", "e"]
    assert result.margin.tolist() == [0.75, 0.75]
    assert result.suggested.tolist() == [0, 0]
    assert len(find_label_issues(table, [0.0] * 7, k=4, share=1.0, least=0.8)) == 0


def test_seven_neighbours_against_two_are_half_sure():
    """0.7 - 0.2 is a little below 0.5 in floating point; 5 of 10 is not."""
    table = Table(feature=[[1.0, 0.0]] * 11, label=[0, *[1] * 7, 0, 0, 2])
    result = find_label_issues(table, [0.0] + [1.0] * 10, k=10, share=0.1)
    assert (result.rows.tolist(), result.margin.tolist()) == ([0], [0.5])


def test_neighbours_are_those_of_brute_force_without_the_image_itself():
    draw = torch.Generator().manual_seed(3)
    feature = torch.randn(50, 6, generator=draw)
    feature[10:14] = feature[10]  # duplicates
    table = Table(feature=feature, label=torch.zeros(50, dtype=torch.long))
    unit = feature / feature.norm(dim=1, keepdim=True)
    cosine = (unit @ unit.T).fill_diagonal_(-2)
    near = _neighbours(table, np.arange(50), 3)
    assert not (near == np.arange(50)[:, None]).any()
    result = torch.gather(cosine, 1, torch.from_numpy(near))
    torch.testing.assert_close(result, cosine.topk(3).values, atol=1e-5, rtol=0)


def test_one_class_has_no_issues():
    result = find_label_issues(Table(feature=torch.eye(4) + 1, label=[2] * 4), [0.0] * 4, k=2)
    assert len(result) == 0
    assert str(result) == "table in memory: 0 labels are likely wrong, among the 2 most certain of 4 images"


def test_classes_too_small_to_agree_are_reported():
    draw = torch.Generator().manual_seed(0)
    table = Table(feature=torch.randn(40, 4, generator=draw), label=torch.arange(40) // 2)
    result = find_label_issues(table, [0.0] * 40)
    assert (result.largest, result.needed, len(result)) == (2, 5, 0)
    assert str(result) == (
        "table in memory: labels cannot be examined, because the largest class has 2 images, and 5 neighbours must "
        "agree. Use fewer neighbours (k), or more images per class."
    )
    assert result.to_dict()["largest_class"] == 2
    # Two of three are enough for 0.5, and two of four for 0.5 exactly.
    assert "likely wrong" in find_label_issues(table, [0.0] * 40, k=3).title()
    assert "likely wrong" in find_label_issues(table, [0.0] * 40, k=4).title()
    assert (
        "the largest class has 2 images, and 3 neighbours must agree"
        in find_label_issues(table, [0.0] * 40, k=5).title()
    )
    # 0.55 * 20 is a little above 11 in floating point.
    assert find_label_issues(table, [0.0] * 40, k=20, least=0.55).needed == 11


def test_a_class_of_just_enough_images_is_suggested():
    """The two other images of the cluster are all of their class, and all who need to agree."""
    feature = [[1.0, 0.0], [1.0, 0.1], [1.0, -0.1], [0.0, 1.0], [-1.0, 0.0]]
    result = find_label_issues(Table(feature=feature, label=[0, 1, 1, 2, 3]), [0.0] * 5, k=4, share=1.0)
    assert (result.largest, result.needed) == (2, 2)
    assert 0 in result.rows.tolist()


def test_json_has_numbers():
    feature = [[1.0, 0.0]] * 3 + [[0.0, 1.0]] * 3
    result = find_label_issues(Table(feature=feature, label=[0, 0, 1, 1, 1, 1]), [0.1] * 6, k=2, share=1.0)
    one = {"id": "2", "label": "1", "suggested": "0", "margin": 1.0, "u": 0.1, "row": 2}
    assert json.loads(json.dumps(result.to_dict()))["issues"] == [one]


def test_csv_and_class_names(tmp_path):
    feature = [[1.0, 0.0]] * 3 + [[0.0, 1.0]] * 3
    table = Table(feature=feature, label=[0, 0, 1, 1, 1, 1], id=list("abcdef"), classes=["cat, tom", "dog"])
    path = find_label_issues(table, [0.1] * 6, k=2, share=1.0).to_csv(tmp_path / "issues.csv")
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row == {"id": "c", "label": "dog", "suggested": "cat, tom", "margin": "1.0", "u": "0.1", "row": "2"}


def test_labels_of_another_set_have_their_own_names():
    feature = [[1.0, 0.0]] * 3 + [[0.0, 1.0]] * 3
    options = {"classes": ["tench", "goldfish"], "label_space": "own", "label_names": ["cat", "dog"]}
    result = find_label_issues(Table(feature=feature, label=[0, 0, 1, 1, 1, 1], **options), [0.1] * 6, k=2, share=1.0)
    assert result.lines()[1][1:3] == ["dog", "cat"]


def test_what_cannot_be_judged_is_refused():
    table, _ = planted(20, 0)
    with pytest.raises(
        ValueRangeError,
        match=r"k must be a whole number in \[1, 19\]; got 20\. They are the other images of table in memory",
    ):
        find_label_issues(table, k=20)
    with pytest.raises(ValueRangeError, match=r"share must be a number in \(0, 1\]; got 0.0"):
        find_label_issues(table, share=0.0)
    with pytest.raises(MissingColumnError, match="find_label_issues needs column 'label'"):
        find_label_issues(table.select("feature", "logit"))
    with pytest.raises(ValueRangeError, match="score 'score': 1 of 20 values are NaN"):
        find_label_issues(table, [float("nan")] + [0.0] * 19)
    with pytest.raises(TableError, match="features must be finite and not all zero"):
        find_label_issues(Table(feature=torch.zeros(4, 2), label=[0] * 4), [0.0] * 4, k=1)
    with pytest.raises(TableError, match=r"3 of 4 .* Leave them out: table.rows\(table.label >= 0\)"):
        find_label_issues(Table(feature=torch.eye(4), label=[0, -1, -1, -1]), [0.0] * 4, k=1)
    for rows in ([], [0]):
        with pytest.raises(TableError, match=f"find_label_issues: table needs at least 2 rows; .* has {len(rows)}"):
            find_label_issues(table.rows(rows), k=1)
