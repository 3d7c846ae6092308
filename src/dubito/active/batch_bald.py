"""BatchBALD: a batch that tells most about the members together, so that no two images ask the same.

    I[y_1 ... y_b; M] = sum_j  I[y_j; M | y_1 ... y_j-1]                        chain rule
    I[y; M | y_1 ... y_j-1] = E_{y_1 ... y_j-1} [ H(sum_m π_m p_m) - sum_m π_m H(p_m) ]

with π the posterior over members once the labels of the batch so far are known. Kirsch, van Amersfoort, Gal 2019
(1906.08158), eq. 8 and algorithm 1: greedy, which is within 1 - 1/e of the best batch. Here, too, all joint labels are
counted while they are at most `samples`; after that, `samples` joint labels are drawn and kept, and each draws its
label of the next image from its own posterior, so that all candidates are judged by the same draws. We differ from
the paper's eq. 14 in what is averaged: conditional information rather than joint entropies. It is the same in
expectation, never negative, and does not underflow in long batches.

Information can only shrink as a batch grows (submodularity), so an image whose last gain is below the best one found
needs no look: most of a large pool is never looked at twice. Where labels are drawn this holds up to their noise.

m members cannot tell more than log m together, which a few images do; the paper leaves open what comes then. Here, once
no image adds a hundredth of what the best would tell by itself, all members are asked anew: the images that follow are
a batch of their own.
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
"""Of some candidates, what every member says."""
_LOOKED_AT = 256
_NUMBERS = 2**22
"""Probabilities at once, 32 MB."""
_NOTHING = 1e-9
_EXHAUSTED = 0.01
"""Of the information of one image: less is left to learn from the members once they are told apart."""
_SETTLED = 1e-6
"""Nats of doubt about the members that are left aside."""


def batch_bald(
    probabilities: Probabilities,
    information: Float64[np.ndarray, "n"],
    count: int,
    *,
    samples: int = 1000,
    seed: int | np.random.Generator = 0,
) -> tuple[Int64[np.ndarray, "k"], Float64[np.ndarray, "k"]]:
    """Positions of a batch in the order of its choice, and what each adds in nats since members were asked anew.

    Args:
        probabilities: Of candidates by position.
        information: The mutual information of every candidate by itself.
        count: How many; at most as many as there are.
        samples: Joint labels that are counted, or drawn.
        seed: Of the draws.
    """
    order, rng = np.argsort(-information, kind="stable"), np.random.default_rng(seed)
    alone, taken = information[order].astype(np.float64), np.zeros(len(order), dtype=bool)
    picks: list[int] = []
    gains: list[float] = []
    known, bound = None, alone.copy()
    while len(picks) < count:
        known = known or KnownLabels(probabilities(order[:1]).shape[1], samples, rng)
        little = _EXHAUSTED * alone[~taken][0]
        place = None if known.left() < little else _best(known, probabilities, order, bound, taken)
        if place is None or (len(known.weight) > 1 and bound[place] < little):
            known, bound = None, alone.copy()
            continue
        taken[place] = True
        picks.append(int(order[place]))
        gains.append(float(bound[place]))
        known.add(probabilities(order[place : place + 1])[0])
    return np.array(picks, dtype=np.int64), np.array(gains, dtype=np.float64)


def _best(
    known: "KnownLabels",
    probabilities: Probabilities,
    order: Int64[np.ndarray, "n"],
    bound: Float64[np.ndarray, "n"],
    taken: Bool[np.ndarray, "n"],
) -> int:
    """The place in the order of the candidate that adds most; bounds of all that were looked at are what they add."""
    looked, best = np.zeros(len(order), dtype=bool), -np.inf
    size = max(1, min(_LOOKED_AT, _NUMBERS // probabilities(order[:1]).size))
    while len(stale := np.flatnonzero(~looked & ~taken & (bound > best))):
        block = stale[np.argsort(-bound[stale], kind="stable")[:size]]
        bound[block], looked[block] = known.gains(probabilities(order[block])), True
        best = float(max(best, bound[block].max()))
    # The first by its own information among those that are equal.
    return int(np.flatnonzero(looked & ~taken & (bound >= best - _NOTHING))[0])


def probabilities_of(table: Table, key: str, candidates: Int64[np.ndarray, "n"]) -> Probabilities:
    """What members say of some rows of a table, read when they are asked for."""
    table.require(key, by="acquire: strategy 'batch_bald'")
    column = table.column(key)

    def said(places: Int64[np.ndarray, "b"]) -> Float64[np.ndarray, "b m c"]:
        logits: Tensor = column[torch.from_numpy(candidates[places])]
        return finite(logits.double().softmax(-1), f"acquire: '{key}' of {table.name}").numpy()

    return said


@final
class KnownLabels:
    """Joint labels of a batch, counted or drawn, with the posterior over members that each of them leaves.

    Attributes:
        posterior: (s, m) one line a joint label.
        weight: (s) its probability.
    """

    def __init__(self, members: int, samples: int, rng: np.random.Generator) -> None:
        self.posterior = np.full((1, members), 1 / members)
        self.weight = np.ones(1)
        self._samples, self._rng, self._drawn = samples, rng, False

    def left(self) -> float:
        """What is still open about the members, in nats: no image tells more."""
        return float(self.weight @ entr(self.posterior).sum(1))

    def gains(self, said: Float64[np.ndarray, "b m c"]) -> Float64[np.ndarray, "b"]:
        """What each candidate would tell about the members beyond these labels, in nats."""
        b, _, c = said.shape
        found, own = np.zeros(b), entr(said).sum(-1)
        # Joint labels that leave one member alone need no look, for the same reason.
        open_ = entr(self.posterior).sum(1) > _SETTLED
        posterior, weight = self.posterior[open_], self.weight[open_]
        for start in range(0, b, size := max(1, _NUMBERS // (max(1, len(weight)) * c))):
            part = slice(start, start + size)
            mixed = np.tensordot(posterior, said[part], axes=(1, 1))
            found[part] = weight @ (entr(mixed).sum(-1) - posterior @ own[part].T)
        return np.maximum(found, 0)

    def add(self, said: Float64[np.ndarray, "m c"]) -> None:
        """One more image in the batch."""
        if not self._drawn and len(self.weight) * said.shape[1] <= self._samples:
            joint = self.posterior[:, None, :] * said.T[None]
            chance = joint.sum(-1)
            weight = (self.weight[:, None] * chance).ravel()
            kept = weight > 0
            self.weight = weight[kept] / weight.sum()
            self.posterior = joint.reshape(-1, said.shape[0])[kept] / chance.ravel()[kept, None]
            return
        if not self._drawn:
            self._draw()
        chances = np.cumsum(self.posterior @ said, axis=1)
        label = (self._rng.random((len(chances), 1)) * chances[:, -1:] >= chances).sum(axis=1)
        joint = self.posterior * said.T[np.minimum(label, said.shape[1] - 1)]
        self.posterior = joint / joint.sum(axis=1, keepdims=True)

    def _draw(self) -> None:
        """From counted labels to drawn ones, by systematic resampling: as many of each as its probability asks."""
        edges = np.cumsum(self.weight)
        places = (np.arange(self._samples) + self._rng.random()) / self._samples * edges[-1]
        self.posterior = self.posterior[np.minimum(np.searchsorted(edges, places, side="right"), len(edges) - 1)]
        self.weight = np.full(self._samples, 1 / self._samples)
        self._drawn = True
