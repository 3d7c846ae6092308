"""Options of the commands that score: --score, --set, --fit, --head and --load, parsed and looked up in `scores`."""

import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

import typer

import dubito
from dubito.cache import open_cache
from dubito.cache.manifest import Manifest, read_manifest
from dubito.cli import _options as options
from dubito.cli._console import Screen
from dubito.errors import ArtefactError, DubitoError, DubitoWarning, MissingColumnError, NotFittedError, TableError
from dubito.scores.available import AvailableScores, available_scores
from dubito.scores.registry import SCORES, make_score
from dubito.table import Table
from dubito.table.provenance import MODEL_PARTS
from dubito.types import Score

_HEAD, _AUTO = "head", "auto"
_SWITCH = {"true": True, "false": False, "yes": True, "no": False}


def ready_scores(  # noqa: PLR0913 (a command's options)
    cache: Path,
    table: Table,
    screen: Screen,
    *,
    names: Sequence[str],
    settings: options.Values,
    fit: Path | None,
    heads: Sequence[str],
    load: Path | None,
    option: str = "--fit",
) -> dict[str, Score]:
    """What `--score`, `--set`, `--fit`, `--head` and `--load` ask for, ready for the table of a cache.

    `option` is what the command calls `--fit`, for messages.
    """
    learn_from = open_fit(fit, cache, option)
    return choose_scores(
        names, settings, table, learn_from, load, screen, heads=open_heads(heads, table), option=option
    )


def open_fit(fit: Path | None, cache: Path, option: str = "--fit") -> Table | None:
    """The table to learn from, which must be the same model's."""
    if fit is None:
        return None
    table = open_cache(fit)
    check_same_model(cache, fit, option)
    if _manifest(fit).identity["images"] == _manifest(cache).identity["images"]:
        warnings.warn(
            f"{option}: '{fit}' holds the very images of '{cache}', so every image is compared with itself, and its "
            f"nearest neighbour is itself. Fit on other images of the same kind.",
            DubitoWarning,
            stacklevel=2,
        )
    return table


def check_same_model(cache: Path, other: Path, option: str) -> None:
    """Raise TableError when two caches come from different weights or transforms."""
    here, there = _manifest(cache), _manifest(other)
    if any(here.identity.get(part) != there.identity.get(part) for part in MODEL_PARTS):
        raise TableError(
            f"{option}: '{other}' and '{cache}' must come from one model with one transform; got {there.model} and "
            f"{here.model}, with different weights or transforms. Extract both with the same model."
        )


def open_heads(values: Sequence[str], table: Table) -> dict[str, Score]:
    """The heads of `--head`: "head" if there is one, "head:NAME" if there are several."""
    values = list(dict.fromkeys(values))
    if not values:
        return {}
    heads: list[Score] = [dubito.UncertaintyHead.from_pretrained(_fitting(table, value)) for value in values]
    if len(values) == 1:
        return {_HEAD: heads[0]}
    short = [value.rstrip("/").rpartition("/")[2] for value in values]
    unique = Counter(short)
    names = [name if unique[name] == 1 else value for name, value in zip(short, values, strict=True)]
    return {f"{_HEAD}:{name}": head for name, head in zip(names, heads, strict=True)}


def choose_scores(
    names: Sequence[str],
    settings: options.Values,
    table: Table,
    fit: Table | None,
    load: Path | None,
    screen: Screen,
    *,
    heads: Mapping[str, Score] = MappingProxyType({}),
    option: str = "--fit",
) -> dict[str, Score]:
    """The scores to use, ready for the table; those that cannot be made are left out with a note, unless named."""
    loaded = _loaded(load) if load else {}
    for head in heads.values():
        head.check_columns(table)
    # A head is trained by `dubito train`, never in passing; one that is given stands for the name.
    wanted = [name for name in dict.fromkeys(names or loaded) if not (heads and name == _HEAD)]
    stray = [name for name in settings if name in loaded or ((names or loaded) and name not in wanted)]
    if stray:
        made = ", ".join(name for name in wanted or SCORES if name not in loaded) or "none"
        raise typer.BadParameter(f"--set names '{stray[0]}', which is not made here, only {made}.")
    values = {name: _values(name, texts) for name, texts in settings.items()}
    found = AvailableScores(dict(heads))
    try:
        for name in wanted:
            if name in loaded:
                _add_loaded(found, name, loaded[name], table, strict=bool(names))
            else:
                found.scores |= available_scores(table, fit, names=[name], settings=values).scores
        if not names and not loaded:
            every = available_scores(table, fit, settings=values, head=False)
            found = replace(every, scores=found.scores | every.scores)
    except NotFittedError as error:
        raise NotFittedError(f"{error} Use {option} CACHE.") from error
    _note(found, screen, option)
    chosen = found.scores
    if not chosen:
        raise MissingColumnError(f"score: nothing can be computed from {table.name}; see the notes above.")
    return chosen


def _add_loaded(found: AvailableScores, name: str, score: Score, table: Table, *, strict: bool) -> None:
    try:
        score.check_columns(table)
    except DubitoError as error:
        if strict:
            raise
        found.left_out[name] = str(error)
    else:
        found.scores[name] = score


def _note(found: AvailableScores, screen: Screen, option: str) -> None:
    """What was left out, except for scores of probes that have not run, which nobody expects."""
    if found.unfitted:
        screen.note(
            f"left out: {', '.join(found.unfitted)}, which learn first. Give in-distribution images: {option} CACHE."
        )
    for name, reason in found.left_out.items():
        if name not in found.unfitted and name not in found.not_extracted:
            screen.note(f"left out: {reason if reason.startswith(name.partition(':')[0]) else f'{name}: {reason}'}")
    for remark in found.remarks:
        screen.note(f"{remark} For another one: --score density, with --set density.covariance=full or what you like.")


def _values(name: str, texts: dict[str, str]) -> dict[str, Any]:
    """Settings as the score's own types."""
    kinds = {setting.name: setting.type for setting in fields(SCORES[name]) if setting.init} if name in SCORES else {}  # type: ignore[arg-type]
    unknown = [key for key in texts if name in SCORES and key not in kinds]
    if unknown:
        raise DubitoError(f"--set: {name} has no setting '{unknown[0]}'; it has {', '.join(kinds) or 'none'}.")
    return {key: _value(f"{name}.{key}", text, kinds[key]) for key, text in texts.items() if key in kinds}


def _value(where: str, text: str, kind: Any) -> Any:
    """A text as what a setting is declared to be: a number, a switch, one of some words, a score; or None.

    >>> _value("density.components", "5", int | None), _value("mahalanobis.relative", "yes", bool)
    (5, True)
    """
    kinds = (kind,) if get_origin(kind) is Literal else get_args(kind) or (kind,)
    if type(None) in kinds and text.lower() == "none":
        return None
    target = next(one for one in kinds if one is not type(None))
    if target is Score:
        inner, _, of = text.partition(":")
        return make_score(inner, **({"of": of} if of else {}))
    if target is bool or get_origin(target) is Literal:
        words = _SWITCH if target is bool else {word: word for word in get_args(target)}
        if text.lower() not in words:
            raise DubitoError(f"--set: {where} must be one of {', '.join(words)}; got '{text}'.")
        return words[text.lower()]
    try:
        return target(text)
    except ValueError as error:
        raise DubitoError(f"--set: {where} must be of type {target.__name__}; got '{text}'.") from error


def _loaded(folder: Path) -> dict[str, Score]:
    found = sorted(path.parent for path in folder.glob("*/score.json"))
    if not found:
        raise ArtefactError(f"--load: no saved scores in '{folder}'. Save some: dubito score CACHE --save {folder}.")
    scores = {path.name: dubito.load_score(path) for path in found}
    times = Counter(score.name for score in scores.values())
    # Several heads have one name: their folders tell them apart.
    return {score.name if times[score.name] == 1 else folder: score for folder, score in scores.items()}


def folder_name(name: str) -> str:
    """Where `--save` keeps a score: its name, without what file systems do not take.

    >>> folder_name("head:org/mine")
    'head_org_mine'
    """
    return re.sub(r"[^\w.-]", "_", name)


def _fitting(table: Table, value: str) -> str:
    """What from_pretrained takes: the value itself, or for auto the folder of the head that was made for this model."""
    if value != _AUTO:
        return value
    from dubito.heads.shelf import entry_for  # noqa: PLC0415 (as above)

    entry = entry_for(table.provenance)
    if entry is None:
        model = (table.provenance.model if table.provenance else None) or "its model"
        raise ArtefactError(
            f"--head auto: no head here was trained for {model} with these weights and this transform, which made "
            f"{table.name}. See `dubito list heads`, or train one with `dubito train`."
        )
    return str(entry.path)


def _manifest(folder: Path) -> Manifest:
    found = read_manifest(folder)
    assert found is not None, "only opened caches are compared"  # noqa: S101 (our own invariant)
    return found
