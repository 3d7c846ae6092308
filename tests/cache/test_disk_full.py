"""A full disk stops the extraction with one sentence; what was finished stays, and the same call goes on."""

import errno
import os
import shutil
import subprocess

import pytest

import dubito
from dubito.errors import DiskFullError
from tests.cache.conftest import contents


def extract(model, images, to):
    return dubito.extract(model, images, to, batch_size=4, shard_size=8, workers=0)


def test_no_space_left(model, folder, tmp_path, monkeypatch):
    extract(model, folder, tmp_path / "undisturbed")
    real, written = os.fsync, []

    def fsync(handle):
        written.append(handle)
        if len(written) > 12:  # a file and its folder each: the manifest, the shards of two blocks and rows fit
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(
        DiskFullError, match=r"no space left for forward-00002-.*\.safetensors \(.* MB\).*free some space"
    ):
        extract(model, folder, tmp_path / "cache")
    monkeypatch.undo()
    assert len(list((tmp_path / "cache").glob("forward-*.safetensors"))) == 2
    assert not list((tmp_path / "cache").glob("*.part"))
    extract(model, folder, tmp_path / "cache")
    assert contents(tmp_path / "cache") == contents(tmp_path / "undisturbed")


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", "size=40k", "tmpfs", place]
    if mount is None or subprocess.run([mount, *options], check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root; test_no_space_left covers the same path")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_small_disk_that_grows(model, folder, tmp_path, small_disk):
    extract(model, folder, tmp_path / "undisturbed")
    (small_disk / "ballast").write_bytes(bytes(28 * 1024))
    with pytest.raises(DiskFullError, match="no space left for"):
        extract(model, folder, small_disk / "cache")
    (small_disk / "ballast").unlink()
    extract(model, folder, small_disk / "cache")
    assert contents(small_disk / "cache") == contents(tmp_path / "undisturbed")
