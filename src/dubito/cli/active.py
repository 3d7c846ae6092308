"""`dubito acquire` and `dubito label-issues`: which images to label next, and which labels are likely wrong."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import dubito
from dubito import choices
from dubito.cli import _console as options
from dubito.cli._console import Screen, command
from dubito.cli.score import one_score

if TYPE_CHECKING:
    from dubito.table import Table


@command
def acquire(  # noqa: PLR0913 (a command's options)
    screen: Screen,
    cache: options.Cache,
    *,
    strategy: Annotated[
        choices.Strategy, typer.Option(help="How images are chosen; see the guide. power needs scores of 0 and above.")
    ] = "power",
    count: Annotated[int, typer.Option("--count", "-n", min=1, metavar="N", help="How many images.")] = 100,
    to: options.Csv = None,
    labelled: Annotated[
        list[Path],
        typer.Option(metavar="FILE", help="A CSV with a column id, such as earlier picks: not chosen again."),
    ] = [],  # noqa: B006 (typer copies it)
    linear: Annotated[
        bool, typer.Option("--linear", help="Choose by a linear classifier, trained on labels in the --labelled files.")
    ] = False,
    classes: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="With --linear: names of labels, if not the model's.")
    ] = None,
    score: options.OneScore = None,
    settings: options.Settings = [],  # noqa: B006
    train: options.Train = None,
    head: options.OneHead = None,
    of: options.Ensemble = "members",
    beta: Annotated[
        float, typer.Option(metavar="B", help="Of softmax, power and softrank: larger is closer to top.")
    ] = 1.0,
    number: Annotated[int, typer.Option("--round", min=0, metavar="N", help="The round; each draws anew.")] = 0,
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
        chosen = one_score(screen, table, score=score, settings=settings, train=train, head=head)
        strategist = dubito.Acquire(strategy, chosen, of=of, beta=beta, seed=seed)
        picks = strategist.pick(table, count, labelled=list(chain.from_iterable(rows.values())), round=number)
    if to is not None:
        picks.to_csv(to)
    screen.show(picks, written={"to": to})


@command
def label_issues(  # noqa: PLR0913 (a command's options)
    screen: Screen,
    cache: options.Cache,
    *,
    to: options.Csv = None,
    k: Annotated[int, typer.Option("-k", "--neighbours", min=1, metavar="K", help="How many neighbours vote.")] = 10,
    share: Annotated[
        float, typer.Option(metavar="P", help="The share of images that is examined: the most certain ones.")
    ] = 0.5,
    least: Annotated[float, typer.Option(metavar="P", help="The smallest vote margin to report.")] = 0.5,
    score: options.OneScore = None,
    settings: options.Settings = [],  # noqa: B006 (typer copies it)
    train: options.Train = None,
    head: options.OneHead = None,
) -> None:
    """Find labels of a CACHE that are likely wrong: certain images whose neighbours agree on another class."""
    with screen.waiting("opening the cache"):
        table = dubito.open(cache)
    with screen.waiting("looking for neighbours"):
        chosen = one_score(screen, table, score=score, settings=settings, train=train, head=head)
        issues = dubito.find_label_issues(table, chosen, k=k, share=share, least=least)
    if to is not None:
        issues.to_csv(to)
    screen.show(issues, written={"to": to})


def _with_linear(
    table: "Table", files: list[Path], classes: str | None, strategy: choices.Strategy, seed: int, *, linear: bool
) -> "Table":
    """The table with the predictions of a linear classifier that is trained on the labels in the files."""
    import torch

    from dubito.active import LinearTrainer, add_labels
    from dubito.active.labels import read_labels, rows_of_ids

    if not linear:
        raise typer.BadParameter("--classes belongs to --linear, which is missing. Give both, or neither.")
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
