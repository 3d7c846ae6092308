"""`dubito acquire`: which images of a pool to label next."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

import dubito
from dubito import choices
from dubito.cli import _options as options
from dubito.cli._console import Screen

if TYPE_CHECKING:
    from dubito.table import Table
    from dubito.types import Score


def acquire(  # noqa: PLR0913 (a command's options)
    cache: options.Cache,
    *,
    strategy: Annotated[
        choices.Strategy,
        typer.Option("--strategy", help="How images are chosen; see the guide. power needs scores of 0 and above."),
    ] = "power",
    count: Annotated[int, typer.Option("--count", "-n", min=1, metavar="N", help="How many images.")] = 100,
    to: Annotated[Path | None, typer.Option("--to", metavar="FILE", help="Write the picks as CSV.")] = None,
    labelled: Annotated[
        list[Path],
        typer.Option(
            "--labelled", metavar="FILE", help="A CSV with a column id, such as earlier picks: not chosen again."
        ),
    ] = [],  # noqa: B006 (typer copies it)
    train: Annotated[
        bool,
        typer.Option(
            "--train", help="Choose by a linear classifier that is trained on column label of the --labelled files."
        ),
    ] = False,
    classes: Annotated[
        str | None,
        typer.Option("--classes", metavar="A,B,...", help="With --train: names of labels, if not the model's."),
    ] = None,
    score: options.OneScore = None,
    settings: options.Settings = [],  # noqa: B006
    fit: options.Fit = None,
    head: options.OneHead = None,
    of: Annotated[
        str, typer.Option("--of", metavar="NAME", help="The ensemble for bald and batch_bald, such as members.")
    ] = "members",
    beta: Annotated[
        float, typer.Option("--beta", metavar="B", help="Of softmax, power and softrank: larger is closer to top.")
    ] = 1.0,
    number: Annotated[int, typer.Option("--round", min=0, metavar="N", help="Which round it is: each draws anew.")] = 0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of what is drawn.")] = 0,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Choose images of a CACHE to label next."""
    screen = Screen.current(json=json, debug=debug)
    with screen.waiting("opening the cache"):
        table = dubito.open(cache)
        known = _known(table, labelled, screen)
    if train or classes:
        with screen.waiting("training"):
            table = _trained(table, labelled, classes, strategy, seed, train=train)
    with screen.waiting("choosing"):
        chosen = given_score(cache, table, screen, score=score, settings=settings, fit=fit, head=head)
        acquire = dubito.Acquire(strategy, chosen, of=of, beta=beta, seed=seed)
        picks = acquire.pick(table, count, labelled=known, round=number)
    if to is not None:
        picks.to_csv(to)
    screen.result({**picks.to_dict(), "to": str(to) if to else None}, picks, *([Text(f"written: {to}")] if to else []))


def given_score(
    cache: Path,
    table: "Table",
    screen: Screen,
    *,
    score: str | None,
    settings: list[str],
    fit: Path | None,
    head: str | None,
) -> "Score | None":
    """The one score that --score or --head names, ready; None for neither."""
    from dubito.cli._scores import ready_scores

    wanted = options.parse_settings(settings)
    if not score and not head:
        if wanted or fit:
            raise dubito.DubitoError("--set and --fit belong to a score; none is named. Give --score NAME, too.")
        return None
    names, heads = ([score] if score else ["head"]), ([head] if head else [])
    found = ready_scores(cache, table, screen, names=names, settings=wanted, fit=fit, heads=heads, load=None)
    return next(iter(found.values()))


def _known(table: "Table", files: list[Path], screen: Screen) -> list[int]:
    """The rows whose ids stand in these files."""
    from dubito.active.labels import read_labels, rows_of_ids

    names = [name for path in files for name in read_labels(path).lines]
    found = rows_of_ids(table, names)
    if len(found) < len(set(names)):
        screen.note(f"--labelled: {len(set(names)) - len(found)} of {len(set(names))} ids are not in {table.name}.")
    return [row for rows in found.values() for row in rows]


def _trained(
    table: "Table", files: list[Path], classes: str | None, strategy: choices.Strategy, seed: int, *, train: bool
) -> "Table":
    """The table with what a linear classifier says that was trained on the labels in the files."""
    import torch

    from dubito.active import LinearTrainer, add_labels
    from dubito.active.labels import read_labels, rows_of_ids

    if not train:
        raise dubito.DubitoError("--classes belongs to --train, which is not given. Give both, or neither.")
    labels = [name for path in files for name in read_labels(path).labels]
    if not labels:
        raise dubito.DubitoError(
            "--train needs --labelled FILE with labels in its column label; there are none. Fill it in first."
        )
    names = None if classes is None else [name.strip() for name in classes.split(",")]
    # Labels of the cache itself are not trained on, and may be of other classes.
    bare = table.select(*(key for key in table.columns if key != "label"))
    pool = add_labels(bare, *files, classes=names)
    rows = sorted(row for found in rows_of_ids(pool, labels).values() for row in found)
    members = 20 if strategy in ("bald", "batch_bald") else 0
    return LinearTrainer(members=members, seed=seed)(pool, torch.tensor(rows, dtype=torch.long)).extend(pool)
