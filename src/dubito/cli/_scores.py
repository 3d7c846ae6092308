"""Which scores a command uses: those asked for, or all that the given tables allow; made, fitted or loaded."""

import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

import typer

import dubito
from dubito.cache import open_cache
from dubito.cache.manifest import Manifest, read_manifest
from dubito.cli import _options as options
from dubito.cli._console import Screen
from dubito.errors import ArtefactError, DubitoError, DubitoWarning, MissingColumnError, TableError
from dubito.scores._layers import ScoreOfLayers
from dubito.scores._members import ScoreOfMembers
from dubito.scores.default_density import QUICK, default_density, told
from dubito.scores.density import Density
from dubito.scores.possible import ensembles_to_score
from dubito.scores.registry import SCORES, make_score
from dubito.table import Table, ensembles_in
from dubito.table.provenance import MODEL_PARTS
from dubito.types import Score

_HEAD, _AUTO = "head", "auto"
_OF_PROBES = ("regrad", "predicted_gradient", "perturbation_variance")
"""Scores of columns that one probe alone writes, and no usual extraction."""
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
            f"{option}: '{fit}' holds the very images of '{cache}', so every image is judged by itself, and its "
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
            f"{option}: '{other}' and '{cache}' must come from one model with one transform; {there.model} and "
            f"{here.model} came, with different weights or transforms. Extract both with the same model."
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
    """The scores to use, ready for the table; those that cannot be had are left out with a note, unless asked for."""
    loaded = _loaded(load) if load else {}
    for head in heads:
        table.require(*heads[head].needs, by=f"{head}.score")
    # A head is trained by `dubito train`, never in passing; one that is given stands for the name.
    wanted = list(dict.fromkeys(names)) or list(loaded) or _possible(fit, settings, table, screen, option)
    wanted = [name for name in wanted if not (heads and name == _HEAD)]
    stray = [name for name in settings if name not in wanted or name in loaded]
    if stray:
        raise typer.BadParameter(f"--set names '{stray[0]}', which is not made here, only {', '.join(wanted)}.")
    chosen: dict[str, Score] = dict(heads)
    for name in wanted:
        made = {name: {}} if name in loaded else _of_each(name, settings.get(name, {}), table)
        for shown, texts in made.items():
            try:
                score = loaded.get(name) or _made(name, texts, fit, option=option, unasked=None if names else screen)
                table.require(*score.needs, by=f"{name}.score")
                if isinstance(score, ScoreOfLayers):
                    score.check_layers_of(table)
            except DubitoError as error:  # noqa: PERF203 (a handful of scores)
                if names or name in settings:
                    raise
                screen.note(f"left out: {error}")
            else:
                chosen[shown] = score
    if not chosen:
        raise MissingColumnError(f"score: nothing can be computed from {table.name}; see the notes above.")
    return chosen


def _possible(fit: Table | None, settings: options.Values, table: Table, screen: Screen, option: str) -> list[str]:
    """All scores but the head; without a table to fit on, those that learn nothing, with one note on the others.

    Scores of members, gradients and noise are meant where there are any: of a table without, nobody expects them.
    """
    without = [] if ensembles_in(table.columns) else [name for name in SCORES if _of_members(name)]
    without += [name for name in _OF_PROBES if not set(SCORES[name].needs) <= set(table.columns)]
    names = [name for name in SCORES if name != _HEAD and (name not in without or name in settings)]
    if fit is not None:
        return names
    unfitted = [name for name in names if SCORES[name].learned and name not in settings]
    screen.note(
        f"left out: {', '.join(unfitted)}, which learn first. Give images that the model knows: {option} CACHE."
    )
    return [name for name in names if name not in unfitted]


def _of_members(name: str) -> bool:
    return name in SCORES and name not in _OF_PROBES and issubclass(SCORES[name], ScoreOfMembers)


def _of_each(name: str, texts: dict[str, str], table: Table) -> dict[str, dict[str, str]]:
    """A score by the name that is shown, with its settings: one of members once for each ensemble of the table.

    `--set NAME.of=...` chooses one. Of tiles only the finest grid is taken.
    """
    if not _of_members(name) or "of" in texts:
        return {name: texts}
    found = ensembles_to_score(table)
    if len(found) < 2:
        return {name: texts | {"of": found[0]} if found else texts}
    return {f"{name}:{one}": texts | {"of": one} for one in found}


def _made(name: str, texts: dict[str, str], fit: Table | None, *, option: str, unasked: Screen | None) -> Score:
    """A score with these settings, fitted; `unasked` is where to tell which one was taken if nobody has said."""
    score = make_score(name, **_values(name, texts))
    if isinstance(score, Density) and unasked and not texts and fit is not None:
        score = _suiting_density(fit, unasked)
    if not score.learned:
        return score
    if fit is None:
        raise DubitoError(
            f"{name} learns from {', '.join(score.learns_from)}. Give it images that the model knows: {option} CACHE."
        )
    return score.fit(fit)


def _suiting_density(fit: Table, screen: Screen) -> Density:
    """One that is fitted in seconds: full covariances of wide features take minutes by EM."""
    density = default_density(fit, by="density.fit", most=QUICK)
    if density != Density():
        screen.note(
            f"density: {told(density, fit)}, to suit {len(fit):,} images of {fit.name}. For other ones ask for it: "
            f"--score density, with --set density.covariance=full or what you like."
        )
    return density


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
