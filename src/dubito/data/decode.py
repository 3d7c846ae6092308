"""From the bytes of a file or URL to RGB pixels that mean what the file meant.

Whatever Pillow reads is read. HEIC, JPEG XL and, with an older Pillow, AVIF need a plug-in: it is used where it is
installed, and otherwise the image is broken and its error has the pip line. Choices that change pixels:

- Transparent pixels (RGBA, LA, palette or key colour) are laid over white, as a page or a viewer shows them.
- 16-bit grey is divided by 257 (65535 becomes 255), 12-bit TIFF by 4095/255; Pillow alone clips above 255.
- Grey of more than 8 bits in a TIFF that calls 0 white is turned over; Pillow does so for 8 bits only.
- Float grey must lie in 0..1 and is scaled by 255. Other ranges have no known scale and are an error.
- The EXIF orientation is applied; EXIF that cannot be parsed counts as none. Colour profiles are not applied.
- Of several frames the first is read.

What is read is bounded: regular files only, at most `LIMIT` bytes of each, and from a web server for at most a minute.
Images above Pillow's hard limit (179 million pixels) are refused as decompression bombs.
"""

import contextlib
import errno
import http.client
import importlib
import io
import os
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps, UnidentifiedImageError, features

from dubito.data.image_set import hash_bytes
from dubito.errors import BrokenImageError
from dubito.storage.locations import Place, RemotePath, is_web, mounted
from dubito.threads import quiet

LIMIT = 512 << 20
"""Bytes that are read of an image, wherever it is: what 179 million pixels take without compression."""
_REPAIR = "Copy it again from its source, or take it out."
_MAYBE_TRANSPARENT = ("LA", "La", "PA", "RGBA", "RGBa", "P")
_BITS_PER_SAMPLE, _PHOTOMETRIC = 258, 262
_PACKAGES = {
    "HEIF": ("pillow_heif", "pillow-heif"),
    "JXL": ("pillow_jxl", "pillow-jxl-plugin"),
    "AVIF": ("pillow_avif", "pillow-avif-plugin"),
}
"""By Pillow's name of a format, the module that reads it, and its package."""
_ENDINGS = {".heic": "HEIF", ".heif": "HEIF", ".hif": "HEIF", ".jxl": "JXL", ".avif": "AVIF"}
_BRANDS = {b"avif": "AVIF", b"avis": "AVIF"} | dict.fromkeys((b"heic", b"heix", b"hevc", b"heim", b"mif1"), "HEIF")
_TIMEOUT, _DEADLINE, _ATTEMPTS = 20, 60, 3
_CHUNK = 1 << 20
_PIXELS_AT_ONCE = 1 << 24


def decode(source: bytes | Path | OSError, name: str) -> Image.Image:
    """The first frame of an image file, upright and in RGB.

    Args:
        source: The file's content, its path, or why it could not be read.
        name: What an error calls the image.

    Raises:
        BrokenImageError: The file is missing, empty, cut off, no image, or has no known meaning in RGB.
    """
    content = read_content(source)[0] if isinstance(source, Path) else source
    if isinstance(content, OSError):
        raise BrokenImageError(
            f"image '{name}' must be a readable file; reading it gave: {content.strerror or content}. "
            f"Restore the file or its permissions, or take it out."
        ) from content
    if not content:
        raise BrokenImageError(f"image '{name}' must be an image file; it has 0 bytes. {_REPAIR}")
    if package := missing_package(content):
        raise BrokenImageError(f"image '{name}' has a format that Pillow reads with a plug-in: pip install {package}")
    kind = "image"
    with quiet(module=r"PIL(\.|$)"):
        try:
            with Image.open(io.BytesIO(content)) as image:
                kind = image.format or kind
                image.load()
                # In place, so that pixels stay turned even when the EXIF block cannot be written back afterwards.
                with contextlib.suppress(Exception):
                    ImageOps.exif_transpose(image, in_place=True)
                return to_rgb(image, name)
        except BrokenImageError:
            raise
        except Image.DecompressionBombError as error:
            fault = f"must fit in memory; got a decompression bomb: {error} Shrink it, or take it out."
            raise BrokenImageError(f"image '{name}' {fault}") from error
        except Exception as error:  # on damaged bytes, Pillow's plug-ins raise anything, down to struct.error
            state = "truncated" if "truncated" in str(error).lower() else "damaged"
            fault = f"a whole image file; got {state} {kind}: {error}"
            if isinstance(error, UnidentifiedImageError):
                got = f"{len(content)} bytes that begin with {content[:8]!r}"
                fault = f"an image file; got {got}, which is no format that this Pillow reads"
            raise BrokenImageError(f"image '{name}' must be {fault}. {_REPAIR}") from error


def to_rgb(image: Image.Image, name: str) -> Image.Image:
    """An image of any mode as RGB; the top of this file says what each mode means.

    A large one is converted in bands, so that a file that announces many pixels does not take many times their memory.
    """
    tags, rows = getattr(image, "tag_v2", {}), max(1, _PIXELS_AT_ONCE // max(1, image.width))
    if image.height <= rows:
        return _to_rgb(image, tags, name)
    whole = Image.new("RGB", image.size)
    for top in range(0, image.height, rows):
        box = (0, top, image.width, min(top + rows, image.height))
        whole.paste(_to_rgb(image.crop(box), tags, name), box)
    return whole


def _to_rgb(image: Image.Image, tags: Mapping[int, Any], name: str) -> Image.Image:
    if image.mode == "F" or image.mode.startswith("I"):
        return Image.fromarray(_grey_levels(image, tags, name)).convert("RGB")
    if image.mode in _MAYBE_TRANSPARENT or "transparency" in image.info:
        over = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", over.size, "white"), over).convert("RGB")
    return image.convert("RGB")


def read_content(place: Place) -> tuple[bytes | OSError, bytes]:
    """The bytes of a file, or why they cannot be read; and their hash.

    What cannot be read is one broken image: the others are still extracted.
    """
    try:
        if isinstance(place, Path):
            with mounted(place):
                content = read_regular(place)
        else:
            content = read_url(place.url) if is_web(place) else _read_object(place)
    except OSError as error:
        return error, hash_bytes(f"unreadable: {error.errno}".encode())
    return content, hash_content(content)


def hash_content(content: bytes) -> bytes:
    """The hash of a file's bytes; other while a plug-in is missing, so that a cache without the image is outdated."""
    return hash_bytes(content) if missing_package(content) is None else hash_bytes(b"no plug-in", content)


def read_regular(path: Path) -> bytes:
    """The bytes of a regular file, at most `LIMIT`; OSError for pipes and devices, which may never end."""
    _check_regular(path.stat())  # before it is opened: that may wait for ever
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb") as file:
        _check_regular(os.fstat(handle))
        content = file.read(LIMIT + 1)
    if len(content) > LIMIT:
        raise too_large()
    return content


def read_url(url: str) -> bytes:
    """What a web server sends, at most `LIMIT` bytes within a minute; OSError otherwise."""
    attempts = _ATTEMPTS
    while True:
        attempts -= 1
        try:
            return _download(url)
        except urllib.error.HTTPError as error:
            error.close()
            if not attempts or error.code < 500:  # those above are of servers that may be busy for a moment
                raise OSError(errno.EIO, f"the server answered {error.code} {error.reason}") from error
        except (http.client.HTTPException, ValueError) as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
        except OSError as error:
            if not attempts or error.errno in (errno.EFBIG, errno.ETIMEDOUT):
                raise


def too_large() -> OSError:
    """The error of what is too large to be read."""
    return OSError(errno.EFBIG, f"it has more than {LIMIT >> 20} MiB, the most that is read of an image")


def missing_package(content: bytes | str) -> str | None:
    """The package without which Pillow cannot read some bytes, or files with an ending; None if it can.

    >>> missing_package(b"GIF89a") is None
    True
    """
    kind = _ENDINGS.get(content) if isinstance(content, str) else _kind(content)
    if kind is None or (kind in Image.OPEN and kind != "AVIF"):
        return None
    if kind == "AVIF" and "avif" in features.modules and features.check("avif"):
        return None
    module, package = _PACKAGES[kind]
    try:
        plugin = importlib.import_module(module)
    except ImportError:
        return package
    if kind == "HEIF":  # the others do so when they are imported
        plugin.register_heif_opener()
    return None


def _kind(content: bytes) -> str | None:
    """The format of bytes that Pillow itself may not read; names of files say little: phones call HEIC files .jpg."""
    if content.startswith((b"\xff\x0a", b"\0\0\0\x0cJXL \r\n\x87\n")):
        return "JXL"
    if content[4:8] != b"ftyp":
        return None
    listed = content[8 : min(int.from_bytes(content[:4], "big"), 256)]
    brands = [listed[start : start + 4] for start in range(0, len(listed), 4)]
    return next((kind for brand, kind in _BRANDS.items() if brand in brands), None)


def _check_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file")
    if status.st_size > LIMIT:
        raise too_large()


def _read_object(place: RemotePath) -> bytes:
    content = place.read_range(0, LIMIT + 1)
    if len(content) > LIMIT:
        raise too_large()
    return content


def _download(url: str) -> bytes:
    end = time.monotonic() + _DEADLINE
    request = urllib.request.Request(url, headers={"User-Agent": "dubito"})  # noqa: S310 (the caller checks the scheme)
    content = bytearray()
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:  # noqa: S310
        while piece := response.read1(_CHUNK):
            content += piece
            if len(content) > LIMIT:
                raise too_large()
            if time.monotonic() > end:
                raise OSError(errno.ETIMEDOUT, f"it took more than {_DEADLINE} s to load")
    return bytes(content)


def _grey_levels(image: Image.Image, tags: Mapping[int, Any], name: str) -> UInt8[np.ndarray, "h w"]:
    """Grey of more than 8 bits as 0..255, rounded."""
    values = np.asarray(image, dtype=np.float64)
    top = 1 if image.mode == "F" else 4095 if tags.get(_BITS_PER_SAMPLE) == (12,) else 65535
    # Written so that NaN fails too.
    if not (values.min() >= 0 and values.max() <= top):
        raise BrokenImageError(
            f"image '{name}' of mode {image.mode} must have values in 0..{top}; "
            f"got {values.min():g}..{values.max():g}. Save it with 8 or 16 bits, scaled for display."
        )
    scaled = np.rint(values * (255 / top)).astype(np.uint8)
    return 255 - scaled if tags.get(_PHOTOMETRIC) == 0 else scaled
