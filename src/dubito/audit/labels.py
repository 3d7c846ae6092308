"""Are the labels the model's classes? Unknown names, and labels off by one, shifted, sorted as text or permuted.

A shift by s is right on  #{i : predicted_i - label_i = s}  images, so one histogram of differences tries them all. A
permutation is estimated on one half of the images and tested on the other (`dubito.cache.order`). Either must beat the
labels as they are on the same images (exact test, corrected for the number of shifts) by ten points, and be right more
often than predictions that have nothing to do with the labels would be:  sum_y #{label = y} #{predicted = y + s} / n.

A shift is the simpler explanation and is preferred to a permutation that is not clearly better. But a shift that leaves
the classes 0..c-1 gives labels that nobody can use: there a permutation that explains as many images is preferred.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dubito.audit.finding import Finding, NotChecked, Outcome, listed, percent
from dubito.audit.sample import Sample
from dubito.audit.significance import below, binomial_tail, paired_p
from dubito.cache.labels import check_count, resolve_labels
from dubito.cache.order import agreement, cross_fitted, exchanged, matched
from dubito.choices import LabelSpace
from dubito.data import Subset
from dubito.errors import ImagesError, OwnLabelsWarning
from dubito.types import Json

NAMES = "class names that the model does not know"
COUNTING, ORDER = "labels off by one", "classes in another order"
_GAIN, _ALPHA = 0.1, 1e-3
_FEWEST, _PER_CLASS = 20, 4
_NUMBERS = Int[Tensor, "n"]


@final
@dataclass(frozen=True)
class ModelLabels:
    """The labels of the images that were read, as the model's classes; or None and the reason."""

    labels: Int[Tensor, "n"] | None
    outcome: Outcome
    missing: str = ""


def model_labels(sample: Sample, images: Subset, space: LabelSpace | None) -> ModelLabels:
    """Look class names up among the model's, as `extract` does; what `extract` would refuse is a finding here."""
    if images.labels is None:
        return ModelLabels(None, NotChecked("no labels"), "no labels")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OwnLabelsWarning)
            labels, resolved = resolve_labels(images, sample.model, space)
        if images.classes is not None and sample.model.classes is None and space is None:
            check_count(images.classes, sample.logit.shape[1])
    except ImagesError as error:
        what, _, repair = str(error).partition(". ")
        return ModelLabels(None, [Finding(NAMES, "wrong", f"{what}.", repair, {})], "the model does not know them all")
    if labels is not None and resolved == "model":
        return ModelLabels(labels[sample.rows], [])
    return ModelLabels(
        None, [] if space == "own" else [_unknown_names(images, sample)], "labels are another set's classes"
    )


@final
@dataclass(frozen=True)
class Relabelled:
    """The outcome of a check of labels, and the labels to go on with: repaired where possible."""

    labels: Int[Tensor, "n"]
    outcome: Outcome


def check_counting(predicted: _NUMBERS, labels: _NUMBERS, c: int, names: Sequence[str] | None) -> Relabelled:
    """The best constant shift, of the labels or of the numbers that class folders are named by.

    Where an order of classes is the better explanation, no shift is reported: `check_order` finds it.

    Args:
        predicted: The predicted classes.
        labels: The original labels; they may exceed the model's classes.
        c: The number of the model's classes.
        names: The names of the labels' classes, where labels are positions in it.
    """
    if len(labels) < _FEWEST:
        return Relabelled(labels, NotChecked(f"needs {_FEWEST} images with finite logits; got {len(labels)}"))
    numbers = _numbers(names)
    candidates = {"": labels} if numbers is None else {"": labels, "numbers": numbers[labels]}
    shifts = [one for kind, base in candidates.items() if (one := _best_shift(predicted, labels, base, c, kind))]
    outside = int((labels >= c).sum())
    shift = max(shifts, key=lambda one: one.accuracy, default=None)
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
    """A one-to-one exchange of classes that explains the predictions better than the labels as they are.

    Args:
        predicted: The predicted classes.
        labels: The original labels: the order is reported in these numbers.
        classes: The model's names of its classes.
        names: The names of the labels.
        than: Labels that were repaired in another way; an order must be better than these.
    """
    before = labels if than is None else than
    order = _read_order(predicted, labels, before)
    if not isinstance(order, _Order):
        return Relabelled(before, [] if order is None else order)
    moved = {label: place for label, place in sorted(order.mapping.items()) if label != place}
    own, then = float(order.own.double().mean()), float(order.hit.double().mean())
    many = len(moved) > 1
    seem = f"{len(moved)} classes seem to be in another order" if many else "1 class seems to be in another place"
    what = (
        f"{seem} than the model's: accuracy on images that the order was not estimated from is "
        f"{percent(then)} instead of {percent(own)} ({below(order.p)}). Label -> class: "
        f"{_arrows(moved, names, classes)}."
    )
    repair = "Give labels= as indices of the model's classes, or " + (
        "name the classes with dubito.wrap(..., classes=[...]) so that class folders are matched by name instead of "
        "position."
        if classes is None
        else "put the names in dubito.wrap(..., classes=[...]) into the order of the model's outputs."
    )
    evidence: Json = {
        "accuracy": own,
        "accuracy_then": then,
        "p": order.p,
        "order": {str(label): place for label, place in moved.items()},
    }
    return Relabelled(exchanged(labels, order.mapping), [Finding(ORDER, "wrong", what, repair, evidence)])


@final
@dataclass(frozen=True)
class _Order:
    """An order of classes, the rows that it can be estimated and tested on, and which of these agree."""

    mapping: dict[int, int]
    rows: Bool[Tensor, "n"]
    hit: Bool[Tensor, "k"]
    own: Bool[Tensor, "k"]
    p: float


def _read_order(predicted: _NUMBERS, labels: _NUMBERS, than: _NUMBERS) -> _Order | NotChecked | None:
    """The order that predictions show, if it is clearly better than other labels of the same images."""
    counts = Counter(labels.tolist())
    enough = torch.tensor([counts[label] >= _PER_CLASS for label in labels.tolist()], dtype=torch.bool)
    if int(enough.sum()) < _FEWEST:
        most = max(counts.values(), default=0)
        return NotChecked(
            f"needs classes of {_PER_CLASS} or more images, {_FEWEST} images in all; the most common class has {most}"
        )
    guess, own_labels = predicted[enough], labels[enough]
    then = cross_fitted(guess, own_labels)
    hit, own = then == guess, than[enough] == guess
    better, worse = int((hit & ~own).sum()), int((own & ~hit).sum())
    p, gain = paired_p(better, worse), (better - worse) / len(guess)
    if gain < _GAIN or p >= _ALPHA or not _informed(hit, guess, then):
        return None
    return _Order(matched(guess, own_labels), enough, hit, own, p)


@final
@dataclass(frozen=True)
class _Shift:
    by: int
    kind: str
    accuracy: float
    own: float
    p: float
    labels: Int[Tensor, "n"]


def _best_shift(predicted: _NUMBERS, own: _NUMBERS, base: _NUMBERS, c: int, kind: str) -> _Shift | None:
    """The shift that most predictions agree with, if it is clearly better than the original labels."""
    [(by, _)] = Counter((predicted - base).tolist()).most_common(1)
    then = base + by
    hit, before = predicted == then, predicted == own
    better, worse = int((hit & ~before).sum()), int((before & ~hit).sum())
    p, gain = paired_p(better, worse, tests=2 * (2 * c - 1)), (better - worse) / len(own)
    if gain < _GAIN or p >= _ALPHA or not _informed(hit, predicted, then):
        return None
    return _Shift(by, kind, float(hit.double().mean()), float(before.double().mean()), p, then)


def _outdone(shift: _Shift, predicted: _NUMBERS, labels: _NUMBERS, c: int) -> bool:
    """Whether an order of classes is clearly better, or as good where the shift leaves the model's classes.

    Classes that are exchanged in a circle, as 0 -> 1, 1 -> 2, 2 -> 0, look like a shift for all labels but one. An
    order that is right on the same images and no others is the shift itself, less plainly stated.
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
    """Which labels are not classes of the model."""
    return (labels < 0) | (labels >= c)


def _counting_finding(shift: _Shift, labels: _NUMBERS, c: int) -> Finding:
    text = shift.kind == "numbers"
    moved = f"label {'+' if shift.by > 0 else '-'} {abs(shift.by)}" if shift.by else "the label"
    folders = "class folders are sorted as text (10 before 2) instead of as numbers; " if text else ""
    reason = ""
    if shift.by == -1:
        reason = " Labels seem to start at one."
    elif shift.by == 1:
        reason = f" The model has {c} outputs; its class 0 may be a background class."
    what = (
        f"Taken as they are, labels give an accuracy of {percent(shift.own)}; {folders}with {moved} it is "
        f"{percent(shift.accuracy)} on the same {len(labels)} images ({below(shift.p)}).{reason}"
    )
    numbers = "the number in its folder's name" if text else "every label"
    repair = f"Take {numbers}{f' plus {shift.by}' if shift.by > 0 else f' minus {-shift.by}' if shift.by else ''}: "
    repair += "give labels= as indices of the model's classes, counted from 0."
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
    repair = "Give indices of the model's classes, counted from 0, or label_space='own' for classes of another set."
    evidence: Json = {"outside": outside, "images": len(labels), "highest": int(labels.max()), "classes": c}
    return Finding(COUNTING, "wrong", what, repair, evidence)


def _numbers(names: Sequence[str] | None) -> Int[Tensor, "k"] | None:
    """The numbers that classes are named by, where that is another order than their positions."""
    if names is None or not all(name.isdecimal() for name in names):
        return None
    numbers = torch.tensor([int(name) for name in names])
    return None if bool((numbers.diff() > 0).all()) else numbers


def _informed(hit: Bool[Tensor, "n"], predicted: _NUMBERS, labels: _NUMBERS) -> bool:
    """Whether more labels agree with the predictions than by chance."""
    return binomial_tail(int(hit.sum()), len(hit), agreement(predicted, labels)) < _ALPHA


def _arrows(moved: dict[int, int], names: Sequence[str] | None, classes: Sequence[str] | None) -> str:
    def named(number: int, known: Sequence[str] | None) -> str:
        return f"{number} ({known[number]})" if known is not None and number < len(known) else str(number)

    return listed([f"{named(label, names)} -> {named(place, classes)}" for label, place in moved.items()])


def _unknown_names(images: Subset, sample: Sample) -> Finding:
    theirs, ours = list(images.classes or ()), list(sample.model.classes or ())
    what = f"None of the {len(theirs)} class names ({listed(theirs, 3)}) is one of the model's {len(ours)} classes."
    repair = (
        "Name the folders as the model names its classes, or set label_space='own' if they are classes of another set."
    )
    evidence: Json = {"names": theirs[:20], "classes": ours[:20]}
    return Finding(NAMES, "suspicious", what, repair, evidence)
