"""What the selection images decide: scores, how they are combined, what counts as novel; then the threshold."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from dubito.errors import GuardError
from dubito.guard._given import Split
from dubito.guard.candidates import Roles, roles_of
from dubito.guard.combine import Combination, choose, quantiles
from dubito.guard.promise import Guarantee, Judged
from dubito.guard.thresholds import Threshold
from dubito.metrics import wrong_predictions
from dubito.table import Table
from dubito.types import Score


@final
@dataclass
class Judge:
    """What the selection images decide: scores, how they are combined, and what counts as novel."""

    combination: Combination
    scores: dict[str, Score]
    grids: dict[str, Tensor]
    known: Tensor
    roles: Roles
    gate: float | None
    selection: Judged
    novel: int = 0

    @classmethod
    def choose(
        cls, scores: dict[str, Score], candidates: list[str], table: Table, *, labelled: bool, novel: float, seed: int
    ) -> "Judge":
        """From the selection images alone."""
        roles = roles_of(scores, table)
        scored = {name: score.score(table) for name, score in scores.items()}
        wrong = wrong_predictions(table, by="guard.fit").numpy() if labelled else None
        if wrong is None:
            combination = Combination({candidates[0]: 1.0}, {})
        else:
            combination = choose({name: scored[name].numpy() for name in candidates}, wrong, seed)
        kept = dict.fromkeys([*combination.weights, *roles.names])
        grids = {name: quantiles(scored[name]) for name in kept}
        gate = None
        if roles.density is not None and novel > 0:
            gate = float(np.quantile(scored[roles.density].numpy(), 1 - novel, method="higher"))
        u = combination.of(scored, grids)
        known = quantiles(u)
        far = novel_rows(scored, roles.density, gate, len(table))
        selection = (torch.where(far, torch.inf, u).numpy(), wrong)
        return cls(combination, {name: scores[name] for name in kept}, grids, known, roles, gate, selection)

    def threshold(self, promise: Guarantee, split: Split, rows: int) -> Threshold:
        """From the calibration images, which are seen here for the first time."""
        names = dict.fromkeys([*self.combination.weights, *([self.roles.density] if self.roles.density else [])])
        scored = {name: self.scores[name].score(split.calibrate) for name in names}
        far = novel_rows(scored, self.roles.density, self.gate, len(split.calibrate))
        self.novel = int(far.sum())
        u = torch.where(far, torch.inf, self.combination.of(scored, self.grids)).numpy()
        wrong = None if self.selection[1] is None else wrong_predictions(split.calibrate, by="guard.fit").numpy()
        try:
            return promise.threshold(self.selection, (u, wrong))
        except GuardError as error:
            raise GuardError(
                f"guard.fit: {error} Of the table's {rows} rows, {len(split.calibrate)} are there to calibrate; the "
                f"uncertainty is {self.combination}."
            ) from error


def novel_rows(scored: Mapping[str, Tensor], density: str | None, gate: float | None, n: int) -> Bool[Tensor, "n"]:
    """Rows whose density score lies above the gate; none without one."""
    return torch.zeros(n, dtype=torch.bool) if density is None or gate is None else scored[density] > gate
