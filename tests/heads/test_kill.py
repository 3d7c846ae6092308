"""Killed at any instant, a training goes on from its last state and ends with the same bits."""

import multiprocessing
import runpy
import time
from pathlib import Path

import numpy as np
import pytest

from dubito.heads.loop import STATE as FILE
from dubito.storage import LOCK

_CHILD = Path(__file__).with_name("child.py")


@pytest.fixture(scope="module")
def server():
    """Children are forked from a process that has torch already: they start in milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "timm.optim", "dubito.heads.loop"])
    return context


def start(server, folder, recipe):
    process = server.Process(
        target=runpy.run_path, args=(str(_CHILD),), kwargs={"init_globals": {"folder": str(folder), **recipe}}
    )
    process.start()
    return process


def finish(server, folder, recipe):
    process = start(server, folder, recipe)
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize(("optimizer", "dropout"), [("adamw", 0.5), ("sgd", 0.0), ("lion", 0.5)])
def test_kills_at_random_instants_change_nothing(server, tmp_path, optimizer, dropout):
    recipe = {"optimizer": optimizer, "dropout": dropout}
    finish(server, tmp_path / "warm-up", recipe)
    begin = time.monotonic()
    finish(server, tmp_path / "undisturbed", recipe)
    takes = time.monotonic() - begin
    # Weights, optimiser, history and sums of losses, all in one file.
    expected = (tmp_path / "undisturbed" / FILE).read_bytes()
    assert expected == (tmp_path / "warm-up" / FILE).read_bytes()

    chance, half_way = np.random.default_rng(0), 0
    folder = tmp_path / "training"
    for kill in range(3):  # the same training is killed again while it resumes
        process = start(server, folder, recipe)
        if kill:
            time.sleep(chance.uniform(0, takes))
        else:  # however busy the machine, one comes soon after the first state
            while process.is_alive() and not (folder / FILE).exists():
                time.sleep(0.002)
        process.kill()
        process.join()
        half_way += (folder / FILE).exists() and (folder / FILE).read_bytes() != expected
    finish(server, folder, recipe)
    assert (folder / FILE).read_bytes() == expected
    assert sorted(path.name for path in folder.iterdir()) == [LOCK, FILE]
    assert half_way >= 1, "no kill came in the middle of a training"
