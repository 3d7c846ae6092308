"""Targets: what the task loss compares the logits with where that is not the class of an image."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from dubito.data.augment import Augmented
from dubito.data.image_set import some
from dubito.errors import ImagesError, TableError
from dubito.table import to_tensor
from dubito.types import Images

_KEY = "targets"


def to_targets(given: Any, images: Images) -> Shaped[Tensor, "n ..."]:
    """One row an image, or a photo behind augmented rows; from a tensor, an array, a list, an .npy or .npz file."""
    values = _read(Path(given)) if isinstance(given, (str, Path)) else given
    try:
        targets = to_tensor(values, "targets")
    except TableError as error:
        raise ImagesError(str(error)) from error
    n = len(images.images if isinstance(images, Augmented) else images)
    if targets.dim() == 0 or len(targets) != n:
        raise ImagesError(
            f"targets must have one row per image, in the order of the images; got shape {tuple(targets.shape)} for "
            f"the {n} images of '{images.name}'. Give an array ({n}, ...)."
        )
    return targets.float() if targets.dtype == torch.bfloat16 else targets


def _read(path: Path) -> Any:
    """The array of an .npy file, or of an .npz file the one called targets, or its only one; no pickles."""
    try:
        with path.open("rb") as file:
            found = np.load(file, allow_pickle=False)
            if isinstance(found, np.ndarray):
                return found
            names = list(found.files)
            if _KEY in names or len(names) == 1:
                return found[_KEY if _KEY in names else names[0]]
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ImagesError(
            f"targets file '{path}' must be an .npy or .npz file of plain numbers; opening it gave: {error}. "
            f"Write it with numpy.save(path, targets)."
        ) from error
    raise ImagesError(
        f"targets file '{path}' must hold one array, or one called '{_KEY}'; it has {some(names, 8) or 'none'}. "
        f"Rename the one that is meant."
    )
