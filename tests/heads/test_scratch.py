"""A column in a temporary file: zeros to write into, gone afterwards, and a sentence where there is no room."""

import errno
import os
import tempfile

import pytest
import torch

from dubito.errors import DiskFullError
from dubito.heads import _scratch
from dubito.heads._scratch import scratch_column
from dubito.heads.recipe import Recipe
from dubito.heads.targets import target_column
from dubito.table import Table


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where temporary files go."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def reserved_bytes(monkeypatch) -> list[int]:
    """How many bytes of the disk the file has before it is mapped."""
    found, real = [], _scratch.mmap.mmap

    def watched(handle, size):
        found.append(512 * os.fstat(handle).st_blocks)
        return real(handle, size)

    monkeypatch.setattr(_scratch.mmap, "mmap", watched)
    return found


@pytest.mark.parametrize("how", ["reserved", "unsupported", "written"])
def test_the_space_is_taken_before_anything_is_written(monkeypatch, how, folder):
    if how == "written":
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
    if how == "unsupported":
        monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP), raising=False)
    found = reserved_bytes(monkeypatch)
    column = scratch_column(600_001, "numbers")
    assert found[0] >= 4 * 600_001
    assert (column.dtype, column.shape, int(column.count_nonzero())) == (torch.float32, (600_001,), 0)
    column[-1] = 3.0
    assert float(column.sum()) == 3.0
    assert list(folder.iterdir()) == []


def failing(number: int):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_no_room(monkeypatch, folder, number):
    monkeypatch.setattr(os, "posix_fallocate", failing(number), raising=False)
    with pytest.raises(DiskFullError) as error:
        target_column(Table(name="cache/train", loss=torch.arange(1000.0)), Recipe())
    assert str(error.value) == (
        f"head.fit: the losses of cache/train go into a temporary file of 4,000 bytes, which '{folder}' cannot take "
        f"({os.strerror(number)}). Free some space there, or set the variable TMPDIR to another folder."
    )
    assert list(folder.iterdir()) == []


def test_no_folder(monkeypatch, folder):
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "gone"))
    with pytest.raises(DiskFullError, match=r"of 8 bytes, which '.*/gone' cannot take \(No such file or directory\)\."):
        scratch_column(2, "numbers")


def test_the_column_outlives_its_names():
    column = scratch_column(4, "numbers")
    column += 2
    part = column[1:3]
    del column
    assert part.tolist() == [2.0, 2.0]
