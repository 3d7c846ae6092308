"""Targets with every kind of fault, to see that the sandbox notices them."""

import ctypes
import os
import pickle
from collections.abc import Callable
from pathlib import Path

from dubito.errors import DubitoError


class World:
    """An empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fresh(self) -> Path:
        """The folder of the example, which becomes the current one."""
        place = self.folder / "example"
        place.mkdir(parents=True, exist_ok=True)
        os.chdir(place)
        return place


class Target:
    """As in the table of targets, but for inputs: a fault needs none."""

    memory, seconds, runs_code = 64 << 20, 0.5, False

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def seeds(self, _: World) -> list[bytes]:
        return []

    def example(self, _: World, script: bytes) -> bytes:
        return script

    def run(self, world: World, _: bytes) -> None:
        world.fresh()
        self._act()


def refuse(text: str) -> None:
    raise DubitoError(text)


def hang() -> None:
    while True:
        pass


def fill() -> None:
    """Memory that is used, and refused afterwards."""
    content = bytearray(256 << 20)
    for place in range(0, len(content), 4096):
        content[place] = 1
    refuse(f"a file of {len(content)} bytes was refused too late")


def catch_everything() -> None:
    try:
        hang()
    except Exception:
        refuse("a loop that catches what interrupts it")


TARGETS = {
    "loads": Target(lambda: None),
    "refuses": Target(lambda: refuse("it is not a file that dubito wrote. Save it again.")),
    "raises": Target(lambda: {}["key"]),
    "says nothing": Target(lambda: refuse("")),
    "exits": Target(lambda: os._exit(3)),
    "segfaults": Target(lambda: ctypes.string_at(0)),
    "hangs": Target(hang),
    "hangs on": Target(catch_everything),
    "fills memory": Target(fill),
    "announces more": Target(lambda: bytearray(1 << 40)),
    "runs a command": Target(lambda: os.system("true")),  # noqa: S605 (that is the point)
    "unpickles": Target(lambda: pickle.loads(pickle.dumps(World))),  # noqa: S301
    "leaves a mark": Target(lambda: Path("executed").write_text("")),
}
