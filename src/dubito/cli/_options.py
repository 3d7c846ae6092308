"""Options and arguments that several commands share, and how their values are read from text."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from dubito import choices
from dubito.errors import ValueRangeError


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


class ProbeSettings(NamedTuple):
    """NAME[:KEY=VALUE,...]: a probe and its settings."""

    name: str
    settings: Assignments

    @classmethod
    def parse(cls, text: str) -> "ProbeSettings":
        """Read the text of an option.

        >>> ProbeSettings.parse("tiles:grids=2,7")
        ProbeSettings(name='tiles', settings={'grids': '2,7'})
        """
        name, colon, settings = text.partition(":")
        return cls(name, Assignments.parse(settings) if colon else Assignments())


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


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="source:name, see `dubito list models`; python:FILE.py:FUNCTION for a model of your own.",
        show_default=False,
    ),
]
Images = Annotated[
    str,
    typer.Argument(
        metavar="IMAGES",
        help="A folder, with or without class folders; an image; a .csv, .zip or .npz file.",
        show_default=False,
    ),
]
Labels = Annotated[Path | None, typer.Option("--labels", metavar="FILE", help="A CSV of image names and labels.")]
LabelSpace = Annotated[
    choices.LabelSpace | None,
    typer.Option(
        "--label-space", help="Whether labels are the model's classes or another set's; by default seen from names."
    ),
]
Weights = Annotated[
    str, typer.Option("--weights", metavar="PATH|none", help="A weights file, or none for random weights.")
]
OtherModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="source:name, or python:FILE.py:FUNCTION.",
        show_default="the one that the folder names",
    ),
]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda or mps.", show_default="cpu")]
BatchSize = Annotated[int | None, typer.Option("--batch-size", min=1, help="Images per forward pass.")]
Workers = Annotated[int | None, typer.Option("--workers", min=0, help="Processes that decode images.")]
Cache = Annotated[
    Path, typer.Argument(metavar="CACHE", help="A folder that `dubito extract` filled.", show_default=False)
]
Train = Annotated[
    Path | None,
    typer.Option(
        "--train",
        metavar="CACHE",
        help="Images like those that the model was trained on, for scores that learn. Without --score, density takes "
        "the covariances that these images allow in seconds, and a note says which.",
    ),
]
OodSets = Annotated[
    list[Path],
    typer.Option("--ood", metavar="CACHE", help="Out-of-distribution images; repeat it for several caches."),
]
Scores = Annotated[
    list[str],
    typer.Option(
        "--score", "-s", metavar="NAME", help="A score; repeat it for several. By default all that the cache allows."
    ),
]
Settings = Annotated[
    list[ScoreSetting],
    typer.Option(
        "--set", metavar="NAME.KEY=VALUE", parser=ScoreSetting.parse, help="A score's setting, such as neighbours.k=5."
    ),
]
Heads = Annotated[
    list[str],
    typer.Option(
        "--head",
        metavar="NAME|PATH|HUB",
        help="A trained uncertainty head: of `dubito list heads`, a folder, a hub id, or auto for the one that fits.",
    ),
]
OneScore = Annotated[
    str | None, typer.Option("--score", "-s", metavar="NAME", help="The uncertainty; by default the entropy.")
]
OneHead = Annotated[
    str | None, typer.Option("--head", metavar="NAME|PATH|HUB", help="A trained uncertainty head as the score.")
]
Load = Annotated[
    Path | None, typer.Option("--load", metavar="DIR", help="Use the scores that `dubito score --save DIR` kept.")
]
Ensemble = Annotated[
    str, typer.Option("--of", metavar="NAME", help="Which ensemble: members, dropout, views, tiles_7 ...")
]
Confidence = Annotated[
    float, typer.Option("--confidence", metavar="P", help="Confidence of the intervals, between 0 and 1.")
]
Resamples = Annotated[int, typer.Option("--resamples", min=1, metavar="N", help="Resamples of the bootstrap.")]
Seed = Annotated[int, typer.Option("--seed", min=0, metavar="N", help="Seed of everything that is drawn at random.")]
Csv = Annotated[Path | None, typer.Option("--to", metavar="FILE", help="Write all rows as CSV.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with pictures.")]


@contextmanager
def reading() -> Iterator[None]:
    """Texts that are not values of a setting make a call that cannot be understood: BadParameter."""
    try:
        yield
    except ValueRangeError as error:
        raise typer.BadParameter(str(error)) from error


def stored_model(name: str, what: str) -> str:
    """The name of a model that a folder records; BadParameter for code, because the folder may come from anybody."""
    if name.startswith("python:"):
        raise typer.BadParameter(
            f"{what} names code as its model, {name}, which is not run unasked: the folder may be somebody else's. "
            f"Give --model {name} if you trust that code."
        )
    return name


def parse_weights(text: str) -> str | None:
    """What dubito.load takes for `--weights`.

    >>> parse_weights("None"), parse_weights("net.safetensors")
    (None, 'net.safetensors')
    """
    return None if text.lower() == "none" else text


def is_cache(place: str) -> bool:
    """Whether a place is a cache rather than images."""
    return (Path(place) / "manifest.json").is_file()


def set_names(paths: list[Path]) -> dict[str, Path]:
    """Caches by the names of their folders, or by whole paths where several have the same name."""
    short = [path.resolve().name for path in paths]
    return {name if short.count(name) == 1 else str(path): path for name, path in zip(short, paths, strict=True)}
