"""Who may know whom: one direction, no way back. And what importing may cost: nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dubito

SOURCE = Path(dubito.__file__).parent
ORDER = (
    ("errors", "choices"),
    ("table",),
    ("types",),
    ("validate", "storage", "result"),
    ("data", "models", "metrics"),
    ("gradients",),
    ("probes",),
    ("cache",),
    ("heads",),
    ("ensembles", "scores"),
    ("evaluate",),
    ("guard", "search", "active", "explain", "audit", "protocols"),
    ("report",),
)
"""Floors from the ground up: a room may import itself and every room of the floors below its own."""
MAY_KNOW = {
    room: {below for floor in ORDER[:number] for below in floor} for number, rooms in enumerate(ORDER) for room in rooms
}
"""Rooms from the ground up, and whom they may import besides themselves."""
KNOW_ALL = {"cli", "__init__", "__main__"}
"""The command line and the front door."""
HEAVY = ("torch", "timm", "transformers", "faiss", "sklearn")


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported(code: str) -> set[str]:
    """The rooms that a module imports, at any depth of nesting; relative imports are not in use."""
    rooms = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import hides its room"
            whole = node.module or ""
            names = [f"{whole}.{alias.name}" for alias in node.names] if whole == "dubito" else [whole]
        else:
            continue
        rooms |= {room_named(name) for name in names if name.split(".")[0] == "dubito"}
    return rooms


def room_named(name: str) -> str:
    """dubito.scores.softmax is in scores; dubito itself and the names that it gives out are at the front door."""
    room = [*name.split("."), "__init__"][1]
    return room if room in MAY_KNOW.keys() | KNOW_ALL else "__init__"


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if "__pycache__" not in path.parts)


def test_every_room_has_a_rule():
    assert {room_of(path) for path in modules()} <= MAY_KNOW.keys() | KNOW_ALL
    assert len(modules()) > 50


@pytest.mark.parametrize(
    "path",
    [path for path in modules() if room_of(path) not in KNOW_ALL],
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_a_module_knows_only_the_rooms_below(path):
    room = room_of(path)
    foreign = imported(path.read_text()) - MAY_KNOW[room] - {room}
    assert not foreign, f"{room} must not import {', '.join(sorted(foreign))}"


def test_the_rule_has_no_way_back():
    rooms = list(MAY_KNOW)
    for number, room in enumerate(rooms):
        assert MAY_KNOW[room] <= set(rooms[:number]), f"{room} knows a room that stands above it"


@pytest.mark.parametrize(
    ("code", "rooms"),
    [
        ("from dubito.cache.shard import write_shard", {"cache"}),
        ("import dubito.models.wrap as w", {"models"}),
        ("from dubito import metrics, load", {"metrics", "__init__"}),
        ("import dubito", {"__init__"}),
        ("def f():\n    if True:\n        from dubito.guard import Guard", {"guard"}),
        ("import numpy, torch.nn\nfrom dubitos import x", set()),
    ],
)
def test_the_reader_of_imports_sees_them_all(code, rooms):
    assert imported(code) == rooms


@pytest.mark.parametrize("name", ["dubito", "dubito.cli"])
def test_importing_is_silent_and_does_not_wait_for_torch(name):
    code = f"import sys, {name}; sys.exit(any(heavy in sys.modules for heavy in {HEAVY}))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_public_name_is_there():
    for name in dubito.__all__:
        assert getattr(dubito, name) is not None
    assert set(dubito.__all__) <= set(dir(dubito))
    with pytest.raises(AttributeError, match=r"module 'dubito' has no attribute 'lood'; it has .*load"):
        _ = dubito.lood
