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

`Classifier.head` is one linear layer for every kind of head (several heads, convolutions): nothing is to be recovered.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, final

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor, nn

from dubito.diagnosis._spread import Spread, directions, histogram, lengths, pair_cosines, spread
from dubito.diagnosis.simplex import Layer
from dubito.errors import ModelError, TableError, ValueRangeError
from dubito.table import Table
from dubito.types import Classifier, Json, finite


@final
@dataclass(frozen=True)
class Means:
    """The class means of a table beside the weights.

    Attributes:
        rows: How many rows.
        classes: How many classes have at least one.
        alignment: Cosine of each centred class mean with its centred weight; 1 is optimal.
        norm: Lengths of the class means.
        centred_norm: Lengths of the centred class means; equal is optimal.
        within_over_between: Variance around the class means (unbiased) over that of the class means; 0 is optimal. With
            few rows a class the means are noisy and it is too small. None without a class of two rows.
    """

    rows: int
    classes: int
    alignment: Spread
    norm: Spread
    centred_norm: Spread
    within_over_between: float | None


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
        from dubito.diagnosis.pictures import structure_figure  # noqa: PLC0415 (pictures know this module)

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

    >>> from dubito.diagnosis.simplex import simplex
    >>> found = structure(3 * simplex(10, 64, seed=0))
    >>> round(found.norm.mean, 6), round(found.cosine.mean, 6), round(found.distance, 6)
    (3.0, -0.111111, 0.0)
    """
    name, layer = _layer_of(of)
    weight, bias = layer.weight, layer.bias
    classes, width = weight.shape
    centred, centred_bias = weight - weight.mean(0), bias - bias.mean()
    if classes < 2 or float(centred.abs().max()) <= 1e-12 * float(weight.abs().max()):
        raise ValueRangeError(
            f"structure of {name}: {classes} classes with {'one' if classes < 2 else 'equal'} weights have no boundary "
            f"between them. Give a trained layer of two classes or more."
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
        means=None if table is None else _means(layer, table, name),
        histograms={"norm": histogram(norm), "bias": histogram(bias), "cosine": counts},
    )


def _layer_of(of: Classifier | nn.Linear | Tensor | tuple[Tensor, Tensor | None]) -> tuple[str, Layer]:
    """Its name, and the last layer in float64 on the CPU."""
    weight: Tensor
    bias: Tensor | None
    if isinstance(of, nn.Linear):
        name, weight, bias = "linear layer", of.weight, of.bias
    elif isinstance(of, Tensor):
        name, weight, bias = "weights", of, None
    elif isinstance(of, tuple):
        name, (weight, bias) = "weights", of
    else:
        name, (weight, bias) = of.name, _head(of)
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueRangeError(
            f"structure of {name}: weight must be (classes, features) and bias (classes); {tuple(weight.shape)} and "
            f"{None if bias is None else tuple(bias.shape)} came. torch.nn.Linear keeps them like that."
        )
    weight = finite(weight.detach().double().cpu(), f"weight of {name}")
    bias = weight.new_zeros(len(weight)) if bias is None else finite(bias.detach().double().cpu(), f"bias of {name}")
    return name, Layer(weight, bias)


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


def _means(layer: Layer, table: Table, name: str) -> Means:
    """One pass over the table: sums of features by class, and of squares."""
    table.require("feature", "label", by="structure")
    _check_table(layer, table, name)
    classes, width = layer.weight.shape
    total, count = torch.zeros(classes, width, dtype=torch.float64), torch.zeros(classes, dtype=torch.float64)
    squares, origin = 0.0, None
    for batch in table.batches("feature", "label"):
        z, label = batch.feature.double(), _known(batch.label, classes, table)
        origin = z.mean(0) if origin is None else origin  # sums around it lose no digits to a large common mean
        total.index_add_(0, label, z - origin)
        count += torch.bincount(label, minlength=classes)
        squares += float((z - origin).square().sum())
    seen = count > 0
    if int(seen.sum()) < 2 or origin is None:
        raise TableError(
            f"structure: {table.name} has rows of {int(seen.sum())} classes; class means need two or more. "
            f"Give a table of labelled images of several classes."
        )
    mean = total[seen] / count[seen, None]
    finite(mean, f"class means of {table.name}")
    centred = mean - mean.mean(0)
    freedom = len(table) - len(mean)
    within = max(squares - float(count[seen] @ mean.square().sum(1)), 0.0) / max(freedom, 1)
    between = float(centred.square().sum(1).mean())
    return Means(
        rows=len(table),
        classes=len(mean),
        alignment=spread((directions(centred) * directions(layer.weight - layer.weight.mean(0))[seen]).sum(1)),
        norm=spread(lengths(mean + origin)),
        centred_norm=spread(lengths(centred)),
        within_over_between=within / between if freedom > 0 and between > 0 else None,
    )


def _check_table(layer: Layer, table: Table, name: str) -> None:
    """Raise TableError unless the table can be of this layer."""
    width = table.shape("feature")[1]
    if width != layer.weight.shape[1] or table.label_space != "model":
        raise TableError(
            f"structure: {table.name} has features of width {width} and labels of {table.label_space} classes; {name} "
            f"reads {layer.weight.shape[1]} and needs labels of the model's classes. Give a table of the same model."
        )
    if "logit" not in table or len(table) == 0:
        return
    few = table.select("feature", "logit").rows(slice(0, 64))
    off = (
        (layer.logits(few.feature) - few.logit.double()).abs().max() if few.logit.shape[1] == len(layer.bias) else None
    )
    if off is None or float(off) > 1e-2 * (1 + float(few.logit.abs().max())):
        raise TableError(
            f"structure: the logits of {table.name} are not those of {name} on its features. "
            f"Give a table that was extracted with this model, or leave the logits out."
        )


def _known(label: Int[Tensor, "n"], classes: int, table: Table) -> Int[Tensor, "n"]:
    if bool(((label < 0) | (label >= classes)).any()):
        raise TableError(
            f"structure: labels of {table.name} must be 0 to {classes - 1}; {int(label.min())} to {int(label.max())} "
            f"came. Leave out rows without a class of the model."
        )
    return label


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
