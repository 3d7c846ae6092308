"""`dubito calibrate`, and `--calibration` of other commands."""

from typing import Annotated

from typer import Option

import dubito
from dubito.cli import _console as options
from dubito.cli._console import Bootstrap, Screen, command, option
from dubito.storage import Place

Saved = Annotated[
    Place | None, option("Calibrate the logits first, by a method that `dubito calibrate --to DIR` saved.", "DIR")
]


@command
def calibrate(
    screen: Screen,
    cache: options.Cache,
    *,
    method: Annotated[
        list[str], Option("--method", "-m", metavar="NAME", help="Only these, such as temperature; repeat it.")
    ] = [],
    folds: Annotated[int, option("Parts of the images, each predicted by fits on the others.", "N", min=2)] = 5,
    bootstrap: Bootstrap,
    to: Annotated[Place | None, option("Save the recommended method, fitted on all images.", "DIR")] = None,
    csv: options.Csv = None,
    html: options.Html = None,
) -> None:
    """Find the best calibration for the probabilities of a labelled CACHE, by images that are held out.

    Methods whose differences may be noise are marked "="; the simplest of them is recommended.
    """
    from dubito.calibration import calibrate as choose
    from dubito.calibration import save_calibration

    with screen.waiting("opening the cache"):
        table = dubito.open(cache)
    choice = choose(table, method or None, folds=folds, **vars(bootstrap), progress=not screen.quiet)
    saved = save_calibration(choice.method, to) if to is not None and choice.method is not None else None
    if to is not None and choice.method is None:
        screen.note(f"nothing is saved in '{to}': no calibration is recommended.")
    written = {"to": saved, "csv": csv and choice.to_csv(csv), "page": html and choice.to_html(html)}
    screen.show(choice, written=written)


def calibrated(table: "dubito.Table", saved: Place | None) -> "dubito.Table":
    """The table of a cache, with logits calibrated by a saved method, if there is one."""
    if saved is None:
        return table
    from dubito.calibration import load_calibration

    return load_calibration(saved).apply(table)
