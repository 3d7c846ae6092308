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

Of a table's features, class by class, with m_i the mean of class i; optimal are cosines of one, equal lengths and
little variance around m_i. Means over j are those of the classes that have rows, of m and of w alike:

    cos(m_i - mean_j m_j, w_i - mean_j w_j),   ||m_i - mean_j m_j||
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dubito.errors import TableError, ValueRangeError
from dubito.explain.last_layer import Layer, directions, last_layer
from dubito.explain.pictures import COLOURS, INK, bin_edges, new_figure
from dubito.result import Axes, Result
from dubito.table import Table
from dubito.types import Classifier, finite
from dubito.validate import check_classes, check_model_labels, check_rows

_ROWS, _COSINE_BINS, _BINS = 512, 400, 40


class Moments(NamedTuple):
    """Many numbers in four, and the skewness: positive where a few are far above the rest."""

    mean: float
    std: float
    low: float
    high: float
    skew: float


class ClassMeans(NamedTuple):
    """The class means of a table beside the weights.

    Attributes:
        rows: The number of rows.
        classes: How many classes have at least one row.
        alignment: Cosine of each centred class mean with its centred weight; 1 is optimal.
        norm: Lengths of the class means.
        centred_norm: Lengths of the centred class means; equal is optimal.
        within_over_between: Variance around the class means (unbiased) over that of the class means; 0 is optimal. With
            few rows per class the means are noisy and it is too small. None without a class of two rows.
    """

    rows: int
    classes: int
    alignment: Moments
    norm: Moments
    centred_norm: Moments
    within_over_between: float | None


@final
@dataclass(frozen=True)
class Structure(Result):
    """What `structure` returns: print it, plot it, or take it as JSON.

    Attributes:
        name: The name of the model or layer.
        classes: The number of classes, c.
        width: The number of features, d.
        norm: Lengths of the weights.
        bias: The biases.
        cosine: Cosines of all pairs; a weight of length zero has no direction and counts as 0.
        centred_norm: Lengths of the centred weights.
        centred_bias: The biases minus their mean.
        centred_cosine: Cosines of all pairs of centred weights; their mean is about -1/(c-1) in any case: look at std.
        common: Which share of the weights' length (root of squares) is one vector that all have in common.
        weight_distance: The first part of the distance.
        bias_distance: The second part of the distance.
        random_distance: What the first part would be for random weights of this size.
        means: The class means of the table, if there is one.
        optimal_cosine: -1/(c-1).
        distance: To the optimal structure, both parts together; 0 is optimal.
        histograms: Of norm, bias and cosine, each (values, counts), for Fig. 4.
    """

    titles: ClassVar[Mapping[str, str]] = {"of": "", "low": "lowest", "high": "highest"}

    name: str
    classes: int
    width: int
    norm: Moments
    bias: Moments
    cosine: Moments
    centred_norm: Moments
    centred_bias: Moments
    centred_cosine: Moments
    common: float
    weight_distance: float
    bias_distance: float
    random_distance: float
    means: ClassMeans | None
    optimal_cosine: float
    distance: float
    histograms: dict[str, tuple[Tensor, Tensor]] = field(repr=False, compare=False)

    def title(self) -> str:
        """The layer and its size."""
        return f"{self.name}: {self.classes} classes, {self.width} features"

    def records(self) -> list[dict[str, Any]]:
        """One row per quantity: its mean, deviation and range, beside the optimum."""
        optimum = f"{self.optimal_cosine:.4g}"
        rows = [
            ("length of weights", self.norm, "all equal"),
            ("length, centred", self.centred_norm, "all equal"),
            ("bias", self.bias, "0"),
            ("cosine", self.cosine, optimum),
            ("cosine, centred", self.centred_cosine, optimum),
        ]
        if self.means is not None:
            rows.append(("mean along weight", self.means.alignment, "1"))
            rows.append(("length of means, centred", self.means.centred_norm, "all equal"))
        return [
            {"of": name, **{key: getattr(of, key) for key in ("mean", "std", "low", "high")}, "optimal": optimal}
            for name, of, optimal in rows
        ]

    def cell(self, key: str, value: Any) -> str:
        """Numbers with four digits."""
        return f"{value:.4g}" if isinstance(value, float) else super().cell(key, value)

    def findings(self) -> list[str]:
        """What the numbers mean."""
        share = min(self.width / (self.classes - 1), 1.0)  # of the dimensions that the optimal structure needs
        most, least = math.sqrt(2 - 2 / math.sqrt(self.classes - 1)), math.sqrt(2 - 2 * math.sqrt(share))
        sentences = [
            f"Distance to the optimal structure: {self.distance:.3f} (weights {self.weight_distance:.3f}, biases "
            f"{self.bias_distance:.3f}). 0 is optimal; random weights of this size have {self.random_distance:.3f}, "
            f"weights on one line {most:.3f}."
        ]
        if least > 0:
            narrow = f"{self.width} features are too few for {self.classes} classes"
            sentences.append(f"{narrow}: the distance cannot be below {least:.3f}.")
        pairs, unequal = self.centred_cosine, self.centred_norm.std / self.centred_norm.mean
        sentences += [
            f"Centred weights differ in length by {unequal:.1%} (standard deviation over mean).",
            f"Cosines of pairs are {self.cosine.mean:.3f} on average, optimal is {self.optimal_cosine:.3f}; centred, "
            f"they spread by {pairs.std:.3f}.",
        ]
        if self.classes > 2 and pairs.skew > 0.5:
            sentences.append(f"A few pairs are far more alike (up to {pairs.high:.2f}): classes that share features.")
        if self.common > 0.3:
            sentences.append(f"{self.common:.0%} of the weights' length is one common vector, unseen by softmax.")
        if (means := self.means) is not None:
            cosine, ratio = means.alignment.mean, means.within_over_between
            sentences.append(f"Class means point along their weights with a cosine of {cosine:.3f} on average.")
            if ratio is not None:
                sentences.append(f"Features vary {ratio:.2f} times as much within classes as between them.")
        return sentences

    def plot(self) -> list[Axes]:
        """Fig. 4: histograms of lengths, biases and cosines of the weights, dashed lines at the optimum."""
        figure, grid = new_figure(1, 3, width=3.6, height=2.8)
        titles = {"norm": "length of weights", "bias": "bias", "cosine": "cosine of pairs"}
        optimum = {"norm": None, "bias": 0.0, "cosine": self.optimal_cosine}
        for panel, (key, title) in zip(grid[0], titles.items(), strict=True):
            place, count = self.histograms[key]
            used = count.nonzero()[:, 0]
            kept = slice(max(int(used[0]) - 2, 0), int(used[-1]) + 3)
            panel.bar(place[kept].tolist(), count[kept].tolist(), width=float(place[1] - place[0]), color=COLOURS[0])
            if (best := optimum[key]) is not None:
                panel.axvline(best, color=INK, linestyle="--", linewidth=1, label=f"optimal {best:.3g}")
                panel.legend(frameon=False, fontsize="small")
            panel.set(title=title, yticks=[])
            panel.spines[["left", "right", "top"]].set_visible(False)
        grid[0][0].set_xlim(left=0)
        figure.suptitle(f"{self.name}: distance to the optimal structure {self.distance:.3f}", fontsize="medium")
        return list(grid[0])


def structure(
    of: Classifier | str | nn.Linear | Tensor | tuple[Tensor, Tensor | None], table: Table | None = None
) -> Structure:
    """Measure the last layer of a classifier, and the class means of a table beside it.

    Args:
        of: A classifier or its name, a linear layer, a weight (c, d), or a weight with its bias.
        table: A table with feature and label adds alignment, lengths and variances of class means. The labels must be
            the model's own classes. If the table has logits too, they must be those of this layer.

    >>> from dubito.explain.last_layer import simplex
    >>> result = structure(3 * simplex(10, 64, seed=0))
    >>> round(result.norm.mean, 6), round(result.cosine.mean, 6), round(result.distance, 6)
    (3.0, -0.111111, 0.0)
    """
    name, layer = last_layer(of)
    weight, bias = layer.weight, layer.bias
    classes, width = weight.shape
    centred, centred_bias = weight - weight.mean(0), bias - bias.mean()
    if classes < 2 or float(centred.abs().max()) <= 1e-12 * float(weight.abs().max()):
        raise ValueRangeError(
            f"structure of {name}: no boundary is between equal weights, {classes} here. Pass a trained layer of two "
            f"classes or more."
        )
    weight_distance = _gram_distance(centred)
    bias_distance = float(centred_bias.norm()) / float(torch.linalg.matrix_norm(centred))
    norm, (cosine, counts) = weight.norm(dim=1), _pair_cosines(weight)
    return Structure(
        name=name,
        classes=classes,
        width=width,
        norm=_moments(norm),
        bias=_moments(bias),
        cosine=cosine,
        centred_norm=_moments(centred.norm(dim=1)),
        centred_bias=_moments(centred_bias),
        centred_cosine=_pair_cosines(centred)[0],
        common=float(weight.mean(0).norm()) * math.sqrt(classes) / float(torch.linalg.matrix_norm(weight)),
        weight_distance=weight_distance,
        bias_distance=bias_distance,
        random_distance=math.sqrt(2 - 2 * math.sqrt(width / (width + classes))),
        means=None if table is None else _class_means(layer, table, name),
        optimal_cosine=-1 / (classes - 1),
        distance=math.hypot(weight_distance, bias_distance),
        histograms={"norm": _histogram(norm), "bias": _histogram(bias), "cosine": counts},
    )


def _moments(values: Float[Tensor, "n"]) -> Moments:
    shift = float(values.mean())
    return _of_powers(_powers(values.double() - shift), shift, float(values.min()), float(values.max()))


def _pair_cosines(weight: Float[Tensor, "c d"]) -> tuple[Moments, tuple[Tensor, Tensor]]:
    """Cosines of all pairs of rows: their moments, and a histogram. In blocks, since c (c-1) / 2 may be many."""
    unit, shift = directions(weight), -1 / (len(weight) - 1)
    powers, counts = torch.zeros(4, dtype=torch.float64), torch.zeros(_COSINE_BINS, dtype=torch.float64)
    low, high = math.inf, -math.inf
    for start in range(0, len(unit) - 1, _ROWS):
        block = unit[start : start + _ROWS] @ unit[start:].T
        cosine = block[torch.ones_like(block, dtype=torch.bool).triu(1)].clamp(-1, 1)
        powers += _powers(cosine - shift)
        counts += torch.histc(cosine, _COSINE_BINS, -1, 1)
        low, high = min(low, float(cosine.min())), max(high, float(cosine.max()))
    edges = torch.linspace(-1, 1, _COSINE_BINS + 1, dtype=torch.float64)
    return _of_powers(powers, shift, low, high), ((edges[1:] + edges[:-1]) / 2, counts)


def _powers(off: Float[Tensor, "n"]) -> Float[Tensor, "4"]:
    """The count, and the sums of the first three powers."""
    return torch.stack([off.new_tensor(len(off)), off.sum(), off.square().sum(), off.pow(3).sum()])


def _of_powers(powers: Float[Tensor, "4"], shift: float, low: float, high: float) -> Moments:
    """Moments from the count and the sums of the first three powers around a shift."""
    first, second, third = (powers[1:] / powers[0]).tolist()
    std = math.sqrt(max(second - first**2, 0.0))
    cubed = third - 3 * first * second + 2 * first**3
    return Moments(shift + first, std, low, high, cubed / std**3 if std > 1e-9 else 0.0)


def _histogram(values: Float[Tensor, "n"]) -> tuple[Tensor, Tensor]:
    """The middles of equal bins, and how many values each holds."""
    edges = bin_edges(values, _BINS, room=1 / 20)
    return (edges[1:] + edges[:-1]) / 2, torch.histogram(values, edges).hist


def _gram_distance(centred: Float[Tensor, "c d"]) -> float:
    """From the eigenvalues of the smaller Gram matrix; those of the simplex are c - 1 equal ones and a zero."""
    classes, width = centred.shape
    gram = centred @ centred.T if classes <= width else centred.T @ centred
    values: Tensor = torch.linalg.eigvalsh(gram).flip(0)[: classes - 1]
    values, equal = values / values.norm(), 1 / math.sqrt(classes - 1)
    return math.sqrt(float((values - equal).square().sum()) + (classes - 1 - len(values)) * equal**2)


def class_sums(
    table: Table, classes: Int[Tensor, "k"], *, by: str, origin: Tensor | float = 0.0
) -> tuple[Float[Tensor, "k d"], Float[Tensor, "k"], float]:
    """The sum of the features of each class, its number of rows, and the sum of all squares, in one pass.

    Args:
        table: With feature and label.
        classes: The labels, rising; all that occur must be among them.
        by: The function that the user called.
        origin: What to subtract from every feature; sums around a common mean lose no digits to it.
    """
    total = torch.zeros(len(classes), table.shape("feature")[1], dtype=torch.float64)
    count, squares = torch.zeros(len(classes), dtype=torch.float64), 0.0
    for batch in table.batches("feature", "label"):
        z = finite(batch.feature.double(), f"{by}: features of {table.name}") - origin
        place = torch.searchsorted(classes, batch.label)
        total.index_add_(0, place, z)
        count += torch.bincount(place, minlength=len(classes))
        squares += float(z.square().sum())
    return total, count, squares


def _class_means(layer: Layer, table: Table, name: str) -> ClassMeans:
    _check_table(layer, table, name)
    origin = next(iter(table.batches("feature"))).feature.double().mean(0)
    total, count, squares = class_sums(table, torch.arange(len(layer.weight)), by="structure", origin=origin)
    seen = count > 0
    if int(seen.sum()) < 2:
        raise TableError(
            f"structure: class means need rows of two classes or more; {table.name} has rows of {int(seen.sum())}. "
            f"Pass a table of labelled images of several classes."
        )
    mean = total[seen] / count[seen, None]
    centred, weight = mean - mean.mean(0), layer.weight[seen]  # both around the middle of the same classes
    freedom = len(table) - len(mean)
    within = max(squares - float(count[seen] @ mean.square().sum(1)), 0.0) / max(freedom, 1)
    between = float(centred.square().sum(1).mean())
    return ClassMeans(
        rows=len(table),
        classes=len(mean),
        alignment=_moments((directions(centred) * directions(weight - weight.mean(0))).sum(1)),
        norm=_moments((mean + origin).norm(dim=1)),
        centred_norm=_moments(centred.norm(dim=1)),
        within_over_between=within / between if freedom > 0 and between > 0 else None,
    )


def _check_table(layer: Layer, table: Table, name: str) -> None:
    """Raise TableError unless the table can be of this layer."""
    check_rows(table, by="structure", least=2)
    check_model_labels(table, by="structure", columns=("feature", "label"))
    layer.check_table(table, by="structure", name=name)
    check_classes(table.label, len(layer.bias), by="structure", of=f"the labels of {table.name}")
    if "logit" not in table:
        return
    rows = table.select("feature", "logit").rows(slice(0, 64))
    same_classes = rows.logit.shape[1] == len(layer.bias)
    off = (layer.logits(rows.feature) - rows.logit.double()).abs().max() if same_classes else torch.inf
    if float(off) > 1e-2 * (1 + float(rows.logit.abs().max())):
        raise TableError(
            f"structure: the logits of {table.name} are not those of {name} on its features. "
            f"Pass a table that was extracted with this model, or leave the logits out."
        )
