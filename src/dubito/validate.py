"""Checks that several rooms need, each written once.

Every message says what was expected, what was passed and how to repair it. `by` is the function that the user called.
"""

import math
import types
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from dubito.choices import suggestion
from dubito.errors import DubitoError, DubitoWarning, ModelError, TableError, UnknownNameError, ValueRangeError
from dubito.table import Table, check_table, warn_of_probabilities
from dubito.table.overlap import example, shared_rows
from dubito.table.provenance import check_provenance
from dubito.types import Classifier

SHARED = 0.01
"""A few images may be the same by chance, in any large collection."""
_WORDS: dict[Any, dict[str, Any]] = {
    bool: {"true": True, "false": False, "yes": True, "no": False},
    type(None): {"none": None},
}
"""The texts that stand for the values of types with few of them."""
_SPOKEN: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", type(None): "none"}


def check_choice(value: Any, known: Collection[str], *, by: str, what: str) -> None:
    """Raise UnknownNameError unless a value is one of the known names.

    >>> check_choice("entropi", ["entropy", "margin"], by="evaluate", what="score")
    Traceback (most recent call last):
    dubito.errors.UnknownNameError: evaluate: score must be one of entropy, margin; got 'entropi'. Did you mean entropy?
    """
    if value not in known:
        names = ", ".join(known) or "none"
        raise UnknownNameError(f"{by}: {what} must be one of {names}; got {value!r}.{suggestion(str(value), known)}")


def check_number(
    value: Any,
    interval: str,
    *,
    by: str,
    what: str,
    whole: bool = False,
    hint: str = "",
    error: type[DubitoError] = ValueRangeError,
) -> None:
    """Raise unless a value is a finite number in an interval.

    Args:
        value: The value to check.
        interval: Where it must lie, such as "[2, inf)" or "(0, 1)"; a round bracket excludes its end.
        by: The function that the user called.
        what: The name of the argument.
        whole: Whether it must be an integer.
        hint: How to repair it, a sentence.
        error: What to raise.

    >>> check_number(1, "[2, inf)", by="dropout", what="passes", whole=True, hint="10 are usual.")
    Traceback (most recent call last):
    dubito.errors.ValueRangeError: dropout: passes must be a whole number, at least 2; got 1. 10 are usual.
    """
    low, high = map(float, interval[1:-1].split(","))
    above, below = interval.startswith("("), interval.endswith(")")
    number = not isinstance(value, bool) and isinstance(value, Integral if whole else Real) and math.isfinite(value)
    if number and (value > low if above else value >= low) and (value < high if below else value <= high):
        return
    percent = number and high == 1 < value <= 100 and not whole  # a share that is given in per cent
    hint = f"{value:g} % is {value / 100:g}. {hint}".strip() if percent else hint
    one_sided = f"{'above' if above else 'at least'} {low:g}"
    raise error(
        f"{by}: {what} must be a {'whole ' if whole else ''}number{',' if high == math.inf else ''} "
        f"{one_sided if high == math.inf else f'in {interval}'}; got {value!r}." + (f" {hint}" if hint else "")
    )


def check_seed(seed: Any, *, by: str) -> None:
    """Raise ValueRangeError unless random numbers of torch and numpy can start from a value.

    >>> check_seed(-1, by="map")
    Traceback (most recent call last):
    dubito.errors.ValueRangeError: map: seed must be a whole number, at least 0; got -1. 0 is usual.
    """
    check_number(seed, "[0, inf)", by=by, what="seed", whole=True, hint="0 is usual.")
    if seed >= 2**63:
        raise ValueRangeError(f"{by}: seed must be below 2**63; got {seed}. 0 is usual.")


def check_per_row(values: Any, table: Table, *, by: str, what: str) -> None:
    """Raise TableError unless an array has one value for each row of a table."""
    if tuple(values.shape) != (len(table),):
        raise TableError(
            f"{by}: {what} must have one value per row of {table.name}, ({len(table)},); got {tuple(values.shape)}. "
            f"Pass one for each of the same images, in their order."
        )


def check_classes(
    labels: Tensor,
    classes: int,
    *,
    by: str,
    of: str = "the labels",
    ids: Sequence[str] | None = None,
    hint: str = "Leave out rows without a class of the model.",
    error: type[DubitoError] = TableError,
) -> None:
    """Raise unless all labels are integers from 0 to classes - 1.

    Args:
        labels: The labels.
        classes: The number of classes.
        by: The function that the user called.
        of: What the labels are called.
        ids: Names of the images, of which the first with another label is reported.
        hint: How to repair it, a sentence.
        error: What to raise.

    >>> check_classes(torch.tensor([0, 3]), 3, by="nll")
    Traceback (most recent call last):
    dubito.errors.TableError: nll: the labels must be classes from 0 to 2; got 0 to 3. Leave out rows ...a class of...
    """
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise error(f"{by}: {of} must be integers from 0 to {classes - 1}; got {labels.dtype}. Cast them.")
    wrong = ((labels < 0) | (labels >= classes)).nonzero().flatten().tolist()
    if wrong:
        low, high = int(labels.min()), int(labels.max())
        hint += " Where -1 stands for no label: table.rows(table.label >= 0)." if low == -1 and ids is None else ""
        hint += " If they count from 1, subtract 1." if (low, high) == (1, classes) else ""
        got = f"{low} to {high}"
        got = got if ids is None else f"{int(labels[wrong[0]])} for image '{ids[wrong[0]]}'"
        raise error(f"{by}: {of} must be classes from 0 to {classes - 1}; got {got}. {hint}")


def settings_from_text(
    cls: type | Mapping[str, Any],
    texts: Mapping[str, str],
    *,
    by: str,
    parsers: Mapping[Any, Callable[[str], Any]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Settings of a dataclass from text, each converted to the type that its field declares.

    Understood are int, float, bool, str, Literal, None, unions, and tuples and lists, with items separated by commas.

    Args:
        cls: The dataclass, or by name the type annotations of the settings.
        texts: By field name, the text of its value.
        by: How errors call the settings.
        parsers: By type, how to convert text to types beyond these.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Settings:
    ...     loss: Literal["ranking", "l2"] = "ranking"
    ...     betas: tuple[float, float] = (0.8, 0.95)
    ...     batch: int | None = None
    >>> settings_from_text(Settings, {"loss": "l2", "betas": "0.9,0.999", "batch": "none"}, by="recipe")
    {'loss': 'l2', 'betas': (0.9, 0.999), 'batch': None}
    """
    kinds = dict(cls) if isinstance(cls, Mapping) else setting_types(cls)
    values = {}
    for name, text in texts.items():
        check_choice(name, kinds, by=by, what="a setting")
        try:
            values[name] = _from_text(text, kinds[name], parsers)
        except ValueError as error:
            raise ValueRangeError(f"{by}: {name} must be {describe_type(kinds[name])}; got '{text}'.") from error
    return values


def setting_types(cls: type) -> dict[str, Any]:
    """The settings of a dataclass by name, with their type annotations."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls) if field.init}


def check_bootstrap(*, by: str, confidence: Any = 0.95, resamples: Any = 1000, seed: Any = 0, least: int = 1) -> None:
    """Raise ValueRangeError for arguments that no bootstrap can have; a generator counts as a seed."""
    check_number(confidence, "(0, 1)", by=by, what="confidence", hint="0.95 is usual.")
    check_number(resamples, f"[{least}, inf)", by=by, what="resamples", whole=True, hint="1000 are usual.")
    if not isinstance(seed, torch.Generator):
        check_seed(seed, by=by)


def check_rows(table: Any, *, by: str, least: int = 1, what: str = "table") -> None:
    """Raise TableError for what is not a table, or for one with too few rows."""
    check_table(table, by=by, what=what)
    if len(table) < least:
        raise TableError(
            f"{by}: {what} needs at least {least} row{'s' if least > 1 else ''}; {table.name} has {len(table)}. "
            f"Pass a table with more rows."
        )


def check_model_first(model: object, other: object, *, by: str, what: str) -> None:
    """Raise ModelError where a call has the model in the place of what follows it.

    Args:
        model: What stands in the place of the model.
        other: What stands after it.
        by: The function that the user called.
        what: The name of the argument after the model.
    """
    models = (Classifier, nn.Module)
    if isinstance(other, models) and not isinstance(model, models):
        raise ModelError(f"{by}: model and {what} are swapped. Call {by}(model, {what}, ...).")


def check_same_model(
    table: Table, others: Mapping[str, Table | None], *, by: str, error: type[DubitoError] = TableError
) -> None:
    """Raise unless all tables come from one model with one transform, as far as that is known.

    Args:
        table: To compare with.
        others: By argument name; None is skipped.
        by: The function that the user called.
        error: What to raise.
    """
    for name, other in others.items():
        if other is None:
            continue
        both = f"{name} ({other.name}) and {table.name}"
        logits = "logit" in table and "logit" in other
        check_provenance(other.provenance, table.provenance, by=by, of=both, error=error, logits=logits)
        for column in ("logit", "feature"):
            if column in table and column in other and table.shape(column)[1:] != other.shape(column)[1:]:
                raise error(
                    f"{by}: column '{column}' of {name} ({other.name}) must be {table.shape(column)[1]} wide, as in "
                    f"{table.name}; got {other.shape(column)[1]}. Extract both with the same model."
                )


def check_disjoint(
    table: Table, other: Table, *, by: str, what: str, harm: str, error: type[DubitoError] = TableError
) -> None:
    """Raise where more than one percent of a table's images are in another table too, by content."""
    if text := _overlap(table, other, by=by, what=what, harm=harm, allowed=SHARED):
        raise error(text)


def warn_shared(table: Table, other: Table, *, by: str, what: str, harm: str, allowed: float = 0.0) -> None:
    """Warn of images that two tables share, by content, where they are more than a share of the first table."""
    if text := _overlap(table, other, by=by, what=what, harm=harm, allowed=allowed):
        warnings.warn(text, DubitoWarning, stacklevel=4)  # of the function that the user called


def has_model_labels(table: Table) -> bool:
    """Whether a table has logits, and labels that are the model's own classes: then predictions are right or wrong."""
    return "logit" in table and "label" in table and table.label_space == "model"


def check_model_labels(table: Table, *, by: str, columns: Sequence[str] = ("logit", "label")) -> None:
    """Raise TableError where labels are not the model's own classes: no prediction is right or wrong then.

    Warns of logits that are probabilities.
    """
    table.require(*columns, by=by)
    if "logit" in columns:
        warn_of_probabilities(table)
    if table.label_space != "model":
        raise TableError(
            f"{by} needs labels of the model's own classes; those of {table.name} are another set's. "
            f"Pass images of the classes that the model was trained for."
        )


def _overlap(table: Table, other: Table, *, by: str, what: str, harm: str, allowed: float) -> str | None:
    shared = shared_rows(table, other)
    if len(shared.here) <= allowed * len(table):
        return None
    return (
        f"{by}: at least {len(shared.here)} of the {len(table)} images of {table.name} are also in {what} "
        f"({other.name}){example(table, other, shared)}. {harm}"
    )


def _from_text(text: str, kind: Any, parsers: Mapping[Any, Callable[[str], Any]]) -> Any:
    """One value; ValueError where the text is none of that type."""
    origin, inner = get_origin(kind), get_args(kind)
    words = {str(word).lower(): word for word in inner} if origin is Literal else _WORDS.get(kind, {})
    if kind in parsers:
        return parsers[kind](text)
    if origin in (Union, types.UnionType):
        # None first, because any text is a list of texts; str last, because any text is one.
        for one in sorted(inner, key=lambda one: (one is str, one is not type(None))):
            with suppress(ValueError):
                return _from_text(text, one, parsers)
    elif origin in (tuple, list, Sequence):
        items = [part.strip() for part in text.split(",")] if text else []
        each = inner if origin is tuple and inner[-1] is not Ellipsis else inner[:1] * len(items)
        made = [_from_text(item, one, parsers) for item, one in zip(items, each, strict=True)]
        return made if origin is list else tuple(made)
    elif text.lower() in words:
        return words[text.lower()]
    elif not words and (kind is Any or isinstance(kind, type)):
        return text if kind is Any else kind(text)
    raise ValueError(text)


def describe_type(kind: Any) -> str:
    """What a text must be to become a value of a type, in words.

    >>> describe_type(int | None), describe_type(tuple[float, float])
    ('a whole number or none', '2 items separated by commas, each a number')
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        # Text cannot become a function or the like.
        spoken = [one for one in inner if isinstance(one, type) or get_origin(one) in (Literal, tuple, list, Sequence)]
        return " or ".join(map(describe_type, spoken))
    if origin in (tuple, list, Sequence):
        many = "some items" if origin is not tuple or inner[-1] is Ellipsis else f"{len(inner)} items"
        return f"{many} separated by commas, each {describe_type(inner[0])}"
    if origin is Literal or kind is bool:
        return f"one of {', '.join(_WORDS.get(kind) or (str(word).lower() for word in inner))}"
    return _SPOKEN.get(kind) or str(getattr(kind, "__name__", kind))
