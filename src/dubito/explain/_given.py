"""What `diagnose` is given: checked, split, and with the density that suits it where none came."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch

from dubito.choices import Covariance
from dubito.errors import TableError, ValueRangeError
from dubito.scores.default_density import default_density
from dubito.table import Table, check_table
from dubito.table.views import chosen_rows
from dubito.types import Score

MEAN = "mean"
"""What the mean over OOD sets is called."""
_BY = "diagnose"


@final
@dataclass(frozen=True)
class Given:
    """What will be scored, and what the density learns from.

    Attributes:
        whole: The known rows as they came.
        known: Those of them to be scored.
        foreign: By name, rows to be scored.
        train: Rows that the density is fitted on; None for one that is fitted already.
        train_name: What they are, in words.
        density: Fitted or not; of one that is, nobody can see here what it was fitted on.
    """

    whole: Table
    known: Table
    foreign: dict[str, Table]
    train: Table | None
    train_name: str
    density: Score


def given(
    known: Table,
    ood: Table | Mapping[str, Table],
    train: Table | None,
    density: Score | None,
    *,
    covariance: Covariance | None = None,
    seed: int = 0,
) -> Given:
    """Everything checked; the known rows split in two halves where there is nothing else to fit a density on."""
    if density is not None and covariance is not None:
        raise ValueRangeError(
            f"{_BY}: covariance is that of the default density; got '{covariance}' together with a density. Set it "
            f"there: Density(covariance='{covariance}')."
        )
    check_table(known, by=_BY, what="known")
    if not isinstance(ood, Mapping):
        check_table(ood, by=_BY, what="ood")
    foreign = {called(ood, "ood"): ood} if isinstance(ood, Table) else dict(ood)
    if not foreign:
        raise TableError(f"{_BY} needs at least one OOD table; got none. Give a table, or some by name.")
    if MEAN in foreign:
        raise TableError(
            f"{_BY}: no OOD set may be called '{MEAN}', which is the line of the mean over sets. Give it another name: "
            f"ood={{'...': table}}, or rename the folder of its cache."
        )
    _check_rows(called(known, "known"), known)
    for name, table in foreign.items():
        check_table(table, by=_BY, what=f"ood '{name}'")
        _check_rows(name, table)
        _check_alike(known, table)
    if train is not None:
        check_table(train, by=_BY, what="train")
        _check_train(train, known)
    elif density is not None and density.is_fitted:
        return Given(known, known, foreign, None, "what it was fitted on before", density)
    scored = known
    if train is None:
        train, scored = _halves(known, seed)
        name = f"half of {called(known, 'known')} ({len(train)} rows drawn with seed {seed}), which is not scored"
    else:
        name = f"{called(train, 'train')} ({len(train)} rows)"
    if density is None:
        density = default_density(train, covariance, by=_BY)
    return Given(known, scored, foreign, train, name, density)


def called(table: Table, otherwise: str) -> str:
    """A short name: where a cache lies does not matter."""
    short = table.name.rstrip("/").rpartition("/")[2]
    return otherwise if short in ("", "table in memory") else short


def check_numbers(**counts: Any) -> None:
    """Raise ValueRangeError for a confidence outside (0, 1), a negative seed or a count below one."""
    confidence, seed = counts.pop("confidence"), counts.pop("seed")
    if seed < 0:
        raise ValueRangeError(f"{_BY}: seed must not be negative; got {seed}. Any number from 0 on will do.")
    if not 0 < confidence < 1 or not all(math.isfinite(count) and count >= 1 for count in counts.values()):
        came = ", ".join(f"{name}={count}" for name, count in {"confidence": confidence, **counts}.items())
        raise ValueRangeError(
            f"{_BY} needs a confidence in (0, 1) and at least one draw and resample; {came} came. "
            f"0.95, 5 and 1000 are usual."
        )


def _check_rows(name: str, table: Table) -> None:
    table.require("feature", "logit", by=f"{_BY} ({name})")
    if len(table) < 2:
        raise TableError(
            f"{_BY}: {name} must have at least 2 rows; it has {len(table)}. "
            + ("Look at how its rows were chosen." if len(table) == 0 else "One image has no distribution: give more.")
        )


def _check_train(train: Table, known: Table) -> None:
    otherwise = "Give training images, or leave train out: then known is split."
    if train is known:
        raise TableError(
            f"{_BY}: train must be other rows than known; got the same table twice. A density knows the rows it was "
            f"fitted on too well. {otherwise}"
        )
    if len(train) == 0:
        raise TableError(
            f"{_BY}: train must have rows to fit the density on; {called(train, 'train')} has none. {otherwise}"
        )
    _check_alike(known, train)


def _check_alike(known: Table, other: Table) -> None:
    """Raise TableError for tables of different models."""
    if known.model_id and other.model_id and known.model_id != other.model_id:
        names = [
            " ".join(filter(None, [table.provenance and table.provenance.model, table.model_id]))
            for table in (known, other)
        ]
        raise TableError(
            f"{_BY}: {other.name} and {known.name} must come from one model with one transform; they come from "
            f"different ones ({names[1]} and {names[0]}). Extract both with the same model."
        )
    for column in ("feature", "logit"):
        if column in known and column in other and known.shape(column)[1] != other.shape(column)[1]:
            raise TableError(
                f"{_BY}: column '{column}' must be as wide in {other.name} as in {known.name}; "
                f"{other.shape(column)[1]} and {known.shape(column)[1]} came. Give tables of one model."
            )


def _halves(known: Table, seed: int) -> tuple[Table, Table]:
    """Rows to fit on and rows to score, at random."""
    if len(known) < 4:
        raise TableError(
            f"{_BY}: without train, known is split in two halves and needs at least 4 rows; it has {len(known)}. "
            f"Give train, a table of training images."
        )
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))
    half = len(known) // 2
    return chosen_rows(known, order[:half].sort().values), chosen_rows(known, order[half:].sort().values)
