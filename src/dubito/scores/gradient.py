"""How far an image would move the weights: norms of gradients in all layers, from the columns of the gradient probe.

    regrad               sum_l lambda_l s_l,  s_l one of
                         fisher       sum_y p_y ||grad_l log p_y||_2^2          the trace of its Fisher information
                         root         sum_y sqrt(p_y) ||grad_l log p_y||_2
                         expected_l1  sum_y p_y ||grad_l log p_y||_1            ExGrad
    predicted_gradient   sum_l lambda_l ||grad_l log p_yhat||_2^2,              yhat the predicted class

Wang & Ji 2024 (arXiv 2404.10124), REGrad: a class weighting by roots, layers weighed exponentially in their depth, and
gradients averaged over noisy copies of the image, which the probe does. Which class weighting is the paper's own, and
its beta, are OPEN: we could not find them stated. `fisher` is our default, because the theory is about it. ExGrad is
that of Igoe et al. 2022 (arXiv 2205.10439). The last layer alone is in `last_layer_gradient`. Layers weigh

    lambda_l = exp(beta (d_l + 1) / L) / exp(beta)

with d_l = 0 ... L - 1 the place of a layer in order of depth: the last has weight 1, and beta = 0 weighs all alike. A
truncated probe writes only the last layers. Those left out are not zero: a sum that would have weighed them is refused,
unless the probe left them out for weights below its tolerance, and they weigh no more here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast, final, get_args

import torch
from jaxtyping import Float64
from torch import Tensor

from dubito.choices import ClassWeighting, LayerWeighting
from dubito.errors import TableError, ValueRangeError
from dubito.table import Table
from dubito.types import Score, depth_weight
from dubito.validate import check_choice, check_number

SUFFIXES: dict[str, str] = {"fisher": "", "root": "_root", "expected_l1": "_l1"}
"""How the column of a class weighting is called, after the probe's name."""
BETA = 4.0
"""Of exponential weights, where nothing was chosen by `tune_regrad`: the first of many layers weighs about exp(-4)."""

Layers = LayerWeighting | Sequence[float]
"""How layers are weighed: by name, or a weight for each layer of the column."""


class LayersKept(NamedTuple):
    """Which layers of a model the columns of a gradient probe have.

    Attributes:
        depth: The place of each column among all layers, from 0.
        of: How many layers the model has.
        settings: Of the probe; of a table in memory, none.
    """

    depth: Sequence[int]
    of: int
    settings: Mapping[str, Any]

    @property
    def missing(self) -> list[int]:
        """The places that were left out."""
        return sorted(set(range(self.of)) - set(self.depth))

    def __str__(self) -> str:
        settings = ", ".join(
            f"{key}={self.settings[key]}" for key in ("last", "beta", "tolerance") if self.settings.get(key) is not None
        )
        return f"{len(self.depth)} of {self.of} layers" + (f" (its probe had {settings})" if settings else "")


class ScoreOfLayers(Score):
    """A weighted sum over the layers of one column of the gradient probe.

    Attributes:
        of: The probe's name; None for a score that can do without one.
        layers: How layers are weighed.
        beta: Of exponential weights.
        suffix: What follows the probe's name in that of the column.
    """

    of: str | None
    layers: Layers
    beta: float
    suffix: str

    own_probe = True

    @property
    def column(self) -> str:
        """The column to read."""
        return f"{self.of}{self.suffix}"

    def __post_init__(self) -> None:
        self.layers = check_layers(self.layers, self.name)
        hint = "0 weighs all layers alike; the larger, the more the last layers count."
        check_number(self.beta, "[0, inf)", by=self.name, what="beta", hint=hint)
        self.needs = (self.column,)

    @property
    def family(self) -> str | None:
        """The gradient probe."""
        return self.of

    def check_columns(self, table: Table) -> None:
        """Raise TableError also where the table lacks layers that are to be weighed."""
        super().check_columns(table)
        if self.of is not None:
            self.weights_of(table)

    def score_batch(self, batch: Table) -> Float64[Tensor, "n"]:
        """The weighted sum."""
        summed: Tensor = batch.whole(self.column).double() @ self.weights_of(batch)
        return summed

    def weights_of(self, table: Table) -> Float64[Tensor, "l"]:
        """The weight of each layer of a table's column; TableError where a layer to weigh is not there."""
        shape, where = table.shape(self.column), f"{self.name}.score: column '{self.column}'"
        if len(shape) != 2 or shape[1] == 0:
            raise TableError(
                f"{where} must come from the gradient probe, (n, l), one per layer; got shape {shape} in {table.name}."
            )
        where += f" of {table.name}"
        kept = layers_kept(table, str(self.of), shape[1], where)
        return layer_weights(self.layers, self.beta, kept, where)


@final
@dataclass
class REGrad(ScoreOfLayers):
    """How far an image would move the weights of all layers, whichever class it is of.

    Attributes:
        weighting: Of the classes: "fisher", "root" or "expected_l1". Which of them is the paper's is open.
        layers: "exponential": lambda_l = exp(beta (d + 1) / L) / exp(beta) at depth d = 0 ... L - 1. "uniform": all
            alike. "kept": all that a truncated probe has written, alike. Or a weight for each layer of the column.
        beta: Of exponential weights; 0 weighs all layers alike, a large one leaves the last alone. The paper's value is
            open, and 4 is no more than a start: `tune_regrad` chooses one for your model, on in-distribution images.
        of: The name of the gradient probe, which is that of its first column.
    """

    weighting: ClassWeighting = "fisher"
    layers: Layers = "exponential"
    beta: float = BETA
    of: str = "gradient"

    name = "regrad"
    kind = "epistemic"
    needs = ("gradient",)

    def __post_init__(self) -> None:
        check_choice(self.weighting, SUFFIXES, by=self.name, what="weighting")
        self.suffix = SUFFIXES[self.weighting]
        super().__post_init__()


@final
@dataclass
class PredictedGradient(ScoreOfLayers):
    """How far an image would move the weights of all layers if it were of the class that the model predicts.

    Attributes:
        layers: See `REGrad`.
        beta: See `REGrad`.
        of: See `REGrad`.
    """

    layers: Layers = "exponential"
    beta: float = BETA
    of: str = "gradient"

    name = "predicted_gradient"
    kind = "epistemic"
    needs = ("gradient_predicted",)
    suffix = "_predicted"


def layers_kept(table: Table, of: str, width: int, where: str) -> LayersKept:
    """What a table knows of its layers; one in memory has all of them."""
    probe = (table.provenance.probes if table.provenance else {}).get(of) or {}
    notes = probe.get("notes")
    if notes is None:
        return LayersKept(range(width), width, {})
    if len(notes["depth"]) != width:
        raise TableError(
            f"{where} has {width} layers, but its probe '{of}' has written {len(notes['depth'])}. "
            f"Extract it again, or pass the column in a table without a provenance."
        )
    return LayersKept(tuple(notes["depth"]), int(notes["of"]), probe.get("settings") or {})


def layer_weights(layers: Layers, beta: float, kept: LayersKept, where: str) -> Float64[Tensor, "l"]:
    """The weight of each layer that is there; TableError where a layer to weigh is not.

    >>> layer_weights("exponential", 2.0, LayersKept((0, 1), 2, {}), "here").tolist()  # exp(-1), 1
    [0.367..., 1.0]
    """
    if not isinstance(layers, str):
        if len(layers) != len(kept.depth):
            raise TableError(f"{where} has {kept}; got {len(layers)} weights. Pass one for each layer of the column.")
        return torch.tensor([*layers], dtype=torch.float64)
    if layers != "kept" and kept.missing:
        _check_truncated(layers, beta, kept, where)
    if layers != "exponential":
        return torch.ones(len(kept.depth), dtype=torch.float64)
    return torch.tensor([depth_weight(place, kept.of, beta) for place in kept.depth], dtype=torch.float64)


def check_layers(layers: str | Sequence[float], by: str, names: Sequence[str] = get_args(LayerWeighting)) -> Layers:
    """The setting, weights as a tuple of numbers; ValueRangeError for what cannot weigh."""
    if isinstance(layers, str):
        check_choice(layers, names, by=by, what="layers")
        return cast("Layers", layers)
    weights = tuple(float(weight) for weight in layers)
    if not any(weights) or not all(0 <= weight < math.inf for weight in weights):
        raise ValueRangeError(
            f"{by}: weights, one per layer, must be finite, none negative and not all zero; got {list(weights)}."
        )
    return weights


def _check_truncated(layers: str, beta: float, kept: LayersKept, where: str) -> None:
    """Raise TableError unless what was left out weighs as little here as the probe's tolerance allows."""
    repair = f"layers='kept' takes what is there, alike; or pass {len(kept.depth)} weights; or extract all layers."
    last, *by_weight = (kept.settings.get(key) is not None for key in ("last", "beta", "tolerance"))
    if layers != "exponential" or last or not all(by_weight):
        raise TableError(f"{where} has {kept}; layers='{layers}' weighs all {kept.of}. {repair}")
    largest = depth_weight(max(kept.missing), kept.of, beta)
    if beta < kept.settings["beta"] and largest >= kept.settings["tolerance"]:
        raise TableError(
            f"{where} has {kept}; with beta={beta:g} a layer that was left out has weight {largest:.2g}. "
            f"Choose beta={kept.settings['beta']:g} or more; {repair}"
        )
