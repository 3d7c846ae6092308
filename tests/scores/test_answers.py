"""Which answers are wrong, and labels that cannot tell."""

import pytest
import torch

from dubito.errors import TableError, ValueRangeError
from dubito.scores._answers import answers, check_own_classes, errors_of
from dubito.table import Table

LOGIT = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0], [0.0, 3.0, 1.0]])


def test_a_row_is_wrong_where_another_class_has_the_highest_logit() -> None:
    assert errors_of(Table(logit=LOGIT, label=[0, 0, 1]), by="here").tolist() == [False, True, False]


def test_answers_come_in_the_order_of_the_rows() -> None:
    table = Table(logit=LOGIT, label=[0, 2, 1])
    logits, labels = zip(*answers(table, by="here"), strict=True)
    assert torch.equal(torch.cat(logits), LOGIT)
    assert torch.cat(labels).tolist() == [0, 2, 1]


def test_labels_of_another_set_are_refused() -> None:
    table = Table(logit=LOGIT, label=[0, 0, 1], label_space="own", name="birds")
    for call in (check_own_classes, errors_of):
        with pytest.raises(TableError, match="here needs labels of the model's own classes; those of birds are anoth"):
            call(table, by="here")


def test_without_rows_the_repair_is_told() -> None:
    table = Table(logit=LOGIT[:0], label=torch.zeros(0, dtype=torch.long))
    with pytest.raises(TableError, match=r"here needs labelled rows; table in memory has none\. Take others\."):
        errors_of(table, by="here", repair="Take others.")


@pytest.mark.parametrize(("label", "came"), [([0, 1, 3], "0 to 3"), ([-1, 0, 1], "-1 to 1")])
def test_labels_beyond_the_classes_are_refused(label: list[int], came: str) -> None:
    with pytest.raises(ValueRangeError, match=f"here: labels must be classes of the logits, 0 to 2; {came} came in"):
        errors_of(Table(logit=LOGIT, label=label), by="here")


def test_logits_that_are_no_numbers_are_refused() -> None:
    logit = LOGIT.clone()
    logit[1, 1] = torch.nan
    with pytest.raises(ValueRangeError, match="here: logits of table in memory"):
        errors_of(Table(logit=logit, label=[0, 0, 1]), by="here")
