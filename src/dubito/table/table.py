"""A Table is named columns with one row per image: in memory, or memory-mapped from a cache.

Users with arrays build one directly; extraction returns one. Scores and metrics see nothing else.
Columns that every extraction writes are attributes: id, label (n), feature (n,d), logit (n,c), loss (n).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from dubito.errors import MissingColumnError, TableError
from dubito.table.provenance import Provenance

WRITERS = {
    "feature": "the forward probe, which every extraction runs",
    "logit": "the forward probe, which every extraction runs",
    "loss": "the forward probe, when the images come with labels of the model's own classes, or with targets=...",
    "label": "an extraction of images with labels (class folders, a CSV, labels=...)",
    "id": "every extraction",
    "epoch": "an extraction of augmented epochs (epochs=..., augment=...)",
    "photo": "an extraction of augmented epochs (epochs=..., augment=...)",
    "pre_activation": "the probe dubito.PreActivation (probes=[dubito.PreActivation()], or dubito extract --before)",
    "gradient": "the gradient probe (extract(..., probes=[dubito.Gradient()]))",
}
"""Who writes a column: told to a user whose table lacks it. Columns of ensembles are in `ENSEMBLES`."""

ENSEMBLES = {
    "members": "the probe of several models (extract(..., probes=[dubito.Members(models)]))",
    "checkpoints": "the probe of several checkpoints (extract(..., probes=[dubito.Members.checkpoints(model, paths)]))",
    "dropout": "the probe of Monte-Carlo dropout (extract(..., probes=[dubito.Members.dropout()]))",
    "views": "the probe of several views of an image (extract(..., probes=[dubito.Members.views()]))",
    "noise": "the probe of noisy copies of an image (extract(..., probes=[dubito.Members.noise()]))",
    "tiles": "the probe of tiles (extract(..., probes=[dubito.Tiles()]))",
    "masks": "masks of the last layer (dubito.HeadMasks().fit(train).extend(table))",
}
"""Who writes the columns of an ensemble: NAME, NAME_loss, NAME_between, NAME_logit, NAME_variance. Those of tiles are
tiles_2 ..."""

_OF_ENSEMBLE = re.compile(
    r"(?P<name>members|checkpoints|dropout|views|noise|masks|tiles_\d+)(?P<part>_loss|_between|_logit|_variance)?"
)
_OF_GRADIENT = re.compile(r"(?P<name>[a-z][a-z_]*)(?P<part>_root|_l1|_predicted|_uniform|_bound)")
_ASKED = {
    "_root": 'method="exact" and weightings=["root"]',
    "_l1": 'method="exact" and weightings=["expected_l1"]',
    "_predicted": 'any method but "signs"',
    "_uniform": "uniform=True",
    "_bound": 'method="top"',
}
"""How the gradient probe is asked for its further columns, by the end of their names."""

_LONG = 80
"""Settings that are longer, such as hashes of members, are named and not shown."""
_NO_MATTER = ("weightings", "uniform")
"""Settings of a gradient probe that add columns, and change no numbers."""
_NO_MATTER_OF_ENSEMBLES = ("keep", "dtype", "grids", "seed")
"""Settings of ensembles by which their numbers stay comparable: how much is kept of which, and other draws."""
_AXES = {"feature": 2, "logit": 2, "label": 1, "loss": 1, "id": 1}

Rows = slice | Tensor | Shaped[np.ndarray, "..."] | Sequence[int]
"""Which rows: a slice, a boolean mask (n) or indices, negative ones counting from the end."""

Exact = slice | Tensor
"""What columns are asked for: a slice of step 1 within bounds, or indices from 0 to n - 1."""


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
        name: How errors call it: a cache's folder or "table in memory".
        classes: Class names of the logits, if known.
        label_space: "model" when labels are indices into the logits, "own" when they are another set of classes.
        label_names: Names of the labels, if known: those of `classes`, or of the other set.
        skipped: Images that could not be decoded and have no row: (id, reason).
        provenance: Who made the columns: the model, the task loss and the probes' settings; None for arrays from
            elsewhere.

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
        self.provenance = provenance
        self.name = name
        self.skipped = skipped
        self.classes = classes
        self.label_space = label_space
        self.label_names = classes if label_names is None and label_space == "model" else label_names
        self._columns: dict[str, Column] = {
            key: _column(key, value) for key, value in columns.items() if value is not None
        }
        _check_shapes(self._columns, name)

    def __len__(self) -> int:
        return next((column.shape[0] for column in self._columns.values()), 0)

    def __contains__(self, column: str) -> bool:
        return column in self._columns

    def __repr__(self) -> str:
        shapes = ", ".join(f"{key} {tuple(column.shape)}" for key, column in self._columns.items())
        return f"Table({self.name!r}: {len(self)} rows; {shapes})"

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
        """What the last layer reads."""
        column: Tensor = self.whole("feature")
        return column

    @property
    def logit(self) -> Float[Tensor, "n c"]:
        """What the last layer says, before softmax."""
        column: Tensor = self.whole("logit")
        return column

    @property
    def label(self) -> Int[Tensor, "n"]:
        """The true class."""
        column: Tensor = self.whole("label")
        return column

    @property
    def loss(self) -> Float[Tensor, "n"]:
        """The task loss of each image."""
        column: Tensor = self.whole("loss")
        return column

    @property
    def id(self) -> Shaped[np.ndarray, "n"]:
        """The name of each image, as strings."""
        column: Shaped[np.ndarray, "n"] = self.whole("id")
        return column

    def whole(self, column: str) -> Any:
        """One column in memory, all rows. Library code uses `batches`, which does not grow with the table."""
        self.require(column, by=f"table.{column}")
        return self._columns[column][:]

    def column(self, column: str) -> Column:
        """One column without reading it: has a shape, and gives rows for a slice."""
        self.require(column, by=f"table.column({column!r})")
        return self._columns[column]

    def shape(self, column: str) -> tuple[int, ...]:
        """The shape of a column, without reading it."""
        self.require(column, by=f"table.shape({column!r})")
        return tuple(self._columns[column].shape)

    def require(self, *columns: str, by: str) -> None:
        """Raise MissingColumnError unless every column is there."""
        for column in columns:
            if column not in self._columns:
                writer = writer_of(column)
                raise MissingColumnError(
                    f"{by} needs column '{column}'; {self.name} has {', '.join(self._columns) or 'no columns'}. "
                    + (f"It is written by {writer}." if writer else "Run the probe that writes it.")
                )

    def select(self, *columns: str) -> "Table":
        """The same rows with fewer columns."""
        self.require(*columns, by="table.select")
        return self._with({key: self._columns[key] for key in columns})

    def rows(self, rows: Rows) -> "Table":
        """Some rows, in memory."""
        exact = _exact(rows, len(self), self.name)
        return self._with({key: _chosen(column, exact) for key, column in self._columns.items()})

    def batches(self, *columns: str, size: int = 2048) -> Iterator["Table"]:
        """Consecutive rows in memory, at most `size` at a time."""
        chosen = self.select(*columns) if columns else self
        for start in range(0, len(self), size):
            yield chosen.rows(slice(start, start + size))

    def extended(self, **columns: Any) -> "Table":
        """The same rows with further columns."""
        return self._with({**self._columns, **columns})

    def _with(self, columns: dict[str, Any]) -> "Table":
        return Table(
            name=self.name,
            classes=self.classes,
            label_space=self.label_space,
            label_names=self.label_names,
            skipped=self.skipped,
            provenance=self.provenance,
            **columns,
        )


def check_table(table: object, *, by: str, what: str = "table") -> None:
    """Raise TableError for what is no table, such as the path of one."""
    if isinstance(table, str | PathLike):
        raise TableError(f'{by}: {what} must be a table; the path "{table}" came. Open it: dubito.open("{table}").')
    if not isinstance(table, Table):
        raise TableError(
            f"{by}: {what} must be a table, from dubito.extract or dubito.open; got {type(table).__name__}. "
            f"Make one of arrays by dubito.Table(logit=..., feature=..., label=...)."
        )


def writer_of(column: str) -> str | None:
    """Who writes a column, if that is known.

    >>> writer_of("tiles_7_logit")
    'the probe of tiles (extract(..., probes=[dubito.Tiles()])), with keep="logits"'
    """
    found = _OF_ENSEMBLE.fullmatch(column)
    if found is None:
        return WRITERS.get(column) or _writer_of_gradient(column)
    kept = "" if found["name"] == "masks" else ', with keep="logits"'
    also = {"_logit": kept, "_loss": ", where labels are the model's classes"}
    if found["name"] != "noise":
        also["_variance"] = f"{kept}, of which it is computed"
    joined = ", or by dubito.ensemble(tables) of one table a model" if column == "members_logit" else ""
    return ENSEMBLES[found["name"].rstrip("_0123456789")] + also.get(found["part"], "") + joined


def _writer_of_gradient(column: str) -> str | None:
    """Gradient probes may have names of their own; how their columns end tells them."""
    found = _OF_GRADIENT.fullmatch(column)
    if found is None:
        return None
    named = "" if found["name"] == "gradient" else f" of the name '{found['name']}'"
    return f"{WRITERS['gradient']}{named}, with {_ASKED[found['part']]}"


def ensembles_in(columns: Sequence[str]) -> tuple[str, ...]:
    """The ensembles that columns tell of, by name.

    >>> ensembles_in(["id", "logit", "members", "members_loss", "tiles_2", "dropout_logit"])
    ('members', 'tiles_2', 'dropout')
    """
    found = [match for match in map(_OF_ENSEMBLE.fullmatch, columns) if match]
    return tuple(dict.fromkeys(match["name"] for match in found if match["part"] in (None, "_logit")))


def gradients_in(table: "Table") -> tuple[str, ...]:
    """The gradient probes that a table knows to have been asked with, by name."""
    probes = table.provenance.probes if table.provenance else {}
    return tuple(name for name, probe in probes.items() if name in table and "notes" in probe)


def asked_otherwise(one: "Table", other: "Table", name: str) -> str | None:
    """In which settings an ensemble, or a gradient probe, was asked otherwise for two tables.

    None for none, or where that is not known.

    >>> few, many = (Provenance(probes={"dropout": {"settings": {"passes": n, "rate": 0.1}}}) for n in (10, 20))
    >>> asked_otherwise(Table(provenance=few), Table(provenance=many), "dropout")
    'passes=10 and passes=20'
    """
    here, there = _asked(one, name), _asked(other, name)
    if here is None or there is None:
        return None
    differing = [key for key in {**here, **there} if here.get(key) != there.get(key)]
    told = [f"{key}={here.get(key)} and {key}={there.get(key)}" for key in differing]
    return ", ".join(text if len(text) <= _LONG else key for text, key in zip(told, differing, strict=True)) or None


def _asked(table: "Table", name: str) -> Mapping[str, Any] | None:
    probes = table.provenance.probes if table.provenance else {}
    probe = probes.get(name) or probes.get(name.rstrip("_0123456789"))
    if probe is None:
        return None
    # A gradient's seed matters: all images share its signs and noise, and so their errors.
    ignored = _NO_MATTER if "notes" in probe else _NO_MATTER_OF_ENSEMBLES
    return {key: value for key, value in probe["settings"].items() if key not in ignored}


def to_tensor(values: Any, what: str) -> Tensor:
    """A tensor on the CPU without a graph, from a tensor, a numpy array or a list."""
    if isinstance(values, Tensor):
        return values.detach().cpu()
    try:
        array = np.asarray(values)
        # torch shares no memory that is read-only (a memory-mapped file), runs backwards or has foreign byte order.
        shared = array.flags.writeable and array.dtype.isnative and all(step >= 0 for step in array.strides)
        return torch.from_numpy(array if shared else array.astype(array.dtype.newbyteorder("="), order="C"))
    except (RuntimeError, TypeError, ValueError) as error:
        raise TableError(
            f"{what} must be numbers in an array; got {type(values).__name__} ({error}). "
            f"Give a tensor, a numpy array or a list of equal-length rows."
        ) from error


def _exact(rows: Rows, n: int, name: str) -> Exact:
    """Rows as columns take them, whatever the user gave."""
    if isinstance(rows, slice):
        start, stop, step = rows.indices(n)
        return slice(start, max(start, stop)) if step == 1 else torch.tensor(range(start, stop, step), dtype=torch.long)
    index = to_tensor(rows, f"rows of {name}")
    if index.dtype == torch.bool and index.shape == (n,):
        return index.nonzero()[:, 0]
    whole = index.dim() == 1 and not index.is_floating_point() and index.dtype != torch.bool
    if len(index) == 0 or (whole and bool(((index >= -n) & (index < n)).all())):
        return index.long() % max(n, 1)
    raise TableError(
        f"rows of {name} must be a slice, a mask of {n} booleans or indices below {n}; {index.dtype} of shape "
        f"{tuple(index.shape)} came" + (f", up to {int(index.max())}" if whole else "") + ". Choose among its rows."
    )


def _chosen(column: Column, rows: Exact) -> Any:
    return column[rows.numpy() if isinstance(column, np.ndarray) and isinstance(rows, Tensor) else rows]  # type: ignore[index]


def _column(key: str, value: Any) -> Column:
    if isinstance(value, Column) and not hasattr(value, "__array__"):
        column: Column = value
        return column
    if key == "id":
        ids: Column = np.asarray(value, dtype=str)
        return ids
    tensor = to_tensor(value, f"column '{key}'")
    if key in ("feature", "logit", "loss"):
        return tensor if tensor.dtype == torch.float64 else tensor.float()
    return tensor.long() if key == "label" and not tensor.is_floating_point() else tensor


def _check_shapes(columns: dict[str, Column], name: str) -> None:
    for key, column in columns.items():
        axes = _AXES.get(key, max(1, len(column.shape)))
        if len(column.shape) != axes:
            raise TableError(
                f"column '{key}' of {name} must have {axes} axes; got one of shape {tuple(column.shape)}. "
                f"Reshape it to {'(n,)' if axes == 1 else '(n, width)'}."
            )
    lengths = {key: column.shape[0] for key, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise TableError(
            f"columns of {name} must have one length; "
            + ", ".join(f"{key} has {n}" for key, n in lengths.items())
            + ". Give one row per image in every column."
        )
    label = columns.get("label")
    if isinstance(label, Tensor) and label.is_floating_point():
        raise TableError(f"column 'label' of {name} must be integers; got {label.dtype}. Cast it if that is meant.")
