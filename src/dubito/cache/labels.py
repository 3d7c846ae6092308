"""Whose classes are the labels: the model's own (a loss and an accuracy exist) or those of another set ("own")."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from dubito.errors import ImagesError
from dubito.types import Classifier, Images, LabelSpace


def resolve_labels(
    images: Images, model: Classifier, space: LabelSpace | None
) -> tuple[Int[Tensor, "n"] | None, LabelSpace | None]:
    """The labels to store and their space.

    Integers are indices into the model's classes unless `space` is "own". Class names (folders) are looked up among
    the model's class names; where none of them is one, they are the folder's own classes. A model whose names are not
    known is taken at its count: as many names as outputs, in order (`check_count`).
    """
    labels = images.labels
    if labels is None or space == "own":
        return labels, None if labels is None else "own"
    if images.classes is None:
        return labels, "model"
    found = _by_name(images.classes, model.classes) if model.classes is not None else None
    if found is not None:
        return torch.tensor(found)[labels], "model"
    if space == "model" or (model.classes is None and space is None):
        return labels, "model"
    return labels, "own"


def check_range(labels: Int[Tensor, "n"], classes: int, ids: Sequence[str]) -> None:
    """Raise ImagesError for a label that is no class of the model."""
    bad = (labels < 0) | (labels >= classes)
    if bad.any():
        row = int(bad.nonzero()[0, 0])
        raise ImagesError(
            f"labels must be 0..{classes - 1}, the model's classes; {int(labels[row])} came for image '{ids[row]}'. "
            f"Give the model's class indices, or label_space='own' if these are classes of another set."
        )


def check_count(names: Sequence[str], classes: int) -> None:
    """Raise ImagesError when names cannot be the classes of a model that has none."""
    if len(names) != classes:
        raise ImagesError(
            f"labels: {len(names)} class names came for a model of {classes} classes whose names are not known, so "
            f"nobody can tell which is which. Wrap it with classes=[...], or say label_space='model' if they are its "
            f"first classes in order, or 'own' if they are classes of another set."
        )


def _by_name(theirs: Sequence[str], ours: Sequence[str]) -> list[int] | None:
    """The model's index of every class name, None where not all are known; case and underscores do not matter."""
    known: dict[str, int] = {}
    for index, name in enumerate(ours):
        for alias in (name, *name.split(",")):
            known.setdefault(_plain(alias), index)
    found = [known.get(_plain(name)) for name in theirs]
    matched = [index for index in found if index is not None]
    if matched and len(matched) < len(found):
        strangers = [name for name, index in zip(theirs, found, strict=True) if index is None]
        raise ImagesError(
            f"labels: {len(matched)} of {len(found)} class folders are classes of the model, but not "
            f"{', '.join(strangers[:3])}. Rename them, or pass label_space='own' if these are classes of another set."
        )
    return matched or None


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", " ")
