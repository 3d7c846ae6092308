"""Accuracy at chance: do the predictions have anything to do with the labels?

The exact test is conditional on how often each class is predicted and each label occurs: predictions are permuted at
random, 9,999 times with a fixed seed, and p is the share of permutations with at least as many right (Phipson & Smyth
2010, equation 2). Chance is the mean of that, and the way from chance to all right is the scale, as for Cohen's kappa:

    chance = sum_y #{label = y} #{predicted = y} / n^2,     kappa = (accuracy - chance) / (1 - chance)

Not being better than chance with certainty is not a fault: there may be too few images. So it is called wrong only
where the exact upper 99 % bound of the accuracy is below a tenth of the way; or below half of it, if accuracy is not
above chance at all. Otherwise the check reports that there are too few images.
"""

from collections import Counter

import numpy as np
from jaxtyping import Int
from torch import Tensor

from dubito.audit.finding import Finding, NotChecked, Outcome, counted, percent
from dubito.audit.significance import binomial_tail, upper_bound
from dubito.cache.order import agreement
from dubito.types import Json

CHANCE = "accuracy at chance"
_FEWEST = 20
_ALPHA = 0.01
_NEAR, _HALF = 0.1, 0.5
"""Of the way from chance to all right."""
_PERMUTATIONS, _SEED = 9_999, 0
_BLOCK = 1 << 22


def check_chance(predicted: Int[Tensor, "n"], labels: Int[Tensor, "n"], c: int) -> Outcome:
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
    if p < _ALPHA:
        return []
    accuracy, bound = right / n, upper_bound(right, n, _ALPHA)
    if bound >= chance + (_NEAR if accuracy > chance else _HALF) * (1 - chance):
        return NotChecked(
            f"{counted(n, 'image')} are too few to distinguish an accuracy of {percent(accuracy)} from chance, "
            f"{percent(chance)}"
        )
    what = (
        f"{right} of {n} predictions agree with the labels ({percent(accuracy)}, at most {percent(bound)} with 99 % "
        f"confidence); predictions unrelated to the labels would give {percent(chance)}."
    )
    repair = (
        "Check that the labels belong to these images and to the model's classes, and that its weights were loaded."
    )
    evidence: Json = {
        "right": right,
        "images": n,
        "accuracy": accuracy,
        "at_most": bound,
        "by_chance": chance,
        "p": p,
    }
    return [Finding(CHANCE, "wrong", what, repair, evidence)]


def _permutation_p(predicted: Int[Tensor, "n"], labels: Int[Tensor, "n"], right: int) -> float:
    """P(at least as many right) with predictions permuted at random; the original ones count as one permutation."""
    rng = np.random.default_rng(_SEED)
    predictions, truth = predicted.numpy(), labels.numpy()
    as_good, rows = 1, max(1, _BLOCK // len(truth))
    for start in range(0, _PERMUTATIONS, rows):
        permuted = rng.permuted(np.tile(predictions, (min(rows, _PERMUTATIONS - start), 1)), axis=1)
        as_good += int(((permuted == truth).sum(1) >= right).sum())
    return as_good / (_PERMUTATIONS + 1)
