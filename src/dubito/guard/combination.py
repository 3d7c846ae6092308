"""Several scores as one uncertainty: a sum of ranks, weighted by how they find errors together; or one score as it is.

    u(x) = sum_j w_j F_j(s_j(x)),   w_j >= 0

F_j is the share of reference images with a lower score, in between linear. Weights are those of a logistic regression
of wrong predictions on the ranks, kept at or above zero, so that u never falls while all scores rise.

Noise must not choose: with a hundred images and a dozen scores, one always looks best. So the first score, which is
max-probability at the best temperature by default, stays unless another has a lower AURC by more than `_SURE` standard
errors of their difference, over resamples that both share; and a score joins only if the sum, on folds that its weights
were not fitted on, is that much better than the scores before it. Whatever is chosen on the reference images, well or
badly, the guarantee holds, because it is tested on other images; a bad choice costs coverage. The rule is ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from dubito.errors import GuardError
from dubito.guard._logistic import fit_logistic
from dubito.metrics import aurc, paired_draws

_FOLDS, _MOST = 5, 3
_SURE = 2.58
"""Standard errors: one-sided, 99.5 % of a normal distribution, because ten scores or so compete."""
_RESAMPLES, _FEWEST_ERRORS, _RIDGE = 200, 20, 2e-3
_GRID = 513
"""Quantiles of a score that are kept, to rank others by."""

Values = Mapping[str, Float64[np.ndarray, "n"]]
"""By score, the uncertainty of every row."""


@final
@dataclass(frozen=True)
class Combination:
    """Which scores make the uncertainty, and how.

    Attributes:
        weights: By score; of a single one, 1, and the uncertainty is that score itself.
        aurc: By candidate, the area under the risk-coverage curve on the reference images, best first.
    """

    weights: dict[str, float]
    aurc: dict[str, float]

    def __str__(self) -> str:
        several = len(self.weights) > 1
        return " + ".join(f"{weight:.2f} {name}" if several else name for name, weight in self.weights.items())

    def of(
        self, scores: Mapping[str, Float64[Tensor, "n"]], reference_quantiles: Mapping[str, Float64[Tensor, "_"]]
    ) -> Tensor:
        """The uncertainty of rows from their scores, and the quantiles of these on the reference images."""
        if len(self.weights) == 1:
            return scores[next(iter(self.weights))]
        parts = [weight * rank(scores[name], reference_quantiles[name]) for name, weight in self.weights.items()]
        return torch.stack(parts).sum(0)


def quantiles(values: Float64[Tensor, "n"], name: str) -> Float64[Tensor, "q"]:
    """Rising numbers to rank others by: all values if they are few, evenly spaced ones of many."""
    ordered = values[values.isfinite()].sort().values
    if len(ordered) == 0:
        raise GuardError(
            f"Guard.fit: score '{name}' is infinite for every reference image; there is nothing to rank others by. "
            f"Pass other scores."
        )
    places = torch.linspace(0, len(ordered) - 1, min(_GRID, len(ordered)), dtype=torch.float64).round().long()
    return ordered[places]


def rank(values: Float64[Tensor, "n"], grid: Float64[Tensor, "q"]) -> Float64[Tensor, "n"]:
    """The share of the grid below each value, in between linear: 0 at its first number, 1 from its last on.

    >>> rank(torch.tensor([0.0, 1.5, 9.0]).double(), torch.tensor([1.0, 2.0, 3.0]).double()).tolist()
    [0.0, 0.25, 1.0]
    """
    if len(grid) == 1:
        return (values > grid[0]).to(grid.dtype)
    # Comparing with all of them, because this also runs inside an exported graph, which cannot search.
    at = ((values[:, None] >= grid[None, :]).sum(1) - 1).clamp(0, len(grid) - 2)
    low, high = grid[at], grid[at + 1]
    wide = high > low
    inside = torch.where(wide, (values - low) / torch.where(wide, high - low, 1.0), 1.0).clamp(0.0, 1.0)
    return (at + inside) / (len(grid) - 1)


def choose(values: Values, wrong: Bool[np.ndarray, "n"], seed: int = 0) -> Combination:
    """The first score, or one that is clearly better by AURC, and up to two more that clearly find further errors.

    >>> wrong = np.arange(40) > 30
    >>> choose({"bad": -np.arange(40.0), "good": np.arange(40.0)}, wrong).weights
    {'good': 1.0}
    """
    alone = dict(sorted(((name, aurc(u, wrong)) for name, u in values.items()), key=lambda pair: pair[1]))
    first = next(iter(values))
    if wrong.all() or not wrong.any():
        return Combination({first: 1.0}, alone)
    better = [name for name in alone if alone[name] < alone[first]]
    clearly = _clearly_better(values[first], [values[name] for name in better], wrong, seed)
    chosen = [next((name for name, sure in zip(better, clearly, strict=True) if sure), first)]
    if min(wrong.sum(), (~wrong).sum()) < _FEWEST_ERRORS:
        return Combination({chosen[0]: 1.0}, alone)
    tensors = {name: torch.from_numpy(u) for name, u in values.items()}
    ranks = {name: rank(u, quantiles(u, name)).numpy() for name, u in tensors.items()}
    before = ranks[chosen[0]]
    while len(chosen) < min(_MOST, len(ranks)):
        tried = {name: _held_out(ranks, [*chosen, name], wrong, seed) for name in alone if name not in chosen}
        name = min(tried, key=lambda one: aurc(tried[one], wrong))
        if not _clearly_better(before, [tried[name]], wrong, seed)[0]:
            break
        chosen, before = [*chosen, name], tried[name]
    weights = _weights(np.stack([ranks[name] for name in chosen]), wrong) if len(chosen) > 1 else np.ones(1)
    kept = {name: float(w) for name, w in zip(chosen, weights, strict=True) if w > 0}
    return Combination(kept if len(kept) > 1 else {next(iter(kept), chosen[0]): 1.0}, alone)


def _clearly_better(
    than: Float64[np.ndarray, "n"], scores: list[Float64[np.ndarray, "n"]], wrong: Bool[np.ndarray, "n"], seed: int
) -> list[bool]:
    """Whether the AURC of each is lower than that of the reference beyond chance."""
    if not scores:
        return []
    draws = paired_draws(aurc, [than, *scores], wrong, resamples=_RESAMPLES, seed=seed, by="Guard.fit")
    error = (draws[0] - draws[1:]).std(axis=1, ddof=1)
    lead = aurc(than, wrong) - np.array([aurc(score, wrong) for score in scores])
    return [bool(sure) for sure in lead > _SURE * error]


def _held_out(ranks: Values, names: list[str], wrong: Bool[np.ndarray, "n"], seed: int) -> Float64[np.ndarray, "n"]:
    """The sum of ranks of every row, by weights that were fitted on the other folds."""
    x = np.stack([ranks[name] for name in names])
    fold = np.random.default_rng(seed).permutation(len(wrong)) % _FOLDS
    held_out = np.zeros(len(wrong))
    for number in range(_FOLDS):
        inside = fold != number
        held_out[~inside] = _weights(x[:, inside], wrong[inside]) @ x[:, ~inside]
    return held_out


def _weights(x: Float64[np.ndarray, "j n"], wrong: Bool[np.ndarray, "n"]) -> Float64[np.ndarray, "j"]:
    """Of a logistic regression, none below zero."""
    start = np.append(-1.0, np.ones(len(x)))
    return fit_logistic(x.T, wrong, ridge=_RIDGE, start=start, nonnegative=True)[1]
