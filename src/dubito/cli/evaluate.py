"""`dubito evaluate`, `dubito compare` and `dubito reject`: how good scores are, which is best, what refusing gains."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

from pathlib import Path
from typing import Annotated, Any

import typer

import dubito
from dubito.cli import _console as options
from dubito.cli._console import Screen, command
from dubito.cli.score import ready_scores


@command
def evaluate(  # noqa: PLR0913 (a command's options)
    screen: Screen,
    cache: options.Cache,
    *,
    train: options.Train = None,
    ood: Annotated[
        Path | None, typer.Option(metavar="CACHE", help="Out-of-distribution images, by the same model.")
    ] = None,
    score: options.Scores = [],  # noqa: B006 (typer copies it)
    settings: options.Settings = [],  # noqa: B006
    head: options.Heads = [],  # noqa: B006
    load: options.Load = None,
    metric: Annotated[list[str], typer.Option(metavar="NAME", help="Only these, such as error_auroc or r_auroc.")] = [],  # noqa: B006
    confidence: options.Confidence = 0.95,
    resamples: options.Resamples = 1000,
    seed: options.Seed = 0,
) -> None:
    """Evaluate scores on a CACHE with labels.

    Are wrong predictions, bad neighbours and out-of-distribution images the uncertain ones? Values come with intervals.
    """
    with screen.waiting("opening the cache"):
        table = dubito.open(cache)
        other = None if ood is None else dubito.open(ood)
        if other is None and "label" not in table:
            raise dubito.DubitoError(
                f"evaluate: '{cache}' has no labels, so there is nothing to compare with. Extract it with labels "
                f"(class folders or --labels FILE), or give out-of-distribution images with --ood CACHE."
            )
    with screen.waiting("scoring, with bootstrap intervals"):
        chosen = ready_scores(screen, table, names=score, settings=settings, train=train, heads=head, load=load)
        bootstrap: Any = {"confidence": confidence, "resamples": resamples, "seed": seed}
        screen.show(dubito.evaluate(chosen, table, ood=other, metrics=metric or None, **bootstrap))


@command
def compare(  # noqa: PLR0913 (a command's options)
    screen: Screen,
    cache: options.Cache,
    *,
    ood: options.OodSets = [],  # noqa: B006 (typer copies it)
    train: options.Train = None,
    score: options.Scores = [],  # noqa: B006
    settings: options.Settings = [],  # noqa: B006
    head: options.Heads = [],  # noqa: B006
    load: options.Load = None,
    confidence: options.Confidence = 0.95,
    resamples: options.Resamples = 1000,
    seed: options.Seed = 0,
) -> None:
    """Compare all scores that a CACHE allows: which finds wrong predictions, or out-of-distribution images, best?

    Ranked with paired intervals and cost. Scores whose gap to the best may be noise are marked "=".
    """
    with screen.waiting("opening the caches"):
        table, others = dubito.open(cache), options.open_sets(ood)
        learned = None if train is None else dubito.open(train)
    with screen.waiting("scoring, with a paired bootstrap"):
        chosen = None
        if score or settings or head or load:
            chosen = ready_scores(screen, table, names=score, settings=settings, train=learned, heads=head, load=load)
        bootstrap: Any = {"confidence": confidence, "resamples": resamples, "seed": seed}
        screen.show(dubito.compare(table, ood=others or None, train=learned, scores=chosen, **bootstrap))


@command
def reject(  # noqa: PLR0913 (a command's options)
    screen: Screen,
    cache: options.Cache,
    *,
    of: Annotated[
        list[str], typer.Option(metavar="NAME", help="An ensemble, such as tiles_2 or members; by default all.")
    ] = [],  # noqa: B006 (typer copies it)
    calibration: Annotated[
        Path | None, typer.Option(metavar="CACHE", help="Other labelled images: adds the optimal temperature.")
    ] = None,
    uncertainty: Annotated[
        list[str],
        typer.Option("--uncertainty", "-u", metavar="NAME", help="Of the ensembles; by default MI and weighted MI."),
    ] = [],  # noqa: B006
    original: Annotated[
        bool, typer.Option("--original", help="Evaluate the model's own predictions: only the order differs.")
    ] = False,
    buckets: Annotated[int, typer.Option(min=2, metavar="N", help="Levels of the curves.")] = 10,
    confidence: options.Confidence = 0.95,
    resamples: options.Resamples = 1000,
    seed: options.Seed = 0,
    csv: Annotated[Path | None, typer.Option(metavar="DIR", help="Write table.csv and curves.csv there.")] = None,
    html: options.Html = None,
) -> None:
    """Study what happens when the most uncertain images of a CACHE are refused.

    Accuracy, NLL and calibration error of what is accepted, by the model's entropy and by uncertainties of ensembles.
    """
    with screen.waiting("opening the caches"):
        from dubito.evaluate.rejection import DEFAULT

        table = dubito.open(cache)
        other = None if calibration is None else dubito.open(calibration)
    with screen.waiting("sorting and counting, with bootstrap intervals"):
        study = dubito.rejection_study(
            table,
            of or None,
            calibration=other,
            uncertainties=uncertainty or DEFAULT,
            predictions="original" if original else "own",
            buckets=buckets,
            confidence=confidence,
            resamples=resamples,
            seed=seed,
        )
    written: dict[str, Path | None] = {"table": None, "curves": None, "page": None}
    if csv is not None:
        written |= {"table": study.to_csv(csv / "table.csv"), "curves": study.curves_to_csv(csv / "curves.csv")}
    if html is not None:
        written["page"] = dubito.report.write_rejection_page(study, html)
    screen.show(study, written=written)
