"""Victims that do everything wrong: a harness that finds nothing in them could find nothing anywhere."""

import json
import time
from pathlib import Path

from dubito.errors import ArtefactError
from tests.faults.victims import Victim

_NUMBERS = 12


class Overwriting(Victim):
    """Writes its file in place, and so a kill leaves half of it where a whole one was."""

    name, safe = "overwriting", True

    def begin(self, to: Path) -> None:
        """An old file."""
        to.mkdir()
        (to / "numbers.json").write_bytes(json.dumps([0] * _NUMBERS).encode())

    def work(self, to: Path) -> None:
        """The new file."""
        with (to / "numbers.json").open("wb") as file:
            file.write(json.dumps(list(range(_NUMBERS))).encode())

    def values(self, to: Path) -> str:
        """Of the file."""
        try:
            return str(json.loads((to / "numbers.json").read_bytes()))
        except ValueError as error:
            raise ArtefactError("numbers.json cannot be read") from error


class Doubling(Victim):
    """Appends a line for every number, and after a kill again from the beginning: without a seal, nobody knows."""

    name = "doubling"

    def work(self, to: Path) -> None:
        """All numbers."""
        to.mkdir(exist_ok=True)
        text = (to / "numbers.txt").read_text() if (to / "numbers.txt").exists() else ""
        for number in range(0 if text.count("\n") < _NUMBERS else _NUMBERS, _NUMBERS):
            text += f"{number}\n"
            (to / "numbers.txt").write_bytes(text.encode())

    def values(self, to: Path) -> str:
        """Of the file."""
        return (to / "numbers.txt").read_text() if (to / "numbers.txt").exists() else ""


class Hanging(Victim):
    """Waits for ever where it finds what a killed process has left."""

    name = "hanging"

    def work(self, to: Path) -> None:
        """One file, with a lock that nobody releases."""
        to.mkdir(exist_ok=True)
        while (to / "taken").exists():
            time.sleep(0.01)
        (to / "taken").write_bytes(b"")
        (to / "number").write_bytes(b"7")
        (to / "taken").unlink()
