"""One image file, of any kind that Pillow reads, to RGB pixels that mean what the file meant.

Choices that change pixels, and why:

- Transparent pixels (RGBA, LA, palette or key colour) are laid over white, as a page or a viewer shows them.
- 16-bit grey is divided by 257 (65535 becomes 255), 12-bit TIFF by 4095/255; Pillow alone clips above 255.
- Grey of more than 8 bits in a TIFF that calls 0 white is turned over; Pillow does so for 8 bits only.
- Float grey must lie in 0..1 and is scaled by 255. Other ranges have no known scale and are an error.
- The EXIF orientation is applied; EXIF that cannot be parsed counts as none. Colour profiles are not applied.
- Of several frames the first is read.

Images above Pillow's hard limit (179 million pixels) are refused as decompression bombs.
"""

import contextlib
import io
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps, UnidentifiedImageError

from dubito.errors import BrokenImageError

_REPAIR = "Copy it again from its source, or take it out."
_MAYBE_TRANSPARENT = ("LA", "La", "PA", "RGBA", "RGBa", "P")
_BITS_PER_SAMPLE, _PHOTOMETRIC = 258, 262


def decode(source: bytes | Path | BinaryIO, name: str) -> Image.Image:
    """The first frame of an image file, upright and in RGB.

    Args:
        source: The file's content, its path, or an open binary file.
        name: What an error calls the image.

    Raises:
        BrokenImageError: The file is missing, empty, cut off, no image, or has no known meaning in RGB.
    """
    content = _content(source, name)
    if not content:
        raise BrokenImageError(f"image '{name}' must be an image file; it has 0 bytes. {_REPAIR}")
    kind = "image"
    with _quiet():
        try:
            with Image.open(io.BytesIO(content)) as image:
                kind = image.format or kind
                image.load()
                _turn_upright(image)
                return to_rgb(image, name)
        except BrokenImageError:
            raise
        except UnidentifiedImageError as error:
            raise BrokenImageError(
                f"image '{name}' must be an image file; got {len(content)} bytes that begin with "
                f"{content[:8]!r}, which is no format that this Pillow reads. {_REPAIR}"
            ) from error
        except Image.DecompressionBombError as error:
            raise BrokenImageError(
                f"image '{name}' must fit in memory; got a decompression bomb: {error} Shrink it, or take it out."
            ) from error
        # Pillow's plug-ins meet damaged bytes with whatever they stumble over, down to struct.error.
        except Exception as error:
            state = "truncated" if "truncated" in str(error).lower() else "damaged"
            raise BrokenImageError(
                f"image '{name}' must be a whole image file; got {state} {kind}: {error}. {_REPAIR}"
            ) from error


def to_rgb(image: Image.Image, name: str) -> Image.Image:
    """An image of any mode as RGB; the top of this file says what each mode means."""
    if image.mode == "F" or image.mode.startswith("I"):
        return Image.fromarray(_grey_levels(image, name)).convert("RGB")
    if image.mode in _MAYBE_TRANSPARENT or "transparency" in image.info:
        over = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", over.size, "white"), over).convert("RGB")
    return image.convert("RGB")


def _content(source: bytes | Path | BinaryIO, name: str) -> bytes:
    if isinstance(source, bytes):
        return source
    try:
        return source.read_bytes() if isinstance(source, Path) else source.read()
    except OSError as error:
        raise unreadable(name, error) from error


def unreadable(name: str, error: OSError) -> BrokenImageError:
    """The error of an image whose file the system does not read."""
    return BrokenImageError(
        f"image '{name}' must be a readable file; reading it gave: {error.strerror or error}. "
        f"Restore the file or its permissions, or take it out."
    )


def _turn_upright(image: Image.Image) -> None:
    # In place, so that pixels stay turned even when the EXIF block cannot be written back afterwards.
    with contextlib.suppress(Exception):
        ImageOps.exif_transpose(image, in_place=True)


def _grey_levels(image: Image.Image, name: str) -> UInt8[np.ndarray, "h w"]:
    """Grey of more than 8 bits as 0..255, rounded."""
    tags = getattr(image, "tag_v2", {})
    values = np.asarray(image, dtype=np.float64)
    top = 1 if image.mode == "F" else 4095 if tags.get(_BITS_PER_SAMPLE) == (12,) else 65535
    # Written so that NaN fails too.
    if not (values.min() >= 0 and values.max() <= top):
        raise BrokenImageError(
            f"image '{name}' of mode {image.mode} must have values in 0..{top}; "
            f"got {values.min():g}..{values.max():g}. Save it with 8 or 16 bits, scaled as it is to be seen."
        )
    scaled = np.rint(values * (255 / top)).astype(np.uint8)
    return 255 - scaled if tags.get(_PHOTOMETRIC) == 0 else scaled


class _Quiet:
    """Silences Pillow's warnings while at least one thread decodes.

    `warnings.catch_warnings` alone is not safe in threads: overlapping ones restore each other's filters.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._catcher: warnings.catch_warnings[None] | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._catcher = warnings.catch_warnings()
                self._catcher.__enter__()
                warnings.filterwarnings("ignore", module=r"PIL(\.|$)")
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0 and self._catcher is not None:
                    self._catcher.__exit__(None, None, None)


_quiet = _Quiet()
