"""What a guard is called with, as images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped
from PIL import Image
from torch import Tensor

from dubito.data import open_images
from dubito.data.files import FileImages
from dubito.data.tree import is_image
from dubito.errors import ImagesError
from dubito.types import Images


def as_images(source: Any) -> tuple[Images, bool]:
    """What was given as a set of images, and whether it is a single one."""
    if isinstance(source, (str, Path)):
        return open_images(source), is_image(Path(source).name) and not Path(source).is_dir()
    if isinstance(source, Image.Image):
        return open_images([source]), True
    if isinstance(source, (np.ndarray, Tensor)):
        single = _is_single(source)
        return open_images(source[None] if single else source), single
    if isinstance(source, Sequence) and len(source) and all(isinstance(one, (str, Path)) for one in source):
        return FileImages(Path(), [str(one) for one in source], name="a list of files"), False
    return open_images(source), False


def _is_single(array: Shaped[np.ndarray, "..."] | Tensor) -> bool:
    """Inputs have channels first, pictures last: (3, h, w) or (h, w, 3), or a grey (h, w)."""
    if array.is_floating_point() if isinstance(array, Tensor) else array.dtype.kind == "f":
        return array.ndim == 3
    if array.ndim == 3 and array.shape[0] == 3 != array.shape[-1]:
        raise ImagesError(
            f"pixels of shape {tuple(array.shape)} may be one picture with channels first, or three grey ones. Give "
            f"the one as (h, w, 3), channels last; the three as a list."
        )
    # One or four channels are no stack of narrow grey pictures; `open_images` says what to do with them.
    return array.ndim == 2 or (array.ndim == 3 and array.shape[-1] in (1, 3, 4))
