"""Which model and which images a guard belongs to: others are refused, and its own calibration images recognised."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from dubito.cache.disk import model_identity
from dubito.cache.labels import resolve_labels
from dubito.errors import ImagesError, ModelError, OwnLabelsWarning, TableError
from dubito.guard.guarantee import CLASS
from dubito.models.frozen import signature
from dubito.models.wrap import eager
from dubito.table import Table, chosen_rows
from dubito.table.overlap import shared_rows, sketch
from dubito.table.provenance import Provenance, check_provenance
from dubito.threads import quiet
from dubito.types import Classifier, Images
from dubito.validate import SHARED, has_model_labels

if TYPE_CHECKING:
    from dubito.guard.guard import Guard

_MOST_COMPARED = 2048
"""Images that are compared with the calibration images, to see whether they are these."""


class ModelRecord(NamedTuple):
    """A model's own provenance, and the signature of its module at that time."""

    provenance: Provenance
    signature: tuple[object, ...]

    @classmethod
    def of(cls, model: Classifier, made: Provenance | None, *, what: str) -> "ModelRecord":
        """The record of a model; ModelError for one that is not the one that made `what`, a table or a guard."""
        own = cls(model_identity(model), signature(eager(model.module)))
        if made and made.calibration:
            raise ModelError(
                f"{what} has logits that were calibrated ({made.calibration}); those of {model.name} are not. "
                f"Leave the model out, and pass tables to which the same calibration was applied."
            )
        if made and (reason := made.difference(own.provenance)):
            raise ModelError(
                f"{what} belongs to another model than {model.name}: {reason}. A guarantee of that one says nothing "
                f"about this one: extract images with {model.name}, and fit a guard on them."
            )
        return own


def check_unchanged(model: Classifier, before: ModelRecord | None) -> ModelRecord:
    """The model's record now; ModelError if it has been trained further, in place, since the guard was made or loaded.

    Weights are hashed only where the module's signature has changed.
    """
    if before is not None and before.signature == signature(eager(model.module)):
        return before
    now = ModelRecord.of(model, None, what="guard")
    if before and (reason := before.provenance.difference(now.provenance)):
        raise ModelError(
            f"guard: {model.name} has changed since the guard was fitted or loaded: {reason}. Its guarantee says "
            f"nothing about the model as it is now: extract images with it, and fit a guard on them."
        )
    return now


def check_table_of(guard: "Guard", table: Table) -> None:
    """Raise TableError for a table of another model."""
    table.require("logit", by="guard")
    reason, classes = None, table.shape("logit")[1]
    if other := [count for count in class_counts(guard) if count != classes]:
        reason = f"it has {classes} classes, not {other[0]}"
    elif any(one.label >= classes for one in guard.missed):
        reason = f"it has {classes} classes, and not class {max(one.label for one in guard.missed)}"
    elif guard.provenance and table.provenance and guard.provenance.names_model and table.provenance.names_model:
        reason = guard.provenance.difference(table.provenance)
    if reason:
        raise TableError(
            f"guard: {table.name} was made by another model than the guard was fitted for: {reason}. "
            f"Fit a guard on a table of this model."
        )
    check_provenance(table.provenance, guard.provenance, by="guard", of=f"{table.name} and the guard's own table")


def class_counts(guard: "Guard") -> Iterator[int]:
    """How many classes there are, by every part of a guard that shows it."""
    if guard.classes is not None:
        yield len(guard.classes)
    if guard.guarantee.per == CLASS:
        yield len(guard.groups)
    if guard.costs is not None:
        yield len(guard.costs.costs)
    if guard.sets is not None:
        yield guard.sets.classes_


def share_of_calibration_images(guard: "Guard", table: Table) -> float:
    """The share of a table's images that are calibration images, by content; 0 where it is one percent at most.

    Of a large table, it is estimated from rows that are drawn at random.
    """
    if len(table) > _MOST_COMPARED:
        drawn = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))[:_MOST_COMPARED]
        table = chosen_rows(table, drawn.sort().values)
    here, there = sketch(table), guard.calibration.sketch
    if here is None or there is None or not len(here):
        return 0.0
    share = len(shared_rows(Table(feature=here), Table(feature=there)).here) / len(here)
    return share if share > SHARED else 0.0


def images_have_labels(images: Images, model: Classifier) -> bool:
    """Whether images bring labels that are classes of the model; where some of its names are not, they are none."""
    if images.labels is None or (images.classes is not None and model.classes is None):
        return False
    try:
        with quiet(category=OwnLabelsWarning):
            return resolve_labels(images, model, None)[1] == "model"
    except ImagesError:
        return False


def labels_are_classes(table: Table) -> bool:
    """Whether a table has labels, all of which are classes of the model."""
    if len(table) == 0 or not has_model_labels(table):
        return False
    return int(table.label.min()) >= 0 and int(table.label.max()) < table.shape("logit")[1]
