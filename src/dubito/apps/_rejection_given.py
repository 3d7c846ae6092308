"""What `rejection_study` is given, checked; and the temperatures that are asked for, as numbers."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from dubito.apps._said import FIELDS, POOLED
from dubito.apps._scored import some_rows
from dubito.errors import TableError, ValueRangeError
from dubito.scores.temperature import fit_temperature
from dubito.table import Table

Against = Literal["level", "uncertainty"]
"""What covariances are with: the level of a quantile, or the uncertainty in its bucket."""
Predictions = Literal["own", "original"]
"""By whose predictions an ensemble's order is judged."""


def check(table: Table, uncertainties: Sequence[str], buckets: int, choices: dict[str, str]) -> None:
    """Raise for a table, names or choices that a study cannot be made of."""
    some_rows("rejection_study", table)
    for column in ("logit", "label"):
        table.require(column, by="rejection_study")
    if table.label_space != "model":
        raise TableError(
            f"rejection_study needs labels of the model's own classes; those of {table.name} are another set's, so no "
            f"prediction can be right. Use images of the classes that the model was trained for."
        )
    if not 2 <= buckets <= len(table):
        raise ValueRangeError(
            f"rejection_study: buckets must be 2 to the number of rows, {len(table)} in {table.name}; {buckets} came. "
            f"Ten, with a hundred rows or more in each, are usual."
        )
    known = [*FIELDS, *POOLED]
    for name in [uncertainties] if isinstance(uncertainties, str) else uncertainties:
        if name not in known or isinstance(uncertainties, str):
            near = get_close_matches(name, known, n=3, cutoff=0.4)
            raise ValueRangeError(
                f"rejection_study: uncertainties must be a list of names; {name!r} came. "
                + (f"Nearest: {', '.join(near)}." if near else f"Known: {', '.join(known)}.")
            )
    for option, allowed in (("predictions", get_args(Predictions)), ("against", get_args(Against))):
        if choices[option] not in allowed:
            raise ValueRangeError(
                f"rejection_study: {option} must be '{allowed[0]}' or '{allowed[1]}'; {choices[option]!r} came. "
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
                    f"rejection_study: temperatures must be positive numbers or 'optimal'; {one!r} came. "
                    f"Use (1.0, 'optimal')."
                )
            found.append(float(one))
        elif calibration is None:
            raise TableError(
                "rejection_study: the optimal temperature is fitted on other images, which it needs as "
                "calibration=...; none came. Give a table of other labelled images of the same model, or half of this "
                "one (and study the other half)."
            )
        else:
            found.append(fit_temperature(calibration))
    if not found:
        raise ValueRangeError("rejection_study needs at least one temperature; none came. Use (1.0,).")
    return list(dict.fromkeys(found))


def _other_images(table: Table, calibration: Table) -> None:
    """A temperature fitted on the evaluated rows would flatter them."""
    for column in ("logit", "label"):
        calibration.require(column, by="rejection_study: calibration")
    if calibration.label_space != "model":
        raise TableError(
            f"rejection_study: calibration needs labels of the model's own classes; those of {calibration.name} are "
            f"another set's. Fit on images of the classes that the model was trained for."
        )
    if table.source and calibration.source and table.source != calibration.source:
        raise TableError(
            f"rejection_study: calibration {calibration.name} was made by another model ({calibration.source}) than "
            f"{table.name} ({table.source}). Extract both with the same model and transform."
        )
    if "id" in table and "id" in calibration:
        # Two caches of different folders may number their images alike: only ids that hold the same logits are shared.
        shared = _shared(table, calibration)
        if shared:
            raise TableError(
                f"rejection_study: calibration must be of other images; {len(shared)} of {len(table)} images of "
                f"{table.name} are in {calibration.name}, too, such as '{shared[0]}'. Keep the halves apart."
            )


def _shared(table: Table, calibration: Table) -> list[str]:
    places = {name: place for place, name in enumerate(calibration.id.tolist())}
    both = [(row, places[name], name) for row, name in enumerate(table.id.tolist()) if name in places]
    if not both:
        return []
    here, there, names = map(list, zip(*both, strict=True))
    same = _logits_at(table, here) == _logits_at(calibration, there)
    return [str(name) for name, equal in zip(names, same.all(1).tolist(), strict=True) if equal]


def _logits_at(table: Table, rows: list[int]) -> Float[Tensor, "k c"]:
    return torch.cat([table.select("logit").rows(rows[at : at + 2048]).logit for at in range(0, len(rows), 2048)])
