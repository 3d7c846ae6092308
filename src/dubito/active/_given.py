"""What active learning is given: rows, what a trainer returns, and how loops are told apart."""

import hashlib
from collections.abc import MutableSequence, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64

from dubito.data.image_set import some
from dubito.errors import TableError, ValueRangeError
from dubito.metrics import Array
from dubito.table import Rows, Table, to_tensor
from dubito.types import Json, Score


class UnlabelledError(TableError):
    """Rows to train on have no labels yet: people are to give them."""


@runtime_checkable
class Extends(Protocol):
    """What a trainer may return: something that adds columns to any table, as `LinearHeads` and `HeadMasks` do."""

    def extend(self, table: Table) -> Table:
        """The table with what was learned."""
        ...


def answer_of(trained: Any, pool: Table) -> tuple[Table, Score | None, Array | None]:
    """What a trainer gave, as the table to choose from, and the score or the uncertainties to choose by, if any."""
    if isinstance(trained, Score):
        return pool, trained, None
    if _extends(trained):
        trained = _extended(trained, pool)
    if isinstance(trained, Table):
        return _of_pool(trained, pool), None, None
    try:
        u = to_tensor(trained, "uncertainties")
    except TableError:
        u = torch.empty(0, 0)
    if u.shape != (len(pool),):
        kind = "None" if trained is None else type(trained).__name__
        came = f"{kind} of shape {tuple(u.shape)}" if u.numel() else kind
        raise TableError(
            f"acquire: the trainer must return a Score, uncertainties ({len(pool)},), a table or something with "
            f"extend(table); got {came}. Let it end with return, such as: return pool.extended(logit=...)."
        )
    return pool, None, u


def _extends(trained: Any) -> TypeGuard[Extends]:
    """Whether it adds columns to tables; a list of numbers has an extend of its own."""
    return isinstance(trained, Extends) and not isinstance(trained, MutableSequence)


def _extended(trained: Extends, table: Table) -> Table:
    found: Any = trained.extend(table)
    if not isinstance(found, Table):
        raise TableError(
            f"acquire: extend(table) of {type(trained).__name__}, which the trainer returned, must give a table; "
            f"got {type(found).__name__}. Let it end with: return table.extended(logit=...)."
        )
    return found


def _of_pool(table: Table, pool: Table) -> Table:
    """A trainer's table, if it has the images of the pool."""
    if len(table) != len(pool):
        came = str(len(table))
    elif "id" in table and "id" in pool and not np.array_equal(table.id, pool.id):
        came = "as many with other ids, or in another order"
    else:
        return table
    raise TableError(
        f"acquire: the trainer must give a table of the pool's {len(pool)} rows; got {came}. "
        f"Add columns to the pool: pool.extended(logit=...)."
    )


def accuracy_of(trained: Any, test: Table | None) -> float | None:
    """On a test table, if what was trained can be asked about it."""
    if test is None or not _extends(trained):
        return None
    table = _extended(trained, test)
    table.require("logit", "label", by="acquire: the accuracy on test images")
    right = sum(int((batch.logit.argmax(1) == batch.label).sum()) for batch in table.batches("logit", "label"))
    return right / len(test) if len(test) else None


def rows_of(table: Table, rows: Rows) -> Int64[np.ndarray, "k"]:
    """Rows as indices, each once, in the order given."""
    if isinstance(rows, slice):
        return np.arange(len(table))[rows].astype(np.int64)
    index = to_tensor(rows, "acquire: labelled").numpy()
    if index.shape == (0,):
        index = index.astype(np.int64)
    if index.dtype == np.bool_ and index.shape == (len(table),):
        index = np.flatnonzero(index)
    whole = index.ndim == 1 and np.issubdtype(index.dtype, np.integer)
    if not whole or (len(index) and (index.min() < 0 or index.max() >= len(table))):
        reach = f", from {index.min()} to {index.max()}" if whole else ""
        raise TableError(
            f"acquire: labelled rows must be indices from 0 to {len(table) - 1}, or a mask of {len(table)} booleans; "
            f"got {index.dtype} of shape {index.shape}{reach}. Choose among the rows of {table.name}."
        )
    return index[np.sort(np.unique(index, return_index=True)[1])].astype(np.int64)


def start_of(pool: Table, start: int | Rows, seed: int) -> Int64[np.ndarray, "s"]:
    """The rows that are labelled at the beginning: those given, or so many at random."""
    if not isinstance(start, int | np.integer):
        return rows_of(pool, start)
    if not 0 <= start <= len(pool):
        raise ValueRangeError(f"acquire: start must be 0 to {len(pool)}, the rows of {pool.name}; got {start}.")
    # A stream of its own: round 0 draws from (seed, 0).
    rng = np.random.default_rng([seed, 2**31])
    return rng.permutation(len(pool))[:start].astype(np.int64)


def without_label(table: Table, rows: Int64[np.ndarray, "k"]) -> Int64[np.ndarray, "w"]:
    """Those rows that have no label yet: -1, or no column label at all."""
    if "label" not in table or not len(rows):
        return rows
    found: np.ndarray = rows[table.select("label").rows(torch.from_numpy(rows)).label.numpy() < 0]
    return found


def need_labels(table: Table, rows: Int64[np.ndarray, "k"], by: str) -> None:
    """Raise UnlabelledError unless all rows have a label."""
    without = ids_of(table, without_label(table, rows))
    if without:
        raise UnlabelledError(
            f"{by}: rows to train on must have a label from 0 on; {len(without)} of {len(rows)} of {table.name} have "
            f"none yet (-1): {some(without)}. Label them, and make the same call again."
        )


def ids_of(table: Table, rows: Int64[np.ndarray, "k"]) -> Sequence[str]:
    """The names of some rows; their numbers where the table has none."""
    if "id" not in table or not len(rows):
        return [str(row) for row in rows.tolist()]
    return [str(name) for name in table.select("id").rows(torch.from_numpy(rows)).id]


def identity_of(table: Table) -> Json:
    """Which images a table has, without its place on the disk."""
    state = hashlib.blake2b(digest_size=16)
    if "id" in table:
        state.update("\n".join(map(str, table.id)).encode())
    if "feature" in table and len(table):
        state.update(table.select("feature").rows(slice(0, 8)).feature.numpy().tobytes())
    return {"rows": len(table), "model_id": table.model_id, "digest": state.hexdigest()}


def name_of(trainer: Any) -> str:
    """A trainer, as far as it can be told from another."""
    return str(getattr(trainer, "__qualname__", type(trainer).__qualname__))
