"""Small pictures inside a page, as JPEG data addresses."""

import base64
import io
from pathlib import Path

from PIL import Image
from torch import Tensor

from dubito.errors import ValueRangeError
from dubito.types import Images


def thumbnail(image: Image.Image | Path, *, side: int = 320, quality: int = 76) -> str:
    """A picture of at most `side` pixels either way, as an address that holds it."""
    small = (image if isinstance(image, Image.Image) else Image.open(image)).convert("RGB")
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    data = io.BytesIO()
    small.save(data, "JPEG", quality=quality, optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"


def picture(images: Images, row: int, *, by: str) -> Image.Image:
    """One image of a set, which must be a picture and not a finished model input."""
    image = images.read(row)
    if isinstance(image, Tensor):
        raise ValueRangeError(
            f"{by} needs pictures; '{images.ids[row]}' of {images.name} is a model input. Give the pixels."
        )
    return image
