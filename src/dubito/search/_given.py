"""What an index is given, checked: items and queries from a table or from arrays, read block by block."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64, Shaped
from torch import Tensor

from dubito.errors import TableError, ValueRangeError
from dubito.metrics import Array
from dubito.search.backend import Block, Origin
from dubito.table import Table, to_tensor
from dubito.types import Score, finite

Names = Sequence[str] | Shaped[np.ndarray, "_"]
"""Ids as lists of texts, or as a table's column."""
AT_ONCE = 8192
"""Rows that are read, normalised and handed on together: 16 MB of 512 features."""
_SHORTEST, _LONGEST = 1e-30, 1e30


@final
@dataclass(frozen=True)
class Given:
    """Features with what is known of them; nothing has been read yet but their uncertainties and names.

    Attributes:
        by: Who asks, as errors tell it.
        name: What they are called there.
        rows: How many.
        read: Some of the features, by slice.
        u: Their uncertainties, if any came.
        ids: Their names, if any came.
        labels: Their classes, if any came.
        origin: Where they come from.
    """

    by: str
    name: str
    rows: int
    read: Callable[[slice], Tensor]
    u: Float64[np.ndarray, "n"] | None
    ids: list[str] | None
    labels: Int64[np.ndarray, "n"] | None
    origin: Origin

    def directions(self) -> Iterator[Float32[np.ndarray, "b d"]]:
        """The features at length one, block by block."""
        for start in range(0, self.rows, AT_ONCE):
            yield self._unit(self.read(slice(start, min(start + AT_ONCE, self.rows))), start)

    def blocks(self, ids: list[str]) -> Iterator[Block]:
        """As a backend takes them."""
        assert self.u is not None, "items always have uncertainties"  # noqa: S101 (our own invariant)
        start = 0
        for unit in self.directions():
            rows = slice(start, start + len(unit))
            yield Block(ids[rows], unit, self.u[rows], None if self.labels is None else self.labels[rows])
            start += len(unit)

    def _unit(self, block: Float[Tensor, "b d"], start: int) -> Float32[np.ndarray, "b d"]:
        # By numpy: for few queries it costs less than torch, whose threads would also stand in the way of faiss's.
        features = block.numpy()
        norm = np.sqrt(np.einsum("bd,bd->b", features, features, dtype=np.float64))
        usable = (norm >= _SHORTEST) & (norm <= _LONGEST)
        if not usable.all():
            row = int(np.flatnonzero(~usable)[0])
            called = f" ('{self.ids[start + row]}')" if self.ids else ""
            what = "is all zeros" if float(norm[row]) == 0 else f"has the norm {float(norm[row]):g}"
            raise ValueRangeError(
                f"{self.by}: features must be finite and not all zero; row {start + row}{called} of {self.name} "
                f"{what}. Look at that image, or leave it out: it has no direction."
            )
        unit = np.empty(features.shape, dtype=np.float32)
        np.divide(features, norm[:, None], out=unit, casting="same_kind")
        return unit


def given(
    by: str,
    features: Table | Array,
    uncertainty: Score | Array | None,
    *,
    width: int,
    ids: Names | None = None,
    labels: Array | None = None,
) -> Given:
    """A table or an array with what belongs to it; a table's own columns serve where nothing else is given."""
    table = features if isinstance(features, Table) else None
    model_id = called = None
    if table is not None:
        table.require("feature", by=by)
        shape, name = table.shape("feature"), table.name
        column = table.column("feature")
        ids = table.id.tolist() if ids is None and "id" in table else ids
        model_id = table.model_id
        if labels is None and "label" in table:
            labels, called = table.label, _called(table.label_names)
    else:
        column = features if isinstance(features, np.ndarray) else to_tensor(features, f"{by}: features")
        shape, name = tuple(column.shape), "the array"
    if len(shape) != 2 or shape[1] != width:
        raise TableError(
            f"{by}: features must have the axes (n, {width}), as wide as the index; got {tuple(shape)} in {name}. "
            + (
                "Take the features of the model that the index was built with."
                if len(shape) == 2
                else f"Give one row per image, such as feature[None] of shape (1, {width}) for one feature."
            )
        )
    n = int(shape[0])
    return Given(
        by=by,
        name=name,
        rows=n,
        read=lambda rows: _floats(to_tensor(column[rows], f"{by}: features"), by, name),
        u=_uncertainties(by, uncertainty, table, n),
        ids=None if ids is None else _names(by, ids, n),
        labels=_classes(by, labels, n),
        origin=Origin(model_id, called, uncertainty.name if isinstance(uncertainty, Score) else None),
    )


def _floats(block: Tensor, by: str, name: str) -> Float[Tensor, "b d"]:
    if block.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TableError(f"{by}: features must be floating-point numbers; got {block.dtype} in {name}. Cast them.")
    return block if block.dtype == torch.float64 else block.float()


def _uncertainties(
    by: str, uncertainty: Score | Array | None, table: Table | None, n: int
) -> Float64[np.ndarray, "n"] | None:
    if uncertainty is None:
        return None
    if isinstance(uncertainty, Score):
        if table is None:
            raise TableError(
                f"{by}: the score {uncertainty.name} reads columns of a table; got an array of features. Give a Table "
                f"with {', '.join(uncertainty.needs)}, or the uncertainties as an array."
            )
        u = uncertainty.score(table) if n else torch.empty(0, dtype=torch.float64)
    else:
        u = finite(to_tensor(uncertainty, f"{by}: uncertainty").double(), f"{by}: uncertainty")
    if tuple(u.shape) != (n,):
        raise TableError(
            f"{by}: uncertainty must have one number a row, ({n},); got {tuple(u.shape)}. Score the same images."
        )
    return u.numpy()


def texts(names: Names) -> list[str]:
    """Names as a list; one text is one name, and not its letters."""
    return [names] if isinstance(names, str) else [str(one) for one in names]


def is_name(text: str) -> bool:
    """Whether files and servers can keep it: a path whose bytes are no UTF-8 has halves of letters in it."""
    return bool(text) and "\0" not in text and (text.isascii() or not any("\ud800" <= one <= "\udfff" for one in text))


def _names(by: str, ids: Names, n: int) -> list[str]:
    names = texts(ids)
    if len(names) != n:
        raise TableError(f"{by}: ids must have one name a row, {n}; got {len(names)}. Name the same images.")
    wrong = next((place for place, one in enumerate(names) if not is_name(one)), None)
    if wrong is not None:
        raise TableError(
            f"{by}: ids must be texts of at least one letter that UTF-8 can write, without NUL; got {names[wrong]!r} "
            f"for row {wrong}. Name it otherwise."
        )
    return names


def _called(names: Sequence[str] | None) -> str | None:
    """A hash of the names of classes, in their order; None where they are not known."""
    return hashlib.blake2b("\0".join(names).encode(errors="replace"), digest_size=8).hexdigest() if names else None


def _classes(by: str, labels: Any, n: int) -> Int64[np.ndarray, "n"] | None:
    if labels is None:
        return None
    found = to_tensor(labels, f"{by}: labels")
    if found.is_floating_point() or found.dtype == torch.bool or tuple(found.shape) != (n,):
        raise TableError(
            f"{by}: labels must be one integer a row, ({n},); got {found.dtype} of shape {tuple(found.shape)}. "
            f"Give the classes as numbers."
        )
    return found.long().numpy()


def twice(names: Sequence[str]) -> str | None:
    """The first name that is there twice, if any."""
    if len(set(names)) == len(names):
        return None
    seen: set[str] = set()
    return next(one for one in names if one in seen or seen.add(one))  # type: ignore[func-returns-value]
