"""How are a classifier's decision boundaries arranged? Its last layer beside the optimal structure.

    ||w_i|| all equal,   b_i = 0,   cos(w_i, w_j) = -1/(c-1);   class means along w_i, of equal length, variance small

Pearce et al. 2021 (arXiv 2106.04972), def. 2, section 4.2 and Fig. 4. Softmax does not change when one vector is added
to all weights, or one number to all biases. So everything is reported twice: of the weights as they are, and centred,
w_i - mean_j w_j. The paper has no single figure for the distance from the optimum. Ours, of the centred weights V:

    distance = sqrt( || V V^T / ||V V^T||  -  (I - 11^T/c) / sqrt(c-1) ||^2  +  (||b - mean b|| / ||V||)^2 )

in Frobenius norms: how far the Gram matrix is from that of a simplex, whatever the scale, and the centred biases beside
the weights. It is zero exactly where softmax is that of an optimal structure. The first part is at most
sqrt(2 - 2/sqrt(c-1)) (all weights on one line), about sqrt(2 - 2 sqrt(d/(d+c))) for random weights, and with fewer than
c - 1 features at least sqrt(2 - 2 sqrt(d/(c-1))). Two classes are always optimal in it: only w_1 - w_2 counts.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dubito.errors import ValueRangeError
from dubito.explain._spread import Spread, histogram, lengths, pair_cosines, spread
from dubito.explain.class_means import Means, class_means
from dubito.explain.last_layer import last_layer
from dubito.table import Table
from dubito.types import Classifier, Json


@final
@dataclass(frozen=True)
class Structure:
    """What `structure` found: print it, draw it, or take it as JSON.

    Attributes:
        name: Whose last layer.
        classes: c.
        width: d.
        norm: Lengths of the weights.
        bias: The biases.
        cosine: Cosines of all pairs; a weight of length zero has no direction and counts as 0.
        centred_norm: Lengths of the centred weights.
        centred_bias: The biases minus their mean.
        centred_cosine: Cosines of all pairs of centred weights; their mean must be about -1/(c-1), watch std.
        common: Which share of the weights' length (root of squares) is one vector that all have in common.
        weight_distance: The first part of the distance.
        bias_distance: The second.
        random_distance: What the first would be for random weights of this size.
        means: Of the table, if one was given.
        histograms: Of norm, bias and cosine, each (values, counts), for Fig. 4.
    """

    name: str
    classes: int
    width: int
    norm: Spread
    bias: Spread
    cosine: Spread
    centred_norm: Spread
    centred_bias: Spread
    centred_cosine: Spread
    common: float
    weight_distance: float
    bias_distance: float
    random_distance: float
    means: Means | None
    histograms: dict[str, tuple[Tensor, Tensor]] = field(repr=False, compare=False)

    @property
    def optimal_cosine(self) -> float:
        """-1/(c-1)."""
        return -1 / (self.classes - 1)

    @property
    def distance(self) -> float:
        """To the optimal structure: 0 is optimal."""
        return math.hypot(self.weight_distance, self.bias_distance)

    def to_json(self) -> Json:
        """Plain numbers, without the histograms."""
        plain = {key: value for key, value in vars(self).items() if key != "histograms"}
        spreads = {key: asdict(value) for key, value in plain.items() if isinstance(value, Spread | Means)}
        return {**plain, **spreads, "optimal_cosine": self.optimal_cosine, "distance": self.distance}

    def sentences(self) -> list[str]:
        """What the numbers mean."""
        return list(_sentences(self))

    def figure(self) -> Any:
        """Fig. 4 as a matplotlib figure: histograms of length, bias and cosine, with the optimum as a line."""
        from dubito.explain.pictures import structure_figure  # noqa: PLC0415 (pictures know this module)

        return structure_figure(self)

    def __str__(self) -> str:
        lines = [["", "mean", "std", "lowest", "highest", "optimal"]]
        for name, of, optimum in _lines(self):
            cells = (of.mean, of.std, of.low, of.high)
            lines.append([name, *(f"{value:.4g}" for value in cells), optimum])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        return "\n".join([f"{self.name}: {self.classes} classes, {self.width} features", *table, *self.sentences()])


def structure(
    of: Classifier | nn.Linear | Tensor | tuple[Tensor, Tensor | None], table: Table | None = None
) -> Structure:
    """Measure the last layer of a classifier, and the class means of a table beside it.

    Args:
        of: A classifier, a linear layer, a weight (c, d), or a weight with its bias.
        table: With feature and label: adds alignment, lengths and variances of class means. The labels must be the
            model's own classes. If the table has logits, too, they must be those of this layer.

    >>> from dubito.explain.simplex import simplex
    >>> found = structure(3 * simplex(10, 64, seed=0))
    >>> round(found.norm.mean, 6), round(found.cosine.mean, 6), round(found.distance, 6)
    (3.0, -0.111111, 0.0)
    """
    name, layer = last_layer(of)
    weight, bias = layer.weight, layer.bias
    classes, width = weight.shape
    centred, centred_bias = weight - weight.mean(0), bias - bias.mean()
    if classes < 2 or float(centred.abs().max()) <= 1e-12 * float(weight.abs().max()):
        raise ValueRangeError(
            f"structure of {name}: "
            + ("a layer of one class has" if classes < 2 else f"{classes} classes with equal weights have")
            + " no boundary between them. Give a trained layer of two classes or more."
        )
    norm, length = lengths(weight), float(torch.linalg.matrix_norm(centred))
    cosine, counts = pair_cosines(weight)
    return Structure(
        name=name,
        classes=classes,
        width=width,
        norm=spread(norm),
        bias=spread(bias),
        cosine=cosine,
        centred_norm=spread(lengths(centred)),
        centred_bias=spread(centred_bias),
        centred_cosine=pair_cosines(centred)[0],
        common=float(weight.mean(0).norm()) * math.sqrt(classes) / float(torch.linalg.matrix_norm(weight)),
        weight_distance=_gram_distance(centred),
        bias_distance=float(centred_bias.norm()) / length,
        random_distance=math.sqrt(2 - 2 * math.sqrt(width / (width + classes))),
        means=None if table is None else class_means(layer, table, name),
        histograms={"norm": histogram(norm), "bias": histogram(bias), "cosine": counts},
    )


def _gram_distance(centred: Float[Tensor, "c d"]) -> float:
    """From the eigenvalues of the smaller Gram matrix; those of the simplex are c - 1 equal ones and a zero."""
    classes, width = centred.shape
    gram = centred @ centred.T if classes <= width else centred.T @ centred
    values: Tensor = torch.linalg.eigvalsh(gram).flip(0)[: classes - 1]
    values, equal = values / values.norm(), 1 / math.sqrt(classes - 1)
    return math.sqrt(float((values - equal).square().sum()) + (classes - 1 - len(values)) * equal**2)


def _lines(of: Structure) -> Iterator[tuple[str, Spread, str]]:
    yield "length of weights", of.norm, "all equal"
    yield "length, centred", of.centred_norm, "all equal"
    yield "bias", of.bias, "0"
    yield "cosine", of.cosine, f"{of.optimal_cosine:.4g}"
    yield "cosine, centred", of.centred_cosine, f"{of.optimal_cosine:.4g}"
    if of.means is not None:
        yield "mean along weight", of.means.alignment, "1"
        yield "length of means, centred", of.means.centred_norm, "all equal"


def _sentences(of: Structure) -> Iterator[str]:
    most, least = math.sqrt(2 - 2 / math.sqrt(of.classes - 1)), math.sqrt(2 - 2 * math.sqrt(_share(of)))
    yield (
        f"Distance to the optimal structure: {of.distance:.3f} (weights {of.weight_distance:.3f}, biases "
        f"{of.bias_distance:.3f}). 0 is optimal; random weights of this size have {of.random_distance:.3f}, weights on "
        f"one line {most:.3f}."
    )
    if least > 0:
        yield f"{of.width} features are too few for {of.classes} classes: the distance cannot be below {least:.3f}."
    unequal = of.centred_norm.std / of.centred_norm.mean
    yield f"Centred weights differ in length by {unequal:.1%} (standard deviation over mean)."
    pairs = of.centred_cosine
    yield (
        f"Cosines of pairs are {of.cosine.mean:.3f} on average, optimal is {of.optimal_cosine:.3f}; "
        f"centred, they spread by {pairs.std:.3f}."
    )
    if of.classes > 2 and pairs.skew > 0.5:
        yield f"A few pairs are far more alike (up to {pairs.high:.2f}): classes that share features."
    if of.common > 0.3:
        yield f"{of.common:.0%} of the weights' length is one common vector, which softmax does not see."
    if of.means is not None:
        yield f"Class means point along their weights with a cosine of {of.means.alignment.mean:.3f} on average." + (
            f" Features vary {of.means.within_over_between:.2f} times as much within classes as between them."
            if of.means.within_over_between is not None
            else ""
        )


def _share(of: Structure) -> float:
    """Of the dimensions that the optimal structure needs, how many there are."""
    return min(of.width / (of.classes - 1), 1.0)
