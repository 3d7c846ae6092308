"""Items and queries as `SafeIndex` accepts them: a table or arrays, checked, and read block by block."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64, Shaped
from torch import Tensor

from dubito.errors import TableError, ValueRangeError
from dubito.metrics import Array
from dubito.search.backend import Block, Origin, State
from dubito.table import Table, to_tensor
from dubito.types import Score, finite

Names = Sequence[str] | Shaped[np.ndarray, "_"]
"""Ids as a list of strings, or as a table's column."""
_ROWS_AT_ONCE = 8192
"""Rows that are read, normalised and passed on together: 16 MB of 512 features."""
_SHORTEST, _LONGEST = 1e-30, 1e30
_PRIVATE = {byte: byte + 0x102000 for byte in range(0xDC80, 0xDD00)}
"""From Python's characters for bytes that are not UTF-8 (PEP 383) to characters for private use, U+10FC80 and on."""
_BYTES = {private: byte for byte, private in _PRIVATE.items()}
_REFUSED = re.compile("[\0\ud800-\udc7f\udd00-\udfff\U0010fc80-\U0010fcff]")


@final
@dataclass(frozen=True)
class Embeddings:
    """Items or queries. Features are read when they are needed; everything else has been read and checked.

    Attributes:
        by: The method that the user called, for errors.
        name: The name of the table, for errors.
        rows: How many rows there are.
        features: The features; slices of rows are read.
        u: The uncertainties, if any.
        ids: The ids, if any.
        labels: The classes, if any.
        origin: Where they come from.
    """

    by: str
    name: str
    rows: int
    features: Any
    u: Float64[np.ndarray, "n"] | None
    ids: list[str] | None
    labels: Int64[np.ndarray, "n"] | None
    origin: Origin

    def unit_vectors(self) -> Iterator[tuple[slice, Float32[np.ndarray, "b d"]]]:
        """The features scaled to length one, block by block, with the rows of each; at least one block."""
        for start in range(0, max(1, self.rows), _ROWS_AT_ONCE):
            rows = slice(start, min(start + _ROWS_AT_ONCE, self.rows))
            yield rows, self._unit(to_tensor(self.features[rows], f"{self.by}: features"), start)

    def blocks(self, ids: list[str]) -> Iterator[Block]:
        """Items as a backend adds them."""
        assert self.u is not None, "items always have uncertainties"  # noqa: S101 (our own invariant)
        for rows, unit in self.unit_vectors():
            yield ids[rows], unit, self.u[rows], None if self.labels is None else self.labels[rows]

    def require_uncertainties(self, what: str, hint: str = "") -> None:
        """Raise TableError for items or queries without uncertainties."""
        if self.u is None:
            raise TableError(
                f"{self.by} needs the uncertainty of every {what}; got none. Pass one number for every {what}, or a "
                f"table and a fitted score{hint}."
            )

    def _unit(self, block: Shaped[Tensor, "b d"], start: int) -> Float32[np.ndarray, "b d"]:
        if block.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise TableError(
                f"{self.by}: features must be floating-point numbers; got {block.dtype} in {self.name}. Cast them."
            )
        # By numpy: for a few queries it costs less than torch, whose threads would also compete with those of faiss.
        features = (block if block.dtype == torch.float64 else block.float()).numpy()
        norm = np.sqrt(np.einsum("bd,bd->b", features, features, dtype=np.float64))
        usable = (norm >= _SHORTEST) & (norm <= _LONGEST)
        if not usable.all():
            row = int(np.flatnonzero(~usable)[0])
            name = f" ('{self.ids[start + row]}')" if self.ids else ""
            raise ValueRangeError(
                f"{self.by}: features must be finite and not all zero; row {start + row}{name} of {self.name} has the "
                f"norm {float(norm[row]):g}. Check that image, or leave it out: it has no direction."
            )
        unit = np.empty(features.shape, dtype=np.float32)
        np.divide(features, norm[:, None], out=unit, casting="same_kind")
        return unit


def read_embeddings(
    by: str,
    features: Table | Array,
    uncertainty: Score | Array | None,
    *,
    width: int,
    score: Score | None,
    state: State,
    ids: Names | None = None,
    labels: Array | None = None,
) -> Embeddings:
    """Items or queries of the same model, width and score as the items of an index.

    Columns of a table serve where an argument is None, and `score` gives its uncertainties.
    """
    table = features if isinstance(features, Table) else None
    column, name, provenance, classes = feature_column(features, by=by), "the array", None, None
    if table is not None:
        name, provenance = table.name, table.provenance
        uncertainty = score if uncertainty is None else uncertainty
        ids = table.id.tolist() if ids is None and "id" in table else ids
        if labels is None and "label" in table:
            labels = table.label
            # A number means the same class only where all names are the same, in the same order.
            names = "\0".join(table.label_names or ()).encode(errors="replace")
            classes = hashlib.blake2b(names, digest_size=8).hexdigest() if names else None
    origin = Origin(provenance, classes, uncertainty.name if isinstance(uncertainty, Score) else None)
    origin.check(state.origin, by=by, name=name)
    if isinstance(uncertainty, Score) and state.rows and score and not _same(uncertainty, score):
        raise TableError(
            f"{by}: uncertainties must be of the score that the items have, {score!r} as it was fitted for them; got "
            f"{uncertainty!r} with other settings or another fit. Values of two scores have no common scale: leave it "
            f"out, or build another index."
        )
    if len(column.shape) != 2 or column.shape[1] != width:
        raise TableError(
            f"{by}: features must have the axes (n, {width}), as wide as the index; got {tuple(column.shape)} in "
            f"{name}. Pass features of the same model, one row per image: feature[None] of shape (1, {width}) for one."
        )
    n = int(column.shape[0])
    u = _uncertainties(by, uncertainty, table, n)
    numbers = None if labels is None else _classes(by, labels, n)
    return Embeddings(by, name, n, column, u, None if ids is None else _valid_ids(by, ids, n), numbers, origin)


def feature_column(features: Table | Array, *, by: str) -> Any:
    """The features of a table or an array, unread where they are on the disk; their axes are not checked."""
    if isinstance(features, Table):
        features.require("feature", by=by)
        return features.column("feature")
    return features if isinstance(features, np.ndarray) else to_tensor(features, f"{by}: features")


def as_list(names: Names) -> list[str]:
    """Ids as a list; a single string is one id, not a list of its letters."""
    return [names] if isinstance(names, str) else [str(one) for one in names]


def is_valid_id(text: str) -> bool:
    """Whether files and servers can store an id."""
    return bool(text) and not (_REFUSED.search(text) if not text.isascii() else "\0" in text)


def stored_id(text: str) -> str:
    r"""An id as UTF-8 can encode it: bytes of a file name that are not UTF-8 become private characters.

    >>> stored_id("\udcff.png")
    '\U0010fcff.png'
    """
    return text if text.isascii() else text.translate(_PRIVATE)


def original_id(text: str) -> str:
    """The id that `stored_id` was called with."""
    return text if text.isascii() else text.translate(_BYTES)


def check_unique(names: Sequence[str], *, by: str) -> None:
    """Raise TableError for an id that occurs twice."""
    if twice := next((name for name, count in Counter(names).items() if count > 1), None):
        raise TableError(f"{by}: ids must be unique; got '{twice}' twice. Nothing was changed: pass every id once.")


def _uncertainties(
    by: str, uncertainty: Score | Array | None, table: Table | None, n: int
) -> Float64[np.ndarray, "n"] | None:
    if uncertainty is None:
        return None
    if isinstance(uncertainty, Score):
        if table is None:
            raise TableError(
                f"{by}: the score {uncertainty.name} reads columns of a table; got an array of features. Pass a Table "
                f"with {', '.join(uncertainty.needs)}, or the uncertainties as an array."
            )
        u = uncertainty.score(table) if n else torch.empty(0, dtype=torch.float64)
    else:
        u = finite(to_tensor(uncertainty, f"{by}: uncertainty").double(), f"{by}: uncertainty")
    if tuple(u.shape) != (n,):
        raise TableError(
            f"{by}: uncertainty must have one number per row, ({n},); got {tuple(u.shape)}. Score the same images."
        )
    return u.numpy()


def _valid_ids(by: str, ids: Names, n: int) -> list[str]:
    names = as_list(ids)
    if len(names) != n:
        raise TableError(f"{by}: ids must have one id per row, {n}; got {len(names)}. Name the same images.")
    if wrong := [(row, name) for row, name in enumerate(names) if not is_valid_id(name)]:
        raise TableError(
            f"{by}: ids must be strings of at least one character, without NUL, as files are named; got "
            f"{wrong[0][1]!r} for row {wrong[0][0]}. Rename it."
        )
    return names


def _classes(by: str, labels: Any, n: int) -> Int64[np.ndarray, "n"]:
    classes = to_tensor(labels, f"{by}: labels")
    if classes.is_floating_point() or classes.dtype == torch.bool or tuple(classes.shape) != (n,):
        raise TableError(
            f"{by}: labels must be one integer per row, ({n},); got {classes.dtype} of shape {tuple(classes.shape)}. "
            f"Pass the classes as numbers."
        )
    return classes.long().numpy()


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal: of scores, all settings and all that was learned."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Score) and type(one) is type(other) and one is not other:
        names = (*one.learned, *(setting.name for setting in fields(one)))  # type: ignore[arg-type]
        return all(_same(getattr(one, name, None), getattr(other, name, None)) for name in names)
    return bool(one == other)
