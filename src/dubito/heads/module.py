"""The uncertainty head: a small network that maps a frozen model's feature to one positive number.

    u(z) = softplus(W_k a(... a(W_1 z + b_1) ...) + b_k) + 1e-6,   a = LeakyReLU(0.01)

Kirchhof et al., Pretrained Visual Uncertainties (2024), appendix A: two hidden layers of width 512. The 1e-6 is in the
authors' code, not in their text: it keeps u positive where softplus underflows.

A head can also start from what the classifier knows (`start_at_classes`), namely how far any class stands out:

    u(z) = softplus(c - s sum_k a(w_k z + b_k - t))

w_k z + b_k is the centred logit of class k; on average one class per image exceeds t; s and c scale the sum to standard
deviation 1 and mean 6 over the table, where softplus is almost linear. An image that no class claims starts out
uncertain, and training continues from there, so that a head need not learn the classes again from a few thousand
images. This start is ours: the paper's heads start at random and see 92 million rows.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import final, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

from dubito.choices import Init
from dubito.errors import TableError, ValueRangeError
from dubito.heads.linear_logits import centred_layer
from dubito.table import Table
from dubito.threads import seeded
from dubito.validate import check_choice, check_number

SMALLEST = 1e-6
SLOPE = 0.01
_BY = "head.fit with init='classes'"
_ROWS = 16_384
_ROWS_AT_ONCE = 2_048
_MEAN = 6.0
_MOST_MERGED = 10_000


@final
class HeadModule(nn.Module):
    """The network alone; `dubito.UncertaintyHead` is the score around it.

    Args:
        features: Width d of the features.
        width: Width of the hidden layers.
        depth: Number of hidden layers; 0 is a linear head.
        init: Initial weights: "default" is torch's own; "zero" sets every weight and bias to zero, which cannot learn
            (Table 3); "classes" is "default" until `start_at_classes` is called with a table.
        seed: Seed of the initial weights.

    >>> head = HeadModule(8, width=4, depth=1, seed=1)
    >>> bool((head(torch.zeros(3, 8)) > 0).all())
    True
    """

    def __init__(
        self, features: int, *, width: int = 512, depth: int = 2, init: Init = "default", seed: int = 0
    ) -> None:
        super().__init__()
        check_shape(features, width, depth)
        check_choice(init, get_args(Init), by="head", what="init")
        self.features, self.width, self.depth = features, width, depth
        sizes = [features, *[width] * depth, 1]
        layers: list[nn.Module] = []
        with seeded(seed):
            for before, after in pairwise(sizes):
                layers += [nn.Linear(before, after), nn.LeakyReLU(SLOPE)]
        self.layers = nn.Sequential(*layers[:-1], nn.Softplus())
        if init == "zero":
            for parameter in self.parameters():
                nn.init.zeros_(parameter)

    @classmethod
    def filled(cls, tensors: Mapping[str, Tensor], features: int, *, width: int, depth: int) -> "HeadModule":
        """A head with these weights, in eval mode; ValueError unless they are finite and have its names and shapes."""
        shapes = {key: tuple(value.shape) for key, value in tensors.items()}
        with torch.device("meta"):  # no memory for sizes, and no layers for a depth, that the tensors do not have
            module = cls(features, width=width, depth=min(depth, len(tensors)))
        if shapes != {key: tuple(value.shape) for key, value in module.state_dict().items()}:
            listed = ", ".join(f"{key} {shape}" for key, shape in list(shapes.items())[:8]) or "nothing"
            raise ValueError(f"expected a head of {features} features, width {width}, depth {depth}; got {listed}")
        if not all(value.isfinite().all() for value in tensors.values()):
            raise ValueError("NaN or infinite weights")
        module.to_empty(device="cpu").load_state_dict(tensors)  # as float32
        return module.eval()

    def forward(self, z: Float[Tensor, "*n d"]) -> Float[Tensor, "*n"]:
        """One positive number per row."""
        if z.shape[-1] != self.features:
            raise TableError(
                f"head: features must be {self.features} wide, as those that the head was trained on; got "
                f"{z.shape[-1]}. Use the head of this model, or train one on its features."
            )
        u: Tensor = self.layers(z)[..., 0] + SMALLEST
        return u


def check_shape(features: int, width: int, depth: int) -> None:
    """Raise ValueRangeError for sizes that no network can have."""
    for name, size in (("features", features), ("width", width), ("depth", depth)):
        check_number(size, "[0, inf)" if name == "depth" else "[1, inf)", by="head", what=name, whole=True)


@torch.no_grad()
def start_at_classes(module: HeadModule, table: Table) -> None:
    """Set a new head's weights from a table's features and logits; of a long table, 16,384 evenly spaced rows.

    The classifier itself is not needed: w and b are the least-squares map from features to logits (`linear_logits`),
    which refuses logits that are not linear in the features. If there are more classes than hidden units, those with
    similar weights share one (Ward's clustering; their mean, centred again), and t stays that of single classes. If
    there are fewer, the other units have no effect at first.
    """
    if module.depth != 1:
        raise ValueRangeError(
            f"head: init='classes' gives every class a unit of one hidden layer, so depth must be 1; got "
            f"{module.depth}. Use depth=1, or init='default'."
        )
    table.require("feature", "logit", by=_BY)
    blocks = _blocks(len(table))
    columns, features = table.select("feature", "logit"), table.select("feature")
    weight, bias = centred_layer(
        lambda: (columns.rows(rows) for rows in blocks), table.name, by=_BY, repair="or use init='default'"
    )
    logit = features.rows(blocks[0]).feature @ weight.T + bias
    # One logit per row exceeds it, on average.
    threshold = float(logit.flatten().topk(min(len(logit) + 1, logit.numel())).values[-1])
    weight, bias = _merged(weight, bias, module.width)
    bias = bias - threshold
    total = torch.cat([leaky_relu(features.rows(rows).feature @ weight.T + bias, SLOPE).sum(1) for rows in blocks])
    deviation = float(total.std()) if len(total) > 1 else 0.0
    scale = 1 / deviation if deviation > 0 else 1.0
    first, last = [layer for layer in module.layers if isinstance(layer, nn.Linear)]
    units = len(weight)
    first.weight[:units], first.bias[:units] = weight, bias
    nn.init.zeros_(last.weight)
    last.weight[:, :units] = -scale
    last.bias.fill_(scale * float(total.mean()) + _MEAN)


def _blocks(rows: int) -> list[Int[Tensor, "b"]]:
    """Evenly spaced rows, dealt out so that every block covers the whole table."""
    count = min(rows, _ROWS)
    spaced = torch.arange(count) * (rows - 1) // max(count - 1, 1)
    parts = -(-count // _ROWS_AT_ONCE)
    return [spaced[part::parts] for part in range(parts)]


def _merged(
    weight: Float[Tensor, "c d"], bias: Float[Tensor, "c"], units: int
) -> tuple[Float[Tensor, "k d"], Float[Tensor, "k"]]:
    """At most so many rows: the means of similar ones. Ward's clustering needs c^2 / 2 distances."""
    if len(weight) <= units:
        return weight, bias
    hint = f"Use width={len(weight)}, so that none have to share, or init='default'."
    check_number(len(weight), f"[1, {_MOST_MERGED}]", by=_BY, what="the number of classes that share units", hint=hint)
    from sklearn.cluster import AgglomerativeClustering  # noqa: PLC0415 (slow to import, rarely needed)

    group = torch.from_numpy(AgglomerativeClustering(units).fit(weight.numpy()).labels_.astype(np.int64))
    count = torch.bincount(group, minlength=units).to(weight.dtype)
    weight = torch.zeros(units, weight.shape[1]).index_add_(0, group, weight) / count[:, None]
    bias = torch.zeros(units).index_add_(0, group, bias) / count
    return weight - weight.mean(dim=0), bias - bias.mean()
