"""`dubito diagnose`: why confidence does not tell known from foreign images."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

import dubito
from dubito.choices import Covariance
from dubito.cli import _options as options
from dubito.cli._console import Screen, facts, grid

if TYPE_CHECKING:
    from dubito.explain.causes_result import Diagnosis
    from dubito.table import Table
    from dubito.types import Classifier


def diagnose(  # noqa: PLR0913 (a command's options)
    known: Annotated[
        Path,
        typer.Argument(metavar="KNOWN", help="A cache of test images that the model knows.", show_default=False),
    ],
    ood: Annotated[
        list[Path],
        typer.Argument(metavar="OOD...", help="Caches of images of other things, by one model.", show_default=False),
    ],
    *,
    train: Annotated[
        Path | None,
        typer.Option("--train", metavar="CACHE", help="Fit the density on this; by default on half of KNOWN."),
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
        str, typer.Option("--weights", metavar="PATH|none", help="Of --model: a weights file, or none for random ones.")
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
    """Find out why a model's confidence does not tell KNOWN images from those of OOD.

    What saturation, extrapolation and feature overlap cost in points of AUROC, and what to do about each.
    """
    screen = Screen.current(json=json, debug=debug, quiet=quiet)
    with screen.waiting("opening the caches"):
        from dubito.explain.causes import diagnose as find

        table = dubito.open(known)
        tables = {name: _opened(path, known, "OOD") for name, path in _names(ood).items()}
        learned = None if train is None else _opened(train, known, "--train")
    classifier = None
    if model is not None:
        with screen.waiting(f"loading {model}"):
            classifier = _loaded(model, weights, table)
    with screen.waiting("fitting the density and scoring, with bootstrap intervals"):
        found = find(
            table,
            tables,
            train=learned,
            covariance=covariance,
            classifier=classifier,
            draws=draws,
            resamples=resamples,
            seed=seed,
        )
    result = {**found.to_json(), "page": None}
    shown = _shown(found)
    if html is not None:
        from dubito.report.diagnosis import write_diagnosis_page

        result["page"] = str(write_diagnosis_page(found, html))
        shown.append(f"The page with the pictures: {html}")
    screen.result(result, *shown)


def _loaded(name: str, weights: str, table: "Table") -> "Classifier":
    """The model that made the table: the weights of another would give angles without a meaning."""
    from dubito.cache.fingerprint import model_identity
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


def _opened(path: Path, known: Path, what: str) -> "Table":
    """A cache of the same model as the known one."""
    from dubito.cli._scores import check_same_model

    table = dubito.open(path)
    check_same_model(known, path, what)
    return table


def _names(paths: list[Path]) -> dict[str, Path]:
    """By the folder's name; where several have the same one, by all of the path."""
    short = [path.resolve().name for path in paths]
    count = Counter(short)
    return {name if count[name] == 1 else str(path): path for name, path in zip(short, paths, strict=True)}


def _shown(found: "Diagnosis") -> list[RenderableType]:
    header, *rows = found.lines()
    pairs = {
        "known": f"{found.known_rows} images scored"
        + ("" if found.accuracy is None else f", accuracy {found.accuracy:.1%}"),
        "density": f"{found.density}; fitted on {found.fitted_on}",
    }
    words = [
        Text.assemble("\n", (f"{name}: ", "bold"), "\n".join(sentences)) for name, sentences in found.findings().items()
    ]
    title = "AUROC of foreign against known images, and what each cause costs, in per cent"
    return [facts(found.known, pairs), grid(title, header, rows, numbers=len(header) - 1), *words]
