"""What a rejection study found, in plain words; and how uncertainties and figures are called."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dubito.evaluate.rejection_result import Rejected

UNCERTAINTIES = {
    "entropy": "entropy",
    "mutual_information": "mutual information",
    "weighted_logsumexp": "weighted MI, log-sum-exp",
    "weighted_sum": "weighted MI, sum",
    "pooled_logsumexp": "pooled MI, log-sum-exp",
    "pooled_sum": "pooled MI, sum",
    "predictive_entropy": "predictive entropy",
    "expected_entropy": "expected entropy",
    "variation_ratio": "variation ratio",
}
"""How uncertainties are shown. Weighted: members weighed anew for every image; pooled: alike for all images."""
RANKING = {"auroc": "error AUROC", "aurc": "AURC"}
"""Figures that tell how well errors are ordered."""


def finding(found: Sequence["Rejected"], temperature: float, predictions: str) -> str:
    """Of one temperature, the original's result first: does anything order errors better than its entropy?"""
    at, others = f"T = {temperature:.3g}", found[1:]
    if not others:
        return f"{at}: no ensemble to compare with the model's own entropy."
    if found[0].figures["auroc"] is None:
        return f"{at}: the model's predictions are all right or all wrong: there is nothing to reject."
    told = []
    for figure, title in RANKING.items():
        better = [one for one in others if one.better(figure) > 0]
        worse = sum(one.better(figure) < 0 for one in others)
        best = max(better, key=lambda one: abs(_difference(one, figure)), default=None)
        named = "" if best is None else f" (best: {UNCERTAINTIES[best.order.uncertainty]} of {best.order.size})"
        alike = len(others) - len(better) - worse
        told.append(f"{title}: {len(better)} of them better{named}, {worse} worse, {alike} alike")
    own = (
        " Each by its own predictions, which differ in accuracy, too: AURC counts that, AUROC does not."
        if predictions == "own"
        else ""
    )
    return (
        f"{at}: the model's own entropy against {_orders(len(others))}, by intervals. {'; '.join(told)}.{own}"
        f"{_constant(others)}"
    )


def _constant(found: Sequence["Rejected"]) -> str:
    """Orders that are none."""
    named = [f"{UNCERTAINTIES[one.order.uncertainty]} of {one.order.size}" for one in found if one.constant]
    if not named:
        return ""
    return (
        f" The same for every image, and no order at all: {', '.join(named)}. Members agree everywhere, as where they "
        f"are one and the same model, or one of them has all the weight."
    )


def _orders(count: int) -> str:
    return f"{count} other order{'' if count == 1 else 's'}"


def _difference(found: "Rejected", figure: str) -> float:
    difference = (found.differences or {})[figure]
    return 0.0 if difference is None else difference.value
