"""Whose classes are the labels: the model's own (a loss and an accuracy exist) or those of another set ("own")."""

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from dubito.choices import LabelSpace
from dubito.data.image_set import some
from dubito.errors import ImagesError, OwnLabelsWarning
from dubito.types import Classifier, Images

_IMAGENET = 1000
_OWN = "label_space='own' (--label-space own)"
"""How to say it, in Python and on the command line."""


def resolve_labels(
    images: Images, model: Classifier, space: LabelSpace | None
) -> tuple[Int[Tensor, "n"] | None, LabelSpace | None]:
    """The labels to store and their space.

    Integers are indices into the model's classes unless `space` is "own". Class names (folders) are looked up among
    the model's class names, of an ImageNet model among WordNet ids too; where none of them is one, they are the
    folder's own classes, with a warning. A model whose names are not known is taken at its count: as many names as
    outputs, in order (`check_count`). Answers that fit another order much better are told of in the end (`order.py`).
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
    warnings.warn(
        f"the {len(images.classes)} class names of '{images.name}' ({some(images.classes)}) are none of the model's "
        f"{len(model.classes or ())} classes: labels are kept as their own, without loss and accuracy. Pass "
        f"{_OWN} to say so, or name the classes as the model does.",
        OwnLabelsWarning,
        stacklevel=3,
    )
    return labels, "own"


def names_of_labels(images: Images, model: Classifier, space: LabelSpace | None) -> list[str] | None:
    """What the images call their labels, where the model does not name them itself."""
    known = images.classes if space == "own" or (space == "model" and model.classes is None) else None
    return None if known is None else list(known)


def check_range(labels: Int[Tensor, "n"], classes: int, ids: Sequence[str]) -> None:
    """Raise ImagesError for a label that is no class of the model."""
    bad = (labels < 0) | (labels >= classes)
    if bad.any():
        row = int(bad.nonzero()[0, 0])
        raise ImagesError(
            f"labels must be 0..{classes - 1}, the model's classes; got {int(labels[row])} for image '{ids[row]}'. "
            f"Give the model's class indices, or {_OWN} if these are classes of another set."
        )


def check_count(names: Sequence[str], classes: int) -> None:
    """Raise ImagesError when names cannot be the classes of a model that has none."""
    if len(names) != classes:
        raise ImagesError(
            f"labels: {len(names)} class names came for a model of {classes} classes whose names are not known, so "
            f"nobody can tell which is which. Wrap it with classes=[...], or say label_space='model' (--label-space "
            f"model) if they are its first classes in order, or {_OWN} if they are classes of another set."
        )


def _by_name(theirs: Sequence[str], ours: Sequence[str]) -> list[int] | None:
    """The model's index of every class name, None where not one is known; case and underscores do not matter.

    A name is looked up as a whole class name first, then among synonyms (`tench, Tinca tinca` has two) and WordNet ids.
    """
    whole = _table((name, index) for index, name in enumerate(ours))
    synonyms = _table((part, index) for index, name in enumerate(ours) for part in name.split(","))
    ids = _table((key, index) for index, key in enumerate(_wordnet_ids(theirs, ours)))
    keys = map(_plain, theirs)
    named = [whole.get(key) or synonyms.get(key) or ids.get(key) for key in keys]
    found = [_one(name, ours, indices) for name, indices in zip(theirs, named, strict=True)]
    matched = [index for index in found if index is not None]
    if matched and len(matched) < len(found):
        strangers = [name for name, index in zip(theirs, found, strict=True) if index is None]
        raise ImagesError(
            f"labels: {len(matched)} of {len(found)} class folders are classes of the model, but not "
            f"{', '.join(strangers[:3])}. Rename them, or pass {_OWN} if these are classes of another set."
        )
    return matched or None


def _one(name: str, ours: Sequence[str], indices: set[int] | None) -> int | None:
    if indices is None:
        return None
    if len(indices) > 1:
        both = " and ".join(f"{index} '{ours[index]}'" for index in sorted(indices))
        raise ImagesError(
            f"labels: class folder '{name}' stands for {len(indices)} classes of the model, {both}. Rename it to the "
            f"full name of one of them (of an ImageNet class also to its WordNet id), give labels= (--labels FILE) as "
            f"class indices, "
            f"or pass {_OWN} if these are classes of another set."
        )
    return next(iter(indices))


def _table(pairs: Iterable[tuple[str, int]]) -> dict[str, set[int]]:
    """Every name with all classes that bear it."""
    table: dict[str, set[int]] = defaultdict(set)
    for name, index in pairs:
        table[_plain(name)].add(index)
    return dict(table)


def _wordnet_ids(theirs: Sequence[str], ours: Sequence[str]) -> Sequence[str]:
    """ImageNet's ids (n01440764) in the order of its classes, if a folder is named by one and the model is ImageNet's.

    timm and torchvision word the names differently, but both begin their thousand with the tench.
    """
    asked = any(re.fullmatch(r"n\d{8}", _plain(name)) for name in theirs)
    if not asked or len(ours) != _IMAGENET or not _plain(ours[0]).startswith("tench"):
        return ()
    from timm.data import ImageNetInfo  # noqa: PLC0415 (slow to import, and few need it)

    return [str(name) for name in ImageNetInfo("imagenet-1k").label_names()]


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", " ")
