"""`dubito audit`: look for faults in a set-up of model, transform, images and labels."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

import dubito
from dubito.cli import _options as options
from dubito.cli._console import Screen, facts

if TYPE_CHECKING:
    from dubito.audit.audit import Audit

SOMETHING_WRONG = 3
"""The exit code when a fault was found, so that a script can stop there."""

_STYLES = {"wrong": "bold red", "suspicious": "yellow", "note": "dim"}


def audit(  # noqa: PLR0913 (a command's options)
    model: options.Model,
    images: options.Images,
    *,
    labels: options.Labels = None,
    label_space: options.LabelSpace = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="IMAGES", help="Training images: none should be in both sets.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, metavar="N", help="Images that the model is run on.")] = 500,
    compare: Annotated[
        int, typer.Option("--compare", min=1, metavar="N", help="Images of a set that are compared for duplicates.")
    ] = 10_000,
    seed: Annotated[int, typer.Option("--seed", help="Of the draw.")] = 0,
    weights: options.Weights = "pretrained",
    device: options.Device = None,
    batch_size: options.BatchSize = None,
    workers: options.Workers = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Look for what ruins every score of a MODEL on IMAGES, and how to repair it.

    Wrong normalisation, labels off by one, a softmax too many, duplicates and more. Exit code 3 if anything is wrong.
    """
    screen = Screen.current(json=json, debug=debug, quiet=quiet)
    with screen.waiting(f"loading {model}"):
        from dubito.audit.audit import audit as look

        classifier = dubito.load(model, weights=options.parse_weights(weights), device=device)
    result = look(
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
        progress=not quiet,
    )
    screen.result(result.to_dict(), *_render(result))
    if not result.ok:
        raise typer.Exit(SOMETHING_WRONG)


def _render(result: "Audit") -> list[RenderableType]:
    accuracy = result.figures.get("accuracy")
    pairs = {
        "model": result.model,
        "images": f"{result.rows} of {result.of}" + ("" if accuracy is None else f", accuracy {accuracy:.4f}"),
        "looked for": ", ".join(result.looked_for()),
    }
    pairs |= {f"not looked for: {check}": reason for check, reason in result.unchecked.items()}
    title = result.images + (": nothing wrong was found" if not result.issues else "")
    return [facts(title, pairs), *(_finding(entry.severity, str(entry)) for entry in result.in_order())]


def _finding(severity: str, text: str) -> Text:
    return Text.assemble("\n", (severity, _STYLES[severity]), text.removeprefix(severity))
