"""Hashes of image sets: BLAKE2b with 16 bytes over ordered ids and the hash of each image's content."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import Shaped

from dubito.storage import encode

SIZE = 16
"""Bytes of a hash."""
_CHUNK = 128
_THREADS = 8


def hash_bytes(*blocks: bytes) -> bytes:
    """One hash of a content that comes in blocks; where they are cut does not matter."""
    total = hashlib.blake2b(digest_size=SIZE)
    for block in blocks:
        total.update(block)
    return total.digest()


def hash_parts(*parts: bytes) -> bytes:
    """One hash of several byte strings, each with its length, so that moving a border changes it."""
    return hash_bytes(*(piece for part in parts for piece in (len(part).to_bytes(8, "little"), part)))


def hash_array(values: Shaped[np.ndarray, "..."]) -> bytes:
    """One hash of an array's type, shape and values."""
    head = f"{values.dtype.str} {values.shape}".encode()
    return hash_parts(head, np.ascontiguousarray(values).tobytes())


def hash_images(ids: Iterable[str], contents: Iterable[bytes]) -> str:
    """One hash, in hexadecimal, of ids and of the content hash of each image, in order."""
    total = hashlib.blake2b(digest_size=SIZE)
    for name, content in zip(ids, contents, strict=True):
        total.update(hash_parts(encode(name), content))
    return total.hexdigest()


def in_threads(content: Callable[[int], bytes], rows: Sequence[int]) -> list[bytes]:
    """content(row) of every row, in order; reading files and BLAKE2b both let other threads run."""

    def chunk(start: int) -> list[bytes]:
        return [content(row) for row in rows[start : start + _CHUNK]]

    if len(rows) <= _CHUNK:
        return chunk(0)
    with ThreadPoolExecutor(_THREADS) as pool:
        return [part for parts in pool.map(chunk, range(0, len(rows), _CHUNK)) for part in parts]
