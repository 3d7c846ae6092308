"""Images as pages and notebooks show them: small JPEGs inside data URLs, so that nothing is loaded from elsewhere."""

import base64
import io
from pathlib import Path

from PIL import Image
from torch import Tensor

from dubito.errors import BrokenImageError, ValueRangeError
from dubito.types import Images


def thumbnail(image: Image.Image | Path, *, side: int = 320, quality: int = 76) -> str:
    """An image of at most `side` pixels either way, as a JPEG inside a data URL."""
    opened = image if isinstance(image, Image.Image) else Image.open(image)
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg(opened, side=side, quality=quality)).decode()}"


def jpeg(image: Image.Image, *, side: int, quality: int = 76) -> bytes:
    """An image of at most `side` pixels either way, as a JPEG."""
    data = io.BytesIO()
    shrink(image, side=side).save(data, "JPEG", quality=quality, optimize=True)
    return data.getvalue()


def thumbnail_of(images: Images, name: str, *, side: int = 240) -> str:
    """The thumbnail of an image by its id; empty where the set has none that can be shown."""
    try:
        return thumbnail(read_pixels(images, list(images.ids).index(name), by="thumbnail"), side=side)
    except (BrokenImageError, ValueRangeError, ValueError, OSError):
        return ""


def shrink(image: Image.Image, *, side: int = 320) -> Image.Image:
    """A copy in RGB of at most `side` pixels either way."""
    small = image.convert("RGB")
    small.thumbnail((side, side), Image.Resampling.LANCZOS)
    return small


def read_pixels(images: Images, row: int, *, by: str) -> Image.Image:
    """One image of a set; ValueRangeError where the set holds model inputs, which cannot be shown."""
    image = images.read(row)
    if isinstance(image, Tensor):
        raise ValueRangeError(
            f"{by} needs images as pixels; '{images.ids[row]}' of {images.name} is a model input. Pass the pixels."
        )
    return image
