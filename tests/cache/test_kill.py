"""Killed at any instant, an extraction goes on from there and ends with the same bytes."""

import multiprocessing
import runpy
import time
from pathlib import Path

import numpy as np
import pytest

from tests.cache.conftest import contents, image_folder

_CHILD = Path(__file__).with_name("child.py")


@pytest.fixture(scope="module")
def server():
    """Children are forked from a process that has torch already: they start in milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torchvision", "dubito.cache", "dubito.models"])
    return context


def start(server, photos, cache, epochs=1):
    process = server.Process(
        target=runpy.run_path,
        args=(str(_CHILD),),
        kwargs={"init_globals": {"photos": str(photos), "cache": str(cache), "epochs": epochs}},
    )
    process.start()
    return process


def finish(server, photos, cache, epochs=1):
    process = start(server, photos, cache, epochs)
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize(("epochs", "least"), [(1, 6), (3, 3)])
def test_kills_at_random_instants_lose_nothing(server, tmp_path, epochs, least):
    photos = image_folder(tmp_path / "photos", count=96 // epochs)
    finish(server, photos, tmp_path / "warm-up", epochs)
    begin = time.monotonic()
    finish(server, photos, tmp_path / "undisturbed", epochs)
    takes = time.monotonic() - begin
    expected = contents(tmp_path / "undisturbed")
    assert len(expected) == 2 * 12 + 2  # shards of rows and columns, the manifest and the lock

    chance, kills, unfinished, number = np.random.default_rng(0), 0, 0, 0
    while kills < least or unfinished < max(1, least // 4):
        number += 1
        if kills >= least:  # too late to test anything: the undisturbed run was slowed down by something else
            takes /= 2
        cache = tmp_path / f"cache-{number}"
        for _ in range(3):  # the same folder is killed again while it resumes
            process = start(server, photos, cache, epochs)
            time.sleep(chance.uniform(0, takes))
            process.kill()
            process.join()
            kills += 1
            unfinished += not (cache / "manifest.json").exists() or contents(cache) != expected
        finish(server, photos, cache, epochs)
        assert contents(cache) == expected


def test_finished_shards_are_not_done_again(server, tmp_path):
    photos, cache = image_folder(tmp_path / "photos", count=96), tmp_path / "cache"
    process = start(server, photos, cache)
    while process.is_alive() and len(list(cache.glob("forward-*.safetensors"))) < 4:
        time.sleep(0.005)
    process.kill()
    process.join()
    written = {path.name: path.stat().st_mtime_ns for path in cache.glob("forward-*.safetensors")}
    finish(server, photos, cache)
    assert {name: (cache / name).stat().st_mtime_ns for name in written} == written
