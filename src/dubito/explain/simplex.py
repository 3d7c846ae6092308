"""The optimal decision boundary structure, and structures that are not optimal: last layers to compare with or freeze.

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

import torch
from jaxtyping import Float
from torch import Tensor

from dubito.errors import ValueRangeError
from dubito.explain.last_layer import Layer

GAP = 10.0
"""By how many logits a class of a stack can lead its neighbours, and the first class of `shifted` leads at the origin:
enough for a probability of 0.9999."""


def simplex(classes: int, width: int, *, seed: int | None = None) -> Float[Tensor, "c d"]:
    """The optimal structure: unit vectors that sum to zero, every pair at the cosine -1/(classes - 1).

    Args:
        classes: How many vectors, at least two.
        width: Their dimensions, at least classes - 1.
        seed: Turns them at random. None keeps the first classes - 1 axes, which is easier to read.

    >>> (simplex(3, 2) @ simplex(3, 2).T).round(decimals=6).tolist()
    [[1.0, -0.5, -0.5], [-0.5, 1.0, -0.5], [-0.5, -0.5, 1.0]]
    """
    return _placed(_corners(_several(classes, 2, "simplex")), width, seed, "simplex")


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
    if structure not in STRUCTURES:
        raise ValueRangeError(
            f"layer: structure must be one of {', '.join(STRUCTURES)}; got '{structure}'. Choose one of those."
        )
    weight, bias = STRUCTURES[structure](_several(classes, 3, "layer"))
    return Layer(scale * _placed(weight, width, seed, f"layer '{structure}'"), scale * bias)


def _optimal(classes: int) -> Layer:
    """Def. 2."""
    return Layer(_corners(classes), _no_bias(classes))


def _sandwich(classes: int) -> Layer:
    """Prop. 5: [0, 1], [-1, 0], [1, 0]. OPEN for more classes: evenly over a half circle, the middle one first."""
    return _fan(classes, math.pi)


def _narrow(classes: int) -> Layer:
    """OPEN, ours: evenly over a quarter of a circle, the middle one first."""
    return _fan(classes, math.pi / 2)


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


def _clustered(classes: int) -> Layer:
    """OPEN, ours: the last class alone, all others within 15 degrees of the opposite direction."""
    around = torch.sin(torch.tensor(math.pi / 12, dtype=torch.float64)) * _corners(classes - 1)
    along = torch.full((classes - 1, 1), math.cos(math.pi / 12), dtype=torch.float64)
    alone = torch.zeros(1, classes - 1, dtype=torch.float64)
    alone[0, 0] = -1
    return Layer(torch.cat([torch.cat([along, around], dim=1), alone]), _no_bias(classes))


def _unequal(classes: int) -> Layer:
    """OPEN, ours: the directions of the simplex, lengths from 1/2 to 2 in equal ratios."""
    length = torch.logspace(-1, 1, classes, base=2.0, dtype=torch.float64)
    return Layer(length[:, None] * _corners(classes), _no_bias(classes))


STRUCTURES: dict[str, Callable[[int], Layer]] = {
    "optimal": _optimal,
    "sandwich": _sandwich,
    "stack": _stack,
    "shifted": _shifted,
    "narrow": _narrow,
    "clustered": _clustered,
    "unequal": _unequal,
}
"""What `layer` can build, by name."""


def _corners(classes: int) -> Float[Tensor, "c m"]:
    """The simplex in as few dimensions as it needs, from the Helmert matrix."""
    steps = torch.arange(1, classes, dtype=torch.float64)
    helmert = torch.ones(classes - 1, classes, dtype=torch.float64).tril()
    helmert.diagonal(1).copy_(-steps)
    helmert /= (steps * (steps + 1)).sqrt()[:, None]
    return math.sqrt(classes / (classes - 1)) * helmert.T


def _fan(classes: int, angle: float) -> Layer:
    """Unit vectors in a plane, evenly over an angle around [0, 1]; the middle one first, as in prop. 5."""
    turn = torch.linspace(math.pi / 2 + angle / 2, math.pi / 2 - angle / 2, classes, dtype=torch.float64)
    middle = classes // 2
    turn = torch.cat([turn[middle : middle + 1], turn[:middle], turn[middle + 1 :]])
    return Layer(torch.stack([turn.cos(), turn.sin()], dim=1), _no_bias(classes))


def _placed(weight: Float[Tensor, "c m"], width: int, seed: int | None, by: str) -> Float[Tensor, "c d"]:
    """The same vectors in more dimensions: on the first axes, or turned at random."""
    classes, needed = weight.shape
    if width < needed:
        raise ValueRangeError(
            f"{by}: {classes} classes need at least {needed} dimensions; width is {width}. "
            f"Take wider features or fewer classes."
        )
    if seed is None:
        return torch.nn.functional.pad(weight, (0, width - needed))
    draw = torch.randn(width, needed, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    axes, triangle = torch.linalg.qr(draw)
    turn: Tensor = axes * triangle.diagonal().sign()  # without the signs, some turns would be likelier than others
    return weight @ turn.T


def _no_bias(classes: int) -> Float[Tensor, "c"]:
    return torch.zeros(classes, dtype=torch.float64)


def _several(classes: int, least: int, by: str) -> int:
    if classes < least:
        raise ValueRangeError(
            f"{by}: classes must be at least {least}; got {classes}. "
            + ("For two, the optimal structure is simplex(2, width)." if least > 2 else "One class has no boundary.")
        )
    return classes
