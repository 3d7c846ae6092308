"""What a guard is given, checked: its model, labels that are the model's classes, rows that are independent."""

import warnings
from typing import Any, NamedTuple

import numpy as np
import torch

from dubito.cache.fingerprint import model_identity
from dubito.errors import DubitoWarning, GuardError, ModelError, ValueRangeError
from dubito.guard.promise import Guarantee
from dubito.metrics import wrong_predictions
from dubito.table import Provenance, Table
from dubito.table.overlap import example, shared_rows
from dubito.table.views import chosen_rows
from dubito.types import Classifier
from dubito.validate import has_model_labels

_LEARN, _CHOOSE, _CHOOSE_ALONE = 0.15, 0.15, 0.2
"""Shares of a table: for scores to learn from, to choose on; and to choose on where nothing must be learned."""
_SHARED = 0.01
"""A few images may be the same by chance, in any large collection."""


class Split(NamedTuple):
    """Rows of a table, each for one purpose.

    Attributes:
        learn: What scores learn from; None where they have a table of their own, or nothing to learn.
        choose: Which scores are chosen on, and thresholds to try are taken from.
        calibrate: What the promise rests on: seen once, when everything else is fixed.
    """

    learn: Table | None
    choose: Table
    calibrate: Table


def check_settings(novel: Any, seed: Any) -> None:
    """Raise ValueRangeError for what is no share, or no seed."""
    if not (isinstance(novel, (int, float, np.floating)) and 0 <= novel < 1):
        raise ValueRangeError(f"guard.fit: novel must be a share from 0 to below 1; got {novel!r}.")
    if not isinstance(seed, (int, np.integer)) or seed < 0:
        raise ValueRangeError(f"guard.fit: seed must be a whole number, from 0 on; got {seed!r}.")


def split_rows(table: Table, *, learn: bool, seed: int) -> Split:
    """Cut a table at random into rows to learn from (if asked for), to choose on, and to calibrate on."""
    check_independent(table)
    if len(table) < 3:
        raise GuardError(f"a guard needs at least three rows, one for each purpose; {table.name} has {len(table)}.")
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(seed))
    first = max(1, round(_LEARN * len(table))) if learn else 0
    last = first + max(1, round((_CHOOSE if learn else _CHOOSE_ALONE) * len(table)))
    parts = [chosen_rows(table, rows.sort().values) for rows in (order[:first], order[first:last], order[last:])]
    return Split(parts[0] if learn else None, parts[1], parts[2])


def check_independent(table: Table) -> None:
    """Raise GuardError for several augmented rows of one photograph, which are no independent images."""
    if "photo" in table and int(table.whole("photo").unique().numel()) < len(table):
        raise GuardError(
            f"{table.name} has several augmented rows of each photograph; they are not independent, and a guarantee "
            f"would count each photograph several times. Extract every image once, without epochs=... ."
        )


def warn_of_twins(split: Split, table: Table) -> None:
    """Say that images are there twice: the test would count each of them as two."""
    shared = shared_rows(split.calibrate, split.choose)
    count = len(shared.here)
    if count > _SHARED * len(split.calibrate):
        warnings.warn(
            f"guard.fit: {table.name} has many images twice; at least {count} of {len(split.calibrate)} to calibrate "
            f"are among those that scores are chosen on, too{example(split.calibrate, split.choose, shared)}. The "
            f"promise counts them as independent, and may not hold. Leave copies out: dubito.audit finds them.",
            DubitoWarning,
            stacklevel=3,
        )


def check_apart(table: Table, learn: Table) -> None:
    """Raise GuardError where scores would learn from the images that the promise is tested on."""
    if len(learn) == 0:
        raise GuardError(f"guard.fit: train must have rows for scores to learn from; {learn.name} has none.")
    shared = shared_rows(table, learn)
    count = len(shared.here)
    if count > _SHARED * len(table):
        raise GuardError(
            f"guard.fit: at least {count} of the {len(table)} images of {table.name} are in train, {learn.name}, too"
            f"{example(table, learn, shared)}. Scores that have learned from them know them by heart, and the promise "
            f"would not hold for others. Give other images as train, or leave it out: a part of the table is set aside "
            f"for it."
        )


def checked_labels(table: Table, promise: Guarantee) -> bool:
    """Whether labels tell which answers are wrong; a promise of coverage does without."""
    table.require("logit", by="guard.fit")
    if promise.kind == "coverage" and not has_model_labels(table):
        return False
    wrong_predictions(table, by="guard.fit")
    return True


def check_model(model: object, *, by: str) -> None:
    """Raise ModelError for what is no wrapped model."""
    if not isinstance(model, Classifier):
        raise ModelError(
            f"{by}: model must come from dubito.load or dubito.wrap; got {type(model).__name__}. "
            f"Wrap it: dubito.wrap(module, transform=...)."
        )


def checked_provenance(model: Classifier | None, table: Table) -> Provenance | None:
    """Which model the guard belongs to; ModelError where the table is another one's."""
    if model is None:
        return table.provenance
    check_model(model, by="guard.fit")
    own = model_identity(model)
    if table.provenance is None:
        return own
    reason = not_the_same(table.provenance, own)
    if reason:
        raise ModelError(
            f"guard.fit: {table.name} was made by another model than {model.name}: {reason}. "
            f"Extract images with this model first."
        )
    return table.provenance.with_model(own)


def not_the_same(there: Provenance | None, here: Provenance | None) -> str | None:
    """Why two models differ; None if they do not, or if one of them is not known."""
    return None if there is None or here is None else there.difference(here)
