"""What a command shows: its result on standard output, as text or as one JSON object; all else on standard error."""

import contextlib
import json as json_format
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TextIO, final

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from dubito.errors import DubitoWarning

_ENDLESS = 10_000
_LEGIBLE = 10
"""Letters of a name that stay on one line, however narrow the terminal."""


@final
@dataclass
class Screen:
    """Both streams and how they are to be used.

    Attributes:
        json: The result is one JSON object.
        debug: Errors show where they came from, and warnings of other packages are shown.
        quiet: No progress bars, no notes on standard error.
        when_stopped: What to know after Ctrl-C.
        notes: What was worth telling so far; part of the JSON.
    """

    json: bool = False
    debug: bool = False
    quiet: bool = False
    when_stopped: str = ""
    notes: list[str] = field(default_factory=list)
    _stdout: TextIO = field(default_factory=lambda: sys.stdout)

    @classmethod
    def current(cls, *, json: bool = False, debug: bool = False, quiet: bool = False) -> "Screen":
        """The screen of the running command, with what its own options say."""
        screen = _CURRENT.get()
        screen.json, screen.debug, screen.quiet = json or screen.json, debug or screen.debug, quiet
        return screen

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While a command runs: warnings become notes, and with JSON nobody else writes to standard output."""
        with contextlib.ExitStack() as stack:
            stack.callback(_CURRENT.reset, _CURRENT.set(self))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("always", DubitoWarning)
            warnings.showwarning = self._on_warning
            if self.json:
                stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            yield

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """A spinner while something takes seconds without telling how far it is."""
        console = Console(stderr=True)
        if self.quiet or not console.is_terminal:
            yield
        else:
            with console.status(text):
                yield

    def note(self, text: str) -> None:
        """Something worth telling without stopping."""
        self.notes.append(text)
        if not self.quiet:
            _say("note", text, "yellow")

    def fail(self, text: str, kind: str) -> None:
        """Why the command ends without a result."""
        line = " ".join(text.splitlines())
        _say("error", line, "bold red")
        if self.json:
            self._write_json({"error": line, "kind": kind, "notes": self.notes})

    def result(self, found: dict[str, Any], *shown: RenderableType) -> None:
        """The one answer of a command: the JSON object, or what people see."""
        if self.json:
            self._write_json({**found, "notes": self.notes})
            return
        console = Console(file=self._stdout)
        if not console.is_terminal:
            console = Console(file=self._stdout, width=_ENDLESS)
        for part in shown:
            console.print(part)

    def _write_json(self, found: dict[str, Any]) -> None:
        self._stdout.write(json_format.dumps(found, indent=2) + "\n")
        self._stdout.flush()

    def _on_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,  # noqa: ARG002 (warnings.showwarning has it)
        line: str | None = None,  # noqa: ARG002
    ) -> None:
        if issubclass(category, DubitoWarning):
            self.note(str(message))
        elif self.debug:
            _say("warning", f"{category.__name__}: {message} ({filename}:{lineno})", "yellow")


_CURRENT: ContextVar[Screen] = ContextVar("screen")
"""Of the command that runs: commands are called by typer, which hands them their options only."""


def grid(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: int = 0) -> RenderableType:
    """A plain table below its title; the last `numbers` columns stand to the right."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for place, name in enumerate(header):
        right = place >= len(header) - numbers
        table.add_column(
            name,
            justify="right" if right else "left",
            overflow="fold",
            no_wrap=right,
            min_width=None if right else min(_LEGIBLE, max((len(row[place]) for row in rows), default=0)),
        )
    for row in rows:
        table.add_row(*map(Text, row))
    return Group(Text(title, style="bold"), table) if title else table


def facts(title: str, pairs: dict[str, str]) -> RenderableType:
    """A title and a few named facts below it."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in pairs.items():
        table.add_row(Text(name), Text(value))
    return Group(Text(title, style="bold"), table)


def short(name: str) -> str:
    """A class name without its synonyms.

    >>> short("lampshade, lamp shade")
    'lampshade'
    """
    return name.partition(",")[0]


def _say(what: str, text: str, style: str) -> None:
    Console(stderr=True, highlight=False).print(Text.assemble((f"{what}: ", style), text), soft_wrap=True)
