"""A short slice of the fuzzing, the same every time, and every input that has shown a fault before.

`make fuzz` draws other inputs, for minutes. All of them run in another process, which may hang or crash.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.sandbox import Sandbox, Verdict
from tests.fuzz.targets import TARGETS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
REGRESSIONS = sorted(
    path for path in (Path(__file__).parent / "regressions").glob("*/*") if path.parent.name in TARGETS
)
FAULTS = {
    "loads": "loaded",
    "refuses": "refused",
    "raises": "crash",
    "says nothing": "crash",
    "exits": "crash",
    "segfaults": "crash",
    "hangs": "hang",
    "hangs on": "hang",
    "fills memory": "memory",
    "announces more": "memory",
    "runs a command": "code",
    "unpickles": "code",
    "leaves a mark": "code",
}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as box:
        yield box


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_and_hostile_inputs_are_refused(name: str, sandbox: Sandbox) -> None:
    """No crash, no hang, no more memory than allowed, no code that runs, no damage that passes for something else."""

    @settings(
        max_examples=TARGETS[name].examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.binary(min_size=1, max_size=48))
    def drawn(script: bytes) -> None:
        verdict, data = sandbox.run(name, script, script=True)
        assert not verdict.fault, _described(verdict, name, data)

    drawn()


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_an_input_that_has_shown_a_fault(path: Path, sandbox: Sandbox) -> None:
    verdict, data = sandbox.run(path.parent.name, path.read_bytes())
    assert not verdict.fault, _described(verdict, path.parent.name, data)


@pytest.mark.parametrize("name", TARGETS)
def test_a_valid_input_is_read(name: str, sandbox: Sandbox) -> None:
    """Otherwise the other tests would prove nothing."""
    verdict, _ = sandbox.run(name, b"", script=True)
    assert verdict.kind == "loaded", verdict


def test_every_fault_is_noticed() -> None:
    with Sandbox("tests.fuzz.faulty") as box:
        assert {name: box.run(name, b"x")[0].kind for name in FAULTS} == FAULTS


def _described(verdict: Verdict, name: str, data: bytes) -> str:
    return f"{verdict.kind} of {name} at {verdict.place}, by the input {data[:400]!r}:\n{verdict.text}"
