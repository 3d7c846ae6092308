"""Let a head begin as what the classifier knows: how far any class stands out.

    u(z) = softplus(c - s sum_k a(w_k z + b_k - t)),   a = LeakyReLU(0.01)

w_k z + b_k is the centred logit of class k, t is exceeded by one class of an image on average, s and c bring
the sum to deviation 1 and mean 6 over the table, where softplus is all but linear. An image that no class claims begins
uncertain. Training goes on from there, so that a head for a known classifier need not find its classes again in a few
thousand images. Ours, not the paper's, whose heads begin at random and see 92 million rows.

The classifier itself is not needed: w and b are the least-squares map from a table's features to its logits
(`linear_logits`), exact for a linear classifier and more rows than features. Logits that are not linear in the features
are refused, where there are rows enough to tell.

If there are more classes than hidden units, those with similar weights share one (Ward's clustering; their mean,
centred again), and t stays that of single classes. If there are fewer, the other units begin as usual, without a say.
"""

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

from dubito.errors import ValueRangeError
from dubito.heads.linear_logits import linear_logits
from dubito.heads.module import SLOPE, HeadModule
from dubito.table import Table
from dubito.types import finite

_BY = "head.fit with init='classes'"
_ROWS = 16_384
_ROWS_AT_ONCE = 2_048
_MEAN = 6.0
_MOST_MERGED = 10_000


@torch.no_grad()
def start_at_classes(module: HeadModule, table: Table) -> None:
    """Set a new head's weights by the table's features and logits; of a long table, 16,384 rows from everywhere."""
    if module.depth != 1:
        raise ValueRangeError(
            f"head: init='classes' gives every class a unit of one hidden layer, so depth must be 1; {module.depth} "
            f"came. Use depth=1, or init='default'."
        )
    table.require("feature", "logit", by=_BY)
    blocks = _blocks(len(table))
    weight, bias = _classes(table, blocks)
    threshold = _one_class_above(table, blocks[0], weight, bias)
    weight, bias = _merged(weight, bias, module.width)
    total = torch.cat([_outstanding(table, rows, weight, bias - threshold) for rows in blocks])
    spread = float(total.std()) if len(total) > 1 else 0.0
    scale = 1 / spread if spread > 0 else 1.0
    first, last = [layer for layer in module.layers if isinstance(layer, nn.Linear)]
    units = len(weight)
    first.weight[:units], first.bias[:units] = weight, bias - threshold
    nn.init.zeros_(last.weight)
    last.weight[:, :units] = -scale
    last.bias.fill_(scale * float(total.mean()) + _MEAN)


def _classes(table: Table, blocks: list[Int[Tensor, "b"]]) -> tuple[Float[Tensor, "c d"], Float[Tensor, "c"]]:
    """Weights and biases that give the centred logits from the features."""

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for rows in blocks:
            part = table.select("feature", "logit").rows(rows)
            feature = finite(part.feature, f"head.fit: features of {table.name}")
            logit = finite(part.logit, f"head.fit: logits of {table.name}").double()
            yield feature.double(), logit - logit.mean(dim=1, keepdim=True)

    found = linear_logits(pairs)
    found.check_linear(table.name, by=_BY, repair="or use init='default'")
    return found.weight.float(), found.bias.float()


def _blocks(rows: int) -> list[Int[Tensor, "b"]]:
    """Rows from everywhere in equal steps, dealt so that every block is from everywhere, too."""
    count = min(rows, _ROWS)
    chosen = torch.arange(count) * (rows - 1) // max(count - 1, 1)
    parts = -(-len(chosen) // _ROWS_AT_ONCE)
    return [chosen[part::parts] for part in range(parts)]


def _one_class_above(
    table: Table, rows: Int[Tensor, "b"], weight: Float[Tensor, "c d"], bias: Float[Tensor, "c"]
) -> float:
    """The height that one logit of a row exceeds, on average over these rows."""
    logit = table.select("feature").rows(rows).feature @ weight.T + bias
    above = logit.flatten().topk(min(len(rows) + 1, logit.numel())).values
    return float(above[-1])


def _outstanding(
    table: Table, rows: Int[Tensor, "b"], weight: Float[Tensor, "k d"], bias: Float[Tensor, "k"]
) -> Float[Tensor, "b"]:
    return leaky_relu(table.select("feature").rows(rows).feature @ weight.T + bias, SLOPE).sum(dim=1)


def _merged(
    weight: Float[Tensor, "c d"], bias: Float[Tensor, "c"], units: int
) -> tuple[Float[Tensor, "k d"], Float[Tensor, "k"]]:
    """At most so many rows: the means of similar ones. Ward's clustering holds c^2 / 2 distances."""
    if len(weight) <= units:
        return weight, bias
    if len(weight) > _MOST_MERGED:
        raise ValueRangeError(
            f"head: init='classes' lets at most {_MOST_MERGED:,} classes share units; got {len(weight):,} for a width "
            f"of {units:,}. Use width={len(weight)}, or init='default'."
        )
    from sklearn.cluster import AgglomerativeClustering  # noqa: PLC0415 (slow to import, rarely needed)

    group = torch.from_numpy(AgglomerativeClustering(units).fit(weight.numpy()).labels_.astype(np.int64))
    count = torch.bincount(group, minlength=units).to(weight.dtype)
    weight = torch.zeros(units, weight.shape[1]).index_add_(0, group, weight) / count[:, None]
    bias = torch.zeros(units).index_add_(0, group, bias) / count
    return weight - weight.mean(dim=0), bias - bias.mean()
