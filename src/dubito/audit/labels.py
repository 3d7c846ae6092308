"""Are the labels the model's classes? Unknown names; labels off by one, shifted, sorted as text, permuted, unrelated.

A shift by s is right on  #{i : predicted_i - label_i = s}  images, so one histogram of differences tries them all. A
permutation is estimated on one half of the images and tested on the other (`dubito.cache.labels`). Either must beat the
labels as they are on the same images (exact test, corrected for the number of shifts) by ten points, and be right more
often than unrelated predictions would be:  sum_y #{label = y} #{predicted = y + s} / n.

A shift is the simpler explanation and is preferred to a permutation that is not clearly better; unless it leaves the
classes 0..c-1, where a permutation that explains as many images is preferred.

Whether predictions have anything to do with the labels at all (`check_chance`) is tested by permuting predictions at
random, 9,999 times with a fixed seed; p is the share of permutations with at least as many right (Phipson & Smyth 2010,
equation 2). Chance is the mean of that, and the way from chance to all right is the scale, as for Cohen's kappa:

    chance = sum_y #{label = y} #{predicted = y} / n^2,     kappa = (accuracy - chance) / (1 - chance)

Accuracy is called wrong only where its exact upper 99 % bound (Clopper and Pearson) is below a tenth of the way; or
below half of it, if accuracy is not above chance at all. Otherwise the check reports that there are too few images.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dubito.audit.finding import Finding, NotChecked, Outcome, below, binomial_tail, listed, paired_gain, percent
from dubito.cache.labels import agreement, check_count, cross_fitted, exchanged, matched, resolve_labels
from dubito.choices import LabelSpace
from dubito.data import Subset
from dubito.errors import ImagesError, OwnLabelsWarning
from dubito.metrics import proportion_bound
from dubito.types import Classifier, Json

NAMES = "class names that the model does not know"
COUNTING, ORDER, CHANCE = "labels off by one", "classes in another order", "accuracy at chance"
_GAIN, _ALPHA = 0.1, 1e-3
_FEWEST, _PER_CLASS = 20, 4
_ALPHA_CHANCE, _NEAR, _HALF = 0.01, 0.1, 0.5
"""Of accuracy at chance; the last two are shares of the way from chance to all right."""
_PERMUTATIONS, _BLOCK = 9_999, 1 << 22
_NUMBERS = Int[Tensor, "n"]


def model_labels(
    model: Classifier, images: Subset, classes: int, space: LabelSpace | None
) -> tuple[_NUMBERS | None, Outcome, str]:
    """The labels as classes of the model, which has so many; or None, with the reason in the last place.

    Names of classes are looked up as `extract` does; what `extract` would refuse is a finding here.
    """
    if images.labels is None:
        return None, NotChecked("no labels"), "no labels"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OwnLabelsWarning)
            labels, resolved = resolve_labels(images, model, space)
        if images.classes is not None and model.classes is None and space is None:
            check_count(images.classes, classes)
    except ImagesError as error:
        what, _, repair = str(error).partition(". ")
        return None, [Finding(NAMES, "wrong", f"{what}.", repair, {})], "the model does not know them all"
    if labels is not None and resolved == "model":
        return labels, [], ""
    theirs, ours = list(images.classes or ()), list(model.classes or ())
    what = f"None of the {len(theirs)} class names ({listed(theirs, 3)}) is one of the model's {len(ours)} classes."
    repair = "Name the folders as the model names its classes, or set label_space='own' for classes of another set."
    finding = Finding(NAMES, "suspicious", what, repair, {"names": theirs[:20], "classes": ours[:20]})
    return None, [] if space == "own" else [finding], "labels are another set's classes"


class Relabelled(NamedTuple):
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
    candidates = {False: labels}
    if names is not None and all(name.isdecimal() for name in names):
        numbers = torch.tensor([int(name) for name in names])
        if not bool((numbers.diff() > 0).all()):
            candidates[True] = numbers[labels]
    shifts = [one for named, base in candidates.items() if (one := _best_shift(predicted, labels, base, c, named))]
    shift = max(shifts, key=lambda one: one.accuracy, default=None)
    if shift is not None and not _outdone(shift, predicted, labels):
        return Relabelled(shift.labels, [_counting_finding(shift, labels, c)])
    outside, highest = int((labels >= c).sum()), int(labels.max())
    if not outside:
        return Relabelled(labels, [])
    what = f"{outside} of {len(labels)} labels are {c} or more, up to {highest}; the model's are 0..{c - 1}."
    repair = "Pass indices of the model's classes, counted from 0, or label_space='own' for classes of another set."
    evidence: Json = {"outside": outside, "images": len(labels), "highest": highest, "classes": c}
    return Relabelled(labels, [Finding(COUNTING, "wrong", what, repair, evidence)])


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
    arrows = [f"{_named(label, names)} -> {_named(place, classes)}" for label, place in moved.items()]
    own, then = float(order.own.double().mean()), float(order.hit.double().mean())
    what = (
        f"Labels and model seem to order their classes differently ({len(moved)} differ): accuracy on images that the "
        f"order was not estimated from is {percent(then)} instead of {percent(own)} ({below(order.p)}). "
        f"Label -> class: {listed(arrows)}."
    )
    repair = "Pass labels= as indices of the model's classes, or " + (
        "name the classes with dubito.wrap(..., classes=[...]), so that class folders are matched by name instead of "
        "position."
        if classes is None
        else "put the names in dubito.wrap(..., classes=[...]) into the order of the model's outputs."
    )
    evidence: Json = {"accuracy": own, "accuracy_then": then, "p": order.p}
    evidence["order"] = {str(label): place for label, place in moved.items()}
    return Relabelled(exchanged(labels, order.mapping), [Finding(ORDER, "wrong", what, repair, evidence)])


def check_chance(predicted: _NUMBERS, labels: _NUMBERS, c: int) -> Outcome:
    """Predictions that have nothing to do with the labels."""
    n = len(labels)
    if n < _FEWEST or c < 2:
        return NotChecked(f"needs {_FEWEST} images and more than one class; got {n} images and {c} classes")
    right = int((predicted == labels).sum())
    one_class = bool((labels == labels[0]).all())
    if not one_class and bool((predicted == predicted[0]).all()) and right == max(Counter(labels.tolist()).values()):
        return NotChecked("every prediction is the most common label, so any permutation of them would be as right")
    # With one class among the labels, agreement and chance are the same thing: then guessing is the measure.
    chance = 1 / c if one_class else agreement(predicted, labels)
    p = binomial_tail(right, n, chance) if one_class else _permutation_p(predicted, labels, right)
    if p < _ALPHA_CHANCE:
        return []
    accuracy = right / n
    bound = proportion_bound(right, n, 1 - _ALPHA_CHANCE)
    if bound >= chance + (_NEAR if accuracy > chance else _HALF) * (1 - chance):
        figures = f"an accuracy of {percent(accuracy)} from chance, {percent(chance)}"
        return NotChecked(f"{n} images are too few to distinguish {figures}")
    what = (
        f"{right} of {n} predictions agree with the labels ({percent(accuracy)}, at most {percent(bound)} with 99 % "
        f"confidence); predictions unrelated to the labels would give {percent(chance)}."
    )
    repair = "Check that the labels belong to these images and the model's classes, and that its weights were loaded."
    evidence: Json = {"right": right, "images": n, "accuracy": accuracy, "at_most": bound, "by_chance": chance, "p": p}
    return [Finding(CHANCE, "wrong", what, repair, evidence)]


class _Order(NamedTuple):
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
    own = than[enough] == guess
    p = _p_if_better(own, guess, then)
    return None if p is None else _Order(matched(guess, own_labels), enough, then == guess, own, p)


class _Shift(NamedTuple):
    """Labels plus a number, or the numbers of class folders plus a number; and which are then no class of the model."""

    by: int
    folder_numbers: bool
    accuracy: float
    own: float
    p: float
    labels: Int[Tensor, "n"]
    outside: Bool[Tensor, "n"]


def _best_shift(predicted: _NUMBERS, own: _NUMBERS, base: _NUMBERS, c: int, folder_numbers: bool) -> _Shift | None:
    """The shift that most predictions agree with, if it is clearly better than the original labels."""
    [(by, _)] = Counter((predicted - base).tolist()).most_common(1)
    then, before = base + by, predicted == own
    if (p := _p_if_better(before, predicted, then, tests=2 * (2 * c - 1))) is None:
        return None
    accuracy, own_accuracy = (float(hit.double().mean()) for hit in (predicted == then, before))
    return _Shift(by, folder_numbers, accuracy, own_accuracy, p, then, (then < 0) | (then >= c))


def _outdone(shift: _Shift, predicted: _NUMBERS, labels: _NUMBERS) -> bool:
    """Whether an order of classes is clearly better, or as good where the shift leaves the model's classes.

    Classes that are exchanged in a circle, as 0 -> 1, 1 -> 2, 2 -> 0, look like a shift for all labels but one.
    """
    if isinstance(_read_order(predicted, labels, shift.labels), _Order):
        return True
    order = _read_order(predicted, labels, labels)
    if not isinstance(order, _Order) or not bool(shift.outside.any()):
        return False
    by_shift, by_order = shift.labels == predicted, exchanged(labels, order.mapping) == predicted
    by_order[order.rows] = order.hit
    return int(by_order.sum()) >= int(by_shift.sum()) and not torch.equal(by_order, by_shift)


def _counting_finding(shift: _Shift, labels: _NUMBERS, c: int) -> Finding:
    moved = f"label {'+' if shift.by > 0 else '-'} {abs(shift.by)}" if shift.by else "the label"
    folders = "class folders are sorted as text (10 before 2) instead of as numbers; " if shift.folder_numbers else ""
    background = f" The model has {c} outputs; its class 0 may be a background class."
    reason = {-1: " Labels seem to start at one.", 1: background}.get(shift.by, "")
    what = (
        f"Taken as they are, labels give an accuracy of {percent(shift.own)}; {folders}with {moved} it is "
        f"{percent(shift.accuracy)} on the same {len(labels)} images ({below(shift.p)}).{reason}"
    )
    numbers = "the number in its folder's name" if shift.folder_numbers else "every label"
    change = f"Add {shift.by} to" if shift.by > 0 else f"Subtract {-shift.by} from" if shift.by else "Use"
    repair = f"{change} {numbers}: pass labels= as indices of the model's classes, counted from 0."
    lost = labels[shift.outside].tolist()
    if lost:
        repair += f" Leave out images that then have no class ({len(lost)}, of label {listed(sorted(set(lost)))})."
    evidence: Json = {"shift": shift.by, "folder_numbers": shift.folder_numbers, "accuracy": shift.own}
    evidence |= {"accuracy_then": shift.accuracy, "p": shift.p}
    evidence |= {"labels_outside": int((labels >= c).sum()), "labels_outside_then": len(lost)}
    return Finding(ORDER if shift.folder_numbers and not shift.by else COUNTING, "wrong", what, repair, evidence)


def _p_if_better(before: Bool[Tensor, "n"], predicted: _NUMBERS, labels: _NUMBERS, *, tests: int = 1) -> float | None:
    """The p-value of other labels, if they are right clearly more often than before and than by chance; else None."""
    hit = predicted == labels
    gain, p = paired_gain(before, hit, tests=tests)
    by_chance = binomial_tail(int(hit.sum()), len(hit), agreement(predicted, labels))
    return p if gain >= _GAIN and p < _ALPHA and by_chance < _ALPHA else None


def _named(number: int, names: Sequence[str] | None) -> str:
    return f"{number} ({names[number]})" if names is not None and number < len(names) else str(number)


def _permutation_p(predicted: _NUMBERS, labels: _NUMBERS, right: int) -> float:
    """P(at least as many right) with predictions permuted at random; the original ones count as one permutation."""
    rng = np.random.default_rng(0)
    predictions, truth = predicted.numpy(), labels.numpy()
    as_good, rows = 1, max(1, _BLOCK // len(truth))
    for start in range(0, _PERMUTATIONS, rows):
        permuted = rng.permuted(np.tile(predictions, (min(rows, _PERMUTATIONS - start), 1)), axis=1)
        as_good += int(((permuted == truth).sum(1) >= right).sum())
    return as_good / (_PERMUTATIONS + 1)
