"""Options and arguments that several commands share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dubito import choices

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output instead of text.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error (also: DUBITO_DEBUG=1).")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no notes.")]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="source:name, see `dubito list models`; of your own, python:FILE.py:FUNCTION.",
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
    typer.Option("--label-space", help="Are labels the model's classes, or their own set? By default seen from names."),
]
Weights = Annotated[
    str, typer.Option("--weights", metavar="PATH|none", help="A weights file, or none for random weights.")
]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda, mps.", show_default="cpu")]
BatchSize = Annotated[int | None, typer.Option("--batch-size", min=1, help="Images at once.")]
Workers = Annotated[int | None, typer.Option("--workers", min=0, help="Processes that decode.")]
Cache = Annotated[
    Path, typer.Argument(metavar="CACHE", help="A folder that `dubito extract` filled.", show_default=False)
]
Scores = Annotated[
    list[str],
    typer.Option(
        "--score", "-s", metavar="NAME", help="A score, several times for several; by default all that can be had."
    ),
]
Fit = Annotated[
    Path | None,
    typer.Option(
        "--fit",
        metavar="CACHE",
        help="Learn from this cache: images like those that the model was trained on. Without --score, density takes "
        "the covariances that these images allow in seconds, and a note says which.",
    ),
]
Settings = Annotated[
    list[str], typer.Option("--set", metavar="NAME.KEY=VALUE", help="A score's setting, such as neighbours.k=5.")
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

Values = dict[str, dict[str, str]]
"""Of `--set`, by score and setting."""


def stored_model(name: str, what: str) -> str:
    """A model's name as a folder tells it; of code, BadParameter: the folder may come from anybody."""
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


def parse_settings(texts: Sequence[str]) -> Values:
    """`NAME.KEY=VALUE` texts, by name and key.

    >>> parse_settings(["neighbours.k=5", "cool.scale=0.2"])
    {'neighbours': {'k': '5'}, 'scaled_entropy': {'scale': '0.2'}}
    """
    settings: Values = {}
    for text in texts:
        where, equals, value = text.partition("=")
        name, dot, key = where.partition(".")
        if not (equals and dot and name and key and value):
            raise typer.BadParameter(f"--set takes NAME.KEY=VALUE, such as neighbours.k=5; got '{text}'.")
        settings.setdefault(name, {})[key] = value
    return settings
