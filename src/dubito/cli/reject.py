"""`dubito reject`: which images to refuse, by the model's entropy or by an ensemble's uncertainties."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

import dubito
from dubito.cli import _options as options
from dubito.cli._console import Screen

if TYPE_CHECKING:
    from dubito.evaluate.rejection_result import RejectionStudy


def reject(  # noqa: PLR0913 (a command's options)
    cache: options.Cache,
    *,
    of: Annotated[
        list[str],
        typer.Option("--of", metavar="NAME", help="An ensemble, such as tiles_2 or members; by default all."),
    ] = [],  # noqa: B006 (typer copies it)
    calibration: Annotated[
        Path | None,
        typer.Option("--calibration", metavar="CACHE", help="Other labelled images: adds the optimal temperature."),
    ] = None,
    uncertainty: Annotated[
        list[str],
        typer.Option("--uncertainty", "-u", metavar="NAME", help="Of the ensembles; by default MI and weighted MI."),
    ] = [],  # noqa: B006
    original: Annotated[
        bool, typer.Option("--original", help="Judge all by the original's predictions: only the order differs.")
    ] = False,
    buckets: Annotated[int, typer.Option("--buckets", min=2, metavar="N", help="Levels of the curves.")] = 10,
    resamples: Annotated[
        int, typer.Option("--resamples", min=1, metavar="N", help="Of the bootstrap intervals.")
    ] = 1000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the bootstrap.")] = 0,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="DIR", help="Write table.csv and curves.csv there.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with the curves.")] = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Study what happens when the most uncertain images of a CACHE are refused.

    Accuracy, NLL and calibration error of what is accepted, by the model's entropy and by uncertainties of ensembles.
    """
    screen = Screen.current(json=json, debug=debug)
    with screen.waiting("opening the cache"):
        from dubito.cli._scores import check_same_model
        from dubito.evaluate.rejection import DEFAULT, rejection_study

        table = dubito.open(cache)
        other = None if calibration is None else dubito.open(calibration)
        if calibration is not None:
            check_same_model(cache, calibration, "--calibration")
    with screen.waiting("sorting and counting, with bootstrap intervals"):
        study = rejection_study(
            table,
            of or None,
            calibration=other,
            uncertainties=uncertainty or DEFAULT,
            predictions="original" if original else "own",
            buckets=buckets,
            resamples=resamples,
            seed=seed,
        )
    written = _written(study, csv, html)
    screen.result(
        {**study.to_dict(), "written": list(map(str, written))}, study, *(Text(f"written: {path}") for path in written)
    )


def _written(study: "RejectionStudy", csv: Path | None, html: Path | None) -> list[Path]:
    paths: list[Path] = []
    if csv is not None:
        paths += [study.to_csv(csv / "table.csv"), study.curves_to_csv(csv / "curves.csv")]
    if html is not None:
        from dubito.report.rejection import write_rejection_page

        paths.append(write_rejection_page(study, html))
    return paths
