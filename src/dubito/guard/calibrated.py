"""What a guard observes of images, and its thresholds, tested on calibration images when all else is fixed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from dubito.errors import GuardError
from dubito.guard.costs import CostMatrix
from dubito.guard.groups import Group, GroupThreshold, group_codes, group_thresholds, groups_in
from dubito.guard.guarantee import CLASS, Guarantee
from dubito.guard.missed import MissedThreshold, alerts, missed_thresholds
from dubito.guard.selection import ScoreSelection
from dubito.guard.shift import Observations
from dubito.guard.thresholds import Threshold
from dubito.metrics import wrong_predictions
from dubito.table import Table
from dubito.table.overlap import sketch


class Rules(NamedTuple):
    """What decides about images in addition to their uncertainty."""

    guarantee: Guarantee
    missed: Sequence[MissedThreshold]
    groups: Sequence[Group]
    costs: CostMatrix | None


class CalibratedThresholds(NamedTuple):
    """All thresholds of a guard, and what they were tested on; the attributes are those of `Guard`."""

    calibration: Observations
    threshold: Threshold
    groups: tuple[GroupThreshold, ...]
    missed: tuple[MissedThreshold, ...]

    @classmethod
    def fit(
        cls,
        guarantee: Guarantee,
        selection: ScoreSelection,
        table: Table,
        costs: CostMatrix | None,
        *,
        labelled: bool,
        rows: int,
        by: str,
    ) -> "CalibratedThresholds":
        """From the calibration images; `rows` is how many the table had that they were drawn from.

        Raises:
            GuardError: The guarantee cannot be given with these images; the message says how many it takes.
        """
        names = dict.fromkeys([*selection.combination.weights, *filter(None, [selection.roles.density])])
        values = {name: selection.scores[name].score(table) for name in names}
        missed = missed_thresholds(guarantee, table, selection.uncertainty(values)[1].numpy(), by=by)
        rules = Rules(guarantee, missed, _groups(guarantee, table, by=by), costs)
        drawn = sketch(table)
        calibration = replace(
            observe(selection, values, table, rules, labelled=labelled), sketch=None if drawn is None else drawn.numpy()
        )
        return cls(calibration, *fit_thresholds(guarantee, selection, calibration, rules.groups, rows, by=by), missed)

    def novel(self, gate: float | None) -> int:
        """How many calibration images are refused as novel: their density is above the gate."""
        density = self.calibration.density
        return 0 if gate is None or density is None else int((density > gate).sum())


def observe(
    selection: ScoreSelection,
    values: Mapping[str, Float64[Tensor, "n"]],
    table: Table,
    rules: Rules,
    *,
    labelled: bool,
) -> Observations:
    """What a guard observes of a table, from its scores."""
    u, novel = selection.uncertainty(values)
    parts = [torch.zeros(0, dtype=torch.long), *(batch.logit.argmax(1) for batch in table.batches("logit"))]
    predicted, density, per = torch.cat(parts).numpy(), selection.roles.density, rules.guarantee.per
    group = None
    if per is not None:
        group = group_codes(predicted if per == CLASS else groups_in(table, per, by="guard"), rules.groups)
    refused = novel | (alerts(rules.missed, table) >= 0)
    wrong = wrong_predictions(table, by="guard").numpy() if labelled else None
    return Observations(
        uncertainty=torch.where(refused, torch.inf, u).numpy(),
        predicted=predicted,
        density=None if density is None else values[density].numpy(),
        wrong=wrong,
        loss=None if wrong is None or rules.costs is None else rules.costs.of_rows(table.label.numpy(), predicted),
        group=group,
    )


def fit_thresholds(
    guarantee: Guarantee,
    selection: ScoreSelection,
    calibration: Observations,
    groups: Sequence[Group],
    rows: int,
    *,
    by: str,
) -> tuple[Threshold, tuple[GroupThreshold, ...]]:
    """The threshold that keeps a guarantee, and that of each group; GuardError says what could be kept instead."""
    u, wrong = calibration.outcomes
    loss = wrong if guarantee.kind != "cost" else calibration.loss
    try:
        if calibration.group is None or loss is None:
            return guarantee.threshold((u, loss)), ()
        return group_thresholds(guarantee, u, loss, calibration.group, groups)
    except GuardError as error:
        refused = _always_refused(guarantee, calibration, selection.gate)
        if guarantee.missed:
            shared = guarantee.shared(guarantee.tested_at)
            refused = f" {shared} Without missed=, fewer images are enough.{refused}"
        raise GuardError(
            f"{by}: {error}{refused} Of the table's {rows} rows, {len(calibration)} are there to calibrate; "
            f"the uncertainty is {selection.combination}. {guarantee.feasible((u, loss), rows)}".rstrip()
        ) from error


def _always_refused(guarantee: Guarantee, calibration: Observations, gate: float | None) -> str:
    """Which calibration images are refused whatever their uncertainty, where that limits how many are accepted."""
    u, wrong = calibration.outcomes
    about = np.isinf(u) if guarantee.kind == "coverage" or wrong is None else np.isinf(u) & ~wrong
    if guarantee.kind in ("risk", "cost") or not about.any():
        return ""
    density = calibration.density
    novel = int((density > gate)[about].sum()) if density is not None and gate is not None else 0
    alerts, names = int(about.sum()) - novel, " or ".join(one.name for one in guarantee.missed)
    words = [f"{novel:,} unlike the in-distribution ones (novel=0 refuses none of these)"] if novel else []
    words += [f"{alerts:,} that may be of class {names} (a larger share in missed refuses fewer)"] if alerts else []
    return f" Among those refused: {', '.join(words)}."


def _groups(guarantee: Guarantee, table: Table, *, by: str) -> tuple[Group, ...]:
    """All classes, or all groups that the calibration images have; none where the guarantee is about all images."""
    if guarantee.per is None:
        return ()
    if guarantee.per == CLASS:
        return tuple(range(table.shape("logit")[1]))
    return tuple(np.unique(groups_in(table, guarantee.per, by=by)).tolist())
