"""What all commands share: options, how a function becomes a command, and what it shows.

The result goes to standard output, as text or as one JSON object; all else goes to standard error.
"""

import contextlib
import copy
import functools
import inspect
import json as json_format
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TextIO, final, get_args, get_origin

from rich.console import Console
from rich.text import Text
from typer import Argument, BadParameter, Option
from typer.models import OptionInfo

import dubito
from dubito.cli._translate import translate
from dubito.errors import DubitoWarning, ValueRangeError
from dubito.result import Result
from dubito.storage import Place, is_url, to_place

if TYPE_CHECKING:
    from dubito.guard import Watch, WatchReport
    from dubito.table import Provenance
    from dubito.types import Classifier

    Stored = dubito.Guard | dubito.SafeIndex | dubito.Table


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
            raise BadParameter(f"expected KEY=VALUE, with commas between several; got '{text}'.")
        return cls({key: value for key, _, value in pairs})


def parse_setting(text: str) -> Assignments:
    """Read NAME.KEY=VALUE, one setting of a score."""
    if not re.fullmatch(r"[^.=]+\.[^=]+=.+", text):
        raise BadParameter(f"expected NAME.KEY=VALUE, such as neighbours.k=5; got '{text}'.")
    name, _, value = text.partition("=")
    return Assignments({name: value})


def parse_numbers(text: str) -> tuple[int | float, ...]:
    """Read numbers with commas between them, or 384x512.

    >>> parse_numbers("0.5,0.5,0.5"), parse_numbers("384x512")
    ((0.5, 0.5, 0.5), (384, 512))
    """
    try:
        return tuple(float(one) if "." in one else int(one) for one in re.split("[,x]", text))
    except ValueError as error:
        raise BadParameter(f"expected numbers with commas between them; got '{text}'.") from error


def parse_weights(text: str) -> str | None:
    """What dubito.load takes for `--weights`.

    >>> parse_weights("None"), parse_weights("net.safetensors")
    (None, 'net.safetensors')
    """
    return None if text.lower() == "none" else text


def option(text: str, metavar: str | None = None, **settings: Any) -> Any:
    """An option of a command: what it does, how the help calls its value, and further settings of typer's Option."""
    return Option(help=text, metavar=metavar, **settings)


Weights = Annotated[
    str | None,
    option(
        "A file of weights: .pt, .pth, .ckpt, .bin or .safetensors; none for random.", "FILE|none", parser=parse_weights
    ),
]
OtherModel = Annotated[
    str | None, option("source:name, or python:FILE.py:FUNCTION.", "MODEL", show_default="the folder's own")
]
Device = Annotated[str | None, option("cpu, cuda or mps.", show_default="cpu")]
Cache = Annotated[Place, Argument(metavar="CACHE", help="A folder that `dubito extract` filled, or an .npz of arrays.")]
Scores = Annotated[
    list[str],
    Option("--score", "-s", metavar="NAME", help="A score; repeat it for several. By default, all that apply."),
]
Ensemble = Annotated[str, option("Which ensemble: members, dropout, views, tiles_7 ...", "NAME")]
Seed = Annotated[int, option("Seed of everything that is drawn at random.", "N", min=0)]
WatchFolder = Annotated[Path | None, option("Show the history of the guard's watch, by `dubito watch`.", "DIR")]
Csv = Annotated[Path | None, option("Write all rows as CSV.", "FILE")]
Html = Annotated[Path | None, option("Write a page with pictures.", "FILE")]
Debug = Annotated[bool, Option("--debug", help="Show the traceback of an error (also: DUBITO_DEBUG=1).")]
Json = Annotated[bool, Option("--json", help="One JSON object on standard output instead of text.")]
_COMMON = {
    "quiet": Annotated[bool, Option("--quiet", "-q", help="No progress bar and no notes.")],
    "json": Json,
    "debug": Debug,
}
"""The options of every command."""


@dataclass
class ModelOptions:
    """Options of commands that load a model, as `dubito.load` takes them."""

    weights: Weights = "pretrained"
    classes: Annotated[
        str | None,
        option("Class names in order: a file (one per line, or JSON) or a,b,c. 0: features alone.", "FILE|NAMES"),
    ] = None
    input_size: Annotated[str | None, option("Input size, if not the model's own.", "N|HxW")] = None
    resize: Annotated[int | None, option("Short side before the crop.", "N", min=1)] = None
    mean: Annotated[str | None, option("Mean of pixels in 0..1, by channel.", "R,G,B")] = None
    std: Annotated[str | None, option("Their standard deviation.", "R,G,B")] = None
    interpolation: Annotated[str | None, option("nearest, bilinear, bicubic or lanczos.")] = None
    device: Device = None

    arguments: ClassVar[Mapping[str, str]] = {"transform": "--input-size", "size": "--input-size"}
    """Arguments of the library that these options stand for under another name."""

    def load(self, name: str) -> "Classifier":
        """The model of a name, with these options."""
        return dubito.load(
            name, weights=self.weights, classes=self.classes, transform=self._transform(), device=self.device
        )

    def load_stored(self, screen: "Screen", chosen: str | None, loaded: "Stored", what: str) -> "Classifier":
        """The model of `--model`, or the one that a folder records: with its file of weights, classes and transform."""
        name, made = stored_model(chosen, loaded, what), loaded.provenance
        if made is None or name != made.model:
            return self.load(name)
        own: Any = {"weights": self.weights, "classes": self.classes, "transform": self._transform()}
        if made.checkpoint and self.weights == "pretrained":
            own["weights"] = _recorded_weights(made.checkpoint, what)
            screen.note(f"weights of the model: '{own['weights']}', as {what} records.")
        if own["transform"] is None and made.transform and made.transform.get("kind") == "preprocess":
            own["transform"] = {key: value for key, value in made.transform.items() if key != "kind"}
        own["classes"] = own["classes"] or getattr(loaded, "classes", None)
        if made.head and made.head.get("output") == "features" and own["classes"] is None:
            own["classes"] = 0  # a backbone without its classifying layer
        return dubito.load(name, **own, device=self.device)

    def _transform(self) -> dict[str, Any] | None:
        size, mean, std = (text and parse_numbers(text) for text in (self.input_size, self.mean, self.std))
        settings: dict[str, Any] = {
            "size": size[0] if size and len(size) == 1 else size,
            "resize": self.resize,
            "mean": mean,
            "std": std,
            "interpolation": self.interpolation,
        }
        return {key: value for key, value in settings.items() if value is not None} or None


@dataclass
class Bootstrap:
    """Options of commands that report intervals, as the library's functions take them."""

    confidence: Annotated[float, option("Confidence of the intervals, between 0 and 1.", "P")] = 0.95
    resamples: Annotated[int, option("Resamples of the bootstrap.", "N", min=1)] = 1000
    seed: Seed = 0


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

    def waiting(self, text: str) -> contextlib.AbstractContextManager[Any]:
        """A spinner while something takes seconds without reporting how far it is."""
        console = Console(stderr=True)
        return console.status(text) if console.is_terminal and not self.quiet else contextlib.nullcontext()

    def note(self, text: str) -> None:
        """Report something that does not stop the command."""
        self.notes.append(text)
        if not self.quiet:
            _say("note", text, "yellow")

    def flush(self) -> None:
        """Write what is still in memory; OSError where standard output takes no more."""
        self._stdout.flush()

    def discard(self) -> None:
        """Nothing more can be written to standard output, not even at exit."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stdout.fileno())

    def unwritable(self) -> str | None:
        """Why standard output takes no more, if so, such as a full disk; from then on it is discarded."""
        try:
            self.flush()
        except OSError as error:
            self.discard()
            return error.strerror or str(error)
        return None

    def fail(self, text: str, kind: str) -> None:
        """Report why the command ends without a result, in one line."""
        line = translate(" ".join(text.splitlines()), self.options)
        with contextlib.suppress(OSError):  # a full disk may be behind both streams
            _say("error", line, "bold red")
        with contextlib.suppress(OSError):
            if self.json:
                self._write_json({"error": line, "kind": kind, "notes": self.notes})
        self.unwritable()

    def show(self, result: Result, *below: str, written: Mapping[str, Place | None] = {}, **extra: Any) -> None:
        """Show the result of a command: for people, or its `to_dict` as JSON.

        Args:
            result: The result.
            below: Sentences for people that stand below it.
            written: By key of the JSON, the files that the command wrote; None where an option is absent.
            extra: Further values of the JSON.
        """
        if self.json:
            files = {key: None if path is None else str(path) for key, path in written.items()}
            self._write_json({**extra, **result.to_dict(), **files, "notes": self.notes})
            return
        console = Console(file=self._stdout)
        if not console.is_terminal:
            console.width = 10_000  # other programs read it: no line is wrapped
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
    """

    heading_text: str
    values: Mapping[str, Any]
    named: Mapping[str, str] = field(default_factory=dict)
    rows: Sequence[dict[str, Any]] = ()

    def title(self) -> str:
        """The title."""
        return self.heading_text

    def facts(self) -> dict[str, str]:
        """The facts."""
        return dict(self.named)

    def records(self) -> list[dict[str, Any]]:
        """The table."""
        return list(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The JSON."""
        return dict(self.values)


_CURRENT: ContextVar[Screen] = ContextVar("screen")
"""Screen of the running command: commands are called by typer, which hands them their options only."""


def command(function: Callable[..., None]) -> Callable[..., None]:
    """A command of a function whose first argument is the screen: adds --quiet, --json and --debug.

    An argument whose type is a dataclass stands for its fields, each an option. Errors of the library name arguments;
    the options with the same names replace them.
    """
    _, *own = inspect.signature(function).parameters.values()
    groups: dict[str, Any] = {one.name: one.annotation for one in own if is_dataclass(one.annotation)}
    parameters = [option for one in own for option in (_fields(groups[one.name]) if one.name in groups else [one])]
    parameters = [one.replace(annotation=_with_places(one.annotation)) for one in parameters]
    renamed = {key: text for group in groups.values() for key, text in getattr(group, "arguments", {}).items()}
    names = renamed | _option_names(parameters)

    @functools.wraps(function)
    def run(*, quiet: bool, json: bool, debug: bool, **arguments: Any) -> None:
        screen = Screen.current(json=json, debug=debug, quiet=quiet)
        screen.options = names
        for name, group in groups.items():
            arguments[name] = group(**{option.name: arguments.pop(option.name) for option in fields(group)})
        function(screen, **arguments)

    parameters += [_keyword(name, hint, default=False) for name, hint in _COMMON.items()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _parse_path(text: str | Path) -> Path:
    """A path on this machine; typer passes defaults, which are paths, too."""
    if is_url(text):
        raise BadParameter(f"it must be on this machine; got '{text}'. Pass a path.")
    return Path(text)


def _with_places(annotation: Any) -> Any:
    """An annotation whose paths and addresses are parsed here: typer knows paths alone, and takes s3://b for one."""
    if get_origin(annotation) is not Annotated or "Path" not in str(annotation):
        return annotation
    kind, info = get_args(annotation)
    info = copy.copy(info)
    info.parser = to_place if "RemotePath" in str(kind) else _parse_path
    several, absent = get_origin(kind) is list, type(None) in get_args(kind)
    return Annotated[list[str] if several else str | None if absent else str, info]


def _fields(group: Any) -> list[inspect.Parameter]:
    """The fields of a dataclass as keyword arguments; one without a default is required."""
    defaults = [one.default if one.default_factory is MISSING else one.default_factory() for one in fields(group)]
    return [
        _keyword(one.name, one.type, inspect.Parameter.empty if default is MISSING else default)
        for one, default in zip(fields(group), defaults, strict=True)
    ]


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _option_names(parameters: Iterable[inspect.Parameter]) -> dict[str, str]:
    """By parameter of a command, its option as users type it, or the name of the argument in its help."""
    names = {}
    for one in parameters:
        for info in getattr(one.annotation, "__metadata__", ()):
            flags = [flag for flag in (info.default, *(info.param_decls or ())) if isinstance(flag, str)]
            if isinstance(info, OptionInfo):
                names[one.name] = max(flags, key=len, default=f"--{one.name.replace('_', '-')}")
                if isinstance(one.default, list):  # an option that is repeated stands for an argument in the plural
                    names[f"{one.name[:-1]}ies" if one.name.endswith("y") else f"{one.name}s"] = names[one.name]
            else:
                names[one.name] = (info.metavar or one.name).rstrip(".")
    return names


def _say(what: str, text: str, style: str) -> None:
    Console(stderr=True, highlight=False).print(Text.assemble((f"{what}: ", style), text), soft_wrap=True)


def read_settings(kinds: Any, texts: Mapping[str, str], by: str, **options: Any) -> dict[str, Any]:
    """`settings_from_text` for an option: a text that is no value of a setting is a call that cannot be understood."""
    from dubito.validate import settings_from_text

    try:
        return settings_from_text(kinds, texts, by=by, **options)
    except ValueRangeError as error:
        raise BadParameter(str(error)) from error


def stored_model(chosen: str | None, loaded: "Stored", what: str) -> str:
    """The model of `--model`, or the one that a folder records, unless that is code: the folder may be anybody's."""
    own = (loaded.provenance.model if loaded.provenance else None) or ""
    if chosen is None and ":" not in own:
        reason = f"belongs to {own}, which was wrapped in Python" if own else "does not name its model"
        raise BadParameter(
            f"{what} {reason}. Pass --model source:name, or --model python:FILE.py:FUNCTION for a module of your own; "
            f"`guard run` and `search query` also take a cache in place of images."
        )
    if chosen is None and own.startswith("python:"):
        raise BadParameter(
            f"{what} names code as its model, {own}, which dubito does not run on its own: the folder may be somebody "
            f"else's. Pass --model {own} if you trust that code."
        )
    return chosen or own


def _recorded_weights(checkpoint: Mapping[str, str], what: str) -> str:
    """The file of weights that a folder records; BadParameter where it is gone or has changed. It is never executed."""
    from dubito.storage import checksum

    path = Path(checkpoint["path"])
    if not path.is_file():
        raise BadParameter(
            f"{what} belongs to a model with the weights of '{path}', which is not there. Put it back, or pass "
            f"its new path with --weights."
        )
    if checksum(path) != checkpoint["checksum"]:
        raise BadParameter(
            f"{what} belongs to a model with the weights of '{path}', which has changed since: what holds for the old "
            f"weights need not hold for the new ones. Pass --weights with the old file, or extract and fit again."
        )
    return str(path)


def describe_inputs(made: "Provenance | None") -> str | None:
    """How images became inputs, and the file of the weights: a wrong input size raises no error, so it must be seen."""
    texts, settings = [], (made and made.transform) or {}
    if settings.get("kind") == "preprocess":
        size, resize = settings["size"], settings["resize"]
        way = f"short side resized to {resize}" if resize else "not resized"
        way = "resized to {}x{}".format(*resize) if isinstance(resize, tuple | list) else way
        texts.append(f"{size[0]}x{size[1]} pixels, {way} ({settings['interpolation']})")
    if made and made.checkpoint:
        texts.append(f"weights of '{made.checkpoint['path']}'")
    return "; ".join(texts) or None


def is_cache(place: str) -> bool:
    """Whether a place is a cache, or an .npz file of columns, rather than images."""
    if place.lower().endswith(".npz"):
        from dubito.cache.arrays import holds_columns, is_npz

        return is_npz(to_place(place)) and holds_columns(to_place(place))
    return (to_place(place) / "manifest.json").is_file()


def check_model_first(model: str, images: str) -> None:
    """Raise where MODEL and IMAGES are swapped: the first is a place, and the second names a model."""
    if ":" in images and not Path(images).exists() and ":" not in model and Path(model).exists():
        raise BadParameter(f"MODEL and IMAGES are swapped: '{images}' names a model, and '{model}' holds the images.")


def check_no_model(model: str | None, load: ModelOptions) -> None:
    """Raise for options of a model where a cache stands in the place of images: they would have no effect."""
    if model is not None or load != ModelOptions():
        raise BadParameter(
            "a CACHE holds what a model predicted: --model, --weights and all other options that load a model have no "
            "effect on it. Leave them out, or pass images."
        )


def check_folder_first(folder: Place, other: str, file: str, names: tuple[str, str]) -> None:
    """Raise where a folder that dubito wrote, known by a file in it, comes after what it is used on."""
    if (to_place(other) / file).is_file() and not (folder / file).is_file():
        raise BadParameter(f"{names[0]} and {names[1]} are swapped: '{other}' is the {names[0].lower()}.")


def open_watch(guard: "dubito.Guard | None", folder: Path | None) -> "Watch | None":
    """The watch of a guard whose state is in a folder."""
    if folder is None:
        return None
    if guard is None:
        raise BadParameter("--watch shows what a guard was used on: pass --guard, too.")
    from dubito.guard import Watch

    return Watch.open(guard, folder)


def with_commands(report: "WatchReport") -> "WatchReport":
    """What a watch reports, with the commands that follow its advice."""
    return replace(report, advice=translate(report.advice, {}))


def open_sets(paths: Sequence[Place]) -> dict[str, "dubito.Table"]:
    """Caches by the names of their folders, or by whole paths where several have the same name."""
    return {name: dubito.open(path) for name, path in short_names(paths).items()}


def short_names(places: Iterable[Any]) -> dict[str, Any]:
    """Places by the last part of their paths, or by whole paths where several have the same last part."""
    last = {place: to_place(place).resolve().name for place in places}
    times = Counter(last.values())
    return {name if times[name] == 1 else str(place): place for place, name in last.items()}
