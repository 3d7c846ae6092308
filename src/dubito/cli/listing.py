"""`dubito list`: what can be named on the command line (scores, probes, models, data sets ...), with its settings."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields
from fnmatch import fnmatch
from inspect import getdoc, isfunction
from typing import Annotated, Any, Literal

from typer import Argument

import dubito
from dubito import choices
from dubito.choices import suggestion
from dubito.cli._console import CommandResult, Screen, command

Entries = list[dict[str, Any]]
Kind = Literal[
    "scores",
    "calibrations",
    "heads",
    "probes",
    "models",
    "metrics",
    "set-methods",
    "openood-benchmarks",
    "imagenet-variants",
    "corruptions",
    "recipe",
    "augment",
]
_SET_METHODS: Mapping[choices.SetMethod, str] = {
    "lac": "The smallest sets on average, sometimes empty.",
    "aps": "Never empty, and large where there are many classes.",
    "raps": "Never empty, and smaller than aps, by a penalty on classes of low rank.",
    "saps": "Never empty, and smaller than aps, by the rank of a class in place of its probability.",
}


@command
def list_(
    screen: Screen,
    kind: Annotated[Kind | None, Argument(help="What to list; without it, an overview.", show_default=False)] = None,
    filter_: Annotated[
        str, Argument(metavar="[FILTER]", help="A part of the name, or a pattern with *.", show_default=False)
    ] = "",
) -> None:
    """List scores, probes, models, metrics and whatever else has a name; settings of probes and training."""
    with screen.waiting("listing"):
        every = {one: _LISTS[one]() for one in ([kind] if kind else _LISTS)}
        entries = {
            one: [entry for entry in known if fnmatch(entry["name"], f"*{filter_}*")] for one, known in every.items()
        }
        title, rows, remarks = _table(kind, entries[kind], filter_) if kind else _overview(entries)
    if kind and not entries[kind]:
        screen.note(f"no name contains '{filter_}'.{suggestion(filter_, [one['name'] for one in every[kind]])}")
    screen.show(CommandResult(title, entries, rows=rows), *remarks, filter=filter_ or None)


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


def _calibrations() -> Entries:
    from dubito.calibration import METHODS

    return [
        {"name": name, "keeps_predictions": method.keeps_predictions, "about": _first_line(method)}
        for name, method in METHODS.items()
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
    entries = []
    for name, factory in dubito.probes.PROBES.items():
        settings = {key: (each.annotation, each.default) for key, each in dubito.probes.probe_settings(name).items()}
        about, price = _first_line(factory), dubito.probes.make_probe(name).price
        entries.append({"name": name, "price": price, "about": about, "settings": _settings(factory, settings)})
    return entries


def _metrics() -> Entries:
    metrics = {name: getattr(dubito.metrics, name) for name in dubito.metrics.__all__}
    return [{"name": name, "about": _first_line(one)} for name, one in metrics.items() if isfunction(one)]


def _set_methods() -> Entries:
    from dubito.guard.set_scores import PENALTY

    return [{"name": name, "penalty": PENALTY.get(name), "about": about} for name, about in _SET_METHODS.items()]


def _openood_benchmarks() -> Entries:
    from dubito.protocols import OPENOOD

    return [
        {"name": name, **{kind: list(getattr(one, kind)) for kind in ("near", "far", "shifted")}}
        for name, one in OPENOOD.items()
    ]


def _imagenet_variants() -> Entries:
    from dubito.protocols.imagenet_variants import VARIANTS, classes_of_variant

    return [{"name": name, "classes": len(classes_of_variant(name))} for name in VARIANTS]


def _corruptions() -> Entries:
    from dubito.data import CORRUPTIONS, STAND_INS

    return [
        {
            "name": name,
            "in_curves": name in CORRUPTIONS,
            "in_corrupted_copies": name in STAND_INS,
            "about": _first_line(function),
        }
        for name, function in {**CORRUPTIONS, **STAND_INS}.items()
    ]


def _models() -> Entries:
    from dubito.models import from_timm, from_torchvision

    sources = {"pypi": list(from_timm.PYPI_SIZES), "timm": from_timm.models(), "torchvision": from_torchvision.models()}
    return [
        {"name": f"{source}:{name}", "source": source}
        for source, names in sources.items()
        for name in dict.fromkeys(names)
    ]


def _fields(cls: type) -> Entries:
    """The settings of a dataclass."""
    from dubito.validate import setting_types

    types = setting_types(cls)
    return _settings(cls, {one.name: (types[one.name], one.default) for one in fields(cls) if one.init})


def _settings(owner: Any, settings: Mapping[str, tuple[Any, Any]]) -> Entries:
    """Settings, of which type and default are passed, as they are typed; each with its line of the docstring."""
    from dubito.validate import describe_type

    docs = [getdoc(each) or "" for each in reversed(getattr(owner, "__mro__", [owner]))]
    sections = [one for doc in docs for one in doc.split("\n\n") if one.startswith(("Args:", "Attributes:"))]
    described = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", "\n".join(sections), flags=re.M)
    about = {name: " ".join(text.split()) for name, text in described}
    return [
        {"name": name, "value": describe_type(kind), "default": _typed(default), "about": about.get(name, "")}
        for name, (kind, default) in settings.items()
    ]


def _typed(value: Any) -> str:
    """A value as it is typed.

    >>> _typed((0.8, 0.95)), _typed(None), _typed(True)
    ('0.8,0.95', 'none', 'yes')
    """
    if isinstance(value, tuple | list):
        return ",".join(map(_typed, value))
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return {"None": "none", "True": "yes", "False": "no"}.get(text, text)


def _first_line(thing: Any) -> str:
    return (getdoc(thing) or "").partition("\n")[0]


_HOW: Mapping[str, str] = {
    "calibrations": "dubito calibrate CACHE --method NAME --to DIR",
    "set-methods": "dubito guard fit CACHE --set-method NAME --to GUARD",
    "openood-benchmarks": "dubito openood MODEL --root DIR --benchmark NAME",
    "imagenet-variants": "dubito imagenet-variants MODEL --root NAME=DIR",
    "corruptions": "dubito extract MODEL IMAGES --to DIR --corrupted, and in Python dubito.protocols.corruption_curve",
    "recipe": "dubito train CACHE --to NAME --set KEY=VALUE",
    "augment": "--augment KEY=VALUE,KEY=VALUE",
}
"""By kind, where its names or settings are typed."""
_LISTS: Mapping[str, Callable[[], Entries]] = {
    "scores": _scores,
    "calibrations": _calibrations,
    "heads": _heads,
    "probes": _probes,
    "models": _models,
    "metrics": _metrics,
    "set-methods": _set_methods,
    "openood-benchmarks": _openood_benchmarks,
    "imagenet-variants": _imagenet_variants,
    "corruptions": _corruptions,
    "recipe": lambda: _fields(dubito.heads.Recipe),
    "augment": lambda: _fields(dubito.Augment),
}


def _overview(entries: Mapping[str, Entries]) -> tuple[str, Entries, list[str]]:
    names = {kind: ", ".join(one["name"] for one in each) for kind, each in entries.items()}
    which = {**names, "models": _counts(entries["models"])}
    rows = [{"what": kind, "how many": str(len(each)), "which": which[kind]} for kind, each in entries.items()]
    return "What there is", rows, ["`dubito list WHAT` shows more."]


def _counts(entries: Entries) -> str:
    counts = Counter(entry["source"] for entry in entries)
    numbers = ", ".join(f"{count} {source}:" for source, count in counts.items())
    return f"{numbers}, all image classifiers of hf:, and python:FILE.py:FUNCTION"


def _table(kind: str, entries: Entries, filter_: str) -> tuple[str, Entries, list[str]]:
    """A title, a table and remarks for one kind of entries."""
    plural = kind.replace("-", " ")
    title = f"{len(entries)} {plural.removesuffix('s') if len(entries) == 1 else plural}"
    remarks = [_HOW[kind]] if kind in _HOW else []
    if kind == "models" and not filter_:
        return _counts(entries), [], ["Add a part of a name or a pattern: dubito list models 'resnet50*'"]
    if kind == "models":
        return title, [], [entry["name"] for entry in entries]
    if kind == "heads":
        from dubito.heads.shelf import local_folder

        names = ("name", "model", "features", "where", "trained_on")
        entries = [{**{key: one[key] for key in names}, "kB": f"{one['bytes'] / 1e3:.0f}"} for one in entries]
        remarks = [f"Your own are looked for in {local_folder()}"]
    elif kind == "probes":
        remarks = [f"{one['name']}: {one['about']} {one['price']}." for one in entries]
        remarks.append("dubito extract MODEL IMAGES --to DIR --probe NAME:KEY=VALUE,KEY=VALUE")
        settings = [(one["name"], dict(each)) for one in entries for each in one["settings"]]
        entries = [{"probe": probe, "setting": each.pop("name"), **each} for probe, each in settings]
    elif kind in ("recipe", "augment"):
        title = f"{len(entries)} settings of {kind}"
    else:
        entries = [
            {key: ", ".join(one) if isinstance(one, list) else one for key, one in each.items()} for each in entries
        ]
    return title, entries, remarks
