"""`dubito acquire` and `dubito label-issues`: which images to label next, and which labels may be wrong."""

from itertools import chain
from pathlib import Path
from typing import Annotated

from typer import BadParameter, Option

import dubito
from dubito import choices
from dubito.cli import _console as options
from dubito.cli._console import Screen, command, option
from dubito.cli.calibrate import Saved, calibrated
from dubito.cli.score import OneScore


@command
def acquire(
    screen: Screen,
    cache: options.Cache,
    *,
    strategy: Annotated[
        choices.Strategy, option("How images are chosen; see the guide. power needs scores of 0 and above.")
    ] = "power",
    count: Annotated[int, Option("--count", "-n", min=1, metavar="N", help="How many images.")] = 100,
    to: options.Csv = None,
    labelled: Annotated[
        list[Path], option("A CSV with a column id, such as earlier picks; these images are not chosen again.", "FILE")
    ] = [],
    linear: Annotated[
        bool, Option("--linear", help="Choose by a linear classifier, trained on labels in the --labelled files.")
    ] = False,
    classes: Annotated[str | None, option("With --linear: names of labels, if not the model's.", "A,B,...")] = None,
    score: OneScore,
    of: options.Ensemble = "members",
    beta: Annotated[float, option("Of softmax, power and softrank: larger is closer to top.", "B")] = 1.0,
    number: Annotated[int, Option("--round", min=0, metavar="N", help="The round; each draws anew.")] = 0,
    seed: options.Seed = 0,
) -> None:
    """Choose images of a CACHE to label next."""
    with screen.waiting("opening the cache"):
        from dubito.active.labels import read_labels, rows_of_ids

        table = dubito.open(cache)
        names = {name for path in labelled for name in read_labels(path).lines}
        rows = rows_of_ids(table, list(names))
        if len(rows) < len(names):
            screen.note(f"--labelled: {len(names) - len(rows)} of {len(names)} ids are not in {table.name}.")
    if linear or classes:
        with screen.waiting("training"):
            table = _with_linear(table, labelled, classes, strategy, seed, linear=linear)
    with screen.waiting("choosing"):
        chosen = score.ready(screen, table)
        strategist = dubito.Acquire(strategy, chosen, of=of, beta=beta, seed=seed)
        picks = strategist.pick(table, count, labelled=list(chain.from_iterable(rows.values())), round=number)
    screen.show(picks, written={"to": to and picks.to_csv(to)})


@command
def label_issues(
    screen: Screen,
    cache: options.Cache,
    *,
    to: options.Csv = None,
    least: Annotated[
        float | None,
        option(
            "The smallest probability to report. [default: 0.1, or more, so that two thirds are wrong by estimate; "
            "if none is, the most suspicious hundredth]",
            "P",
        ),
    ] = None,
    cross_validate: Annotated[
        bool | None,
        Option(
            "--cross-validate/--no-cross-validate",
            help="Predict by linear classifiers on the features, each fitted on the other images, not by the model. "
            "Use it for labels that the model was trained on; by default, only labels that are not its classes are.",
            show_default=False,
        ),
    ] = None,
    folds: Annotated[
        int, option("With cross-validation: parts of the images, each predicted by fits on the others.", "N", min=2)
    ] = 5,
    calibration: Saved = None,
    seed: options.Seed = 0,
) -> None:
    """Find labels of a CACHE that may well be wrong, each with its probability.

    Labels that the model contradicts more firmly than its own errors explain.
    """
    with screen.waiting("opening the cache"):
        table = calibrated(dubito.open(cache), calibration)
    with screen.waiting("comparing labels with predictions"):
        issues = dubito.find_label_issues(table, least=least, cross_validate=cross_validate, folds=folds, seed=seed)
    if calibration is not None and issues.cross_validated:
        screen.note("--calibration has no effect: the predictions are those of linear classifiers on the features.")
    screen.show(issues, written={"to": to and issues.to_csv(to)})


def _with_linear(
    table: "dubito.Table",
    files: list[Path],
    classes: str | None,
    strategy: choices.Strategy,
    seed: int,
    *,
    linear: bool,
) -> "dubito.Table":
    """The table with the predictions of a linear classifier that is trained on the labels in the files."""
    import torch

    from dubito.active import LinearTrainer, add_labels
    from dubito.active.labels import read_labels, rows_of_ids

    if not linear:
        raise BadParameter("--classes belongs to --linear, which is missing. Pass both, or neither.")
    labels = [name for path in files for name in read_labels(path).labels]
    if not labels:
        raise dubito.DubitoError(
            "--linear needs --labelled FILE with labels in its column label; there are none. Fill it in first."
        )
    names = None if classes is None else [name.strip() for name in classes.split(",")]
    # Labels of the cache itself are not trained on, and may be of other classes.
    bare = table.select(*(key for key in table.columns if key != "label"))
    pool = add_labels(bare, *files, classes=names)
    rows = sorted(chain.from_iterable(rows_of_ids(pool, labels).values()))
    members = 20 if strategy in ("bald", "batch_bald") else 0
    return LinearTrainer(members=members, seed=seed)(pool, torch.tensor(rows, dtype=torch.long)).extend(pool)
