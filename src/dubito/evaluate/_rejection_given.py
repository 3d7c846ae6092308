"""What `rejection_study` is given, checked; and the temperatures that are asked for, as numbers."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Literal, get_args

import torch

from dubito.errors import TableError, ValueRangeError
from dubito.evaluate._member_predictions import FIELDS, POOLED
from dubito.scores.temperature import fit_temperature
from dubito.table import Table
from dubito.validate import check_model_labels, check_rows

Against = Literal["level", "uncertainty"]
"""What covariances are with: the level of a quantile, or the uncertainty in its bucket."""
Predictions = Literal["own", "original"]
"""By whose predictions an ensemble's order is judged."""
_ROWS = 2048


def check(
    table: Table,
    ensembles: Sequence[str] | None,
    uncertainties: Sequence[str],
    buckets: int,
    choices: dict[str, str],
) -> None:
    """Raise for a table, names or choices that a study cannot be made of."""
    check_rows(table, by="rejection_study")
    check_model_labels(table, by="rejection_study")
    if not 2 <= buckets <= len(table):
        raise ValueRangeError(
            f"rejection_study: buckets must be 2 to the number of rows, {len(table)} in {table.name}; got {buckets}. "
            f"Ten, with a hundred rows or more in each, are usual."
        )
    if isinstance(ensembles, str):
        raise ValueRangeError(
            f"rejection_study: ensembles must be a list of names; got '{ensembles}'. Give ['{ensembles}']."
        )
    known = [*FIELDS, *POOLED]
    for name in [uncertainties] if isinstance(uncertainties, str) else uncertainties:
        if name not in known or isinstance(uncertainties, str):
            near = get_close_matches(name, known, n=3, cutoff=0.4)
            raise ValueRangeError(
                f"rejection_study: uncertainties must be a list of names; got {name!r}. "
                + (f"Nearest: {', '.join(near)}." if near else f"Known: {', '.join(known)}.")
            )
    for option, allowed in (("predictions", get_args(Predictions)), ("against", get_args(Against))):
        if choices[option] not in allowed:
            raise ValueRangeError(
                f"rejection_study: {option} must be '{allowed[0]}' or '{allowed[1]}'; got {choices[option]!r}. "
                f"Choose one of the two."
            )


def temperatures_of(
    table: Table, given: Sequence[float | int | Literal["optimal"]] | None, calibration: Table | None
) -> list[float]:
    """As numbers, each once."""
    asked = given if given is not None else (1.0,) if calibration is None else (1.0, "optimal")
    if calibration is not None:
        _other_images(table, calibration)
    found = []
    for one in asked:
        if one != "optimal":
            if not (isinstance(one, int | float) and 0 < one < float("inf")):
                raise ValueRangeError(
                    f"rejection_study: temperatures must be positive numbers or 'optimal'; got {one!r}. "
                    f"Use (1.0, 'optimal')."
                )
            found.append(float(one))
        elif calibration is None:
            raise TableError(
                "rejection_study: the optimal temperature is fitted on other images, which it needs as "
                "calibration=...; got none. Give a table of other labelled images of the same model, or half of this "
                "one (and study the other half)."
            )
        else:
            found.append(fit_temperature(calibration))
    if not found:
        raise ValueRangeError("rejection_study needs at least one temperature; got none. Use (1.0,).")
    return list(dict.fromkeys(found))


def _other_images(table: Table, calibration: Table) -> None:
    """A temperature fitted on the evaluated rows would flatter them."""
    check_model_labels(calibration, by="rejection_study: calibration")
    if table.model_id and calibration.model_id and table.model_id != calibration.model_id:
        raise TableError(
            f"rejection_study: calibration {calibration.name} was made by another model ({calibration.model_id}) than "
            f"{table.name} ({table.model_id}). Extract both with the same model and transform."
        )
    if table.shape("logit")[1] != calibration.shape("logit")[1]:
        raise TableError(
            f"rejection_study: calibration must have the classes of {table.name}, {table.shape('logit')[1]}; "
            f"{calibration.name} has {calibration.shape('logit')[1]}. Extract both with the same model."
        )
    if "id" not in table or "id" not in calibration:
        _not_the_same(table, calibration)
    else:
        # Two caches of different folders may number their images alike: only ids that hold the same logits are shared.
        shared = _shared(table, calibration)
        if shared:
            raise TableError(
                f"rejection_study: calibration must be of other images; {len(shared)} of {len(table)} images of "
                f"{table.name} are in {calibration.name}, too, such as '{shared[0]}'. Keep the halves apart."
            )


def _not_the_same(table: Table, calibration: Table) -> None:
    """Without ids, only a table that is given twice can be seen."""
    if len(table) == len(calibration) and all(
        torch.equal(ours.logit, theirs.logit)
        for ours, theirs in zip(table.batches("logit"), calibration.batches("logit"), strict=True)
    ):
        raise TableError(
            f"rejection_study: calibration must be of other images; {calibration.name} has the logits of {table.name}, "
            f"row by row. Give half of them, and study the other half."
        )


def _shared(table: Table, calibration: Table) -> list[str]:
    """Names of images that both have, with the same logits; compared a few at a time."""
    places = {name: place for place, name in enumerate(calibration.id.tolist())}
    both = [(row, places[name], str(name)) for row, name in enumerate(table.id.tolist()) if name in places]
    found: list[str] = []
    for at in range(0, len(both), _ROWS):
        here, there, names = map(list, zip(*both[at : at + _ROWS], strict=True))
        ours, theirs = (some.select("logit").rows(rows).logit for some, rows in ((table, here), (calibration, there)))
        found += [name for name, equal in zip(names, (ours == theirs).all(1).tolist(), strict=True) if equal]
    return found
