"""Labels that are counted or ordered otherwise than the model's classes: off by one, shifted, sorted as text, permuted.

A shift by s is right on  #{i : predicted_i - label_i = s}  images, so one histogram of differences tries them all. A
permutation is read off one half of the images and judged on the other half (`dubito.cache.order`). Either must beat the
labels as they are on the same images (exact test, corrected for the number of shifts) by ten points, and be right more
often than answers that have nothing to do with the labels would be:  sum_y #{label = y} #{predicted = y + s} / n.

A shift is the simpler reason, and goes before a permutation that is not clearly better. But a shift that leaves the
classes 0..c-1 gives labels that nobody can use: there a permutation that explains as many images goes before it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dubito.audit.finding import Finding, NotChecked, Outcome, listed, percent
from dubito.audit.significance import below, binomial_tail, paired_p
from dubito.cache.order import agreement, cross_fitted, exchanged, matched
from dubito.types import Json

COUNTING, ORDER = "labels off by one", "classes in another order"
_GAIN, _ALPHA = 0.1, 1e-3
_FEWEST, _PER_CLASS = 20, 4
_NUMBERS = Int[Tensor, "n"]


@final
@dataclass(frozen=True)
class Relabelled:
    """What was found about labels, and the labels to go on with: repaired where they could be."""

    labels: Int[Tensor, "n"]
    outcome: Outcome


def check_counting(predicted: _NUMBERS, labels: _NUMBERS, c: int, names: Sequence[str] | None) -> Relabelled:
    """The best constant shift, of the labels or of the numbers that class folders are named by.

    Where an order of classes is the better reason, nothing is said of a shift: `check_order` finds it.

    Args:
        predicted: The model's classes.
        labels: As they came; they may reach beyond the model's classes.
        c: How many classes the model has.
        names: Of the classes of the labels, where labels are positions in it.
    """
    if len(labels) < _FEWEST:
        return Relabelled(labels, NotChecked(f"it takes {_FEWEST} images with finite logits; got {len(labels)}"))
    numbers = _numbers(names)
    ways = {"": labels} if numbers is None else {"": labels, "numbers": numbers[labels]}
    won = [found for kind, given in ways.items() if (found := _best_shift(predicted, labels, given, c, kind))]
    outside = int((labels >= c).sum())
    shift = max(won, key=lambda found: found.accuracy, default=None)
    if shift is not None and not _outdone(shift, predicted, labels, c):
        return Relabelled(shift.labels, [_counting_finding(shift, labels, c)])
    return Relabelled(labels, [_outside_finding(labels, c)] if outside else [])


def check_order(
    predicted: _NUMBERS,
    labels: _NUMBERS,
    classes: Sequence[str] | None,
    names: Sequence[str] | None = None,
    *,
    than: _NUMBERS | None = None,
) -> Relabelled:
    """A one-to-one exchange of classes that explains the answers better than the labels as they are.

    Args:
        predicted: The model's classes.
        labels: As they came: the order is told in these numbers.
        classes: The model's names of its classes.
        names: Of the labels.
        than: Labels that were repaired otherwise; an order must be better than these.
    """
    before = labels if than is None else than
    order = _read_order(predicted, labels, before)
    if not isinstance(order, _Order):
        return Relabelled(before, [] if order is None else order)
    moved = {label: answer for label, answer in sorted(order.mapping.items()) if label != answer}
    own, then = float(order.own.double().mean()), float(order.hit.double().mean())
    many = len(moved) > 1
    seem = f"{len(moved)} classes seem to stand in another order" if many else "1 class seems to stand in another place"
    what = (
        f"{seem} than the model's: accuracy on images that the order was not read from is "
        f"{percent(then)} instead of {percent(own)} ({below(order.p)}). Label -> class: "
        f"{_arrows(moved, names, classes)}."
    )
    repair = "Give labels= (--labels FILE) as indices of the model's classes, or " + (
        "name the classes with dubito.wrap(..., classes=[...]) so that class folders are matched by name and not by "
        "their place."
        if classes is None
        else "put the names in dubito.wrap(..., classes=[...]) into the order of the model's outputs."
    )
    evidence: Json = {
        "accuracy": own,
        "accuracy_then": then,
        "p": order.p,
        "order": {str(label): answer for label, answer in moved.items()},
    }
    return Relabelled(exchanged(labels, order.mapping), [Finding(ORDER, "wrong", what, repair, evidence)])


@final
@dataclass(frozen=True)
class _Order:
    """An order of classes, the rows that it can be read from and judged on, and which of these agree."""

    mapping: dict[int, int]
    rows: Bool[Tensor, "n"]
    hit: Bool[Tensor, "k"]
    own: Bool[Tensor, "k"]
    p: float


def _read_order(predicted: _NUMBERS, labels: _NUMBERS, than: _NUMBERS) -> _Order | NotChecked | None:
    """The order that answers show, if it is clearly better than other labels of the same images."""
    counts = Counter(labels.tolist())
    enough = torch.tensor([counts[label] >= _PER_CLASS for label in labels.tolist()], dtype=torch.bool)
    if int(enough.sum()) < _FEWEST:
        most = max(counts.values(), default=0)
        return NotChecked(
            f"it takes {_PER_CLASS} images of a class and {_FEWEST} such images; the commonest class has {most}"
        )
    guess, given = predicted[enough], labels[enough]
    then = cross_fitted(guess, given)
    hit, own = then == guess, than[enough] == guess
    better, worse = int((hit & ~own).sum()), int((own & ~hit).sum())
    p, gain = paired_p(better, worse), (better - worse) / len(given)
    if gain < _GAIN or p >= _ALPHA or not _informed(hit, guess, then):
        return None
    return _Order(matched(guess, given), enough, hit, own, p)


@final
@dataclass(frozen=True)
class _Shift:
    by: int
    kind: str
    accuracy: float
    own: float
    p: float
    labels: Int[Tensor, "n"]


def _best_shift(predicted: _NUMBERS, own: _NUMBERS, given: _NUMBERS, c: int, kind: str) -> _Shift | None:
    """The shift that most answers agree with, if it is clearly better than the labels as they came."""
    [(by, _)] = Counter((predicted - given).tolist()).most_common(1)
    then = given + by
    hit, before = predicted == then, predicted == own
    better, worse = int((hit & ~before).sum()), int((before & ~hit).sum())
    p, gain = paired_p(better, worse, tests=2 * (2 * c - 1)), (better - worse) / len(own)
    if gain < _GAIN or p >= _ALPHA or not _informed(hit, predicted, then):
        return None
    return _Shift(by, kind, float(hit.double().mean()), float(before.double().mean()), p, then)


def _outdone(shift: _Shift, predicted: _NUMBERS, labels: _NUMBERS, c: int) -> bool:
    """Whether an order of classes is clearly better, or as good where the shift leaves the model's classes.

    Classes that are exchanged in a circle, as 0 -> 1, 1 -> 2, 2 -> 0, look like a shift for all labels but one. An
    order that is right on the same images and no others is the shift itself, told less plainly.
    """
    if isinstance(_read_order(predicted, labels, shift.labels), _Order):
        return True
    order = _read_order(predicted, labels, labels)
    if not isinstance(order, _Order) or not bool(_outside(shift.labels, c).any()):
        return False
    by_shift, by_order = shift.labels == predicted, exchanged(labels, order.mapping) == predicted
    by_order[order.rows] = order.hit
    return int(by_order.sum()) >= int(by_shift.sum()) and not torch.equal(by_order, by_shift)


def _outside(labels: _NUMBERS, c: int) -> Bool[Tensor, "n"]:
    """Which labels are no class of the model."""
    return (labels < 0) | (labels >= c)


def _counting_finding(shift: _Shift, labels: _NUMBERS, c: int) -> Finding:
    text = shift.kind == "numbers"
    moved = f"label {'+' if shift.by > 0 else '-'} {abs(shift.by)}" if shift.by else "the label"
    source = "class folders are sorted as text (10 before 2), and not as the numbers that they are; " if text else ""
    reason = ""
    if shift.by == -1:
        reason = " Labels seem to count from one."
    elif shift.by == 1:
        reason = f" The model has {c} outputs; its class 0 may be a background class."
    what = (
        f"Taken as they are, labels give an accuracy of {percent(shift.own)}; {source}with {moved} it is "
        f"{percent(shift.accuracy)} on the same {len(labels)} images ({below(shift.p)}).{reason}"
    )
    numbers = "the number in its folder's name" if text else "every label"
    repair = f"Take {numbers}{f' plus {shift.by}' if shift.by > 0 else f' minus {-shift.by}' if shift.by else ''}: "
    repair += "give labels= (--labels FILE) as indices of the model's classes, counted from 0."
    lost = labels[_outside(shift.labels, c)].tolist()
    if lost:
        repair += (
            f" {len(lost)} of the images {'has' if len(lost) == 1 else 'have'} no class then and must be left out: "
        )
        repair += f"those of label {listed(sorted(set(lost)))}."
    evidence: Json = {
        "shift": shift.by,
        "folder_numbers": text,
        "accuracy": shift.own,
        "accuracy_then": shift.accuracy,
        "p": shift.p,
        "labels_outside": int((labels >= c).sum()),
        "labels_outside_then": len(lost),
    }
    return Finding(ORDER if text and not shift.by else COUNTING, "wrong", what, repair, evidence)


def _outside_finding(labels: _NUMBERS, c: int) -> Finding:
    outside = int((labels >= c).sum())
    what = f"{outside} of {len(labels)} labels are {c} or more, up to {int(labels.max())}; the model's are 0..{c - 1}."
    repair = (
        "Give indices of the model's classes, counted from 0, or label_space='own' (--label-space own) for classes of "
        "another set."
    )
    evidence: Json = {"outside": outside, "images": len(labels), "highest": int(labels.max()), "classes": c}
    return Finding(COUNTING, "wrong", what, repair, evidence)


def _numbers(names: Sequence[str] | None) -> Int[Tensor, "k"] | None:
    """The numbers that classes are named by, where that is another order than their own."""
    if names is None or not all(name.isdecimal() for name in names):
        return None
    numbers = torch.tensor([int(name) for name in names])
    return None if bool((numbers.diff() > 0).all()) else numbers


def _informed(hit: Bool[Tensor, "n"], predicted: _NUMBERS, labels: _NUMBERS) -> bool:
    """Whether more labels agree with the answers than by chance."""
    return binomial_tail(int(hit.sum()), len(hit), agreement(predicted, labels)) < _ALPHA


def _arrows(moved: dict[int, int], names: Sequence[str] | None, classes: Sequence[str] | None) -> str:
    def told(number: int, known: Sequence[str] | None) -> str:
        return f"{number} ({known[number]})" if known is not None and number < len(known) else str(number)

    return listed([f"{told(label, names)} -> {told(answer, classes)}" for label, answer in moved.items()])
