"""Nearest-neighbour guidance: the energy, guided by how similar the image is to confident training images.

    e(x) = log sum_y exp(l_y),   cos_i = cosine of z and row i of a bank
    g(x) = mean of the k largest  e_i cos_i  over the bank
    u(x) = -g(x) e(x)

Park, Jung & Teoh 2023 (NNGuide). A product is of use only where both factors are positive: of two negative ones it
would rank the image farthest from the in-distribution ones as the most certain. So:

- A sum of exponentials changes with a constant that is added to all logits of a row, and the softmax does not. Where
  the median energy of the bank is zero or less, energies are those of logits less their mean over the classes, which
  by Jensen are at least log c > 0 for every image; otherwise they are the paper's, whatever single images have.
- u = -(e+ g+ + e- + g-), with positive parts e+, g+ and negative parts e-, g- (zero or less). It is the paper's where
  both are positive, continuous, and never grows with the energy or the guidance.

A feature of zeros has no direction: its cosines are taken as 0, and so is its guidance.

The paper draws 1 % of ImageNet's training images for the bank, 12,812; the default here is 10,000 at most.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dubito.errors import TableError
from dubito.scores._features import ScoreOfFeatures, drawn, unit, unit_bank
from dubito.scores.neighbours import Search, most_similar
from dubito.table import Table
from dubito.types import check_finite
from dubito.validate import check_number, check_seed

_AT_ONCE = 2048


def guided_energy(energy: Float64[Tensor, "n"], guidance: Float64[Tensor, "n"]) -> Float64[Tensor, "n"]:
    """Minus their product where both are positive; higher is more uncertain.

    >>> two = torch.tensor([2.0, 2.0, -1.0, -1.0], dtype=torch.float64)
    >>> guided_energy(two, torch.tensor([3.0, -3.0, 3.0, -3.0], dtype=torch.float64)).tolist()
    [-6.0, 3.0, 1.0, 4.0]
    """
    product: Tensor = energy.clamp(min=0) * guidance.clamp(min=0)
    return -(product + energy.clamp(max=0) + guidance.clamp(max=0))


def energies(logits: Float[Tensor, "n c"], *, centred: bool) -> Float64[Tensor, "n"]:
    """The log-sum-exp of every row; centred: of logits less their mean."""
    logits = logits.double()
    return (logits - logits.mean(1, keepdim=True) if centred else logits).logsumexp(1)


@final
@dataclass
class NNGuide(ScoreOfFeatures):
    """Minus the energy times the guidance: the mean of the k largest similarities, times energies, in a bank.

    Attributes:
        k: Number of neighbours that guide.
        bank_size: Keep this many rows at most, drawn at random; None keeps all.
        seed: Seed of that draw.
        bank_: (b, d) features at length one times their energies, once fitted.
        centred_: Whether energies are those of logits less their mean.
    """

    k: int = 10
    bank_size: int | None = 10_000
    seed: int = 0

    name = "nnguide"
    kind = "epistemic"
    needs = ("feature", "logit")
    learns_from = ("feature", "logit")
    learned = ("bank_", "centred_")

    def __post_init__(self) -> None:
        check_seed(self.seed, by=self.name)

    def learn(self, table: Table) -> None:
        """Keep features at length one, times energies."""
        rows = drawn(table, self.bank_size, self.seed)
        size = len(table) if rows is None else len(rows)
        hint = f"The bank has {size} rows: fit on more images or choose a smaller k."
        check_number(self.k, f"[1, {size}]", by="nnguide.fit", what="k", whole=True, hint=hint, error=TableError)
        bank, energy = unit_bank(table, rows, "nnguide.fit"), self._energies(table, rows, centred=False)
        self.centred_ = bool(energy.median() <= 0)
        if self.centred_:
            energy = self._energies(table, rows, centred=True)
        self.bank_ = bank.mul_(energy.float()[:, None])

    def score_batch(self, batch: Table) -> Float[Tensor, "n"]:
        """The guided energy of every row."""
        self.check_width(batch, self.bank_.shape[1])
        most, hint = f"[1, {len(self.bank_)}]", "It is not as it was saved: fit it again."
        check_number(self.k, most, by="nnguide.score", what="k", whole=True, hint=hint, error=TableError)
        return self.guided(batch.feature, batch.logit)

    def guided(
        self, feature: Float[Tensor, "n d"], logits: Float[Tensor, "n c"], search: Search = most_similar
    ) -> Float64[Tensor, "n"]:
        """The same from features and logits, unchecked."""
        guidance = search(unit(feature), self.bank_, self.k)[0].double().mean(1)
        return guided_energy(energies(logits, centred=self.centred_), guidance)

    def _energies(self, table: Table, rows: Tensor | None, *, centred: bool) -> Float64[Tensor, "b"]:
        size, logits = len(table) if rows is None else len(rows), table.select("logit")
        energy = torch.empty(size, dtype=torch.float64)
        for start in range(0, size, _AT_ONCE):
            part = slice(start, min(start + _AT_ONCE, size))
            chosen = range(part.start, part.stop) if rows is None else rows[part].tolist()
            logit = logits.rows(part if rows is None else rows[part]).logit
            check_finite(logit, "logit", chosen, table.name, by="nnguide.fit")
            energy[part] = energies(logit, centred=centred)
        return energy
