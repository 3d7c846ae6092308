"""`dubito imagenet-variants`: accuracy and selective prediction on ImageNet-A, -R, -V2 and -C."""

from typing import Annotated

from typer import BadParameter

import dubito
from dubito.cli import _console as options
from dubito.cli._console import Screen, command, option
from dubito.cli.extract import Model
from dubito.cli.score import NamedScores
from dubito.storage import Place


@command
def imagenet_variants(
    screen: Screen,
    model: Model,
    *,
    root: Annotated[
        list[str],
        option("The folder of imagenet-a, imagenet-r, imagenet-v2 or imagenet-c; more than once.", "NAME=DIR"),
    ],
    to: Annotated[Place | None, option("Keep one cache per variant there, to resume and to reuse.", "DIR")] = None,
    scores: NamedScores,
    batch_size: Annotated[int | None, option("Images per forward pass.", min=1)] = None,
    workers: Annotated[int | None, option("Processes that decode images.", min=0)] = None,
    csv: options.Csv = None,
    load: options.ModelOptions,
) -> None:
    """Run a MODEL of ImageNet's 1,000 classes on harder images: is it accurate, and does its uncertainty find errors?

    By default, the score is max_probability. Folders are laid out as in the authors' archives.
    """
    roots = _roots(root)
    with screen.waiting(f"loading {model}"):
        classifier = load.load(model)
    result = dubito.protocols.imagenet_variants(
        classifier,
        roots,
        to,
        scores=scores.made() or ("max_probability",),
        progress=not screen.quiet,
        batch_size=batch_size,
        workers=workers,
    )
    screen.show(result, written={"csv": csv and result.to_csv(csv)})


def _roots(texts: list[str]) -> dict[str, str]:
    """By variant, its folder."""
    pairs = [text.partition("=") for text in texts]
    if wrong := [text for text, (name, _, folder) in zip(texts, pairs, strict=True) if not name or not folder]:
        raise BadParameter(f"--root must be NAME=DIR, such as imagenet-a=data/imagenet-a; got '{wrong[0]}'.")
    return {name: folder for name, _, folder in pairs}
