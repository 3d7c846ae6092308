"""The last layer of a table's model, recovered once for all the scores that read it: logits = W z + b.

By least squares from features to logits (`heads/linear_logits.py`), which is exact where the logits are linear in the
features. A few thousand rows determine it, so it is recovered from at most 2,000 rows, or three for every two
features, drawn at random: it takes no longer for a million rows.
"""

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dubito.errors import TableError
from dubito.heads.linear_logits import LinearLogits, linear_logits
from dubito.table import Table
from dubito.types import finite_batches
from dubito.validate import check_rows

_ROWS, _PER_FEATURE, _BLOCK = 2_000, 1.5, 2048
_OTHERS = "use scores of logits alone, such as energy"
_shared: ContextVar[dict[Hashable, Any] | None] = ContextVar("shared", default=None)
Once = TypeVar("Once")


class LastLayer(NamedTuple):
    """The classifying layer.

    Attributes:
        weight: (c, d); features that never vary have weight 0.
        bias: (c).
    """

    weight: Float64[Tensor, "c d"]
    bias: Float64[Tensor, "c"]


def last_layer(table: Table, *, by: str, instead: str = _OTHERS) -> LastLayer:
    """The layer between the features and the logits of a table.

    Args:
        table: With the columns `feature` and `logit`.
        by: The function that the user called.
        instead: What else the user can do, for errors.

    Raises:
        TableError: There are too few rows, or the logits are not linear in the features.
    """
    layer = recovered(table, by=by)
    if layer.missed is None:
        raise TableError(
            f"{by}: weights of {layer.rank} independent features need more than {layer.rank + 1} rows; "
            f"{table.name} has {layer.rows}. Fit on more images, or {instead}."
        )
    layer.check_linear(table.name, by=by, repair=f"or {instead}")
    return LastLayer(layer.weight, layer.bias)


def recovered(table: Table, *, by: str) -> LinearLogits:
    """The layer as it is found, of however few rows, and how well it fits."""
    check_rows(table, by=by)
    return once("last layer", table, lambda: _recovered(table, by))


@contextmanager
def sharing() -> Iterator[None]:
    """Inside, what several scores learn from the same table is computed once; afterwards it is forgotten."""
    token = _shared.set({})
    try:
        yield
    finally:
        _shared.reset(token)


def once(what: Hashable, table: Table, compute: Callable[[], Once]) -> Once:
    """What `compute` returns for a table, from the score before if it is shared; see `sharing`."""
    results = _shared.get()
    if results is None:
        return compute()
    # The table is kept beside the result, so that no other one can get its id meanwhile.
    key = (what, id(table))
    if key not in results:
        results[key] = table, compute()
    result: Once = results[key][1]
    return result


def energy_of(z: Float[Tensor, "n d"], weight: Float[Tensor, "c d"], bias: Float[Tensor, "c"]) -> Float64[Tensor, "n"]:
    """-logsumexp(W z + b): in the precision of the weights, as a model computes logits.

    >>> energy_of(torch.tensor([[5.0]]), torch.tensor([[2.0], [2.0]]), torch.tensor([0.0, -1e9])).item()
    -10.0
    """
    logits = torch.addmm(bias, z.to(weight.dtype), weight.T)
    top = logits.amax(-1, keepdim=True)
    return -(top[:, 0].double() + logits.sub_(top).exp_().sum(-1).double().log())


def _recovered(table: Table, by: str) -> LinearLogits:
    n, pair = len(table), table.select("feature", "logit")
    most = max(_ROWS, math.ceil(_PER_FEATURE * (table.shape("feature")[1] + 1)))
    chosen = torch.arange(n)
    if n > most:
        chosen = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:most].sort().values

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        blocks = (pair.rows(rows) for rows in torch.split(chosen, _BLOCK))
        for block in finite_batches(blocks, table.name, by=by):
            yield block.feature.double(), block.logit.double()

    return linear_logits(pairs)
