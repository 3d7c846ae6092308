"""Families of columns: which columns belong together, who writes them, and which settings change their numbers.

Whoever writes columns declares them (`declare`); tables look them up here and know no writer by name. Declarations are
imported when one is first needed, so a table can say who writes a missing column whatever was imported before.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from dubito.table.table import Table

DECLARED_IN = "dubito.probes.registry"
"""The module that declares every family."""
_LONG = 80
"""Settings that are longer, such as hashes of members, are named and not shown."""
_FAMILIES: "dict[str, ColumnFamily]" = {}


@final
@dataclass(frozen=True)
class ColumnFamily:
    """Columns of one writer.

    Attributes:
        pattern: Regular expression of their names. Its group `name` is what the columns of one model and setting share;
            its optional groups are `part`, the end of a name, and `probe`, under which provenance records the settings
            (by default the name).
        writer: Completes "It is written by ...".
        parts: By the end of a name: what that column requires in addition, appended to the writer.
        ensemble: Whether the columns hold predictions of ensemble members.
        ignored: Settings that leave numbers comparable: what is kept, and other draws.
    """

    pattern: str
    writer: str
    parts: Mapping[str, str] = field(default_factory=dict)
    ensemble: bool = False
    ignored: tuple[str, ...] = ()

    def match(self, column: str) -> dict[str, str] | None:
        """The groups of a column's name, None for a column of another family."""
        match = re.fullmatch(self.pattern, column)
        return None if match is None else {key: value or "" for key, value in match.groupdict().items()}


def declare(name: str, family: ColumnFamily) -> None:
    """Register a family under the name of the probe that writes it."""
    _FAMILIES[name] = family


def families() -> Mapping[str, ColumnFamily]:
    """Every declared family by name."""
    import_module(DECLARED_IN)
    return _FAMILIES


def writer_of(column: str) -> str | None:
    """Who writes a column; None for a column that nobody has declared.

    >>> writer_of("id")
    'every extraction'
    """
    for key, family in families().items():
        if (groups := family.match(column)) is not None:
            own = "" if family.ensemble or groups.get("name", "") in ("", key) else f" named '{groups['name']}'"
            return family.writer + own + family.parts.get(groups.get("part", ""), "")
    return None


def ensembles_in(columns: Sequence[str]) -> tuple[str, ...]:
    """The names of the ensembles whose summaries or logits are among some columns."""
    matches = [family.match(column) for column in columns for family in families().values() if family.ensemble]
    return tuple(dict.fromkeys(each["name"] for each in matches if each and each["part"] in ("", "_logit")))


def recorded_settings(table: "Table", name: str) -> Mapping[str, Any] | None:
    """The settings of the probe that wrote the columns called `name`; None where they are not recorded."""
    probe = _probe(table, name)
    return None if probe is None or table.provenance is None else table.provenance.probes[probe].get("settings", {})


def settings_difference(one: "Table", other: "Table", name: str) -> str | None:
    """In which settings the columns called `name` of two tables differ, as far as these change their numbers.

    Returns None where the settings agree, or where those of a table are not recorded.
    """
    here, there = recorded_settings(one, name), recorded_settings(other, name)
    if here is None or there is None:
        return None
    family = families().get(here.get("probe") or _probe(one, name) or "")  # a probe of another name records its family
    ignored = family.ignored if family else ()
    keys = [key for key in {**here, **there} if key not in ignored and here.get(key) != there.get(key)]
    texts = [f"{key}={here.get(key)} and {key}={there.get(key)}" for key in keys]
    return ", ".join(text if len(text) <= _LONG else key for text, key in zip(texts, keys, strict=True)) or None


def compared_names(table: "Table", columns: Sequence[str]) -> tuple[str, ...]:
    """Names of columns whose settings a table may have recorded: its ensembles, and its other probes."""
    probes = table.provenance.probes if table.provenance else {}
    return tuple(dict.fromkeys([*ensembles_in(columns), *(name for name in probes if name in columns)]))


def _probe(table: "Table", name: str) -> str | None:
    """The probe that wrote the columns called `name`; None where it is not recorded."""
    matches = [family.match(name) for family in families().values()]
    names = [name, *(groups["probe"] for groups in matches if groups and "probe" in groups)]
    return next((one for one in names[:2] if table.provenance and one in table.provenance.probes), None)
