"""What `compare` is given, checked: tables of one model that share no images, settings that make sense."""

import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from dubito.errors import DubitoWarning, TableError
from dubito.evaluate.uncertainties import check_fitted_scores
from dubito.scores.possible import Possible
from dubito.scores.registry import by_name
from dubito.table import Table, check_table
from dubito.table.overlap import example, shared_rows


def named_tables(ood: Table | Mapping[str, Table] | Sequence[Table] | str | PathLike[str] | None) -> dict[str, Table]:
    """Foreign tables by name, each with rows."""
    if ood is None:
        return {}
    several: Any = [ood] if isinstance(ood, Table | str | PathLike) else ood  # a text would be a sequence, too
    pairs = (
        list(several.items()) if isinstance(several, Mapping) else [(getattr(one, "name", ""), one) for one in several]
    )
    for _, one in pairs:
        check_table(one, by="compare", what="ood")
    named: dict[str, Table] = dict(pairs)
    if len(named) < len(pairs):
        raise TableError(
            f"compare: ood tables need names of their own; got {len(pairs)} with {len(named)}. "
            f"Give them by name: ood={{'svhn': ..., 'textures': ...}}."
        )
    for name, table in named.items():
        if len(table) == 0:
            raise TableError(f"compare: ood '{name}' must have at least one row; it has none. Leave it out.")
    return named


def check_same_model(table: Table, train: Table | None, strangers: dict[str, Table]) -> None:
    """Raise TableError for tables of several models."""
    for name, other in {"train": train, **{f"ood '{name}'": one for name, one in strangers.items()}}.items():
        if other is not None and None not in (other.model_id, table.model_id) and other.model_id != table.model_id:
            raise TableError(
                f"compare: {name} ({other.name}) and {table.name} must come from one model with one transform; they "
                f"have different weights or transforms. Extract both with the same model."
            )
        for column in ("logit", "feature"):
            if other is None or column not in table or column not in other:
                continue
            width, came = table.shape(column)[1], other.shape(column)[1]
            if width != came:
                raise TableError(
                    f"compare: column '{column}' of {name} ({other.name}) must be {width} wide, as in {table.name}; "
                    f"{came} came. Extract both with the same model."
                )


def warn_of_shared(table: Table, train: Table | None, strangers: dict[str, Table]) -> None:
    """Warn of images that are in two tables, by their features or logits: their names may differ."""
    harms = {
        "train": "scores that learn know them already, and look better than they are. Fit on other images of the same "
        "kind.",
        "ood": "known and foreign at once, they cannot be told apart. Leave them out of one of the two.",
    }
    others = {"train": train, **{f"ood '{name}'": one for name, one in strangers.items()}}
    for name, other in others.items():
        shared = None if other is None else shared_rows(table, other)
        if other is not None and shared is not None and len(shared.here):
            warnings.warn(
                f"compare: {len(shared.here)} images of {table.name} are also in {name}"
                f"{example(table, other, shared)}: {harms[name.partition(' ')[0]]}",
                DubitoWarning,
                stacklevel=3,
            )


def given_scores(scores: object) -> Possible:
    """Scores that were given, by name, each ready."""
    named = by_name(scores, by="compare", arrays=False)
    check_fitted_scores(named, by="compare")
    return Possible(named)
