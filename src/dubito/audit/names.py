"""Are the labels the model's classes? Class names are looked up among its own; with foreign ones nobody can tell."""

import warnings
from dataclasses import dataclass
from typing import final

from jaxtyping import Int
from torch import Tensor

from dubito.audit.finding import Finding, NotChecked, Outcome, listed
from dubito.audit.sample import Sample
from dubito.cache.labels import check_count, resolve_labels
from dubito.choices import LabelSpace
from dubito.data import Subset
from dubito.errors import ImagesError, OwnLabelsWarning
from dubito.types import Json

NAMES = "class names that the model does not know"


@final
@dataclass(frozen=True)
class ModelLabels:
    """The labels of the images that were read, as the model's classes; None, and why, if that cannot be."""

    labels: Int[Tensor, "n"] | None
    outcome: Outcome
    missing: str = ""


def model_labels(sample: Sample, images: Subset, space: LabelSpace | None) -> ModelLabels:
    """Look class names up among the model's, as `extract` does; what `extract` would refuse is a finding here."""
    if images.labels is None:
        return ModelLabels(None, NotChecked("no labels came"), "no labels came")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OwnLabelsWarning)
            labels, resolved = resolve_labels(images, sample.model, space)
        if images.classes is not None and sample.model.classes is None and space is None:
            check_count(images.classes, sample.logit.shape[1])
    except ImagesError as error:
        what, _, repair = str(error).partition(". ")
        return ModelLabels(None, [Finding(NAMES, "wrong", f"{what}.", repair, {})], "the model does not know them all")
    if labels is not None and resolved == "model":
        return ModelLabels(labels[sample.rows], [])
    return ModelLabels(None, [] if space == "own" else [_strangers(images, sample)], "labels are another set's classes")


def _strangers(images: Subset, sample: Sample) -> Finding:
    theirs, ours = list(images.classes or ()), list(sample.model.classes or ())
    what = f"None of the {len(theirs)} class names ({listed(theirs, 3)}) is one of the model's {len(ours)} classes."
    repair = (
        "Name the folders as the model names its classes, or say label_space='own' (--label-space own) if they are "
        "another set's."
    )
    evidence: Json = {"names": theirs[:20], "classes": ours[:20]}
    return Finding(NAMES, "suspicious", what, repair, evidence)
