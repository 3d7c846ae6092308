"""The harness finds what is wrong, and what it has found once stays mended."""

import errno
import os
import signal

import pytest

from tests.faults import processes
from tests.faults.careless import Doubling, Hanging, Overwriting
from tests.faults.folders import FolderPart, at_call, compare
from tests.faults.instants import FULL, REVOKED, allow
from tests.faults.outcome import HUNG, LOST, OK, SILENT
from tests.faults.processes import call
from tests.faults.victims import VICTIMS

SEED = 0


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Parts by victim, whose undisturbed runs are made once."""
    made = {}

    def part(victim):
        if victim not in made:
            made[victim] = FolderPart(victim, tmp_path_factory.mktemp(victim.__name__))
        return made[victim]

    return part


@pytest.mark.parametrize(
    ("name", "kind", "case"),
    [
        ("acquire", "flip", 17),  # another pick in acquisition.json, which was not sealed
        ("train", "kill", 0),  # another order of the figures in README.md
        ("label", "permissions", 8),  # PermissionError
        ("watch", "permissions", 18),
        ("train", "permissions", 8),
    ],
)
def test_cases_that_failed_once(parts, name, kind, case):
    outcomes = parts(VICTIMS[name]).strike(kind, case, SEED)
    assert [(one.result, one.note) for one in outcomes if one.result != OK] == []


def test_killed_before_the_last_layer_was_written(parts):
    """A new process knows the last layer of a model only once it has seen a batch, and there is none left to do."""
    part = parts(VICTIMS["extract"])
    to = part.place / "killed"
    call(at_call, part.one, to, part.undisturbed.calls - 10, int(signal.SIGKILL))
    shards = [name for name in part.undisturbed.contents if name.startswith(("rows-", "forward-", "noise-"))]
    assert all((to / name).exists() for name in shards)
    assert not list(to.glob("head-*.safetensors"))
    assert part.resumed(to) == (OK, "")


@pytest.mark.parametrize(("victim", "kind", "result"), [(Overwriting, "kill", LOST), (Doubling, "flip", SILENT)])
def test_careless_victims_are_seen(parts, victim, kind, result):
    part = parts(victim)
    results = {one.result for case in range(3) for one in part.strike(kind, case, SEED)}
    assert result in results


def test_a_hang_is_seen(parts, monkeypatch):
    monkeypatch.setattr(processes.call, "__kwdefaults__", {"patience": 0.5})
    part = parts(Hanging)
    to = part.place / "killed"
    assert call(at_call, part.one, to, part.undisturbed.calls - 1, int(signal.SIGKILL)).how == processes.KILLED
    assert part.resumed(to) == (HUNG, "resuming hangs")


@pytest.mark.parametrize(("fault", "number"), [(FULL, errno.ENOSPC), (REVOKED, errno.EACCES)])
def test_the_disk_refuses_from_one_call_on(parts, fault, number):
    part = parts(Doubling)
    to = part.place / fault
    ending = call(at_call, part.one, to, part.undisturbed.calls // 2, fault)
    assert ending.how == processes.RAISED
    assert os.strerror(number) in ending.value
    allow(to)
    assert 0 < (to / "numbers.txt").read_text().count("\n") < 12


def test_comparing_folders():
    whole = {"a": "1", "b": "2"}
    assert compare(whole, dict(whole)) == (OK, "")
    assert compare(whole, {"a": "1"}) == (LOST, "['b'] are missing")
    assert compare(whole, {"a": "1", "b": "3"}) == (SILENT, "['b'] have other bytes")
    assert compare(whole, {**whole, "c.part": ""})[0] == SILENT
