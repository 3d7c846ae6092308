"""What a model, or an ensemble, predicts for every row at a temperature: correct or not, how confident, how uncertain.

    p = softmax(logit / T)     p̄ = mean_m softmax(member logit / T)     uncertainties of p̄ and its members: `SUMMARY`

At T = 1 an ensemble's summary and loss columns suffice. At any other temperature, and for pooled weights, the members'
logits are read in batches of bounded size. Pooled weights w_m are learned on other images and are equal for all rows.
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple, get_args

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dubito.choices import WeighedBy
from dubito.errors import MissingColumnError, TableError
from dubito.metrics import SUMMARY, MemberStream, confidence, correct, nll_per_row
from dubito.metrics.information import entropy_of, log_size
from dubito.scores.information import WeightedMutualInformation, pooled
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
_BYTES = 2**24
"""Most bytes of members' logits in float32 at once: a few copies of them are made, in float64."""
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
    logits = f"{name}_logit" in table
    stored = temperature == 1 == _summary_temperature(table, name) and name in table
    stored = stored and (f"{name}_loss" in table or not logits)
    if stored and logits:
        _check_summary(table, name)
    summary, nll = _stored(table, name) if stored else _computed(table, name, temperature)
    members = int(summary[0, SUMMARY.index("members")])
    if members < 2:
        raise TableError(
            f"rejection_study: the ensemble '{name}' of {table.name} has one member, which agrees with itself on every "
            f"image. Give at least two members."
        )
    values = {one: summary[:, SUMMARY.index(SUMMARY_FIELDS[one])] for one in uncertainties if one in SUMMARY_FIELDS}
    if calibration is not None and (pooled_ones := [one for one in uncertainties if one in POOLED]):
        weights = pooled_weights(calibration, name, temperature)
        for one in pooled_ones:
            score = WeightedMutualInformation(by=POOLED[one], over="pooled", of=name)
            score.weights_ = weights[one]
            parts = [score.of_logits(batch, temperature) for batch in member_batches(table, name)]
            values[one] = torch.cat(parts)
    right = (summary[:, SUMMARY.index("predicted")].long() == table.label).double()
    return MemberPredictions(
        members,
        right,
        nll,
        # float32 may hold a probability as one plus a rounding error.
        summary[:, SUMMARY.index("confidence")].clamp(0, 1) - right,
        {one: _without_rounding(finite(values[one], f"{one} of {name}")) for one in uncertainties},
    )


def pooled_weights(table: Table, name: str, temperature: float) -> dict[str, Float64[Tensor, "m"]]:
    """One weight per member, by uncertainty, from the size of its logits over all rows (Kirsch 2024, formula of B.1).

    w_m = sum_n exp l_mn / sum_kn exp l_kn, in logarithms: a sum of a thousand logits has no exponential.
    """
    sizes: dict[str, Tensor] = {}
    for batch in member_batches(table, name):
        z = _logits(batch, name).double() / temperature
        for uncertainty, by in POOLED.items():
            sizes[uncertainty] = pooled(sizes.get(uncertainty), log_size(z, by))
    return {uncertainty: size.softmax(0) for uncertainty, size in sizes.items()}


def member_batches(table: Table, name: str, *more: str) -> Iterator[Table]:
    """Rows of the members' logits, as many at a time as fit into bounded memory."""
    column = f"{name}_logit"
    _, members, classes = table.shape(column)
    return table.batches(column, *more, size=max(1, _BYTES // (4 * members * classes)))


def require_ensemble(table: Table, name: str, *, logits_for: str | None, own: bool) -> None:
    """Raise unless the table has the columns of an ensemble; the message says what writes them.

    Args:
        table: The table.
        name: Name of the ensemble.
        logits_for: What needs the members' logits, if anything does.
        own: Whether the losses of the ensemble's own predictions are needed.
    """
    logits, loss = f"{name}_logit", f"{name}_loss"
    if name not in table and logits not in table:
        raise MissingColumnError(
            f"rejection_study needs an ensemble '{name}'; {table.name} has {', '.join(ensembles_of(table)) or 'none'}. "
            f"It is written by {writer_of(name) or 'the probe of that name'}."
        )
    for column, axes in ((name, f"(n, {len(SUMMARY)})"), (logits, "(n, members, classes)")):
        shape = table.shape(column) if column in table else None
        if shape and (len(shape) != len(axes.split()) or (column == name and shape[1] != len(SUMMARY))):
            raise TableError(
                f"rejection_study: column '{column}' of {table.name} must have the axes {axes}; got {shape}. "
                f"Give the columns as probes of ensembles write them."
            )
    if logits in table:
        return
    if (at := _summary_temperature(table, name)) != 1:
        raise TableError(
            f"rejection_study needs the summary '{name}' at T = 1, or column '{logits}'; that of {table.name} was made "
            f"with temperature={at:g}. Extract it with temperature=1, or with keep='logits'."
        )
    if logits_for:
        raise MissingColumnError(
            f"rejection_study: {logits_for} needs column '{logits}', the members' logits; {table.name} has only "
            f"their summary at T = 1. It is written by {writer_of(logits) or 'its probe, if logits are kept'}."
        )
    if own and loss not in table:
        raise MissingColumnError(
            f"rejection_study needs column '{loss}' for the NLL of the ensemble's own predictions; {table.name} has "
            f"none. It is written by {writer_of(loss) or 'its probe, where labels are'}; or compare orders alone with "
            f"predictions='original'."
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


def _stored(table: Table, name: str) -> tuple[Float64[Tensor, "n s"], Float64[Tensor, "n"]]:
    summary = finite(table.whole(name).double(), f"column '{name}'")
    if f"{name}_loss" not in table:  # `require_ensemble` has checked that nobody needs it
        return summary, torch.full((len(table),), torch.nan, dtype=torch.float64)
    return summary, finite(table.whole(f"{name}_loss").double(), f"column '{name}_loss'")


def _summary_temperature(table: Table, name: str) -> float:
    """The temperature of an ensemble's summary, if the table records it; 1 is usual."""
    return float((recorded_settings(table, name) or {}).get("temperature", 1.0))


def _without_rounding(u: Float64[Tensor, "n"]) -> Float64[Tensor, "n"]:
    """One value for all rows if they differ by rounding alone, which must not order them."""
    return u if float(u.max() - u.min()) > _ROUNDING else torch.zeros_like(u)


def _check_summary(table: Table, name: str) -> None:
    """Raise TableError for a summary that is not that of the stored logits, such as one at another temperature."""
    first = next(member_batches(table, name, name)).rows(slice(0, _COMPARED))
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


def _computed(table: Table, name: str, temperature: float) -> tuple[Float64[Tensor, "n s"], Float64[Tensor, "n"]]:
    """Summary and loss from the members' logits."""
    classes = table.shape(f"{name}_logit")[2]
    if classes != table.shape("logit")[1]:
        raise TableError(
            f"rejection_study: '{name}' must predict the classes of the logits, {table.shape('logit')[1]}; its members "
            f"have {classes}. Give an ensemble of the same classes."
        )
    parts = []
    for batch in member_batches(table, name, "label"):
        stream = MemberStream(temperature=temperature)
        stream.add(_logits(batch, name))
        parts.append((stream.summary(), stream.loss(batch.label)))
    summary, nll = map(torch.cat, zip(*parts, strict=True))
    return summary, nll


def _logits(batch: Table, name: str) -> Float[Tensor, "n m c"]:
    return finite(batch.whole(f"{name}_logit"), f"rejection_study: column '{name}_logit' of {batch.name}")
