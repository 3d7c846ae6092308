"""The contracts: what an image set, a transform, a classifier, a probe and a score must provide.

Axes have fixed letters everywhere: n images, c classes, d features, t tiles, m members, k sub-ensembles, l layers.
Higher is always more uncertain. A probe needs model and images and writes named columns; a score needs columns only.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int, Shaped
from PIL import Image
from torch import Tensor, nn

from dubito.choices import Kind
from dubito.errors import DubitoError, NotFittedError, TableError, ValueRangeError, first_words
from dubito.table import Provenance, Table, check_size_of_logits, check_table
from dubito.table.provenance import check_provenance

Json = dict[str, Any]
Inputs = Float[Tensor, "n ..."]
"""A batch of finished inputs."""
Targets = Shaped[Tensor, "n ..."]
"""What the task loss compares logits with: the class of each image, or anything else with one row per image."""
Mixed = tuple[Targets, Float[Tensor, "n"]]
"""The target of the other image, and the weight of the own one."""
AnyScore = TypeVar("AnyScore", bound="Score")


@runtime_checkable
class Transform(Protocol):
    """Turns one image into one model input, in two steps so that the costly part runs in worker processes."""

    def prepare(self, image: Image.Image) -> Tensor:
        """One RGB image to one tensor, in a worker: uint8 pixels (h,w,3), or a finished float input."""

    def finish(self, batch: Tensor) -> Inputs:
        """A stacked batch of prepared tensors to model inputs, on the model's device: scaling and normalisation."""

    def describe(self) -> Json:
        """Everything that changes the result, as JSON: part of a cache's identity."""


@runtime_checkable
class Images(Protocol):
    """An ordered set of images, read one at a time and in any order by worker processes."""

    name: str
    ids: Sequence[str]
    labels: Int[Tensor, "n"] | None
    classes: Sequence[str] | None

    def __len__(self) -> int: ...

    def read(self, index: int) -> Image.Image | Tensor:
        """The image as RGB, or a tensor that is an input already; BrokenImageError if it cannot be decoded."""

    def digest(self) -> str:
        """A hash of the ordered ids and of every image's content."""


@runtime_checkable
class Classifier(Protocol):
    """A frozen classifier, split where its last layer reads its features. It never changes the module it holds."""

    name: str
    module: nn.Module
    transform: Transform
    classes: Sequence[str] | None

    @property
    def device(self) -> torch.device:
        """Where the module is."""

    def features(self, x: Inputs) -> Float[Tensor, "n d"]:
        """What the last classifying layer reads."""

    def logits(self, z: Float[Tensor, "*n d"]) -> Float[Tensor, "*n c"]:
        """What the last layer makes of features, for rows and for tiles; of features(x), the module's output."""

    def feature_map(self, x: Inputs) -> Float[Tensor, "n t d"]:
        """The features each tile would give the last layer if it were the whole image."""

    def head(self) -> tuple[Float[Tensor, "c d"], Float[Tensor, "c"] | None]:
        """Weight and bias of the last layer as `logits` applies them; known once a batch has been seen."""

    def fingerprint(self) -> Json:
        """Hashes of weights and transform: who made a cache."""


def has_logits(model: object) -> bool:
    """Whether a model has a classifying layer; a backbone without one gives features alone."""
    return getattr(model, "output", None) != "features"


@dataclass(frozen=True)
class Tiled:
    """The result of one pass over images and each of their tiles.

    Attributes:
        features: As returned by `Classifier.features`.
        grid: Height and width of the feature map.
        logits: The whole head on every tile of the images [start, stop), tiles in row-major order: (b, t, c). To be
            called for a few images at a time, so that those of a batch are never in memory at once.
    """

    features: Float[Tensor, "n d"]
    grid: tuple[int, int]
    logits: Callable[[int, int], Tensor]


@runtime_checkable
class Tiling(Protocol):
    """A classifier that computes features and tiles in one pass. Any other takes two."""

    def tiled(self, x: Inputs) -> Tiled:
        """Features, and the logits of every tile; ModelError where there is no feature map."""


@runtime_checkable
class Probe(Protocol):
    """Runs the model on a batch of images and writes columns, one row per image.

    With an attribute `uses_labels = False`, a cache takes it that the columns do not depend on labels.
    """

    price: str

    @property
    def name(self) -> str:
        """Name of its columns and of its part of a cache; a plain attribute suffices."""

    def run(self, model: Classifier, x: Inputs, label: Targets | None) -> Mapping[str, Tensor]:
        """The columns of one batch, each (n, ...), on any device.

        `label` is the model's class of each image, or the targets of `extract`; None if there are neither.
        """

    def settings(self) -> Json:
        """Everything that changes the columns, as JSON: part of a cache's identity."""


@runtime_checkable
class SharingProbe(Protocol):
    """A probe whose pass also gives the features, so that the forward probe beside it needs no pass of its own."""

    def run_and_share(
        self, model: Classifier, x: Inputs, label: Targets | None
    ) -> tuple[Mapping[str, Tensor], Float[Tensor, "n d"]]:
        """The columns of `run`, and model.features(x) to the last bit."""


@runtime_checkable
class BaseProbe(Protocol):
    """The probe that every extraction runs: it compares logits with targets, and takes features that are there."""

    @property
    def recorded_loss(self) -> str:
        """The name under which a cache records the task loss."""

    @property
    def keeps_head(self) -> bool:
        """Whether logits are not stored but rebuilt from features, so that the last layer is kept once."""

    def run(
        self,
        model: Classifier,
        x: Inputs,
        label: Targets | None,
        *,
        mixed: Mixed | None = None,
        feature: Float[Tensor, "n d"] | None = None,
    ) -> Mapping[str, Tensor]:
        """As of any probe, but without a pass where a SharingProbe has computed `feature`.

        Of images that are mixed from two, `mixed` is the other one's target and the weight of the first.
        """

    def check_targets(self, targets: Targets | None, classes: int | None) -> None:
        """Raise an error for targets that the task loss cannot be computed with; classes is None while unknown."""


@runtime_checkable
class NotingProbe(Protocol):
    """A probe that records more than columns, such as the names of the layers that a column's numbers belong to."""

    def notes(self) -> Json:
        """What is the same for all images, as JSON; known after the first batch. Kept with the columns."""


class Score(ABC):
    """An uncertainty from columns alone: a dataclass of its settings; learned attributes end in `_`.

    Subclasses name the columns they read (`needs`), those they learn from (`learns_from`) and the attributes that `fit`
    sets (`learned`), and implement `score_batch` (and `learn`). `provenance_` is that of the table it was fitted on;
    `from_file_` is whether it was read from a file since.
    """

    name: str
    kind: Kind
    needs: tuple[str, ...]
    learns_from: tuple[str, ...] = ()
    learned: tuple[str, ...] = ()
    per_ensemble: ClassVar[bool] = False
    """Whether it is a score of an ensemble, made once for each that a table has (setting `of`)."""
    own_probe: ClassVar[bool] = False
    """Whether it reads columns of an optional probe, so that nobody misses it where that probe has not run."""
    ood_only: ClassVar[bool] = False
    """Whether it is designed to find OOD images alone, so that a guard, which looks for errors, tries it on request."""
    named_only: ClassVar[str | None] = None
    """Why it is made only where it is named, such as that it learns for minutes; None for a score that always is."""
    reads_size: ClassVar[bool] = False
    """Whether it reads the size of logits, which log-probabilities do not have."""
    provenance_: Provenance | None = None
    from_file_: bool = False

    def fit(self: AnyScore, table: Table) -> AnyScore:
        """Learn from a table, if there is anything to learn; returns the score itself.

        What was learned before is discarded first, so a fit that fails leaves a score that is not fitted.
        """
        for name in (*self.learned, "provenance_", "from_file_"):
            self.__dict__.pop(name, None)
        check_table(table, by=f"{self.name}.fit")
        table.require(*self.learns_from, by=f"{self.name}.fit")
        if self.reads_size and "logit" in self.learns_from:
            check_size_of_logits(table, by=f"{self.name}.fit")
        self.learn(table)
        self.provenance_ = table.provenance
        return self

    def score(self, table: Table) -> Float[Tensor, "n"]:
        """The uncertainty of every row, float64, higher = more uncertain; the table is read in batches."""
        check_table(table, by=f"{self.name}.score")
        self.check_columns(table)
        self.check_fitted()
        self.check_provenance(table)
        batches = finite_batches(self.batches(table), table.name, by=f"{self.name}.score")
        u, start = torch.empty(len(table), dtype=torch.float64), 0
        for batch in batches:  # filled in place: many small parts would keep freed memory between them from being used
            with self._using_a_file(table):
                u[start : start + len(batch)] = self.score_batch(batch)
            start += len(batch)
        return finite(u, f"{self.name}.score of {table.name}")

    @contextmanager
    def _using_a_file(self, table: Table) -> Iterator[None]:
        """Name the score where what it has learned, read from a file, does not fit together, or not the table."""
        try:
            yield
        except (DubitoError, MemoryError):
            raise
        except Exception as error:
            if not self.from_file_:
                raise
            raise TableError(
                f"{self.name}.score: what it has learned, as its file says, does not fit {table.name} "
                f"({first_words(error)}). Use a table of the same model, or fit the score again."
            ) from error

    def learn(self, table: Table) -> None:  # noqa: B027 (nothing to learn is a fine default)
        """Set the learned attributes from a table that has the columns `learns_from`."""

    @property
    def family(self) -> str | None:
        """The ensemble or gradient probe whose columns it reads; None for the model's own columns."""
        return None

    def columns_in(self, table: Table) -> tuple[str, ...]:  # noqa: ARG002 (for subclasses that have a choice)
        """The columns of a table that it reads, whether they are there or not."""
        return self.needs

    def check_columns(self, table: Table) -> None:
        """Raise MissingColumnError or TableError where a table lacks what the score reads, before it is scored."""
        by = f"{self.name}.score"
        table.require(*self.columns_in(table), by=by)
        if self.reads_size:
            check_size_of_logits(table, by=by)

    def check_provenance(self, table: Table) -> None:
        """Raise TableError for a table of another model than the score was fitted on."""
        if self.learned:
            both = f"{table.name} and the table that {self.name} was fitted on"
            logits = "logit" in (*self.needs, *self.learns_from)
            check_provenance(table.provenance, self.provenance_, by=f"{self.name}.score", of=both, logits=logits)

    def batches(self, table: Table) -> Iterator[Table]:
        """The rows of a table with the columns that the score reads, as many in memory as it can score at once."""
        return table.batches(*self.needs)

    @abstractmethod
    def score_batch(self, batch: Table) -> Float[Tensor, "n"]:
        """The uncertainty of one in-memory batch."""

    @property
    def is_fitted(self) -> bool:
        """Whether every learned attribute is set."""
        return all(hasattr(self, name) for name in self.learned)

    def check_fitted(self) -> None:
        """Raise NotFittedError while a learned attribute is missing."""
        if missing := [name for name in self.learned if not hasattr(self, name)]:
            raise NotFittedError(
                f"{self.name}.score was called before fit (no {', '.join(missing)}). "
                f"Call fit(table) first, with a table that has {', '.join(self.learns_from)}."
            )


TaskLoss = Callable[[Tensor, Tensor], Tensor]


def depth_weight(place: int, of: int, beta: float) -> float:
    """exp(beta ((place + 1) / of - 1)): the weight of a layer by its depth, 1 for the last one; place counts from 0."""
    return math.exp(beta * ((place + 1) / of - 1))


def finite_batches(batches: Iterable[Table], name: str, *, by: str) -> Iterator[Table]:
    """The batches of a table of that name, unchanged; ValueRangeError for the first NaN or infinity in any column.

    Every column that a score reads passes here: a logit of minus infinity would give a rank to an impossible class.
    """
    start = 0
    for batch in batches:
        for column in batch.columns:
            check_finite(batch.whole(column), column, range(start, start + len(batch)), name, by=by)
        start += len(batch)
        yield batch


def check_finite(values: Shaped[Tensor, "n ..."], column: str, rows: Sequence[int], name: str, *, by: str) -> None:
    """Raise ValueRangeError for NaN and infinity in these rows of a column of the table of that name."""
    # NaN and infinity reach the sum, which is much cheaper than the check.
    if not values.is_floating_point() or bool(values.sum().isfinite()):
        return
    bad = ~values.flatten(1).isfinite() if values.dim() > 1 else ~values[:, None].isfinite()
    if bool(bad.any()):
        row, place = bad.nonzero()[0].tolist()
        value = float(values[row].flatten()[place])
        masked = value == -math.inf and column.endswith("logit")
        repair = "Give an impossible class a large negative logit, such as -1e4." if masked else "Look at that image."
        raise ValueRangeError(
            f"{by}: column '{column}' must be finite; row {int(rows[row])} of {name} holds {value}. {repair}"
        )


def finite(
    values: Float[Tensor, "..."],
    what: str,
    repair: str = "Uncertainties must be finite: check the logits or features of that row.",
) -> Float[Tensor, "..."]:
    """The values unchanged; ValueRangeError for NaN or infinity, which have no rank."""
    # NaN and infinity reach the sum, which is much cheaper than the check.
    if bool(values.sum().isfinite()):
        return values
    bad = ~torch.isfinite(values)
    if bad.any():
        count, first = f"{int(bad.sum())} of {values.numel()}", int(bad.flatten().nonzero()[0, 0])
        raise ValueRangeError(f"{what}: {count} values are NaN or infinite, the first at position {first}. {repair}")
    return values
