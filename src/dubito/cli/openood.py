"""`dubito openood`: the table of OpenOOD v1.5 for a model."""

from pathlib import Path
from typing import Annotated

from typer import BadParameter, Option

import dubito
from dubito.cli import _console as options
from dubito.cli._console import Screen, command, option
from dubito.cli.extract import Model
from dubito.cli.score import NamedScores
from dubito.storage import Place


@command
def openood(
    screen: Screen,
    model: Model,
    *,
    root: Annotated[
        Path, option("The folder with benchmark_imglist, images_largescale and images_classic of OpenOOD.", "DIR")
    ],
    benchmark: Annotated[str, option("imagenet, imagenet200, cifar10 or cifar100.", "NAME")] = "imagenet",
    to: Annotated[Place | None, option("Keep one cache per data set there, to resume and to reuse.", "DIR")] = None,
    scores: NamedScores,
    sets: Annotated[list[str], Option("--only", metavar="NAME", help="Only this OOD set; repeat it for several.")] = [],
    full_spectrum: Annotated[
        bool, Option("--full-spectrum", help="Count covariate-shifted images as in-distribution, too.")
    ] = False,
    learn_from: Annotated[Place | None, option("Training images, for scores that learn.", "CACHE")] = None,
    train: Annotated[
        int | None,
        Option(
            "--learn-images", metavar="N", min=1, help="Draw so many of OpenOOD's training images for them instead."
        ),
    ] = None,
    seed: options.Seed = 0,
    batch_size: Annotated[int | None, option("Images per forward pass.", min=1)] = None,
    workers: Annotated[int | None, option("Processes that decode images.", min=0)] = None,
    csv: options.Csv = None,
    load: options.ModelOptions,
) -> None:
    """Run OpenOOD v1.5 on a MODEL, and print its table: near and far OOD images, in per cent.

    Images are those that OpenOOD's download script puts into a folder. Nothing is downloaded here.
    """
    if learn_from is not None and train is not None:
        raise BadParameter("--learn-from and --learn-images both say what scores learn from. Pass one of them.")
    with screen.waiting(f"loading {model}"):
        classifier = load.load(model)
        learned = None if learn_from is None else dubito.open(learn_from)
    result = dubito.protocols.openood(
        classifier,
        root,
        to,
        benchmark=benchmark,
        scores=scores.made(),
        sets=sets or None,
        full_spectrum=full_spectrum,
        train=train if learned is None else learned,
        seed=seed,
        batch_size=batch_size,
        workers=workers,
        progress=not screen.quiet,
    )
    screen.show(result, written={"csv": csv and result.to_csv(csv)})
