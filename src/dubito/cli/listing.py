"""`dubito list`: which scores, heads, probes, models and metrics there are."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

from collections.abc import Callable
from fnmatch import fnmatch
from inspect import getdoc, isfunction
from typing import Annotated, Any, Literal, get_args

import typer

import dubito
from dubito.cli import _options as options
from dubito.cli._console import Screen, grid

Entries = list[dict[str, Any]]
Kind = Literal["scores", "heads", "probes", "models", "metrics"]


def list_(
    kind: Annotated[
        Kind | None, typer.Argument(help="What to list; without it, an overview.", show_default=False)
    ] = None,
    filter_: Annotated[
        str, typer.Argument(metavar="[FILTER]", help="A part of the name, or a pattern with *.", show_default=False)
    ] = "",
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """List what there is: scores, heads, probes, models, metrics."""
    screen = Screen.current(json=json, debug=debug)
    with screen.waiting("looking around"):
        found = {one: _LISTS[one](filter_) for one in ([kind] if kind else get_args(Kind))}
    result = {"filter": filter_ or None, **found}
    if kind is None:
        screen.result(result, _overview(found))
    elif kind == "models":
        screen.result(result, *_models_shown(found["models"], filter_))
    elif kind == "heads":
        screen.result(result, *_heads_shown(found["heads"]))
    else:
        screen.result(result, _entries_shown(kind, found[kind]))


def _scores(filter_: str) -> Entries:
    from dubito.scores.registry import SCORES

    return [
        {
            "name": name,
            "kind": getattr(score, "kind", "that of the score it scales"),
            "needs": list(score.needs),
            "learns_from": list(score.learns_from),
            "about": _first_line(score),
        }
        for name, score in SCORES.items()
        if _fits(name, filter_)
    ]


def _heads(filter_: str) -> Entries:
    from dubito.heads.shelf import list_heads

    return [
        {
            "name": head.name,
            "model": head.model or "not recorded",
            "features": head.features,
            "bytes": head.size,
            "where": head.where,
            "trained_on": head.about,
            "path": str(head.path),
        }
        for head in list_heads()
        if _fits(head.name, filter_)
    ]


def _probes(filter_: str) -> Entries:
    from dubito.probes import PROBES, make_probe

    return [
        {"name": name, "price": make_probe(name).price, "about": _first_line(factory)}
        for name, factory in PROBES.items()
        if _fits(name, filter_)
    ]


def _metrics(filter_: str) -> Entries:
    found = {name: getattr(dubito.metrics, name) for name in dubito.metrics.__all__}
    return [
        {"name": name, "about": _first_line(metric)}
        for name, metric in found.items()
        if isfunction(metric) and _fits(name, filter_)
    ]


def _models(filter_: str) -> Entries:
    from dubito.models import from_pypi, from_timm, from_torchvision

    sources = {"pypi": list(from_pypi.SIZES), "timm": from_timm.models(), "torchvision": from_torchvision.models()}
    return [
        {"name": f"{source}:{name}", "source": source}
        for source, names in sources.items()
        for name in dict.fromkeys(names)
        if _fits(f"{source}:{name}", filter_)
    ]


_LISTS: dict[Kind, Callable[[str], Entries]] = {
    "scores": _scores,
    "heads": _heads,
    "probes": _probes,
    "models": _models,
    "metrics": _metrics,
}


def _fits(name: str, filter_: str) -> bool:
    return fnmatch(name, f"*{filter_}*")


def _first_line(thing: Any) -> str:
    return (getdoc(thing) or "").partition("\n")[0]


def _overview(found: dict[str, Entries]) -> Any:
    rows = []
    for kind, entries in found.items():
        names = ", ".join(entry["name"] for entry in entries) if kind != "models" else _counts(entries)
        rows.append([kind, str(len(entries)), names])
    return grid("", ["what", "how many", "which: `dubito list WHAT` tells more"], rows)


def _counts(entries: Entries) -> str:
    counts: dict[str, int] = {}
    for entry in entries:
        counts[entry["source"]] = counts.get(entry["source"], 0) + 1
    return (
        ", ".join(f"{count} {source}:" for source, count in counts.items())
        + ", all image classifiers of hf:, and python:FILE.py:FUNCTION"
    )


def _entries_shown(kind: str, entries: Entries) -> Any:
    header = list(entries[0]) if entries else ["name"]
    rows = [[", ".join(value) if isinstance(value, list) else str(value) for value in one.values()] for one in entries]
    return grid(f"{len(entries)} {kind}", [name.replace("_", " ") for name in header], rows)


def _heads_shown(entries: Entries) -> list[Any]:
    from dubito.heads.shelf import local_folder

    rows = [
        {
            **{key: value for key, value in one.items() if key not in ("bytes", "path")},
            "kB": f"{one['bytes'] / 1e3:.0f}",
        }
        for one in entries
    ]
    return [_entries_shown("heads", rows), f"Your own are looked for in {local_folder()}"]


def _models_shown(entries: Entries, filter_: str) -> list[Any]:
    if not filter_:
        return [f"{_counts(entries)}.", "Give a part of a name or a pattern: dubito list models 'resnet50*'"]
    return [*(entry["name"] for entry in entries), f"{len(entries)} models"]
