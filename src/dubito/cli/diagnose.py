"""`dubito diagnose`: why confidence does not separate in-distribution from OOD images."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

import dubito
from dubito.choices import Covariance
from dubito.cli import _options as options
from dubito.cli._console import Screen

if TYPE_CHECKING:
    from dubito.table import Table
    from dubito.types import Classifier


def diagnose(  # noqa: PLR0913 (a command's options)
    cache: Annotated[
        Path,
        typer.Argument(metavar="CACHE", help="A cache of in-distribution test images.", show_default=False),
    ],
    ood: Annotated[
        list[Path],
        typer.Argument(metavar="OOD...", help="Caches of out-of-distribution images.", show_default=False),
    ],
    *,
    train: Annotated[
        Path | None,
        typer.Option("--train", metavar="CACHE", help="Fit the density on this; by default on half of CACHE."),
    ] = None,
    covariance: Annotated[
        Covariance | None,
        typer.Option("--covariance", help="Of the density; by default what the number of images allows."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="source:name of the model: adds lengths and angles of features."),
    ] = None,
    weights: Annotated[
        str, typer.Option("--weights", metavar="PATH|none", help="Weights of --model: a file, or none for random ones.")
    ] = "pretrained",
    draws: Annotated[int, typer.Option("--draws", min=1, metavar="N", help="Balanced sets that are drawn.")] = 5,
    resamples: Annotated[
        int, typer.Option("--resamples", min=1, metavar="N", help="Of the bootstrap intervals.")
    ] = 1000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the split, the draws and the bootstrap.")] = 0,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with bars and histograms.")
    ] = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Find out why a model's confidence does not separate the images of CACHE from those of OOD.

    What saturation, extrapolation and feature overlap cost in points of AUROC, and what to do about each.
    """
    screen = Screen.current(json=json, debug=debug, quiet=quiet)
    with screen.waiting("opening the caches"):
        from dubito.explain.causes import diagnose as find

        table = dubito.open(cache)
        tables = {name: _opened(path, cache, "OOD") for name, path in _names(ood).items()}
        train_table = None if train is None else _opened(train, cache, "--train")
    classifier = None
    if model is not None:
        with screen.waiting(f"loading {model}"):
            classifier = _loaded(model, weights, table)
    with screen.waiting("fitting the density and scoring, with bootstrap intervals"):
        diagnosis = find(
            table,
            tables,
            train=train_table,
            covariance=covariance,
            classifier=classifier,
            draws=draws,
            resamples=resamples,
            seed=seed,
        )
    result = {**diagnosis.to_dict(), "page": None}
    shown: list[RenderableType] = [diagnosis]
    if html is not None:
        from dubito.report.diagnosis import write_diagnosis_page

        result["page"] = str(write_diagnosis_page(diagnosis, html))
        shown.append(f"The page with the pictures: {html}")
    screen.result(result, *shown)


def _loaded(name: str, weights: str, table: "Table") -> "Classifier":
    """The model that made the table: the weights of another would give angles without a meaning."""
    from dubito.cache.manifest import model_identity
    from dubito.errors import ModelError
    from dubito.explain.last_layer import last_layer

    classifier = dubito.load(name, weights=options.parse_weights(weights))
    last_layer(classifier)  # a model that has not seen a picture does not know its own head
    reason = None if table.provenance is None else table.provenance.difference(model_identity(classifier))
    if reason:
        raise ModelError(
            f"--model: {name} must be the model that made {table.name}; it is not: {reason}. "
            f"Give the same name and --weights as to `dubito extract`."
        )
    return classifier


def _opened(path: Path, cache: Path, what: str) -> "Table":
    """A cache of the same model as the first one."""
    from dubito.cli._scores import check_same_model

    table = dubito.open(path)
    check_same_model(cache, path, what)
    return table


def _names(paths: list[Path]) -> dict[str, Path]:
    """By the folder's name; where several have the same one, by all of the path."""
    short = [path.resolve().name for path in paths]
    count = Counter(short)
    return {name if count[name] == 1 else str(path): path for name, path in zip(short, paths, strict=True)}
