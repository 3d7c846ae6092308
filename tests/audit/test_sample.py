"""Answers under a transform: rows without finite logits neither decide nor tell anything."""

import math

import pytest
import torch

from dubito.audit.alternatives import OWN, Alternative
from dubito.audit.sample import NO_CLASS, Answers, drawn
from dubito.data import ArrayImages
from tests.audit.drawn import draw

NAN = float("nan")
SURE = torch.tensor([[100.0, 0], [0, 100.0]])


def answers(logit: torch.Tensor, usable: list[bool], feature: torch.Tensor | None = None) -> Answers:
    found = Answers(Alternative(OWN, ""))
    found.add(torch.ones(len(logit), 1) if feature is None else feature, logit, torch.tensor(usable))
    return found


def test_rows_that_are_not_usable_do_not_count():
    logit = torch.cat([SURE, torch.full((2, 2), NAN)])
    assert answers(logit, [True, True, False, False]).information == pytest.approx(math.log(2))
    both = Answers(Alternative(OWN, ""))
    both.add(torch.ones(2, 1), SURE, torch.tensor([True, True]))
    both.add(torch.ones(2, 1), logit[2:], torch.tensor([False, False]))
    assert both.information == pytest.approx(math.log(2))


def test_usable_rows_that_are_not_finite_here_are_undecided():
    """Two sure and different answers of four: H(mean) = log 2, and the mean entropy is half of log 2."""
    found = answers(torch.cat([SURE, torch.full((2, 2), NAN)]), [True] * 4)
    assert found.information == pytest.approx(math.log(2) / 2)
    assert found.confidence.tolist() == pytest.approx([1, 1, 0.5, 0.5])
    assert found.predicted.tolist() == [0, 1, NO_CLASS, NO_CLASS]


def test_a_logit_of_minus_infinity_alone_is_not_finite_either():
    assert answers(torch.tensor([[0.0, -math.inf], [0, 100]]), [True, True]).predicted.tolist() == [NO_CLASS, 1]


def test_length_is_that_of_finite_usable_features():
    feature = torch.tensor([[3.0, 4], [NAN, 1], [6, 8], [math.inf, 0]])
    logit = draw(4, 2)
    assert answers(logit, [True] * 4, feature).norm == pytest.approx(7.5)
    assert answers(logit, [True, True, False, True], feature).norm == pytest.approx(5)
    assert answers(logit, [False] * 4, feature).norm == 0
    assert answers(logit, [False] * 4, feature).information == 0


def test_a_smaller_draw_is_part_of_a_larger_one():
    images = ArrayImages(inputs=draw(50, 4))
    few, many = (drawn(images, limit, 3).ids for limit in (10, 30))
    assert set(few) < set(many)
    assert few == sorted(few)
    assert list(drawn(images, 100, 3).ids) == list(images.ids)
