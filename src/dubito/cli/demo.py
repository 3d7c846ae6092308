"""`dubito demo`: a real model on real photographs and their corrupted copies."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dubito.cli import _options as options
from dubito.cli._console import Screen, grid

if TYPE_CHECKING:
    from dubito.report.demo import Demo


def demo(
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Images, cache and page go there.")] = Path("demo"),
    quiet: options.Quiet = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """See it work: EfficientNet-Lite0 on photographs and their blurred, boxed, zoomed and noisy copies.

    Nothing is downloaded: weights and photographs come inside packages of the extra "demo".
    """
    screen = Screen.current(json=json, debug=debug, quiet=quiet)
    screen.when_stopped = "Finished shards are safe: the same command goes on from there."
    with screen.waiting("waking PyTorch"):
        from dubito.report.demo import run_demo, write_demo_page
    found = run_demo(to, progress=not quiet)
    page = write_demo_page(found, to / "demo.html")
    screen.result({**found.to_dict(), "page": str(page)}, *_shown(found), f"The page with the images: {page}")


def _shown(found: "Demo") -> list[Any]:
    first, *others = found.images[0].scores
    names = [first, *(name for name in others if name != "max_probability")]  # that one is minus the probability
    rows = [
        [
            image.photo,
            image.corruption,
            image.short_prediction,
            f"{image.probability:.2f}",
            *(f"{image.scores[name]:.2f}" for name in names),
        ]
        for image in found.images
    ]
    groups = [
        [group.kind, str(group.severity), f"{group.uncertainty:.2f}", f"{group.unchanged} of {group.images}"]
        for group in found.groups
    ]
    return [
        grid(
            f"{len(rows)} images by {found.model}, the most uncertain first (by {first}; higher = more uncertain)",
            ["photo", "corruption", "prediction", "probability", *names],
            rows,
            numbers=len(names) + 1,
        ),
        grid(
            "Does uncertainty rise with the severity of the corruption?",
            ["kind", "severity 0-5", f"mean {first}", "same prediction as clean"],
            groups,
            numbers=3,
        ),
        *found.findings(),
    ]
