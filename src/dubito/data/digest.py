"""Hashes of image sets: BLAKE2b with 16 bytes over ordered ids and the hash of each image's content."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import Shaped

_SIZE = 16
_CHUNK = 128
_THREADS = 8


def hash_parts(*parts: bytes) -> bytes:
    """One hash of several byte strings, each with its length, so that moving a border changes it."""
    total = hashlib.blake2b(digest_size=_SIZE)
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.digest()


def hash_blocks(blocks: Iterable[bytes]) -> bytes:
    """One hash of a content that comes in blocks."""
    total = hashlib.blake2b(digest_size=_SIZE)
    for block in blocks:
        total.update(block)
    return total.digest()


def hash_array(values: Shaped[np.ndarray, "..."]) -> bytes:
    """One hash of an array's type, shape and values."""
    head = f"{values.dtype.str} {values.shape}".encode()
    return hash_parts(head, np.ascontiguousarray(values).tobytes())


def hash_images(ids: Sequence[str], rows: Sequence[int], content: Callable[[int], bytes]) -> str:
    """One hash, in hexadecimal, of the ids of some rows and of the content hash that `content(row)` gives.

    Contents are hashed in threads: reading files and BLAKE2b both let other threads run.
    """

    def chunk(start: int) -> list[bytes]:
        return [hash_parts(encode(ids[row]), content(row)) for row in rows[start : start + _CHUNK]]

    with ThreadPoolExecutor(_THREADS) as pool:
        return hash_blocks(part for parts in pool.map(chunk, range(0, len(rows), _CHUNK)) for part in parts).hex()


def encode(text: str) -> bytes:
    """The bytes of a name, also of a file name that is no valid UTF-8."""
    return text.encode("utf-8", "surrogateescape")
