"""`dubito evaluate`, `dubito compare` and `dubito reject`: how good scores are, which is best, what refusing gains."""

from pathlib import Path
from typing import Annotated

from typer import Option

import dubito
from dubito.cli import _console as options
from dubito.cli._console import Bootstrap, Screen, command, option
from dubito.cli.calibrate import Saved, calibrated
from dubito.cli.score import ScoreOptions
from dubito.storage import Place


@command
def evaluate(
    screen: Screen,
    cache: options.Cache,
    *,
    scores: ScoreOptions,
    ood: Annotated[Place | None, option("Out-of-distribution images, by the same model.", "CACHE")] = None,
    metric: Annotated[list[str], option("Only these, such as error_auroc or r_auroc.", "NAME")] = [],
    calibration: Saved = None,
    bootstrap: Bootstrap,
) -> None:
    """Evaluate scores on a CACHE with labels.

    Are wrong predictions, bad neighbours and out-of-distribution images the uncertain ones? Values come with intervals.
    """
    with screen.waiting("opening the cache"):
        table = calibrated(dubito.open(cache), calibration)
        other = None if ood is None else calibrated(dubito.open(ood), calibration)
        if other is None and "label" not in table:
            raise dubito.DubitoError(
                f"'{cache}' has no labels, so there is nothing to compare with. Add labels with "
                f"`dubito label {cache} LABELS`, or pass out-of-distribution images with --ood CACHE."
            )
    with screen.waiting("scoring, with bootstrap intervals"):
        chosen = scores.ready(screen, table, calibration=calibration)
        screen.show(dubito.evaluate(chosen, table, ood=other, metrics=metric or None, **vars(bootstrap)))


@command
def compare(
    screen: Screen,
    cache: options.Cache,
    *,
    ood: Annotated[list[Place], option("Out-of-distribution images; repeat it for several caches.", "CACHE")] = [],
    corrupted: Annotated[
        Place | None, option("The same images, by `dubito extract --corrupted`: which score for unseen OOD?", "CACHE")
    ] = None,
    scores: ScoreOptions,
    calibration: Saved = None,
    bootstrap: Bootstrap,
) -> None:
    """Compare all scores that a CACHE allows: which finds wrong predictions, or out-of-distribution images, best?

    Ranked with paired intervals and cost. Scores whose gap to the best may be noise are marked "=".
    """
    with screen.waiting("opening the caches"):
        table = calibrated(dubito.open(cache), calibration)
        others = {name: calibrated(one, calibration) for name, one in options.open_sets(ood).items()}
        learned = None if scores.train is None else calibrated(dubito.open(scores.train), calibration)
        copies = None if corrupted is None else calibrated(dubito.open(corrupted), calibration)
    with screen.waiting("scoring, with a paired bootstrap"):
        named = scores.score or scores.settings or scores.head or scores.load
        chosen = scores.ready(screen, table, learned) if named else None
        screen.show(
            dubito.compare(table, ood=others or None, train=learned, corrupted=copies, scores=chosen, **vars(bootstrap))
        )


@command
def reject(
    screen: Screen,
    cache: options.Cache,
    *,
    of: Annotated[list[str], option("An ensemble, such as tiles_2 or members; by default all.", "NAME")] = [],
    calibration: Annotated[
        Place | None,
        Option(
            "--learn-from",
            metavar="CACHE",
            help="Other labelled images, on which temperatures and pooled weights are fitted.",
        ),
    ] = None,
    uncertainty: Annotated[
        list[str],
        Option("--uncertainty", "-u", metavar="NAME", help="Of the ensembles; by default MI and weighted MI."),
    ] = [],
    original: Annotated[
        bool, Option("--original", help="Evaluate the model's own predictions: only the order differs.")
    ] = False,
    buckets: Annotated[int, option("Levels of the curves.", "N", min=2)] = 10,
    bootstrap: Bootstrap,
    csv: Annotated[Path | None, option("Write table.csv and curves.csv there.", "DIR")] = None,
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
        study = dubito.protocols.rejection_study(
            table,
            of or None,
            calibration=other,
            uncertainties=uncertainty or DEFAULT,
            predictions="original" if original else "own",
            buckets=buckets,
            **vars(bootstrap),
        )
    table_csv, curves_csv = csv and study.to_csv(csv / "table.csv"), csv and study.curves_to_csv(csv / "curves.csv")
    page = html and study.to_html(html)
    screen.show(study, written={"table": table_csv, "curves": curves_csv, "page": page})
