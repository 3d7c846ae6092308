"""Whether what comes fits an index: names, classes, score, model; and what queries are held against."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64

from dubito.errors import ArtefactError, TableError, ValueRangeError
from dubito.metrics import Array
from dubito.search._given import Given, Names, given, twice
from dubito.search.backend import Backend, State
from dubito.search.in_memory import InMemory
from dubito.search.rule import Rule, Thresholds
from dubito.table import Provenance, Table, to_tensor
from dubito.types import Score


def width_of(items: Table | Array) -> int:
    """The width of features that an index is to be built of."""
    if isinstance(items, Table):
        items.require("feature", by="SafeIndex.build")
        return items.shape("feature")[1]
    shape = items.shape if isinstance(items, np.ndarray) else to_tensor(items, "SafeIndex.build: items").shape
    if len(shape) != 2:
        raise TableError(f"SafeIndex.build: features must have the axes (n, d); got {tuple(shape)}. One row an image.")
    return int(shape[1])


def some(state: State) -> Thresholds:
    """The thresholds of an index that is not empty."""
    if state.thresholds is None:
        raise TableError("SafeIndex: the index is empty, so there is nothing to find. Add items first.")
    return state.thresholds


def fitting(
    by: str,
    features: Table | Array,
    uncertainty: Score | Array | None,
    *,
    width: int,
    score: Score | None,
    state: State,
    ids: Names | None = None,
    labels: Array | None = None,
) -> Given:
    """Items or queries of the same width and score as the items that are there; a table is judged by `score`."""
    if uncertainty is None and isinstance(features, Table):
        uncertainty = score
    if isinstance(uncertainty, Score) and state.rows:
        _check_score(by, uncertainty, score, state.origin.judged_by)
    return given(by, features, uncertainty, width=width, ids=ids, labels=labels)


def check_source(by: str, features: Table | Array, model_id: str | None, provenance: Provenance | None) -> None:
    """Raise for a table of another model than that of the items, where both are known."""
    if isinstance(features, Table) and features.model_id and model_id and features.model_id != model_id:
        raise TableError(
            f"{by}: {features.name} was made by another model ({_called(features.provenance, features.model_id)}) than the "
            f"items of the index ({_called(provenance, model_id)}), so that cosines mean nothing. Extract it with the same "
            f"model and transform."
        )


def check_judged(found: Given, score: Score | None, what: str) -> None:
    """Raise for items or queries without uncertainties, where these are needed."""
    if found.u is None:
        raise TableError(
            f"{found.by} needs the uncertainty of every {what}; got none"
            + (", and the index has no score of its own" if score is None else " with an array of features")
            + f". Give a fitted score (with a table) or one number for every {what}"
            + (", or build the index with clean='items'." if what == "query" else ".")
        )


def in_memory(backend: Backend) -> InMemory:
    """A backend that can be saved."""
    if not isinstance(backend, InMemory):
        raise ArtefactError(
            "SafeIndex.save: this index lives on a server, which has kept every change already. Open it with "
            "SafeIndex.on_server, or build one from the same items to save it."
        )
    return backend


def check_new(backend: Backend, names: Sequence[str], *, named: bool) -> None:
    """Raise for names that come twice, or that are there already."""
    if again := twice(names):
        raise TableError(f"SafeIndex.add: every id once; got '{again}' twice. Nothing was added: name them apart.")
    if there := sorted(backend.known(names)):
        raise TableError(
            f"SafeIndex.add: ids must be new; {len(there)} of {len(names)} are in the index, such as '{there[0]}'. "
            f"Nothing was added: {'remove them first' if named else 'give ids=...'}."
        )


def check_there(backend: Backend, names: Sequence[str]) -> None:
    """Raise for names that come twice, or that are not there."""
    if again := twice(names):
        raise TableError(f"SafeIndex.remove: every id once; got '{again}' twice. Drop one of them.")
    if unknown := sorted({*names} - backend.known(names)):
        raise TableError(
            f"SafeIndex.remove: ids must be those of items; {len(unknown)} of {len(names)} are not, such as "
            f"'{unknown[0]}'. Nothing was removed: ask `id in index` first."
        )


def check_labels(found: Given, state: State, rule: Rule) -> None:
    """Raise for items with classes among items without, or the other way round."""
    labelled = found.labels is not None
    if found.rows and state.labelled is not None and state.labelled != labelled:
        raise TableError(
            f"SafeIndex.add: items must have classes or not, all alike; those of the index have "
            f"{'some' if state.labelled else 'none'}, {found.name} has {'some' if labelled else 'none'}. "
            f"{'Give labels=...' if state.labelled else 'Leave the labels out'}."
        )
    if found.rows and rule.per_class and not labelled:
        rule.thresholds(np.zeros(1), None)  # raises, and says what is missing
    if found.rows and _called_otherwise(found, state):
        raise TableError(
            f"SafeIndex.add: a number must mean one class; the classes of {found.name} have other names than those of "
            f"the items. Nothing was added: give labels=... with the numbers that the items have."
        )


def limits_of(
    found: Given, rule: Rule, state: State, refuse_above: float | Array | None
) -> tuple[Float64[np.ndarray, "n"], str]:
    """What each query's uncertainty is held against, and that in words."""
    if refuse_above is not None:
        return _given_limits(refuse_above, found.rows), "the threshold that was given"
    if not rule.refuses_queries:
        return np.full(found.rows, np.inf), "no threshold"
    if rule.per_class and found.labels is None:
        raise TableError(
            "SafeIndex.search: per_class=True needs the class of every query, true or predicted; got no labels. "
            "Give labels=..., refuse_above=index.thresholds.everywhere, or build the index with clean='items'."
        )
    if rule.per_class and _called_otherwise(found, state):
        raise TableError(
            f"SafeIndex.search: per_class=True needs queries of the items' classes; those of {found.name} have other "
            f"names, so that a number means two things. Give labels=... with the numbers that the items have, or one "
            f"threshold with refuse_above=... (--refuse-above U)."
        )
    limits = some(state).of(found.rows, found.labels)
    which = "the items of its class" if rule.per_class else "the items"
    return limits, f"the {rule.quantile:.4g} quantile of {which}"


def _called(provenance: Provenance | None, model_id: str) -> str:
    """A model by its name, if it has one, and by its hash: one name may have several weights and transforms."""
    name = provenance.model if provenance else None
    return f"{name}, {model_id}" if name else model_id


def _called_otherwise(found: Given, state: State) -> bool:
    """Whether the classes have other names than those of the items, where both are known."""
    came, there = found.origin.classes, state.origin.classes
    return bool(came and there and came != there)


def _check_score(by: str, came: Score, known: Score | None, judged_by: str | None) -> None:
    """Raise for another score than the one that judged the items, or one of other settings or another fit."""
    name = judged_by or (known or came).name
    if came.name != name:
        differing = f"{name}; got {came.name}"
    elif known is not None and came is not known and (came != known or not _alike(came, known)):
        differing = f"{known!r} as it was fitted for them; got {came!r} of other settings or another fit"
    else:
        return
    raise TableError(
        f"{by}: uncertainties must be of the score that the items have, {differing}. Values of two scores have no "
        f"common scale: leave it out, or build another index."
    )


def _given_limits(refuse_above: float | Array, rows: int) -> Float64[np.ndarray, "n"]:
    limits: Float64[np.ndarray, "..."] = to_tensor(refuse_above, "SafeIndex.search: refuse_above").double().numpy()
    if limits.ndim and limits.shape != (rows,):
        raise TableError(
            f"SafeIndex.search: refuse_above must be one number, or one a query, ({rows},); got {limits.shape}. Give "
            f"the same queries."
        )
    if np.isnan(limits).any():
        raise ValueRangeError("SafeIndex.search: refuse_above must be numbers; got NaN. Infinity refuses no query.")
    return np.full(rows, limits)


def _alike(one: Score, other: Score) -> bool:
    """Whether two scores of the same settings have learned the same, and so have the scores that they are made of."""
    learned = [(getattr(one, name, None), getattr(other, name, None)) for name in one.learned]
    parts = [(getattr(one, setting.name), getattr(other, setting.name)) for setting in fields(one)]  # type: ignore[arg-type]
    return all(_equal(*pair) for pair in learned) and all(
        _alike(*pair) for pair in parts if isinstance(pair[0], Score) and isinstance(pair[1], Score)
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
