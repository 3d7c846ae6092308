"""`dubito list`: which scores, heads, probes, models and metrics there are, and which settings can be given as text."""

# ruff: noqa: PLC0415 (torch is not imported before a command runs)

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields
from fnmatch import fnmatch
from inspect import getdoc, isfunction
from typing import Annotated, Any, Literal

import typer

import dubito
from dubito.cli._console import Screen, command

Entries = list[dict[str, Any]]
Kind = Literal["scores", "heads", "probes", "models", "metrics", "recipe", "augment"]


@command
def list_(
    screen: Screen,
    kind: Annotated[
        Kind | None, typer.Argument(help="What to list; without it, an overview.", show_default=False)
    ] = None,
    filter_: Annotated[
        str, typer.Argument(metavar="[FILTER]", help="A part of the name, or a pattern with *.", show_default=False)
    ] = "",
) -> None:
    """List what there is: scores, heads, probes, models and metrics; settings of probes, recipe and augmentation."""
    with screen.waiting("looking around"):
        from dubito.cli._results import Listing

        entries = {one: [e for e in _LISTS[one]() if _fits(e["name"], filter_)] for one in ([kind] if kind else _LISTS)}
        title, rows, remarks = _overview(entries) if kind is None else _rendered(kind, entries[kind], filter_)
    screen.show(Listing(title, entries, rows, remarks), filter=filter_ or None)


def _scores() -> Entries:
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
    ]


def _heads() -> Entries:
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
    ]


def _probes() -> Entries:
    from dubito.probes import PROBES, make_probe, probe_settings

    return [
        {
            "name": name,
            "price": make_probe(name).price,
            "about": _first_line(factory),
            "settings": [
                _setting(key, one.type, one.default, _meanings(factory)) for key, one in probe_settings(name).items()
            ],
        }
        for name, factory in PROBES.items()
    ]


def _metrics() -> Entries:
    metrics = {name: getattr(dubito.metrics, name) for name in dubito.metrics.__all__}
    return [{"name": name, "about": _first_line(one)} for name, one in metrics.items() if isfunction(one)]


def _models() -> Entries:
    from dubito.models import from_pypi, from_timm, from_torchvision

    sources = {"pypi": list(from_pypi.SIZES), "timm": from_timm.models(), "torchvision": from_torchvision.models()}
    return [
        {"name": f"{source}:{name}", "source": source}
        for source, names in sources.items()
        for name in dict.fromkeys(names)
    ]


def _recipe() -> Entries:
    from dubito.heads import Recipe

    return _fields(Recipe)


def _augment() -> Entries:
    from dubito.data import Augment

    return _fields(Augment)


_LISTS: Mapping[str, Callable[[], Entries]] = {
    "scores": _scores,
    "heads": _heads,
    "probes": _probes,
    "models": _models,
    "metrics": _metrics,
    "recipe": _recipe,
    "augment": _augment,
}


def _fields(cls: type) -> Entries:
    """The settings of a dataclass."""
    from dubito.validate import setting_types

    types, meanings = setting_types(cls), _meanings(cls)
    return [_setting(one.name, types[one.name], one.default, meanings) for one in fields(cls) if one.init]


def _setting(name: str, kind: Any, default: Any, meanings: Mapping[str, str]) -> dict[str, Any]:
    """A setting with its values and its default, as they are typed on the command line."""
    from dubito.validate import describe_type

    return {"name": name, "value": describe_type(kind), "default": _typed(default), "about": meanings.get(name, "")}


def _meanings(thing: Any) -> dict[str, str]:
    """By setting, what the docstring says in its section Args or Attributes; of a class, those of its bases too."""
    docs = [getdoc(each) or "" for each in reversed(getattr(thing, "__mro__", [thing]))]
    sections = [one for doc in docs for one in doc.split("\n\n") if one.startswith(("Args:", "Attributes:"))]
    entries = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", "\n".join(sections), flags=re.M)
    return {name: " ".join(text.split()) for name, text in entries}


def _typed(value: Any) -> str:
    """A value as it is typed.

    >>> _typed((0.8, 0.95)), _typed(None), _typed(True)
    ('0.8,0.95', 'none', 'yes')
    """
    if isinstance(value, tuple | list):
        return ",".join(map(_typed, value))
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return {"None": "none", "True": "yes", "False": "no"}.get(text, text)


def _fits(name: str, filter_: str) -> bool:
    return fnmatch(name, f"*{filter_}*")


def _first_line(thing: Any) -> str:
    return (getdoc(thing) or "").partition("\n")[0]


def _overview(entries: Mapping[str, Entries]) -> tuple[str, Entries, list[str]]:
    rows = [
        {
            "what": kind,
            "how many": str(len(each)),
            "which": _counts(each) if kind == "models" else [one["name"] for one in each],
        }
        for kind, each in entries.items()
    ]
    return "What there is", rows, ["`dubito list WHAT` shows more."]


def _counts(entries: Entries) -> str:
    counts = Counter(entry["source"] for entry in entries)
    numbers = ", ".join(f"{count} {source}:" for source, count in counts.items())
    return f"{numbers}, all image classifiers of hf:, and python:FILE.py:FUNCTION"


def _rendered(kind: str, entries: Entries, filter_: str) -> tuple[str, Entries, list[str]]:
    """A title, a table and remarks for one kind of entries."""
    title = f"{len(entries)} {kind}"
    if kind == "models" and not filter_:
        return _counts(entries), [], ["Give a part of a name or a pattern: dubito list models 'resnet50*'"]
    if kind == "models":
        return title, [], [entry["name"] for entry in entries]
    if kind == "heads":
        from dubito.heads.shelf import local_folder

        return title, [_head_row(entry) for entry in entries], [f"Your own are looked for in {local_folder()}"]
    if kind == "probes":
        rows = [{"probe": one["name"], "setting": each["name"], **each} for one in entries for each in one["settings"]]
        rows = [{key: value for key, value in row.items() if key != "name"} for row in rows]
        remarks = [f"{one['name']}: {one['about']} {one['price']}." for one in entries]
        return title, rows, [*remarks, "dubito extract MODEL IMAGES --to DIR --probe NAME:KEY=VALUE,KEY=VALUE"]
    if kind in ("recipe", "augment"):
        how = {"recipe": "dubito train CACHE --to NAME --set KEY=VALUE", "augment": "--augment KEY=VALUE,KEY=VALUE"}
        return f"{len(entries)} settings of {kind}", entries, [how[kind]]
    return title, entries, []


def _head_row(entry: dict[str, Any]) -> dict[str, Any]:
    shown = {key: value for key, value in entry.items() if key not in ("bytes", "path")}
    return {**shown, "kB": f"{entry['bytes'] / 1e3:.0f}"}
