"""What active learning is given: rows, what a trainer returns, and how loops are told apart."""

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64

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
    if trained is None:
        raise TableError(
            "acquire: the trainer must return a Score, uncertainties, a table or something with extend(table); None "
            "came. Let it end with return."
        )
    table = trained.extend(pool) if isinstance(trained, Extends) else trained if isinstance(trained, Table) else pool
    if len(table) != len(pool):
        raise TableError(
            f"acquire: the trainer must give a table of the pool's {len(pool)} rows; {len(table)} came. "
            f"Add columns to the pool: pool.extended(logit=...)."
        )
    if isinstance(trained, Score):
        return table, trained, None
    return table, None, None if isinstance(trained, Extends | Table) else trained


def accuracy_of(trained: Any, test: Table | None) -> float | None:
    """On a test table, if what was trained can be asked about it."""
    if test is None or not isinstance(trained, Extends):
        return None
    table = trained.extend(test)
    table.require("logit", "label", by="acquire: the accuracy on test images")
    right = sum(int((batch.logit.argmax(1) == batch.label).sum()) for batch in table.batches("logit", "label"))
    return right / len(test) if len(test) else None


def rows_of(table: Table, rows: Rows) -> Int64[np.ndarray, "k"]:
    """Rows as indices, each once, in the order given."""
    if isinstance(rows, slice):
        return np.arange(len(table))[rows].astype(np.int64)
    index = to_tensor(rows if len(rows) else np.empty(0, dtype=np.int64), "acquire: labelled").numpy()
    if index.dtype == np.bool_:
        index = np.flatnonzero(index) if index.shape == (len(table),) else index
    whole = np.issubdtype(index.dtype, np.integer)
    if index.ndim != 1 or not whole or (len(index) and (index.min() < 0 or index.max() >= len(table))):
        raise TableError(
            f"acquire: labelled rows must be indices from 0 to {len(table) - 1}, or a mask of {len(table)} booleans; "
            f"{index.dtype} of shape {index.shape} came. Choose among the rows of {table.name}."
        )
    return index[np.sort(np.unique(index, return_index=True)[1])].astype(np.int64)


def start_of(pool: Table, start: int | Rows, seed: int) -> Int64[np.ndarray, "s"]:
    """The rows that are labelled at the beginning: those given, or so many at random."""
    if not isinstance(start, int):
        return rows_of(pool, start)
    if not 0 <= start <= len(pool):
        raise ValueRangeError(f"acquire: start must be 0 to {len(pool)}, the rows of {pool.name}; {start} came.")
    # A stream of its own: round 0 draws from (seed, 0).
    rng = np.random.default_rng([seed, 2**31])
    return rng.permutation(len(pool))[:start].astype(np.int64)


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
    return {"rows": len(table), "source": table.source, "digest": state.hexdigest()}


def name_of(trainer: Any) -> str:
    """A trainer, as far as it can be told from another."""
    return str(getattr(trainer, "__qualname__", type(trainer).__qualname__))
