"""What a command shows: its result on standard output, as text or as one JSON object; all else on standard error.

`command` makes a command of a function: it adds the options that all of them have and hands it the screen.
"""

import contextlib
import functools
import inspect
import json as json_format
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TextIO, final, get_type_hints

import typer
from rich.console import Console
from rich.text import Text

from dubito.errors import DubitoWarning

if TYPE_CHECKING:
    from dubito.result import Result

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output instead of text.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error (also: DUBITO_DEBUG=1).")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no notes.")]

_ENDLESS = 10_000
_NOWHERE: Mapping[str, Path | None] = MappingProxyType({})
_EXTRACT = re.compile(r"dubito\.extract\(model, images, to='([^']*)'\)")
_CODE = r"`[^`]*`|\bdubito\.[\w.]+\((?:[^()]|\([^()]*\))*\)|(?<!\w)'[^']*'"
"""Parts of a message that are left as they are: commands, calls in Python and quoted values."""


@final
@dataclass
class Screen:
    """Both streams and how they are used.

    Attributes:
        json: Whether the result is one JSON object.
        debug: Whether errors show where they came from, and warnings of other packages are shown.
        quiet: Whether progress bars and notes are left out.
        when_stopped: What to know after Ctrl-C.
        options: By argument of the library, the option of the running command.
        notes: The notes so far; part of the JSON.
    """

    json: bool = False
    debug: bool = False
    quiet: bool = False
    when_stopped: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _stdout: TextIO = field(default_factory=lambda: sys.stdout)

    @classmethod
    def current(cls, *, json: bool = False, debug: bool = False, quiet: bool = False) -> "Screen":
        """The screen of the running command, with its own options."""
        screen = _CURRENT.get()
        screen.json, screen.debug, screen.quiet = json or screen.json, debug or screen.debug, quiet
        return screen

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While a command runs, warnings become notes, and with JSON nobody else writes to standard output."""
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
        """A spinner while something takes seconds without reporting how far it is."""
        console = Console(stderr=True)
        if self.quiet or not console.is_terminal:
            yield
        else:
            with console.status(text):
                yield

    def note(self, text: str) -> None:
        """Report something that does not stop the command."""
        self.notes.append(text)
        if not self.quiet:
            _say("note", text, "yellow")

    def fail(self, text: str, kind: str) -> None:
        """Report why the command ends without a result, in one line."""
        line = translate(" ".join(text.splitlines()), self.options)
        _say("error", line, "bold red")
        if self.json:
            self._write_json({"error": line, "kind": kind, "notes": self.notes})

    def show(self, result: "Result", *below: str, written: Mapping[str, Path | None] = _NOWHERE, **extra: Any) -> None:
        """Show the result of a command: for people, or its `to_dict` as JSON.

        Args:
            result: The result.
            below: Sentences for people that stand below it.
            written: By key of the JSON, the files that the command wrote; None where an option was not given.
            extra: Further values of the JSON.
        """
        if self.json:
            files = {key: None if path is None else str(path) for key, path in written.items()}
            self._write_json({**extra, **result.to_dict(), **files, "notes": self.notes})
            return
        console = Console(file=self._stdout)
        if not console.is_terminal:
            console = Console(file=self._stdout, width=_ENDLESS)
        console.print(result)
        for text in (*below, *(f"written: {path}" for path in written.values() if path is not None)):
            console.print(Text(text))

    def _write_json(self, values: dict[str, Any]) -> None:
        self._stdout.write(json_format.dumps(values, indent=2) + "\n")
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
            self.note(translate(str(message), self.options))
        elif self.debug:
            _say("warning", f"{category.__name__}: {message} ({filename}:{lineno})", "yellow")


_CURRENT: ContextVar[Screen] = ContextVar("screen")
"""Screen of the running command: commands are called by typer, which hands them their options only."""


def command(function: Callable[..., None]) -> Callable[..., None]:
    """A command of a function whose first argument is the screen: adds --quiet, --json and --debug.

    Errors of the library name arguments; the options of the function with the same names replace them.
    """
    common = {"quiet": Quiet, "json": Json, "debug": Debug}
    names = _option_names(function)

    @functools.wraps(function)
    def run(*, quiet: bool, json: bool, debug: bool, **arguments: Any) -> None:
        screen = Screen.current(json=json, debug=debug, quiet=quiet)
        screen.options = names
        function(screen, **arguments)

    _, *own = inspect.signature(function).parameters.values()
    kind = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(name, kind, default=False, annotation=hint) for name, hint in common.items()]
    run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {**function.__annotations__, **common}
    return run


def translate(text: str, options: Mapping[str, str]) -> str:
    """A message of the library in the words of the command line: arguments become options.

    >>> translate("compare: ood 'cats' is empty. Give ood= or train='x'.", {"ood": "--ood", "train": "--train"})
    "compare: --ood 'cats' is empty. Give --ood or --train 'x'."
    """
    text = _EXTRACT.sub(r"`dubito extract MODEL IMAGES --to \1`", text)
    if not options:
        return text
    names = "|".join(map(re.escape, options))
    keyword = rf"(?<![\w.-])(?P<keyword>{names})=(?P<value>True|\.\.\.|\S?)"
    argument = rf"(?:^|(?<=: )|(?<= in ))(?P<argument>{names})(?=: | must | needs | cannot | \(| ')"

    def replaced(match: re.Match[str]) -> str:
        if match["argument"]:
            return options[match["argument"]]
        if not match["keyword"]:
            return match[0]
        value = match["value"].removeprefix("True")
        return options[match["keyword"]] + (value if value in ("", ".", ",", ";", ")") else f" {value}")

    return re.sub(f"{_CODE}|{keyword}|{argument}", replaced, text)


def _option_names(function: Callable[..., None]) -> dict[str, str]:
    """By parameter of a command, its option as users type it, or the name of the argument in its help."""
    names = {}
    for name, hint in get_type_hints(function, include_extras=True).items():
        for info in getattr(hint, "__metadata__", ()):
            flags = [one for one in (info.default, *(info.param_decls or ())) if isinstance(one, str)]
            names[name] = max(flags, key=len, default="") or (info.metavar or name).rstrip(".")
    return names


def _say(what: str, text: str, style: str) -> None:
    Console(stderr=True, highlight=False).print(Text.assemble((f"{what}: ", style), text), soft_wrap=True)
