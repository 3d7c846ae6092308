"""`dubito audit`: look for faults in a set-up of model, transform, images and labels."""

from typing import Annotated

from typer import Exit

import dubito
from dubito.cli import _console as options
from dubito.cli._console import Screen, command, option
from dubito.cli._translate import translate
from dubito.cli.extract import Images, Model, Reading

SOMETHING_WRONG = 3
"""The exit code when a fault was found, so that a script can stop there."""


@command
def audit(
    screen: Screen,
    model: Model,
    images: Images,
    *,
    reading: Reading,
    against: Annotated[str | None, option("Training images: none should be in both sets.", "IMAGES")] = None,
    limit: Annotated[int, option("Images that the model is run on.", "N", min=1)] = 500,
    compare: Annotated[int, option("Images of a set that are compared for duplicates.", "N", min=1)] = 10_000,
    seed: options.Seed = 0,
    load: options.ModelOptions,
) -> None:
    """Look for what ruins every score of a MODEL on IMAGES, and how to repair it.

    Wrong normalisation, labels off by one, a softmax too many, duplicates and more. Exit code 3 if anything is wrong.
    """
    options.check_model_first(model, images)
    with screen.waiting("opening the images"):  # before the model is fetched
        opened = dubito.open_images(images, reading.labels)
        others = None if against is None else dubito.open_images(against)
    with screen.waiting(f"loading {model}"):
        classifier = load.load(model)
    result = dubito.audit(
        classifier,
        opened,
        against=others,
        limit=limit,
        compare=compare,
        seed=seed,
        **{**vars(reading), "labels": None},
        progress=not screen.quiet,
    )
    result.issues = [issue._replace(repair=translate(issue.repair, screen.options)) for issue in result.issues]
    result.unchecked = {check: translate(reason, screen.options) for check, reason in result.unchecked.items()}
    screen.show(result)
    if not result.ok:
        raise Exit(SOMETHING_WRONG)
