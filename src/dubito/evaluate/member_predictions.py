"""What a model, or an ensemble, predicts for every row at a temperature: correct or not, how confident, how uncertain.

    p = softmax(logit / T)     p̄ = mean_m softmax(member logit / T)     uncertainties of p̄ and its members: `SUMMARY`

At T = 1 an ensemble's summary and loss columns suffice. At any other temperature, and for pooled weights, the members'
logits are read in batches of bounded size. Pooled weights w_m are learned on other images and are equal for all rows.
"""

from collections.abc import Collection
from typing import NamedTuple, get_args

import torch
from jaxtyping import Float64
from torch import Tensor

from dubito.choices import WeighedBy
from dubito.errors import MissingColumnError, TableError
from dubito.metrics import SUMMARY, MemberStream, confidence, correct, nll_per_row
from dubito.metrics.information import entropy_of
from dubito.scores.information import MutualInformation, WeightedMutualInformation, blocks, members_of
from dubito.table import Table, ensembles_in, recorded_settings, writer_of
from dubito.types import finite

SUMMARY_FIELDS = {
    "mutual_information": "epistemic",
    "weighted_logsumexp": "weighted_logsumexp",
    "weighted_sum": "weighted_sum",
    "predictive_entropy": "total",
    "expected_entropy": "aleatoric",
    "variation_ratio": "variation",
}
"""Uncertainties of an ensemble that its summary holds: the field, by name."""
POOLED: dict[str, WeighedBy] = {f"pooled_{by}": by for by in get_args(WeighedBy)}
"""Uncertainties whose weights are learned on other images."""
_ROUNDING = 1e-5
"""Nats: what rounding in float32 may leave between images on which members always agree."""
_COMPARED, _CLOSE = 16, 2e-2
"""Rows whose summary is compared with their logits, and the tolerance: stored logits may be in half precision."""


class MemberPredictions(NamedTuple):
    """Of every row: correctness, the label's loss and confidence minus correctness; and uncertainties by name."""

    members: int
    correct: Float64[Tensor, "n"]
    nll: Float64[Tensor, "n"]
    gap: Float64[Tensor, "n"]
    uncertainties: dict[str, Float64[Tensor, "n"]]


def model_predictions(table: Table, temperature: float) -> MemberPredictions:
    """The model's own predictions, with their entropy."""
    parts = []
    for batch in table.batches("logit", "label"):
        logit = batch.logit.double() / temperature
        entropy = entropy_of(logit.softmax(-1))
        right = correct(logit, batch.label).double()
        parts.append((right, nll_per_row(logit, batch.label), confidence(logit) - right, entropy))
    right, nll, gap, entropy = map(torch.cat, zip(*parts, strict=True))
    return MemberPredictions(1, right, nll, gap, {"entropy": entropy})


def ensemble_predictions(
    table: Table, name: str, temperature: float, uncertainties: Collection[str], calibration: Table | None
) -> MemberPredictions:
    """What the members' mean predicts, with uncertainties by name.

    Args:
        table: A table with the summary and loss columns, or with the members' logits.
        name: Name of the ensemble.
        temperature: Temperature of the members' logits.
        uncertainties: Names in SUMMARY_FIELDS and POOLED.
        calibration: Other images, on which the weights of those in POOLED are learned.
    """
    of_members = MutualInformation(of=name)
    stored = name in table and (f"{name}_loss" in table or of_members.logits not in table)
    stored = stored and temperature == 1 == _summary_temperature(table, name)
    summary, nll = _stored(table, of_members) if stored else _computed(table, of_members, temperature)
    values = {one: summary[:, SUMMARY.index(SUMMARY_FIELDS[one])] for one in uncertainties if one in SUMMARY_FIELDS}
    for one in uncertainties:
        if one in POOLED and calibration is not None:
            score = WeightedMutualInformation(by=POOLED[one], over="pooled", of=name)
            score.weights_ = score.pooled_weights(calibration, temperature)
            values[one] = torch.cat([score.of_logits(batch, temperature) for batch in score.batches(table)])
    right = (summary[:, SUMMARY.index("predicted")].long() == table.label).double()
    return MemberPredictions(
        int(summary[0, SUMMARY.index("members")]),
        right,
        nll,
        # float32 may hold a probability as one plus a rounding error.
        summary[:, SUMMARY.index("confidence")].clamp(0, 1) - right,
        {one: _without_rounding(finite(values[one], f"{one} of {name}")) for one in uncertainties},
    )


def require_ensemble(table: Table, name: str, *, logits_for: str | None, own: bool) -> None:
    """Raise MissingColumnError unless the table has the columns of an ensemble; the message says what writes them.

    Args:
        table: The table.
        name: Name of the ensemble.
        logits_for: What needs the members' logits, if anything does.
        own: Whether the losses of the ensemble's own predictions are needed.
    """
    logits, at = f"{name}_logit", _summary_temperature(table, name)
    if logits in table:
        return
    if name not in table:
        raise MissingColumnError(
            f"rejection_study needs an ensemble '{name}'; {table.name} has {', '.join(ensembles_of(table)) or 'none'}. "
            f"It is written by {writer_of(name) or 'the probe of that name'}."
        )
    loss_for = "the NLL of the ensemble's own predictions, which predictions='original' does without" if own else None
    logits_for = logits_for if at == 1 else "T = 1"
    for column, reason in ((logits, logits_for), (f"{name}_loss", loss_for)):
        if reason and column not in table:
            raise MissingColumnError(
                f"rejection_study needs column '{column}' for {reason}; {table.name} has only the summary '{name}' "
                f"with temperature={at:g}. It is written by {writer_of(column) or 'the probe of the ensemble'}."
            )


def ensembles_of(table: Table) -> list[str]:
    """The ensembles that a table has, as summaries or logits; grids of tiles last and by size."""
    return sorted(ensembles_in(table.columns), key=lambda name: (name.startswith("tiles_"), grid_of(name) or 0))


def grid_of(name: str) -> int | None:
    """The k of a k x k grid of tiles.

    >>> grid_of("tiles_7"), grid_of("members")
    (7, None)
    """
    size = name.removeprefix("tiles_")
    return int(size) if name.startswith("tiles_") and size.isdecimal() else None


def _stored(table: Table, of_members: MutualInformation) -> tuple[Float64[Tensor, "n s"], Float64[Tensor, "n"]]:
    """Summary and loss as the probe wrote them."""
    name, loss = of_members.of, f"{of_members.of}_loss"
    summary = finite(table.whole(name).double(), f"column '{name}'")
    of_members.of_summary(name, table)  # checks its shape and members
    if of_members.logits in table:
        _check_summary(table, name)
    if loss not in table:  # `require_ensemble` has checked that nobody needs it
        return summary, torch.full((len(table),), torch.nan, dtype=torch.float64)
    return summary, finite(table.whole(loss).double(), f"column '{loss}'")


def _summary_temperature(table: Table, name: str) -> float:
    """The temperature of an ensemble's summary, if the table records it; 1 is usual."""
    return float((recorded_settings(table, name) or {}).get("temperature", 1.0))


def _without_rounding(u: Float64[Tensor, "n"]) -> Float64[Tensor, "n"]:
    """One value for all rows if they differ by rounding alone, which must not order them."""
    return u if float(u.max() - u.min()) > _ROUNDING else torch.zeros_like(u)


def _check_summary(table: Table, name: str) -> None:
    """Raise TableError for a summary that is not that of the stored logits, such as one at another temperature."""
    first = table.select(name, f"{name}_logit").rows(slice(0, _COMPARED))
    stream = MemberStream()
    stream.add(first.whole(f"{name}_logit"))
    place = SUMMARY.index("total")
    ours, theirs = stream.summary()[:, place], first.whole(name)[:, place].double()
    if not torch.allclose(ours, theirs, rtol=_CLOSE, atol=_CLOSE):
        row = int((ours - theirs).abs().argmax())
        raise TableError(
            f"rejection_study: column '{name}' of {table.name} must be the summary of '{name}_logit' at T = 1; in row "
            f"{row} its total uncertainty is {float(theirs[row]):.4g}, that of the logits {float(ours[row]):.4g}. "
            f"Extract with temperature=1: other temperatures are studied from the logits, temperatures=(1.0, 2.0)."
        )


def _computed(
    table: Table, of_members: MutualInformation, temperature: float
) -> tuple[Float64[Tensor, "n s"], Float64[Tensor, "n"]]:
    """Summary and loss from the members' logits."""
    column, classes, parts = of_members.logits, table.shape("logit")[1], []
    if table.shape(column)[-1] != classes:
        raise TableError(
            f"rejection_study: '{of_members.of}' must predict the classes of the logits, {classes}; its members have "
            f"{table.shape(column)[-1]}. Give an ensemble of the same classes."
        )
    for batch in blocks(table, column, "label"):
        stream = MemberStream(temperature=temperature)
        finite(batch.whole(column), f"rejection_study: column '{column}' of {table.name}")
        for members in members_of(of_members, batch):
            stream.add(members)
        parts.append((stream.summary(), stream.loss(batch.label)))
    summary, nll = map(torch.cat, zip(*parts, strict=True))
    return summary, nll
