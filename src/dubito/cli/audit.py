"""`dubito audit`: look for faults in a set-up of model, transform, images and labels."""

from typing import Annotated

import typer

import dubito
from dubito.cli import _console as options
from dubito.cli._console import Screen, command, translate

SOMETHING_WRONG = 3
"""The exit code when a fault was found, so that a script can stop there."""


@command
def audit(  # noqa: PLR0913 (a command's options)
    screen: Screen,
    model: options.Model,
    images: options.Images,
    *,
    labels: options.Labels = None,
    label_space: options.LabelSpace = None,
    against: Annotated[
        str | None, typer.Option(metavar="IMAGES", help="Training images: none should be in both sets.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Images that the model is run on.")] = 500,
    compare: Annotated[
        int, typer.Option(min=1, metavar="N", help="Images of a set that are compared for duplicates.")
    ] = 10_000,
    seed: options.Seed = 0,
    weights: options.Weights = "pretrained",
    device: options.Device = None,
    batch_size: options.BatchSize = None,
    workers: options.Workers = None,
) -> None:
    """Look for what ruins every score of a MODEL on IMAGES, and how to repair it.

    Wrong normalisation, labels off by one, a softmax too many, duplicates and more. Exit code 3 if anything is wrong.
    """
    with screen.waiting(f"loading {model}"):
        classifier = dubito.load(model, weights=weights, device=device)
    result = dubito.audit(
        classifier,
        images,
        against=against,
        labels=labels,
        label_space=label_space,
        limit=limit,
        compare=compare,
        seed=seed,
        batch_size=batch_size,
        workers=workers,
        progress=not screen.quiet,
    )
    result.issues = [issue._replace(repair=translate(issue.repair, screen.options)) for issue in result.issues]
    result.unchecked = {check: translate(reason, screen.options) for check, reason in result.unchecked.items()}
    screen.show(result)
    if not result.ok:
        raise typer.Exit(SOMETHING_WRONG)
