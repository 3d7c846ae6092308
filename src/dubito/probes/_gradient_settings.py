"""What the gradient probe may be asked, and how a request can be wrong."""

import math
import re
from collections.abc import Sequence
from typing import get_args

from dubito.choices import ClassWeighting, GradientMethod
from dubito.errors import ValueRangeError
from dubito.table import ENSEMBLES, WRITERS, ensembles_in


def check_classes(method: str, classes: int, draws: int, weightings: Sequence[str]) -> None:
    """Raise ValueRangeError where there is nothing to differentiate, or no way to."""
    if method not in get_args(GradientMethod):
        raise ValueRangeError(f"gradient: method must be one of {', '.join(get_args(GradientMethod))}; got '{method}'.")
    if method in ("top", "combined") and classes < 1:
        raise ValueRangeError(f"gradient: classes must be at least 1; got {classes}. For none, use method='signs'.")
    if draws < (1 if method in ("signs", "combined") else 0):
        raise ValueRangeError(f"gradient: draws must be at least 1; got {draws}. For none, use method='top'.")
    if isinstance(weightings, str):
        raise ValueRangeError(f"gradient: weightings must be a list; got '{weightings}'. Write ['{weightings}'].")
    for weighting in weightings:
        if weighting not in get_args(ClassWeighting):
            raise ValueRangeError(
                f"gradient: weightings are {', '.join(get_args(ClassWeighting))}; got '{weighting}'. Choose of those."
            )
        if weighting != "fisher" and method not in ("exact", "top"):
            raise ValueRangeError(
                f"gradient: weighting '{weighting}' is a sum of norms, which random signs do not estimate. "
                f"Use method='exact', or 'top' for the most likely classes."
            )


def check_layers(last: int | None, beta: float | None, tolerance: float) -> None:
    """Raise ValueRangeError where it is not clear which layers count."""
    if last is not None and (last < 1 or beta is not None):
        raise ValueRangeError(f"gradient: give either last, at least 1, or beta; got last={last} and beta={beta}.")
    if beta is not None and not (0 <= beta < math.inf and 0 < tolerance <= 1):
        raise ValueRangeError(
            f"gradient: beta must be finite and not negative, and tolerance above 0 and at most 1; beta={beta} and "
            f"tolerance={tolerance} came."
        )


def check_copies(copies: int, sigma: float) -> None:
    """Raise ValueRangeError for noise that is none."""
    if copies < 0 or (copies and not 0 < sigma < math.inf):
        raise ValueRangeError(
            f"gradient: copies must be 0 or more, and sigma positive; got copies={copies} and sigma={sigma}."
        )


def check_name(name: str) -> None:
    """Raise ValueRangeError for what is no name of a probe, or one that others have."""
    if not re.fullmatch("[a-z][a-z_]*", name):
        raise ValueRangeError(f"gradient: a name has small letters and underscores; got '{name}'.")
    taken = {"forward", *WRITERS, *ENSEMBLES, *ensembles_in([name])} - {"gradient"}
    if name in taken:
        raise ValueRangeError(
            f"gradient: '{name}' is what another probe or column is called. Choose another name, such as gradient_late."
        )
