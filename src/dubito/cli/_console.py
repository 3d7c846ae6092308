"""What all commands share: options, how a function becomes a command, and what it shows.

The result goes to standard output, as text or as one JSON object; all else goes to standard error.
"""

import contextlib
import functools
import inspect
import json as json_format
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TextIO, final, get_type_hints

import typer
from rich.console import Console
from rich.text import Text
from typer.models import OptionInfo

import dubito
from dubito import choices
from dubito.errors import DubitoWarning, ValueRangeError
from dubito.result import Result

if TYPE_CHECKING:
    from dubito.table import Provenance, Table

_ENDLESS = 10_000
_NOWHERE: Mapping[str, Path | None] = MappingProxyType({})
_EXTRACT = re.compile(r"dubito\.extract\(model, images, to='([^']*)'\)")
_CODE = r"`[^`]*`|\bdubito\.[\w.]+\((?:[^()]|\([^()]*\))*\)|(?<!\w)'[^']*'"
"""Parts of a message that are left as they are: commands, calls in Python and quoted values."""


class Assignments(dict[str, str]):
    """KEY=VALUE,...: by key the text of its value. A value may have commas of its own."""

    @classmethod
    def parse(cls, text: str) -> "Assignments":
        """Read the text of an option.

        >>> Assignments.parse("grids=2,7,keep=logits")
        {'grids': '2,7', 'keep': 'logits'}
        """
        pairs = [part.partition("=") for part in re.split(r",(?=\w+=)", text)]
        if not all(key and value for key, _, value in pairs):
            raise typer.BadParameter(f"expected KEY=VALUE, with commas between several; got '{text}'.")
        return cls({key: value for key, _, value in pairs})


class ScoreSetting(NamedTuple):
    """NAME.KEY=VALUE: one setting of a score."""

    score: str
    key: str
    value: str

    @classmethod
    def parse(cls, text: str) -> "ScoreSetting":
        """Read the text of an option."""
        match = re.fullmatch(r"([^.=]+)\.([^=]+)=(.+)", text)
        if match is None:
            raise typer.BadParameter(f"expected NAME.KEY=VALUE, such as neighbours.k=5; got '{text}'.")
        return cls(*match.groups())


def parse_weights(text: str) -> str | None:
    """What dubito.load takes for `--weights`.

    >>> parse_weights("None"), parse_weights("net.safetensors")
    (None, 'net.safetensors')
    """
    return None if text.lower() == "none" else text


Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A source:name of `dubito list models`, or python:FILE.py:FUNCTION.")
]
Images = Annotated[
    str, typer.Argument(metavar="IMAGES", help="A folder, with or without class folders; an image; .csv, .zip or .npz.")
]
Labels = Annotated[Path | None, typer.Option(metavar="FILE", help="A CSV of image names and labels.")]
LabelSpace = Annotated[
    choices.LabelSpace | None,
    typer.Option(help="Whether labels are the model's classes or another set's; by default seen from names."),
]
Weights = Annotated[
    str | None,
    typer.Option(metavar="PATH|none", parser=parse_weights, help="A weights file, or none for random weights."),
]
OtherModel = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="source:name, or python:FILE.py:FUNCTION.", show_default="the folder's own"),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or mps.", show_default="cpu")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Images per forward pass.")]
Workers = Annotated[int | None, typer.Option(min=0, help="Processes that decode images.")]
Cache = Annotated[Path, typer.Argument(metavar="CACHE", help="A folder that `dubito extract` filled.")]
Train = Annotated[
    Path | None,
    typer.Option(
        metavar="CACHE",
        help="Images like those that the model was trained on, for scores that learn. Without --score, density takes "
        "the covariances that these images allow in seconds, and a note says which.",
    ),
]
OodSets = Annotated[
    list[Path], typer.Option(metavar="CACHE", help="Out-of-distribution images; repeat it for several caches.")
]
Scores = Annotated[
    list[str],
    typer.Option("--score", "-s", metavar="NAME", help="A score; repeat it for several. By default all that apply."),
]
Settings = Annotated[
    list[ScoreSetting],
    typer.Option("--set", metavar="NAME.KEY=VALUE", parser=ScoreSetting.parse, help="A setting: neighbours.k=5."),
]
Heads = Annotated[
    list[str],
    typer.Option(
        metavar="NAME|PATH|HUB",
        help="A trained uncertainty head: of `dubito list heads`, a folder, a hub id, or auto for the one that fits.",
    ),
]
OneScore = Annotated[
    str | None, typer.Option("--score", "-s", metavar="NAME", help="The uncertainty; by default the entropy.")
]
OneHead = Annotated[str | None, typer.Option(metavar="NAME|PATH|HUB", help="A trained uncertainty head as the score.")]
Load = Annotated[Path | None, typer.Option(metavar="DIR", help="Use the scores that `dubito score --save DIR` kept.")]
Ensemble = Annotated[str, typer.Option(metavar="NAME", help="Which ensemble: members, dropout, views, tiles_7 ...")]
Confidence = Annotated[float, typer.Option(metavar="P", help="Confidence of the intervals, between 0 and 1.")]
Resamples = Annotated[int, typer.Option(min=1, metavar="N", help="Resamples of the bootstrap.")]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Seed of everything that is drawn at random.")]
Csv = Annotated[Path | None, typer.Option(metavar="FILE", help="Write all rows as CSV.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with pictures.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output instead of text.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error (also: DUBITO_DEBUG=1).")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no notes.")]


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

    def show(self, result: Result, *below: str, written: Mapping[str, Path | None] = _NOWHERE, **extra: Any) -> None:
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

    def _on_warning(self, message: Warning | str, category: type[Warning], *where: Any, **_: Any) -> None:
        if issubclass(category, DubitoWarning):
            self.note(translate(str(message), self.options))
        elif self.debug:
            _say("warning", f"{category.__name__}: {message} ({where[0]}:{where[1]})", "yellow")


@final
@dataclass
class CommandResult(Result):
    """What a command did, where no function of the library returns it.

    Attributes:
        heading_text: Its title.
        values: The JSON.
        named: Facts for people, by name.
        rows: A table for people.
        remarks: Sentences below the table.
    """

    heading_text: str
    values: Mapping[str, Any]
    named: Mapping[str, str] = field(default_factory=dict)
    rows: Sequence[dict[str, Any]] = ()
    remarks: Sequence[str] = ()

    def title(self) -> str:
        """The title."""
        return self.heading_text

    def facts(self) -> dict[str, str]:
        """The facts."""
        return dict(self.named)

    def records(self) -> list[dict[str, Any]]:
        """The table."""
        return list(self.rows)

    def findings(self) -> list[str]:
        """The remarks."""
        return list(self.remarks)

    def cell(self, key: str, value: Any) -> str:
        """Several names in one cell."""
        return ", ".join(map(str, value)) if isinstance(value, list) else super().cell(key, value)

    def to_dict(self) -> dict[str, Any]:
        """The JSON."""
        return dict(self.values)


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
            if isinstance(info, OptionInfo):
                names[name] = max(flags, key=len, default=f"--{name.replace('_', '-')}")
            else:
                names[name] = (info.metavar or name).rstrip(".")
    return names


def _say(what: str, text: str, style: str) -> None:
    Console(stderr=True, highlight=False).print(Text.assemble((f"{what}: ", style), text), soft_wrap=True)


def read_settings(kinds: Any, texts: Mapping[str, str], by: str, **options: Any) -> dict[str, Any]:
    """`settings_from_text` for an option: a text that is no value of a setting is a call that cannot be understood."""
    from dubito.validate import settings_from_text  # noqa: PLC0415 (imports torch)

    try:
        return settings_from_text(kinds, texts, by=by, **options)
    except ValueRangeError as error:
        raise typer.BadParameter(str(error)) from error


def stored_model(chosen: str | None, provenance: "Provenance | None", what: str) -> str:
    """The model of `--model`, or the one that a folder records, unless that is code: the folder may be anybody's."""
    own = (provenance.model if provenance else None) or ""
    if chosen is None and ":" not in own:
        reason = f"belongs to {own}, which was wrapped in Python" if own else "does not name its model"
        raise typer.BadParameter(
            f"{what} {reason}. Give --model source:name, or --model python:FILE.py:FUNCTION for a module of your own; "
            f"`guard run` and `search query` also take a cache in place of images."
        )
    if chosen is None and own.startswith("python:"):
        raise typer.BadParameter(
            f"{what} names code as its model, {own}, which is not run unasked: the folder may be somebody else's. "
            f"Give --model {own} if you trust that code."
        )
    return chosen or own


def is_cache(place: str) -> bool:
    """Whether a place is a cache rather than images."""
    return (Path(place) / "manifest.json").is_file()


def open_sets(paths: Sequence[Path]) -> dict[str, "Table"]:
    """Caches by the names of their folders, or by whole paths where several have the same name."""
    return {name: dubito.open(path) for name, path in short_names(paths).items()}


def short_names(places: Iterable[Any]) -> dict[str, Any]:
    """Places by the last part of their paths, or by whole paths where several have the same last part."""
    last = {place: Path(place).resolve().name for place in places}
    times = Counter(last.values())
    return {name if times[name] == 1 else str(place): place for place, name in last.items()}
