"""Labels and targets of an extraction: what the task loss compares the logits with.

Labels are classes of the model (a loss and an accuracy exist) or of another set ("own"). Targets are anything else that
has one row per image.
"""

import re
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from dubito.choices import LabelSpace
from dubito.data.augment import Augmented
from dubito.data.image_set import some
from dubito.errors import ImagesError, OwnLabelsWarning, TableError
from dubito.table import to_tensor
from dubito.types import Classifier, Images

_IMAGENET = 1000
_OWN = "label_space='own'"
_KEY = "targets"


def resolve_labels(
    images: Images, model: Classifier, space: LabelSpace | None
) -> tuple[Int[Tensor, "n"] | None, LabelSpace | None]:
    """The labels to store and their space.

    Integers are indices into the model's classes unless `space` is "own". Class names (folders) are looked up among
    the model's class names, of an ImageNet model among WordNet ids too; where none of them is one, they are the
    folder's own classes, with a warning. A model whose names are not known is taken at its count: as many names as
    outputs, in order (`check_count`). `order.py` warns where predictions fit another order much better.
    """
    labels = images.labels
    if labels is None or space == "own":
        return labels, None if labels is None else "own"
    if images.classes is None:
        return labels, "model"
    indices = _by_name(images.classes, model.classes) if model.classes is not None else None
    if indices is not None:
        return torch.tensor(indices)[labels], "model"
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
            f"labels: got {len(names)} class names for a model of {classes} classes whose names are not known, so it "
            f"is unclear which is which. Wrap it with classes=[...], or pass label_space='model' if they are its first "
            f"classes in order, or {_OWN} if they are classes of another set."
        )


def to_targets(values: Any, images: Images) -> Shaped[Tensor, "n ..."]:
    """One row per image, or per image behind augmented rows; from a tensor, an array, a list, an .npy or .npz file."""
    loaded = _read_targets(Path(values)) if isinstance(values, (str, Path)) else values
    try:
        targets = to_tensor(loaded, "targets")
    except TableError as error:
        raise ImagesError(str(error)) from error
    n = len(images.images if isinstance(images, Augmented) else images)
    if targets.dim() == 0 or len(targets) != n:
        raise ImagesError(
            f"targets must have one row per image, in the order of the images; got shape {tuple(targets.shape)} for "
            f"the {n} images of '{images.name}'. Give an array ({n}, ...)."
        )
    return targets.float() if targets.dtype == torch.bfloat16 else targets


def _by_name(theirs: Sequence[str], ours: Sequence[str]) -> list[int] | None:
    """The model's index of every class name, None where not one is known; case and underscores do not matter.

    A name is looked up as a whole class name first, then among synonyms (`tench, Tinca tinca` has two) and WordNet ids.
    """
    whole = _table((name, index) for index, name in enumerate(ours))
    synonyms = _table((part, index) for index, name in enumerate(ours) for part in name.split(","))
    ids = _table((key, index) for index, key in enumerate(_wordnet_ids(theirs, ours)))
    keys = map(_plain, theirs)
    named = [whole.get(key) or synonyms.get(key) or ids.get(key) for key in keys]
    indices = [_one(name, ours, classes) for name, classes in zip(theirs, named, strict=True)]
    matched = [index for index in indices if index is not None]
    if matched and len(matched) < len(indices):
        unknown = [name for name, index in zip(theirs, indices, strict=True) if index is None]
        raise ImagesError(
            f"labels: {len(matched)} of {len(indices)} class folders are classes of the model, but not "
            f"{', '.join(unknown[:3])}. Rename them, or pass {_OWN} if these are classes of another set."
        )
    return matched or None


def _one(name: str, ours: Sequence[str], indices: set[int] | None) -> int | None:
    if indices is None:
        return None
    if len(indices) > 1:
        both = " and ".join(f"{index} '{ours[index]}'" for index in sorted(indices))
        raise ImagesError(
            f"labels: class folder '{name}' stands for {len(indices)} classes of the model, {both}. Rename it to the "
            f"full name of one of them (of an ImageNet class also to its WordNet id), give labels= as class indices, "
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
    by_id = any(re.fullmatch(r"n\d{8}", _plain(name)) for name in theirs)
    if not by_id or len(ours) != _IMAGENET or not _plain(ours[0]).startswith("tench"):
        return ()
    from timm.data import ImageNetInfo  # noqa: PLC0415 (slow to import, and few need it)

    return [str(name) for name in ImageNetInfo("imagenet-1k").label_names()]


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", " ")


def _read_targets(path: Path) -> Any:
    """The array of an .npy file, or of an .npz file the one called targets, or its only one; no pickles."""
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return loaded
            names = list(loaded.files)
            if _KEY in names or len(names) == 1:
                return loaded[_KEY if _KEY in names else names[0]]
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ImagesError(
            f"targets file '{path}' must be an .npy or .npz file of plain numbers; opening it gave: {error}. "
            f"Write it with numpy.save(path, targets)."
        ) from error
    raise ImagesError(
        f"targets file '{path}' must hold one array, or one called '{_KEY}'; it has {some(names, 8) or 'none'}. "
        f"Rename the one that is meant."
    )
