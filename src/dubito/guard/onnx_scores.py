"""Scores as plain tensor operations, without the checks and short cuts that depend on rows, which no graph can hold."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dubito.errors import GuardError
from dubito.scores import (
    Density,
    Energy,
    Entropy,
    GradNorm,
    LastLayerGradient,
    Mahalanobis,
    Margin,
    MaxLogit,
    MaxProbability,
    MentalModel,
    Neighbours,
    ScaledEntropy,
    Temperature,
    UncertaintyHead,
)
from dubito.scores.gaussians import Mixture
from dubito.scores.last_layer_gradient import grad_norm, last_layer_gradient
from dubito.scores.mahalanobis import mahalanobis
from dubito.scores.mental import mental_log_odds
from dubito.scores.softmax import energy, entropy, margin, max_logit, max_probability
from dubito.types import Score

Written = Callable[[Tensor | None, Tensor], Tensor]
"""A score as operations on features (n, d), where there are any, and logits (n, c)."""


def as_graph(name: str, score: Score, owner: nn.Module) -> Written:
    """A score as tensor operations; its own networks become parts of the module that is exported."""
    if isinstance(score, Temperature) and isinstance(score.score_of, tuple(_OF_LOGITS)):
        inner, scale = as_graph(name, score.score_of, owner), score.temperature_
        return lambda z, logits: inner(z, logits.double() / scale)
    if isinstance(score, UncertaintyHead):
        head = copy.deepcopy(score.module)
        owner.add_module("head", head)
        return lambda z, _: head(_there(z).float()).double()
    if isinstance(score, Density) and score.nonlinearity == "after":
        mixture, neurons = score.mixture, score.neurons_
        return lambda z, _: -_log_density(mixture, _prepared(_there(z), score)[:, neurons])
    if not isinstance(score, GradNorm) or score.of is None:
        for kind, make in (_OF_LOGITS | _OF_FEATURES).items():
            if isinstance(score, kind):
                return make(score)
    raise GuardError(
        f"guard.export_onnx: score '{name}' ({score.name}) cannot be written as an ONNX graph. Fit the guard with "
        f"those that can, by scores=[...]: {', '.join(WRITABLE)}."
    )


_OF_LOGITS: dict[type[Score], Callable[[Any], Written]] = {
    MaxProbability: lambda _: lambda _z, logits: max_probability(logits),
    Entropy: lambda _: lambda _z, logits: entropy(logits),
    Margin: lambda _: lambda _z, logits: margin(logits),
    MaxLogit: lambda _: lambda _z, logits: max_logit(logits),
    Energy: lambda score: lambda _z, logits: energy(logits, score.temperature),
    ScaledEntropy: lambda score: lambda _z, logits: entropy(score.scale * logits.double()),
}
_OF_FEATURES: dict[type[Score], Callable[[Any], Written]] = {
    GradNorm: lambda score: lambda z, logits: -grad_norm(_there(z), logits, bias=score.bias),
    LastLayerGradient: lambda score: (
        lambda z, logits: last_layer_gradient(_there(z), logits, score.weighting, bias=score.bias)
    ),
    MentalModel: lambda score: lambda z, _: mental_log_odds(_there(z), score.weights_),
    Mahalanobis: lambda score: lambda z, _: _nearest_class(_there(z).double(), score),
    Neighbours: lambda score: lambda z, _: _kth_distance(_there(z), score),
}
WRITABLE = (*(kind.name for kind in _OF_LOGITS | _OF_FEATURES), Temperature.name, Density.name, UncertaintyHead.name)
"""Names of the scores that a graph can hold: a temperature of one of logits, a density of features as they are read."""


def _nearest_class(z: Tensor, score: Mahalanobis) -> Tensor:
    """As `Mahalanobis.rows`."""
    nearest: Tensor = mahalanobis(z, score.means_, score.factor_).amin(1)
    if score.relative:
        nearest = nearest - mahalanobis(z, score.background_mean_[None], score.background_factor_)[:, 0]
    return nearest


def _kth_distance(z: Tensor, score: Neighbours) -> Tensor:
    """As `neighbours.kth_distance`, by products with the whole bank in place of faiss."""
    z = (z / torch.linalg.vector_norm(z, dim=-1, keepdim=True)).float()
    places = (z @ score.bank_.T).topk(score.k, dim=-1).indices[:, -1]
    distance: Tensor = torch.linalg.vector_norm(z.double() - score.bank_[places].double(), dim=-1)
    return distance


def _log_density(mixture: Mixture, z: Tensor) -> Tensor:
    """As `Mixture.log_density`, whose short cuts for full covariances depend on the rows, which a graph cannot."""
    if mixture.covariance != "full":
        return mixture.log_density(z)
    parts = torch.einsum("nd,kde->nke", z, mixture.factors) - torch.einsum("kd,kde->ke", mixture.means, mixture.factors)
    constants = mixture._constants()
    return (constants - 0.5 * parts.square().sum(-1)).logsumexp(1)


def _prepared(z: Tensor, score: Density) -> Tensor:
    """As the density sees features, without the checks that a graph cannot make."""
    return z.double() if score.space == "z" else (z.double() + score.offset).log()


def _there(z: Tensor | None) -> Tensor:
    assert z is not None, "scores of features are refused where there are none"  # noqa: S101 (our own invariant)
    return z
