"""What `make faults` prints, and the code that it exits with."""

import json
from dataclasses import dataclass

import pytest

from tests.faults import run
from tests.faults.outcome import HUNG, LOST, OK, SILENT, UNNAMED, Outcome


@dataclass
class Scripted:
    """A part with these results."""

    name: str
    results: list[str]
    faults: int = 10

    def run(self, faults, seed):
        for case in range(faults):
            result = self.results[case % len(self.results)]
            yield Outcome(self.name, f"kind {case % 2}", case, result, "a note" if result != OK else "")


@pytest.fixture
def strike(monkeypatch, capsys):
    def start(results, *arguments):
        parts = {name: Scripted(name, results) for name in ("extract", "train")}
        monkeypatch.setattr(run, "make_part", lambda name, place, kinds: parts[name])
        code = run.main(["--parts", "extract,train", *arguments])
        printed = capsys.readouterr().out
        return code, json.loads(printed.splitlines()[-1]), printed

    return start


def test_nothing_lost(strike):
    code, result, _ = strike([OK])
    assert code == 0
    assert [result[key] for key in ("faults", "lost", "silent", "hangs")] == [20, 0, 0, 0]


@pytest.mark.parametrize(("result", "key"), [(LOST, "lost"), (SILENT, "silent"), (HUNG, "hangs"), (UNNAMED, "unnamed")])
def test_whatever_is_wrong_fails(strike, result, key):
    code, counts, printed = strike([OK, OK, OK, OK, result])
    assert code == 1
    assert (counts[key], counts["parts"]["train"][key]) == (4, 2)
    assert f"train, kind 0, case 4 of seed 0: {result}: a note" in printed


def test_faults_are_shared_among_parts(strike):
    assert strike([OK], "--faults", "7")[1]["faults"] == 8


def test_unknown_parts_are_refused(capsys):
    with pytest.raises(SystemExit):
        run.main(["--parts", "extrakt"])
    assert "unknown parts: extrakt; there are extract," in capsys.readouterr().err
