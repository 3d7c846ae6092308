"""What every calibration method is: settings, `fit` on labelled images, and logits that become calibrated ones.

    p = softmax(method.calibrated(logits)),      fitted on rows that the model was not trained on

A calibrated table (`apply`) is a view: its column `logit` is computed as rows are read, in the precision of the model's
own logits. Methods that are affine in the logits (temperature, vector, matrix) keep their size; the others give log p.
All scores, metrics and guards of probabilities take the table like any other. Scores that read the size of logits
(energy, max_logit, nci, vim) refuse log-probabilities. The column `loss`, which belongs to the old logits, is left out;
members of ensembles stay as they are. The table's provenance records the method, so that what was fitted on other
logits (a score, a guard, a calibration) refuses the table.
"""

import hashlib
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import ClassVar, TypeVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from dubito.errors import NotFittedError, TableError
from dubito.metrics import labelled_logits
from dubito.table import Provenance, Table, check_table
from dubito.table.provenance import check_provenance
from dubito.table.table import Exact, take
from dubito.table.views import Computed
from dubito.threads import torch_threads
from dubito.types import finite
from dubito.validate import check_model_labels

_BLOCK = 2048
_SMALL = 2**18
"""Most logits that one thread computes with: more gain little, and wait long for each other on a busy machine."""
_REPAIR = "Fit on held-out images of the classes that the model was trained for."
AnyCalibration = TypeVar("AnyCalibration", bound="Calibration")


class Calibration(ABC):
    """A map from logits to calibrated ones: a dataclass of its settings; learned attributes end in `_`.

    Subclasses implement `learn` and `calibrated`, and name the attributes that `fit` sets (`learned`).

    Attributes:
        classes_: Number of classes, once fitted.
        provenance_: Provenance of the table that it was fitted on; None where it is not known.
    """

    name: ClassVar[str]
    learned: ClassVar[tuple[str, ...]]
    keeps_predictions: ClassVar[bool] = False
    """Whether the most likely class stays the most likely one, so that no prediction changes."""
    places: ClassVar[tuple[str, ...]] = ()
    """Learned tensors that are whole numbers; all others are float64."""
    classes_: int
    provenance_: Provenance | None = None

    def fit(self: AnyCalibration, table: Table) -> AnyCalibration:
        """Learn from labelled images that the model was not trained on; returns the method itself.

        What was learned before is discarded first, so a fit that fails leaves a method that is not fitted.
        """
        for name in ("classes_", "provenance_", *self.learned):
            self.__dict__.pop(name, None)
        by = f"{self.name}.fit"
        check_table(table, by=by)
        check_model_labels(table, by=by)
        if table.shape("logit")[1] < 2:
            raise TableError(f"{by} needs at least 2 classes; {table.name} has {table.shape('logit')[1]}.")
        for _ in labelled_logits(table, by=by, repair=_REPAIR):
            pass  # every block is checked before anything is learned
        with threads_for(table):
            self.learn(table)
        self.classes_, self.provenance_ = table.shape("logit")[1], table.provenance
        return self

    @abstractmethod
    def learn(self, table: Table) -> None:
        """Set the learned attributes from a table with rows, finite logits and labels of the model's classes."""

    @abstractmethod
    def calibrated(self, logits: Float[Tensor, "n c"]) -> Float64[Tensor, "n c"]:
        """Calibrated logits, whose softmax gives the calibrated probabilities: scaled logits, or log-probabilities."""

    def log_probability(self, logits: Float[Tensor, "n c"]) -> Float64[Tensor, "n c"]:
        """The logarithm of the calibrated probability of every class; the probabilities of a row sum to 1."""
        return self.calibrated(logits).log_softmax(-1)

    @property
    def parameters(self) -> int:
        """How many numbers it has learned."""
        values = (getattr(self, name) for name in self.learned)
        return sum(value.numel() if isinstance(value, Tensor) else 1 for value in values)

    def apply(self, table: Table) -> Table:
        """The same images with calibrated logits, computed as rows are read.

        >>> from dubito.calibration import TemperatureScaling
        >>> table = Table(logit=[[4.0, 0.0]] * 3, label=[0, 1, 0])
        >>> calibrated = TemperatureScaling().fit(table).apply(table)
        >>> round(calibrated.logit.softmax(1)[0, 0].item(), 4)  # 2 of 3 are of class 0
        0.6667
        """
        self._check(table, by=f"{self.name}.apply")
        logits = table.column("logit")

        def read(rows: Exact) -> Float[Tensor, "k c"]:
            chosen = torch.as_tensor(take(logits, rows))
            finite(chosen, f"{self.name}: logits of {table.name}")
            parts = [self.calibrated(part).to(chosen.dtype) for part in torch.split(chosen, _BLOCK)]
            return torch.cat(parts) if parts else chosen

        columns = {name: table.column(name) for name in table.columns if name != "loss"}
        applied = table.with_only(columns | {"logit": Computed(table.shape("logit"), read)})
        made = table.provenance or Provenance()
        names = (made.calibration, f"{self.name} {self._fingerprint()}")
        applied.provenance = replace(made, calibration=" + ".join(filter(None, names)))
        return applied

    def probability(self, table: Table) -> Float[Tensor, "n c"]:
        """The calibrated probabilities of all rows, in the precision of the table's logits."""
        return self.apply(table).logit.softmax(-1)

    def check_learned(self) -> None:
        """Raise ValueError where what was read from a file cannot have been learned."""
        for name in self.learned:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                dtype = torch.int64 if name in self.places else torch.float64
                fits = value.dtype == dtype and bool(value.isfinite().all())
            else:
                fits = type(value) in (int, float) and value > 0
            if not fits:
                raise ValueError(f"{name} is not what {self.name} learns")
        if type(self.classes_) is not int or self.classes_ < 2 or not self.parts_agree():
            raise ValueError(f"what {self.name} has learned does not fit together")

    def parts_agree(self) -> bool:
        """Whether learned tensors have the shapes and ranges that `learn` gives them; numbers are checked already."""
        return True

    def _fingerprint(self) -> str:
        """A short hash of what it has learned."""
        known = hashlib.blake2b(digest_size=4)
        for value in (getattr(self, name) for name in self.learned):
            known.update(value.numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode())
        return known.hexdigest()

    def _check(self, table: Table, *, by: str) -> None:
        """Raise unless it is fitted, and the table comes from the same model."""
        check_table(table, by=by)
        table.require("logit", by=by)
        if missing := [name for name in ("classes_", *self.learned) if not hasattr(self, name)]:
            raise NotFittedError(
                f"{by} was called before fit (no {', '.join(missing)}). Call fit(table) first, with labelled images."
            )
        if table.shape("logit")[1] != self.classes_:
            raise TableError(
                f"{by}: {table.name} has {table.shape('logit')[1]} classes; {self.name} was fitted with "
                f"{self.classes_}. Use a table of the same model."
            )
        both = f"{table.name} and the table that {self.name} was fitted on"
        check_provenance(table.provenance, self.provenance_, by=by, of=both)


def threads_for(table: Table) -> AbstractContextManager[None]:
    """Inside, torch computes with one thread if a table is small, and with as many as before if it is not."""
    n, c = table.shape("logit")
    return torch_threads(1 if n * c <= _SMALL else torch.get_num_threads())
