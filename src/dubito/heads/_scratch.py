"""A column in a temporary file, behind a memory map: it need not stay in memory, and nothing is left of it afterwards.

The file has no name, so the system removes it together with the last tensor, however the process ends. Its space is
taken beforehand: writing to a map for which the disk has no room would end the process without a word.
"""

import errno
import mmap
import os
import tempfile
from contextlib import suppress
from typing import IO

import torch
from jaxtyping import Float
from torch import Tensor

from dubito.errors import DiskFullError

_BYTES = 4
_ZEROS = bytes(1 << 20)
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def scratch_column(rows: int, what: str) -> Float[Tensor, "n"]:
    """Zeros, float32, one a row; `what` is told if there is no room for them."""
    size = _BYTES * rows
    try:
        with tempfile.TemporaryFile() as file:
            _reserve(file, size)
            mapped = mmap.mmap(file.fileno(), size)  # with a handle of its own: the file's can be closed
    except OSError as error:
        raise DiskFullError(
            f"{what} go into a temporary file of {size:,} bytes, which '{_folder()}' cannot take "
            f"({error.strerror or error}). Free some space there, or set the variable TMPDIR to another folder."
        ) from error
    return torch.frombuffer(mapped, dtype=torch.float32)


def _reserve(file: IO[bytes], size: int) -> None:
    """All bytes of the file on the disk; where the system cannot reserve them, they are written."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        else:
            return
    for start in range(0, size, len(_ZEROS)):
        file.write(_ZEROS[: size - start])
    file.flush()


def _folder() -> str:
    with suppress(OSError):  # no folder can be written to
        return tempfile.gettempdir()
    return os.environ.get("TMPDIR", "the folder for temporary files")
