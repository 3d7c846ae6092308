"""Labels that are counted or ordered otherwise than the model's classes: off by one, shifted, sorted as text, permuted.

A shift by s is right on  #{i : predicted_i - label_i = s}  images, so one histogram of differences tries them all. A
permutation is read off the counts of (label, predicted) on one half of the images, largest counts first and one to one,
and judged on the other half, so that it cannot win by having been fitted. Either must beat the labels as they are on
the same images (exact test, corrected for the number of shifts) by ten points, and be right more often than answers
that have nothing to do with the labels would be:  sum_y #{label = y} #{predicted = y + s} / n.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dubito.diagnosis.checks.chance import agreement
from dubito.diagnosis.checks.finding import Finding, NotChecked, Outcome, counted, listed, percent
from dubito.diagnosis.checks.significance import below, binomial_tail, paired_p
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

    Args:
        predicted: The model's classes.
        labels: As they came; they may reach beyond the model's classes.
        c: How many classes the model has.
        names: Of the classes of the labels, where labels are positions in it.
    """
    if len(labels) < _FEWEST:
        return Relabelled(labels, NotChecked(f"it takes {_FEWEST} images with finite logits; {len(labels)} came"))
    numbers = _numbers(names)
    ways = {"": labels} if numbers is None else {"": labels, "numbers": numbers[labels]}
    won = [found for kind, given in ways.items() if (found := _best_shift(predicted, labels, given, c, kind))]
    outside = int((labels >= c).sum())
    if won:
        shift = max(won, key=lambda found: found.accuracy)
        return Relabelled(shift.labels, [_counting_finding(shift, labels, c)])
    return Relabelled(labels, [_outside_finding(labels, c)] if outside else [])


def check_order(predicted: _NUMBERS, labels: _NUMBERS, classes: Sequence[str] | None) -> Relabelled:
    """A one-to-one exchange of classes that explains the answers better than the labels as they are."""
    counts = Counter(labels.tolist())
    enough = torch.tensor([counts[label] >= _PER_CLASS for label in labels.tolist()], dtype=torch.bool)
    if int(enough.sum()) < _FEWEST:
        most = max(counts.values(), default=0)
        reason = f"it takes {_PER_CLASS} images of a class and {_FEWEST} such images; the commonest class has {most}"
        return Relabelled(labels, NotChecked(reason))
    guess, given = predicted[enough], labels[enough]
    then = _cross_fitted(guess, given)
    hit, own = then == guess, given == guess
    better, worse = int((hit & ~own).sum()), int((own & ~hit).sum())
    p, gain = paired_p(better, worse), (better - worse) / len(given)
    if gain < _GAIN or p >= _ALPHA or not _informed(hit, guess, then):
        return Relabelled(labels, [])
    mapping = _matched(guess, given)
    moved = {label: answer for label, answer in sorted(mapping.items()) if label != answer}
    what = (
        f"{counted(len(moved), 'class')} seem to stand in another order than the model's: accuracy on images that the "
        f"order was not read from is {percent(float(hit.double().mean()))} instead of "
        f"{percent(float(own.double().mean()))} ({below(p)}). Label -> class: {_arrows(moved, classes)}."
    )
    repair = (
        "Give labels= (--labels FILE) as indices of the model's classes, or name the classes with dubito.wrap(..., "
        "classes=[...]) so that class folders are matched by name and not by their place."
    )
    evidence: Json = {
        "accuracy": float(own.double().mean()),
        "accuracy_then": float(hit.double().mean()),
        "p": p,
        "order": {str(label): answer for label, answer in moved.items()},
    }
    repaired = torch.tensor([mapping.get(label, label) for label in labels.tolist()])
    return Relabelled(repaired, [Finding(ORDER, "wrong", what, repair, evidence)])


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
    evidence: Json = {
        "shift": shift.by,
        "folder_numbers": text,
        "accuracy": shift.own,
        "accuracy_then": shift.accuracy,
        "p": shift.p,
        "labels_outside": int((labels >= c).sum()),
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


def _cross_fitted(predicted: _NUMBERS, labels: _NUMBERS) -> _NUMBERS:
    """For every image, its label under the order that was read off the other half of its class."""
    then = labels.clone()
    turn, seen = torch.zeros(len(labels), dtype=torch.bool), Counter[int]()
    for row, label in enumerate(labels.tolist()):
        turn[row] = seen[label] % 2 == 1
        seen[label] += 1
    for half in (turn, ~turn):
        mapping = _matched(predicted[~half], labels[~half])
        then[half] = torch.tensor([mapping.get(label, label) for label in labels[half].tolist()])
    return then


def _matched(predicted: _NUMBERS, labels: _NUMBERS) -> dict[int, int]:
    """One answer for each label and one label for each answer, by the largest counts; ties leave a label alone."""
    counts = Counter(zip(labels.tolist(), predicted.tolist(), strict=True))
    order = sorted(counts, key=lambda pair: (-counts[pair], pair[0] != pair[1], pair))
    mapping: dict[int, int] = {}
    taken: set[int] = set()
    for label, answer in order:
        if label not in mapping and answer not in taken:
            mapping[label] = answer
            taken.add(answer)
    return mapping


def _arrows(moved: dict[int, int], classes: Sequence[str] | None) -> str:
    def name(answer: int) -> str:
        return f" ({classes[answer]})" if classes is not None and answer < len(classes) else ""

    return listed([f"{label} -> {answer}{name(answer)}" for label, answer in moved.items()])
