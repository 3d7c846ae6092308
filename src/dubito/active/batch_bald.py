"""BatchBALD: the batch with the highest joint information about the members, so that no two images are redundant.

    I[y_1 ... y_b; M] = sum_j  I[y_j; M | y_1 ... y_j-1]                        chain rule
    I[y; M | y_1 ... y_j-1] = E_{y_1 ... y_j-1} [ H(sum_m π_m p_m) - sum_m π_m H(p_m) ]

with π the posterior over members once the labels of the batch so far are known. Kirsch, van Amersfoort, Gal 2019
(1906.08158), eq. 8 and algorithm 1: greedy, which is within 1 - 1/e of the best batch. All joint labels are enumerated
while they are at most `samples`; after that, `samples` joint labels are drawn and kept, and each draws its label of the
next image from its own posterior. We differ from the paper's eq. 14 in what is averaged: conditional information rather
than joint entropies. It is the same in expectation, never negative, and does not underflow in long batches.

Information can only shrink as a batch grows (submodularity), so an image whose last gain is below the best need not be
evaluated again. With drawn labels this holds up to their noise. The information about m members is at most log m, which
a few images exhaust; the paper leaves open what comes then. Here, once no image adds a hundredth of the best image's
own information, the posterior is reset: the images that follow are a batch of their own.
"""

from collections.abc import Callable
from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from scipy.special import entr
from torch import Tensor

from dubito.table import Table
from dubito.types import finite

Probabilities = Callable[[Int64[np.ndarray, "b"]], Float64[np.ndarray, "b m c"]]
"""From positions of candidates to the probabilities of every member."""
_EVALUATED_AT_ONCE = 256
_NUMBERS = 2**22
"""Probabilities at once, 32 MB."""
_NOTHING = 1e-9
_EXHAUSTED = 0.01
"""The share of one image's information below which the members count as exhausted."""
_SETTLED = 1e-6
"""Entropy of a posterior over members, in nats, that is neglected."""


def batch_bald(
    predicted: Probabilities, information: Float64[np.ndarray, "n"], count: int, samples: int, rng: np.random.Generator
) -> tuple[Int64[np.ndarray, "k"], Float64[np.ndarray, "k"]]:
    """Positions of a batch in the order of its choice, and what each adds in nats since the last reset.

    Args:
        predicted: Returns the members' probabilities of candidates, by position.
        information: The mutual information of every candidate by itself.
        count: How many to choose; at most as many as there are.
        samples: The number of joint labels that are enumerated, or drawn.
        rng: Generator of the draws.
    """
    order = np.argsort(-information, kind="stable")
    alone, taken = information[order].astype(np.float64), np.zeros(len(order), dtype=bool)
    picks: list[int] = []
    gains: list[float] = []
    joint, bound = None, alone.copy()
    while len(picks) < count:
        joint = joint or JointLabels(predicted(order[:1]).shape[1], samples, rng)
        little = _EXHAUSTED * alone[~taken][0]
        left = joint.weight @ entr(joint.posterior).sum(1)  # the entropy of the posterior: no image adds more
        place = None if left < little else _best(joint, predicted, order, bound, taken)
        if place is None or (len(joint.weight) > 1 and bound[place] < little):
            joint, bound = None, alone.copy()
            continue
        taken[place] = True
        picks.append(int(order[place]))
        gains.append(float(bound[place]))
        joint.add(predicted(order[place : place + 1])[0])
    return np.array(picks, dtype=np.int64), np.array(gains, dtype=np.float64)


def _best(
    joint: "JointLabels",
    probabilities: Probabilities,
    order: Int64[np.ndarray, "n"],
    bound: Float64[np.ndarray, "n"],
    taken: Bool[np.ndarray, "n"],
) -> int:
    """The place in the order of the candidate that adds most; the bounds of evaluated candidates become exact."""
    evaluated, best = np.zeros(len(order), dtype=bool), -np.inf
    size = max(1, min(_EVALUATED_AT_ONCE, _NUMBERS // probabilities(order[:1]).size))
    while len(stale := np.flatnonzero(~evaluated & ~taken & (bound > best))):
        block = stale[np.argsort(-bound[stale], kind="stable")[:size]]
        bound[block], evaluated[block] = joint.gains(probabilities(order[block])), True
        best = float(max(best, bound[block].max()))
    # The first by its own information among those that are equal.
    return int(np.flatnonzero(evaluated & ~taken & (bound >= best - _NOTHING))[0])


def member_probabilities(table: Table, key: str, candidates: Int64[np.ndarray, "n"]) -> Probabilities:
    """The members' probabilities of some rows of a table, read when they are needed."""
    table.require(key, by="acquire: strategy 'batch_bald'")
    column = table.column(key)

    def probabilities(places: Int64[np.ndarray, "b"]) -> Float64[np.ndarray, "b m c"]:
        logits: Tensor = column[torch.from_numpy(candidates[places])]
        return finite(logits.double().softmax(-1), f"acquire: '{key}' of {table.name}").numpy()

    return probabilities


@final
class JointLabels:
    """Joint labels of a batch, enumerated or drawn, each with its posterior over members.

    Attributes:
        posterior: (s, m) One row per joint label.
        weight: (s) The probability of each.
    """

    def __init__(self, members: int, samples: int, rng: np.random.Generator) -> None:
        self.posterior = np.full((1, members), 1 / members)
        self.weight = np.ones(1)
        self._samples, self._rng, self._drawn = samples, rng, False

    def gains(self, p: Float64[np.ndarray, "b m c"]) -> Float64[np.ndarray, "b"]:
        """The information of each candidate about the members, given these labels, in nats."""
        b, _, c = p.shape
        gains, own = np.zeros(b), entr(p).sum(-1)
        # Joint labels that leave one member alone have nothing to add.
        open_ = entr(self.posterior).sum(1) > _SETTLED
        posterior, weight = self.posterior[open_], self.weight[open_]
        for start in range(0, b, size := max(1, _NUMBERS // (max(1, len(weight)) * c))):
            part = slice(start, start + size)
            mixed = np.tensordot(posterior, p[part], axes=(1, 1))
            gains[part] = weight @ (entr(mixed).sum(-1) - posterior @ own[part].T)
        return np.maximum(gains, 0)

    def add(self, p: Float64[np.ndarray, "m c"]) -> None:
        """Add an image to the batch."""
        if not self._drawn and len(self.weight) * p.shape[1] <= self._samples:
            joint = self.posterior[:, None, :] * p.T[None]
            chance = joint.sum(-1)
            weight = (self.weight[:, None] * chance).ravel()
            kept = weight > 0
            self.weight = weight[kept] / weight.sum()
            self.posterior = joint.reshape(-1, p.shape[0])[kept] / chance.ravel()[kept, None]
            return
        if not self._drawn:  # go from enumerated labels to drawn ones, by systematic resampling
            cumulative = np.cumsum(self.weight)
            at = (np.arange(self._samples) + self._rng.random()) / self._samples * cumulative[-1]
            self.posterior = self.posterior[np.searchsorted(cumulative, at, side="right").clip(max=len(cumulative) - 1)]
            self.weight, self._drawn = np.full(self._samples, 1 / self._samples), True
        chances = np.cumsum(self.posterior @ p, axis=1)
        label = (self._rng.random((len(chances), 1)) * chances[:, -1:] >= chances).sum(axis=1)
        joint = self.posterior * p.T[np.minimum(label, p.shape[1] - 1)]
        self.posterior = joint / joint.sum(axis=1, keepdims=True)
