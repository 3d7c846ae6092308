"""The options of commands that score: --score, --set, --train, --head and --load, read and looked up in `scores`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import typer

import dubito
from dubito.cli._console import Screen
from dubito.cli._options import ScoreSetting, reading
from dubito.errors import ArtefactError, DubitoError, MissingColumnError, NotFittedError
from dubito.heads.shelf import entry_for
from dubito.scores.available import AvailableScores, available_scores
from dubito.scores.registry import SCORES, make_score
from dubito.table import Table
from dubito.types import Score
from dubito.validate import check_same_model, settings_from_text, warn_shared

_HEAD, _AUTO = "head", "auto"
_SELF = "Each of them is compared with itself, and its nearest neighbour is itself. Give other images of the same kind."


def ready_scores(
    screen: Screen,
    table: Table,
    *,
    names: Sequence[str],
    settings: Sequence[ScoreSetting] = (),
    train: Path | Table | None = None,
    heads: Sequence[str] = (),
    load: Path | None = None,
) -> dict[str, Score]:
    """The scores that `--score`, `--set`, `--train`, `--head` and `--load` name, ready for a table."""
    learned = open_train(train, table) if isinstance(train, Path) else train
    return choose_scores(screen, table, names, settings, learned, load, heads=_open_heads(heads, table))


def one_score(
    screen: Screen,
    table: Table,
    *,
    score: str | None,
    settings: Sequence[ScoreSetting],
    train: Path | None,
    head: str | None,
) -> Score | None:
    """The one score that `--score` or `--head` names, ready; None for neither."""
    if score and head and score != _HEAD:
        raise typer.BadParameter(f"--score and --head both name the score. Give --score {score} or --head {head}.")
    if not score and not head:
        if settings or train:
            raise typer.BadParameter("--set and --train belong to a score, and none is named. Give --score NAME, too.")
        return None
    names, heads = [score or _HEAD], ([head] if head else [])
    scores = ready_scores(screen, table, names=names, settings=settings, train=train, heads=heads)
    if len(scores) > 1:
        raise typer.BadParameter(f"--score must name one score; got {', '.join(scores)}. Set {score}.of with --set.")
    return next(iter(scores.values()))


def open_train(path: Path, table: Table) -> Table:
    """The cache to learn from, which must be the same model's; a warning if it holds images of the table."""
    train = dubito.open(path)
    check_same_model(table, {"train": train}, by="scores")
    warn_shared(table, train, by="scores", what="train", harm=_SELF)
    return train


def choose_scores(
    screen: Screen,
    table: Table,
    names: Sequence[str],
    settings: Sequence[ScoreSetting] = (),
    train: Table | None = None,
    load: Path | None = None,
    *,
    heads: Mapping[str, Score] = MappingProxyType({}),
) -> dict[str, Score]:
    """The scores to use, ready for the table; those that cannot be made are left out with a note, unless named."""
    loaded = _loaded(load) if load else {}
    for head in heads.values():
        head.check_columns(table)
    # A head is trained by `dubito train`, never in passing; one that is given stands for the name.
    wanted = [name for name in dict.fromkeys(names or loaded) if not (heads and name == _HEAD)]
    values = _values(settings, [name for name in wanted or SCORES if name not in loaded])
    chosen = AvailableScores(dict(heads))
    for name in wanted:
        if name in loaded:
            _add_loaded(chosen, name, loaded[name], table, strict=bool(names))
        else:
            chosen.scores |= _available(table, train, names=[name], settings=values).scores
    if not names and not loaded:
        every = _available(table, train, settings=values, head=False)
        chosen = replace(every, scores=chosen.scores | every.scores)
    _note(screen, chosen)
    if not chosen.scores:
        raise MissingColumnError(f"scores: nothing can be computed from {table.name}; see the notes above.")
    return chosen.scores


def _available(table: Table, train: Table | None, **options: Any) -> AvailableScores:
    try:
        return available_scores(table, train, **options)
    except NotFittedError as error:
        raise NotFittedError(f"{error} Use --train CACHE.") from error


def _values(settings: Sequence[ScoreSetting], made: Sequence[str]) -> dict[str, dict[str, Any]]:
    """By score, the settings as values of its own types."""
    texts: dict[str, dict[str, str]] = {}
    for name, key, text in settings:
        if name not in made:
            raise typer.BadParameter(f"--set names '{name}', which is not made here, only {', '.join(made) or 'none'}.")
        texts.setdefault(name, {})[key] = text
    with reading():
        return {
            name: settings_from_text(SCORES[name], texts[name], by=f"--set: {name}", parsers={Score: _inner_score})
            for name in texts
            if name in SCORES
        }


def _inner_score(text: str) -> Score:
    """A score within a score: NAME, or NAME:ENSEMBLE."""
    name, _, of = text.partition(":")
    return make_score(name, **({"of": of} if of else {}))


def _add_loaded(chosen: AvailableScores, name: str, score: Score, table: Table, *, strict: bool) -> None:
    try:
        score.check_columns(table)
    except DubitoError as error:
        if strict:
            raise
        chosen.left_out[name] = str(error)
    else:
        chosen.scores[name] = score


def _note(screen: Screen, chosen: AvailableScores) -> None:
    """What was left out, except for scores of probes that have not run, which nobody expects."""
    if chosen.unfitted:
        screen.note(
            f"left out: {', '.join(chosen.unfitted)}, which learn first. Give in-distribution images: --train CACHE."
        )
    for name, reason in chosen.left_out.items():
        if name not in chosen.unfitted and name not in chosen.not_extracted:
            screen.note(f"left out: {reason if reason.startswith(name.partition(':')[0]) else f'{name}: {reason}'}")
    for remark in chosen.remarks:
        screen.note(f"{remark} For another one: --score density, with --set density.covariance=full or the like.")


def _loaded(folder: Path) -> dict[str, Score]:
    folders = sorted(path.parent for path in folder.glob("*/score.json"))
    if not folders:
        raise ArtefactError(f"--load: no saved scores in '{folder}'. Save some: dubito score CACHE --save {folder}.")
    scores = {path.name: dubito.load_score(path) for path in folders}
    times = Counter(score.name for score in scores.values())
    # Several heads have one name: their folders distinguish them.
    return {score.name if times[score.name] == 1 else name: score for name, score in scores.items()}


def _open_heads(values: Sequence[str], table: Table) -> dict[str, Score]:
    """The heads of `--head`: "head" if there is one, "head:NAME" if there are several."""
    values = list(dict.fromkeys(values))
    heads: list[Score] = [dubito.UncertaintyHead.from_pretrained(_place(value, table)) for value in values]
    if len(values) < 2:
        return dict(zip([_HEAD], heads, strict=False))
    short = [value.rstrip("/").rpartition("/")[2] for value in values]
    names = [name if short.count(name) == 1 else value for name, value in zip(short, values, strict=True)]
    return {f"{_HEAD}:{name}": head for name, head in zip(names, heads, strict=True)}


def _place(value: str, table: Table) -> str:
    """What from_pretrained takes: the value itself, or for auto the folder of the head that fits the model."""
    if value != _AUTO:
        return value
    entry = entry_for(table.provenance)
    if entry is None:
        model = (table.provenance.model if table.provenance else None) or "its model"
        raise ArtefactError(
            f"--head auto: no head here was trained for {model} with these weights and this transform, which made "
            f"{table.name}. See `dubito list heads`, or train one with `dubito train`."
        )
    return str(entry.path)
