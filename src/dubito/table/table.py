"""A Table is named columns with one row per image: in memory, or memory-mapped from a cache.

Users with arrays build one directly; extraction returns one. Scores and metrics see nothing else.
Columns that every extraction writes are attributes: id, label (n), feature (n,d), logit (n,c), loss (n).
"""

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from os import PathLike
from typing import TYPE_CHECKING, Any, Protocol, cast, final, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from dubito.choices import nearest, suggestion
from dubito.errors import DubitoWarning, MissingColumnError, TableError, users_level
from dubito.table.columns import writer_of
from dubito.table.provenance import Provenance

_PREVIEW = 5
"""Rows that a notebook shows."""
_AXES = {"feature": 2, "logit": 2, "label": 1, "loss": 1, "id": 1}
_CHANCE = 3
"""Letters of a name that may be like another one by chance."""

Rows = slice | Tensor | Shaped[np.ndarray, "..."] | Sequence[int]
"""Which rows: a slice, a boolean mask (n) or indices, negative ones counting from the end."""

Exact = slice | Tensor
"""What columns are indexed by: a slice of step 1 within bounds, or indices from 0 to n - 1."""


@runtime_checkable
class Column(Protocol):
    """Rows that need not be in memory: a tensor is one, a column of shards another."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    def __getitem__(self, rows: Exact, /) -> Any: ...


@final
class Table:
    """Columns of equal length. `Table(feature=..., logit=..., label=...)` takes numpy arrays, tensors or lists.

    Attributes:
        name: Its name in errors: a cache's folder or "table in memory".
        classes: Class names of the logits, if known.
        label_space: "model" if labels are indices into the logits, "own" if they belong to another set of classes.
        label_names: Names of the labels, if known: those of `classes`, or of the other set.
        skipped: Images that could not be decoded and have no row: (id, reason).
        provenance: Who made the columns: model, task loss and settings of probes; None for arrays from
            elsewhere, of which at most the calibration is known.

    >>> table = Table(logit=[[2.0, 0.0], [0.0, 1.0]], label=[0, 1])
    >>> len(table), table.columns, table.logit.argmax(1).tolist()
    (2, ('logit', 'label'), [0, 1])
    """

    def __init__(
        self,
        *,
        name: str = "table in memory",
        classes: Sequence[str] | None = None,
        label_space: str = "model",
        label_names: Sequence[str] | None = None,
        skipped: Sequence[tuple[str, str]] = (),
        provenance: Provenance | None = None,
        **columns: Any,
    ) -> None:
        if label_space not in ("model", "own"):
            raise TableError(f"label_space must be 'model' or 'own'; got '{label_space}'. Choose one of the two.")
        self.name, self.skipped, self.provenance = name, skipped, provenance
        self.classes, self.label_space = classes, label_space
        self.label_names = classes if label_names is None and label_space == "model" else label_names
        self._columns = _checked(columns, name)
        _warn_of_misspelt(self, columns)

    def __len__(self) -> int:
        return next((column.shape[0] for column in self._columns.values()), 0)

    def __contains__(self, column: str) -> bool:
        return column in self._columns

    def __repr__(self) -> str:
        shapes = ", ".join(f"{key} {tuple(column.shape)}" for key, column in self._columns.items())
        return f"Table({self.name!r}: {len(self)} rows; {shapes})"

    def _repr_html_(self) -> str:
        """For notebooks: the columns, and the first rows of what people can read."""
        made = f", made by {self.provenance.model}" if self.provenance and self.provenance.model else ""
        head = f"{self.name}: {len(self):,} image{'' if len(self) == 1 else 's'}{made}"
        columns = [[key, " x ".join(map(str, column.shape)), _kind(column)] for key, column in self._columns.items()]
        skipped = f"<div>{len(self.skipped):,} images could not be decoded: see skipped.</div>" if self.skipped else ""
        tables = _html(["column", "shape", "type"], columns) + self._preview()
        return f"<div><strong>{escape(head)}</strong></div>{tables}{skipped}"

    def _preview(self) -> str:
        """The first rows: their ids, labels and predictions, as HTML."""
        first = self.select(*(key for key in ("id", "label", "logit") if key in self)).rows(slice(_PREVIEW))
        shown: dict[str, list[str]] = {"id": first.row_ids()}
        if "label" in first:
            shown["label"] = [_named(self.label_names, index) for index in first.label.tolist()]
        if "logit" in first and first.shape("logit")[1]:
            shown["predicted"] = [_named(self.classes, index) for index in first.logit.argmax(1).tolist()]
            shown["probability"] = [f"{p:.0%}" for p in first.logit.double().softmax(1).amax(1).tolist()]
        return _html(list(shown), list(zip(*shown.values(), strict=True))) if len(shown) > 1 else ""

    @property
    def model_id(self) -> str | None:
        """The hash of the model that made the columns, None where it is not known."""
        return None if self.provenance is None else self.provenance.model_id

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(self._columns)

    @property
    def feature(self) -> Float[Tensor, "n d"]:
        """The input of the last layer."""
        return cast("Tensor", self.whole("feature"))

    @property
    def logit(self) -> Float[Tensor, "n c"]:
        """The output of the last layer, before softmax."""
        return cast("Tensor", self.whole("logit"))

    @property
    def label(self) -> Int[Tensor, "n"]:
        """The true class."""
        return cast("Tensor", self.whole("label"))

    @property
    def loss(self) -> Float[Tensor, "n"]:
        """The task loss of each image."""
        return cast("Tensor", self.whole("loss"))

    @property
    def id(self) -> Shaped[np.ndarray, "n"]:
        """The name of each image, as strings."""
        return cast("np.ndarray", self.whole("id"))

    def whole(self, column: str) -> Any:
        """One column in memory, all rows. Library code uses `batches`, which does not grow with the table."""
        self.require(column, by=f"table.{column}")
        return self._columns[column][:]

    def column(self, column: str) -> Column:
        """One column without reading it: it has a shape and returns rows for a slice."""
        self.require(column, by=f"table.column({column!r})")
        return self._columns[column]

    def shape(self, column: str) -> tuple[int, ...]:
        """The shape of a column, without reading it."""
        self.require(column, by=f"table.shape({column!r})")
        return tuple(self._columns[column].shape)

    if not TYPE_CHECKING:  # attributes that are not there stay errors of the type checker

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)  # looked up by tools, also before the columns are there
            if name in _AXES:  # a property of a column that is missing
                self.require(name, by=f"table.{name}")
            if name in self._columns:
                raise AttributeError(f"column '{name}' is not an attribute. Read it with table.whole('{name}').")
            known = [*self._columns, *(one for one in dir(type(self)) if not one.startswith("_"))]
            raise AttributeError(f"a table has no attribute or column '{name}'.{suggestion(name, known)}")

    def require(self, *columns: str, by: str) -> None:
        """Raise MissingColumnError unless every column is there."""
        for column in columns:
            if column not in self._columns:
                raise MissingColumnError(
                    f"{by} needs column '{column}'; {self.name} has {', '.join(self._columns) or 'no columns'}. "
                    + self._repair(column)
                )

    def _repair(self, missing: str) -> str:
        """How to get a missing column: by its own name, as an array, or from the probe that writes it."""
        alike = next((one for one in self._columns if usual_name(one, [missing]) == missing), None)
        if alike is not None:
            return f"The column '{alike}' must be called '{missing}'. Pass it as {missing}=... to dubito.Table."
        writer = writer_of(missing)
        by_probe = f"It is written by {writer}." if writer else "Run the probe that writes it."
        arrays = self.provenance is None and missing in _AXES
        return f"Pass {missing}=... to dubito.Table. {by_probe}" if arrays else by_probe

    def select(self, *columns: str) -> "Table":
        """The same rows with fewer columns."""
        self.require(*columns, by="table.select")
        return self.with_only({key: self._columns[key] for key in columns})

    def rows(self, rows: Rows) -> "Table":
        """Some rows, in memory."""
        exact = _exact(rows, len(self), self.name)
        return self.with_only({key: take(column, exact) for key, column in self._columns.items()})

    def row_ids(self, rows: Rows | None = None) -> list[str]:
        """The ids of some rows, of all by default; row numbers where the table has no ids."""
        names = self.column("id") if "id" in self else np.arange(len(self))
        exact = _exact(slice(None) if rows is None else rows, len(self), self.name)
        return [str(name) for name in take(names, exact)]

    def batches(self, *columns: str, size: int = 2048) -> Iterator["Table"]:
        """Consecutive rows in memory, at most `size` at a time."""
        chosen = self.select(*columns) if columns else self
        for start in range(0, len(self), size):
            yield chosen.rows(slice(start, start + size))

    def extended(self, **columns: Any) -> "Table":
        """The same rows with further columns."""
        table = self.with_only({**self._columns, **columns})
        _warn_of_misspelt(table, columns)
        return table

    def with_only(self, columns: Mapping[str, Any], *, name: str | None = None) -> "Table":
        """A table of other columns about which the same is known: classes, labels, provenance and skipped images."""
        table = copy.copy(self)
        table.name = name or self.name
        table._columns = _checked(columns, table.name)
        return table


def check_table(table: object, *, by: str, what: str = "table") -> None:
    """Raise TableError for anything but a table, such as the path of one."""
    if isinstance(table, str | PathLike):
        raise TableError(f'{by}: {what} must be a table; got the path "{table}". Open it: dubito.open("{table}").')
    if not isinstance(table, Table):
        raise TableError(
            f"{by}: {what} must be a table, from dubito.extract or dubito.open; got {type(table).__name__}. "
            f"Make one from arrays: dubito.Table(logit=..., feature=..., label=...)."
        )


def usual_name(column: str, names: Iterable[str] = _AXES) -> str | None:
    """The name of a usual column that another one is the plural or a misspelling of; None for a name of its own.

    >>> usual_name("logits"), usual_name("lable"), usual_name("labeler"), usual_name("camera")
    ('logit', 'label', None, None)
    """
    if column in _AXES:
        return None
    one = column.lower().removesuffix("s")
    alike = nearest(one, names, cutoff=0.8, or_first=False)
    return next((name for name in alike if name == one or (len(one) > _CHANCE and abs(len(name) - len(one)) < 2)), None)


def to_tensor(values: Any, what: str) -> Tensor:
    """A tensor on the CPU without a graph, from a tensor, a numpy array or a list."""
    if isinstance(values, Tensor):
        return values.detach().cpu()
    try:
        array = np.asarray(values)
        # torch shares no memory that is read-only (a memory-mapped file), runs backwards or has another byte order.
        shared = array.flags.writeable and array.dtype.isnative and all(step >= 0 for step in array.strides)
        return torch.from_numpy(array if shared else array.astype(array.dtype.newbyteorder("="), order="C"))
    except (RuntimeError, TypeError, ValueError) as error:
        raise TableError(
            f"{what} must be numbers in an array; got {type(values).__name__} ({error}). "
            f"Give a tensor, a numpy array or a list of equal-length rows."
        ) from error


def _named(names: Sequence[str] | None, index: int) -> str:
    """A class by its name without synonyms, or by its number."""
    return names[index].partition(",")[0] if names is not None and 0 <= index < len(names) else str(index)


def _kind(column: Column) -> str:
    """What a column holds, from one row of it."""
    values = column[slice(0, 1)]
    return "text" if isinstance(values, np.ndarray) else str(values.dtype).removeprefix("torch.")


def _html(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for notebooks; every text is escaped."""
    lines = [("th", header), *(("td", row) for row in rows)]
    cells = ["".join(f'<{tag} style="text-align:left">{escape(text)}</{tag}>' for text in line) for tag, line in lines]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"


def _exact(rows: Rows, n: int, name: str) -> Exact:
    """Rows as columns take them, whatever the user gave."""
    if isinstance(rows, slice):
        start, stop, step = rows.indices(n)
        return slice(start, max(start, stop)) if step == 1 else torch.tensor(range(start, stop, step), dtype=torch.long)
    index = to_tensor(rows, f"rows of {name}")
    if index.dtype == torch.bool and index.shape == (n,):
        return index.nonzero()[:, 0]
    whole = index.dim() == 1 and not index.is_floating_point() and index.dtype != torch.bool
    if index.shape[:1] == (0,) or (whole and bool(((index >= -n) & (index < n)).all())):
        return index.long() % max(n, 1)
    raise TableError(
        f"rows of {name} must be a slice, a mask of {n} booleans or indices below {n}; got {index.dtype} of shape "
        f"{tuple(index.shape)}" + (f", up to {int(index.max())}" if whole else "") + ". Choose among its rows."
    )


def take(column: Column, rows: Exact) -> Any:
    """Some rows of a column, also of one in numpy, which does not take tensors as indices."""
    return column[rows.numpy() if isinstance(column, np.ndarray) and isinstance(rows, Tensor) else rows]  # type: ignore[index]


def _column(key: str, value: Any) -> Column:
    if isinstance(value, Column) and not hasattr(value, "__array__"):
        return value
    if key == "id" or (key not in _AXES and _is_text(value)):
        return cast("Column", np.asarray(value, dtype=str))
    try:
        tensor = to_tensor(value, f"column '{key}'")
    except TableError as error:
        if key != "label" or not _is_text(names := np.asarray(value, dtype=object).tolist()):
            raise
        raise TableError(
            f"column 'label' must hold class indices, 0 for the first logit; got names such as '{names[0]}'. Number "
            f"them in the order of the logits: label=[classes.index(name) for name in names], classes=classes."
        ) from error
    if key in ("feature", "logit", "loss"):
        return tensor if tensor.dtype == torch.float64 else tensor.float()
    return tensor.long() if key == "label" and not tensor.is_floating_point() else tensor


def _checked(columns: Mapping[str, Any], name: str) -> dict[str, Column]:
    """Columns as a table has them, of one length."""
    checked = {key: _column(key, value) for key, value in columns.items() if value is not None}
    _check_shapes(checked, name)
    return checked


def _warn_of_misspelt(table: Table, columns: Iterable[str]) -> None:
    """Warn of new columns whose names are nearly those of usual ones, which the table lacks."""
    for column in columns:
        usual = usual_name(column)
        if usual is not None and usual not in table:
            warnings.warn(
                f"The column '{column}' must be called '{usual}'. Pass it as {usual}=... to dubito.Table.",
                DubitoWarning,
                stacklevel=users_level(),
            )


def _is_text(value: Any) -> bool:
    """Whether a column that a user has added holds text alone, such as names of cameras."""
    if isinstance(value, np.ndarray):
        return bool(value.dtype.kind == "U")
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(one, str) for one in value)


def _check_shapes(columns: dict[str, Column], name: str) -> None:
    for key, column in columns.items():
        axes = _AXES.get(key, max(1, len(column.shape)))
        if len(column.shape) != axes:
            one_hot = key == "label" and len(column.shape) == 2 and column.shape[1] > 1
            raise TableError(
                f"column '{key}' of {name} must have {'one axis' if axes == 1 else f'{axes} axes'}; got shape "
                f"{tuple(column.shape)}. Reshape it to {'(n,)' if axes == 1 else '(n, width)'}."
                + (" For one-hot labels, pass label.argmax(1)." if one_hot else "")
            )
    lengths = {key: column.shape[0] for key, column in columns.items()}
    if len(set(lengths.values())) > 1:
        each = ", ".join(f"{key} has {n}" for key, n in lengths.items())
        raise TableError(f"columns of {name} must have one length; {each}. Pass one row per image in every column.")
    label = columns.get("label")
    if isinstance(label, Tensor) and label.is_floating_point():
        raise TableError(f"column 'label' of {name} must be integers; got {label.dtype}. Cast it if that is meant.")
