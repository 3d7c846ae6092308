"""Gradients of the last layer alone, in closed form: from features and logits, without a backward pass.

    last_layer_gradient  fisher       sum_y p_y ||grad log p_y||_2^2
                         root         sum_y sqrt(p_y) ||grad log p_y||_2
                         expected_l1  sum_y p_y ||grad log p_y||_1              ExGrad
    grad_norm            -||grad_W KL(u || p)||_1 = -||p - u||_1 ||z||_1,       u uniform

ExGrad is that of Igoe et al. 2022 (arXiv 2205.10439). GradNorm: Huang et al. 2021 (arXiv 2110.00218), at temperature 1;
its norms are larger for in-distribution images, so here the sign is turned. With logits W z + b and p = softmax,
grad_W log p_y = (e_y - p) z^T and grad_b log p_y = e_y - p, so

    ||grad log p_y||_2^2 = ||e_y - p||_2^2 (||z||_2^2 + 1)      ||e_y - p||_2^2 = (1 - p_y)^2 + sum_(j != y) p_j^2
    ||grad log p_y||_1   = ||e_y - p||_1 (||z||_1 + 1)          ||e_y - p||_1   = 2 (1 - p_y)
    fisher               = sum_y p_y (1 - p_y) (||z||_2^2 + 1)
    expected_l1          = sum_y 2 p_y (1 - p_y) (||z||_1 + 1)

without the 1 if the layer has no bias. If the head is not one linear layer of the feature, these are the gradients of a
linear layer with the same outputs. Confident rows keep their order: 1 - p_y is the float64 sum of the other
probabilities.
"""

from dataclasses import dataclass, field
from typing import final, get_args

from jaxtyping import Float, Float64
from torch import Tensor

from dubito.choices import ClassWeighting
from dubito.scores.gradient import Layers, ScoreOfLayers, check_layers
from dubito.scores.softmax import check_two_classes
from dubito.table import Table
from dubito.types import Score
from dubito.validate import check_choice

_LAST_LAYER: tuple[str, ...] = ("feature", "logit")


def last_layer_gradient(
    feature: Float[Tensor, "n d"],
    logits: Float[Tensor, "n c"],
    weighting: ClassWeighting = "fisher",
    *,
    bias: bool = True,
) -> Float64[Tensor, "n"]:
    """The weighted norm of grad log p_y over classes, for the last layer's weights and, with `bias`, its bias.

    >>> import torch
    >>> z, logits = torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2)
    >>> last_layer_gradient(z, logits).item()  # (1/4 + 1/4) (1 + 4 + 1)
    3.0
    """
    p, others = _probabilities(logits, "last_layer_gradient")
    if weighting == "expected_l1":
        return 2 * (p * others).sum(-1) * _norm(feature, 1, bias=bias)
    squared = _norm(feature, 2, bias=bias)
    if weighting == "fisher":
        return (p * others).sum(-1) * squared
    # sum_(j != y) p_j^2 for every y: only for the largest p_y would a difference lose digits.
    squares = p.square()
    top, rest = _top_and_rest(p)
    of_others = (squares.sum(-1, keepdim=True) - squares).scatter(-1, top, rest.square().sum(-1, keepdim=True))
    return (p * (others.square() + of_others)).sqrt().sum(-1) * squared.sqrt()


def grad_norm(
    feature: Float[Tensor, "n d"], logits: Float[Tensor, "n c"], *, bias: bool = False
) -> Float64[Tensor, "n"]:
    """||grad KL(u || softmax)||_1 of the last layer, as the authors have it: larger for in-distribution images.

    >>> import torch
    >>> grad_norm(torch.tensor([[1.0, -2.0]]), torch.tensor([[80.0, 0.0]])).item()  # (1/2 + 1/2) 3
    3.0
    """
    p, _ = _probabilities(logits, "grad_norm")
    return (p - 1 / p.shape[-1]).abs().sum(-1) * _norm(feature, 1, bias=bias)


@final
@dataclass
class LastLayerGradient(Score):
    """How far an image would move the last layer, whichever class it is of: REGrad without any backward pass.

    Attributes:
        weighting: Of the classes: "fisher", "root" or "expected_l1" (ExGrad).
        bias: Whether the last layer has one.
    """

    weighting: ClassWeighting = "fisher"
    bias: bool = True

    name = "last_layer_gradient"
    kind = "epistemic"
    needs = _LAST_LAYER

    def __post_init__(self) -> None:
        check_choice(self.weighting, get_args(ClassWeighting), by=self.name, what="weighting")

    def score_batch(self, batch: Table) -> Float64[Tensor, "n"]:
        """In closed form."""
        return last_layer_gradient(batch.feature, batch.logit, self.weighting, bias=self.bias)


@final
@dataclass
class GradNorm(ScoreOfLayers):
    """How little the weights would move if an image had no class: minus the norm of the gradient towards uniform.

    Attributes:
        of: None: the last layer alone, as in the paper. The name of a gradient probe (uniform=True): all its layers.
        bias: Whether the last layer's bias counts too; not in the paper. A probe's layers always have theirs.
        layers: Of the probe's layers: "uniform", "kept" for those of a truncated probe, or a weight for each.
    """

    of: str | None = None
    bias: bool = False
    layers: Layers = "uniform"
    beta: float = field(default=0.0, init=False, repr=False)

    name = "grad_norm"
    kind = "epistemic"
    needs = _LAST_LAYER
    suffix = "_uniform"
    own_probe = False

    def __post_init__(self) -> None:
        self.layers = check_layers(self.layers, self.name, ("uniform", "kept"))
        if self.of is not None:
            self.needs = (self.column,)

    def score_batch(self, batch: Table) -> Float64[Tensor, "n"]:
        """Minus the norm."""
        if self.of is not None:
            return -super().score_batch(batch)
        return -grad_norm(batch.feature, batch.logit, bias=self.bias)


def _probabilities(logits: Float[Tensor, "n c"], by: str) -> tuple[Float64[Tensor, "n c"], Float64[Tensor, "n c"]]:
    """p, and 1 - p as the sum of the others, which a subtraction from almost one would lose."""
    p = check_two_classes(logits, by).softmax(-1)
    top, rest = _top_and_rest(p)
    return p, (1 - p).scatter(-1, top, rest.sum(-1, keepdim=True))


def _top_and_rest(p: Float64[Tensor, "n c"]) -> tuple[Tensor, Float64[Tensor, "n c"]]:
    """Where the largest probability stands (n, 1), and p without it."""
    top = p.argmax(-1, keepdim=True)
    return top, p.scatter(-1, top, 0.0)


def _norm(feature: Float[Tensor, "n d"], order: int, *, bias: bool) -> Float64[Tensor, "n"]:
    """||z||_1 or ||z||_2^2, and one more for the bias, whose input is always 1."""
    return feature.double().abs().pow(order).sum(-1) + float(bias)
