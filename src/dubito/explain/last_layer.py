"""The last layer of a classifier, from the feature to the logits, W z + b; and layers to compare it with or to freeze.

The optimal decision boundary structure:

    ||w_i|| = 1,   b_i = 0,   cos(w_i, w_j) = -1/(c-1),   sum_i w_i = 0,   in d >= c - 1 dimensions

Pearce et al. 2021 (arXiv 2106.04972), def. 2 and theorem 3: c corners of a regular simplex. With the Helmert matrix H
(orthonormal rows, all orthogonal to 1) they are the rows of sqrt(c/(c-1)) H^T. `layer` builds that one and the
structures of the counterfactual experiment (Fig. 5). Fig. 5 is a drawing: the text gives numbers for 'sandwich' only
(prop. 5) and names 'stack'; all that is ours is marked OPEN where it is built.

Not among them is a narrow cone of weights around one common direction. It looks different from the simplex, but softmax
does not change when one vector is added to all weights: such a cone is the optimal structure with shorter weights.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from dubito.errors import ModelError, TableError, ValueRangeError
from dubito.models.load import as_classifier
from dubito.table import Table
from dubito.types import Classifier, finite
from dubito.validate import check_choice, check_number

GAP = 10.0
"""The lead in logits of a class of a stack, and of the first of `shifted` at the origin: a probability of 0.9999."""


class Layer(NamedTuple):
    """A last layer: weight (c, d) and bias (c)."""

    weight: Float[Tensor, "c d"]
    bias: Float[Tensor, "c"]

    def logits(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n c"]:
        """W z + b, in float64: regions and fields need the order of nearly equal confidences."""
        width, reads = z.shape[1], self.weight.shape[1]
        if width != reads:
            raise ValueRangeError(
                f"Layer.logits: features must be {reads} wide; got {width}. Pass rows of features of the same model."
            )
        return z.double() @ self.weight.double().T + self.bias.double()

    def check_table(self, table: Table, *, by: str, name: str) -> None:
        """Raise TableError unless the layer reads features as wide as those of a table."""
        table.require("feature", by=by)
        width, reads = table.shape("feature")[1], self.weight.shape[1]
        if width != reads:
            raise TableError(
                f"{by}: {table.name} has features of width {width}; {name} reads {reads}. Pass one of the same model."
            )


def last_layer(of: Classifier | str | nn.Linear | Tensor | tuple[Tensor, Tensor | None]) -> tuple[str, Layer]:
    """Its name, and the last layer in float64 on the CPU.

    Args:
        of: A classifier or its name, a linear layer, a weight (c, d), or a weight with its bias; without one it is
            zero.

    >>> name, layer = last_layer(torch.eye(2))
    >>> name, layer.bias.tolist()
    ('weights', [0.0, 0.0])
    """
    weight: Tensor
    bias: Tensor | None
    if isinstance(of, nn.Linear):
        name, weight, bias = "linear layer", of.weight, of.bias
    elif isinstance(of, Tensor):
        name, weight, bias = "weights", of, None
    elif isinstance(of, tuple):
        name, (weight, bias) = "weights", of
    else:
        model = as_classifier(of, by="last_layer")
        name, (weight, bias) = model.name, _head(model)
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueRangeError(
            f"last layer of {name}: weight must be (classes, features) and bias (classes); got {tuple(weight.shape)} "
            f"and {None if bias is None else tuple(bias.shape)}. torch.nn.Linear keeps them like that."
        )
    weight = finite(weight.detach().double().cpu(), f"weight of {name}")
    bias = weight.new_zeros(len(weight)) if bias is None else finite(bias.detach().double().cpu(), f"bias of {name}")
    return name, Layer(weight, bias)


def directions(rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Every row at length one; a row of zeros stays."""
    unit: Tensor = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-300)
    return unit


def cosines(z: Float[Tensor, "n d"], unit: Float[Tensor, "c d"]) -> Float[Tensor, "n c"]:
    """With unit vectors; rows of zeros have none and give 0."""
    cosine: Tensor = (z @ unit.T) / z.norm(dim=1).clamp(min=1e-300)[:, None]
    return cosine.clamp(-1, 1)


def simplex(classes: int, width: int, *, seed: int | None = None) -> Float[Tensor, "c d"]:
    """The optimal structure: unit vectors that sum to zero, every pair at the cosine -1/(classes - 1).

    Args:
        classes: How many vectors, at least two.
        width: Their dimensions, at least classes - 1.
        seed: Turns them at random. None keeps the first classes - 1 axes, which is easier to read.

    >>> (simplex(3, 2) @ simplex(3, 2).T).round(decimals=6).tolist()
    [[1.0, -0.5, -0.5], [-0.5, 1.0, -0.5], [-0.5, -0.5, 1.0]]
    """
    check_number(classes, "[2, inf)", by="simplex", what="classes", whole=True, hint="One class has no boundary.")
    return _placed(_corners(classes), width, seed, "simplex")


def layer(structure: str, classes: int = 3, width: int = 16, *, scale: float = 1.0, seed: int | None = 0) -> Layer:
    """A last layer with one of the STRUCTURES, to freeze or to look at.

    Args:
        structure: 'optimal', 'sandwich', 'stack', 'shifted', 'narrow', 'clustered' or 'unequal'.
        classes: How many, at least three.
        width: Of the features; 16 in the paper.
        scale: Multiplies weights and biases: how confident features of a given length can be.
        seed: Turns the layer at random; None does not. Turn it for features behind a ReLU: they are never negative, so
            that a class whose weights point along a negative axis could not win.
    """
    check_choice(structure, STRUCTURES, by="layer", what="structure")
    two = "For two, the optimal structure is simplex(2, width)."
    check_number(classes, "[3, inf)", by="layer", what="classes", whole=True, hint=two)
    _, (weight, bias) = last_layer(STRUCTURES[structure](classes))
    return Layer(scale * _placed(weight, width, seed, f"layer '{structure}'"), scale * bias)


def _head(model: Classifier) -> tuple[Tensor, Tensor | None]:
    """The head; a model that has not seen a batch yet is shown a black picture, if it takes pictures."""
    try:
        return model.head()
    except ModelError as unseen:
        try:
            picture = model.transform.prepare(Image.new("RGB", (256, 256)))
        except ModelError:
            raise unseen from None
        model.features(model.transform.finish(picture[None].to(model.device)))
        return model.head()


def _corners(classes: int) -> Float[Tensor, "c m"]:
    """The simplex in as few dimensions as it needs, from the Helmert matrix."""
    steps = torch.arange(1, classes, dtype=torch.float64)
    helmert = torch.ones(classes - 1, classes, dtype=torch.float64).tril()
    helmert.diagonal(1).copy_(-steps)
    helmert /= (steps * (steps + 1)).sqrt()[:, None]
    return math.sqrt(classes / (classes - 1)) * helmert.T


def _fan(classes: int, angle: float) -> Tensor:
    """Unit vectors in a plane, evenly over an angle around [0, 1]; the middle one first, as in prop. 5."""
    turn = torch.linspace(math.pi / 2 + angle / 2, math.pi / 2 - angle / 2, classes, dtype=torch.float64)
    middle = classes // 2
    turn = torch.cat([turn[middle : middle + 1], turn[:middle], turn[middle + 1 :]])
    return torch.stack([turn.cos(), turn.sin()], dim=1)


def _stack(classes: int) -> Layer:
    """OPEN: parallel boundaries. The paper says no more than the name, and that it changed the weights in training.

    All weights lie on one line, w_i = a_i v with a_i evenly from -1 to 1. Only biases can give a class in the middle
    room of its own: b_i = -k a_i^2 / 2 puts the boundaries at v.z = k (a_i + a_(i+1)) / 2, and k is chosen so that a
    class leads its neighbours by GAP logits where it leads most.
    """
    place = torch.linspace(-1, 1, classes, dtype=torch.float64)
    step = 2 / (classes - 1)
    return Layer(place[:, None], -(GAP / step**2) * place.square())


def _shifted(classes: int) -> Layer:
    """OPEN, ours: the weights of the simplex with biases, so that boundaries do not meet at the origin.

    b = s W w_1 moves the meeting point to -s w_1: the origin, where features that nothing excites lie, is then far
    inside the first class. Its lead there, s (1 + 1/(classes - 1)), is GAP.
    """
    weight = _corners(classes)
    return Layer(weight, GAP * (classes - 1) / classes * (weight @ weight[0]))


def _clustered(classes: int) -> Tensor:
    """OPEN, ours: the last class alone, all others within 15 degrees of the opposite direction."""
    around = torch.sin(torch.tensor(math.pi / 12, dtype=torch.float64)) * _corners(classes - 1)
    along = torch.full((classes - 1, 1), math.cos(math.pi / 12), dtype=torch.float64)
    alone = torch.zeros(1, classes - 1, dtype=torch.float64)
    alone[0, 0] = -1
    return torch.cat([torch.cat([along, around], dim=1), alone])


def _unequal(classes: int) -> Tensor:
    """OPEN, ours: the directions of the simplex, lengths from 1/2 to 2 in equal ratios."""
    length = torch.logspace(-1, 1, classes, base=2.0, dtype=torch.float64)
    return length[:, None] * _corners(classes)


STRUCTURES: dict[str, Callable[[int], Tensor | Layer]] = {
    "optimal": _corners,  # def. 2
    # Prop. 5: [0, 1], [-1, 0], [1, 0]. OPEN for more classes: evenly over a half circle, the middle one first.
    "sandwich": lambda classes: _fan(classes, math.pi),
    "stack": _stack,
    "shifted": _shifted,
    # OPEN, ours: evenly over a quarter of a circle, the middle one first.
    "narrow": lambda classes: _fan(classes, math.pi / 2),
    "clustered": _clustered,
    "unequal": _unequal,
}
"""What `layer` can build, by name: weights, and biases where there are any."""


def _placed(weight: Float[Tensor, "c m"], width: int, seed: int | None, by: str) -> Float[Tensor, "c d"]:
    """The same vectors in more dimensions: on the first axes, or turned at random."""
    needed = weight.shape[1]
    hint = f"{len(weight)} classes need {needed} dimensions: take wider features or fewer classes."
    check_number(width, f"[{needed}, inf)", by=by, what="width", whole=True, hint=hint)
    if seed is None:
        return torch.nn.functional.pad(weight, (0, width - needed))
    draw = torch.randn(width, needed, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    axes, triangle = torch.linalg.qr(draw)
    turn: Tensor = axes * triangle.diagonal().sign()  # without the signs, some turns would be likelier than others
    return weight @ turn.T
