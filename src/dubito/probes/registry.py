"""Every probe by name, with its settings, and the columns that it writes.

Here columns are declared for `dubito.table.columns`: a new probe adds its class to `_KINDS` and declares its columns.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any

from dubito.errors import MissingColumnError
from dubito.probes.dropout import Dropout
from dubito.probes.forward import Forward
from dubito.probes.gradient import Gradient
from dubito.probes.layers import Layers
from dubito.probes.pre_activation import PreActivation
from dubito.probes.tiles import Tiles
from dubito.probes.views import Noise, Views
from dubito.table.columns import ColumnFamily, declare, writer_of
from dubito.table.provenance import Provenance
from dubito.table.views import MEMBERS
from dubito.types import Probe
from dubito.validate import check_choice

_KINDS: Sequence[Any] = (Forward, PreActivation, Layers, Tiles, Dropout, Views, Noise, Gradient)
PROBES: Mapping[str, Callable[..., Probe]] = MappingProxyType({kind.name: kind for kind in _KINDS})
"""What makes each probe that plain values can configure. Ensembles of models are made in Python: `Members(models)`."""
_UNRECORDED = ("tiles", "pre_activation")
"""Probes whose columns name everything that must be known to write them again; others need recorded settings."""


def probe_settings(name: str) -> Mapping[str, Parameter]:
    """The settings of a probe by name, each with its `annotation` and `default`.

    >>> {key: setting.default for key, setting in probe_settings("noise").items()}
    {'copies': 8, 'sigma': 0.05, 'seed': 0, 'keep': 'summary', 'temperature': 1.0, 'variance': True}
    """
    check_choice(name, PROBES, by="probe_settings", what="probe")
    return signature(PROBES[name]).parameters


def make_probe(name: str, /, **settings: Any) -> Probe:
    """A probe from its name and plain values, as the command line has them.

    >>> make_probe("tiles", grids=[2, 7]) == Tiles([2, 7])
    True
    """
    check_choice(name, PROBES, by="make_probe", what="probe")
    for key in settings:
        check_choice(key, probe_settings(name), by=f"probe '{name}'", what="a setting")
    return PROBES[name](**settings)


def probes_for(
    columns: Iterable[str], provenance: Provenance | None, replacing: Sequence[Probe] = (), *, by: str = "probes_for"
) -> list[Probe]:
    """The probes that write some columns, beside the forward probe.

    Args:
        columns: What is to be written.
        provenance: Of a table that has them; its probes are configured again as they were.
        replacing: Probes to use instead, recognised by their names.
        by: The function that the user called.

    Raises:
        MissingColumnError: A column's probe is neither among these nor recorded, or needs more than plain values.
    """
    needed = sorted(set(columns) - {"id", "feature", "logit"})  # the forward probe runs in any case
    probes: dict[str, Probe] = {}
    for column in needed:
        probe = next((each for each in replacing if _writes(each.name, column)), None)
        probe = probe or _rebuilt(column, needed, provenance)
        if probe is None:
            raise MissingColumnError(
                f"{by} reads column '{column}', written by {writer_of(column) or 'a probe of yours'}, which cannot be "
                f"configured again: its settings are not recorded, or it needs models. Pass the probe: probes=[...]."
            )
        probes.setdefault(probe.name, probe)
    return list(probes.values())


def _writes(name: str, column: str) -> bool:
    return column == name or column.startswith(f"{name}_")


def _rebuilt(column: str, columns: Sequence[str], provenance: Provenance | None) -> Probe | None:
    """The recorded probe that writes a column, or one whose columns say enough; writing no more than is needed."""
    recorded = {name: probe["settings"] for name, probe in (provenance.probes if provenance else {}).items()}
    names = [name for name in (*recorded, *_UNRECORDED) if _writes(name, column)]
    name = max(names, key=len, default="")
    settings = recorded.get(name, {})
    kind = settings.get("probe", name)  # of a probe that has a name of its own
    if kind not in PROBES:
        return None
    known = probe_settings(kind)
    chosen = {key: value for key, value in settings.items() if key in known}
    if "name" in known:
        chosen["name"] = name
    if "keep" in known:
        own = [one for one in columns if _writes(name, one)]
        chosen["keep"] = "logits" if any(one.endswith("_logit") for one in own) else "summary"
    if "grids" in known:
        chosen["grids"] = sorted({int(one.split("_")[1]) for one in columns if _writes(name, one)})
    return make_probe(kind, **chosen)


def _declare(name: str, pattern: str, writer: str, probe: str = "", **more: Any) -> None:
    how = f" (dubito.extract(..., probes=[dubito.probes.{probe}]))" if probe else ""
    declare(name, ColumnFamily(pattern, writer + how, **more))


def _declare_ensemble(name: str, writer: str, probe: str = "", *, pattern: str | None = None, **parts: str) -> None:
    pattern = f"(?P<name>{pattern or name})(?P<part>_loss|_between|_logit|_variance)?"
    ends = {"_loss": ", where labels are the model's classes", "_logit": ', with keep="logits"'}
    ends |= {"_variance": ', with keep="logits", from which it is computed'}
    ends |= {f"_{end}": text for end, text in parts.items()}
    _declare(name, pattern, writer, probe, parts=ends, ensemble=True, ignored=("keep", "dtype", "grids", "seed"))


_declare(
    "forward",
    "feature|(?P<part>logit)",
    "the forward probe, which every extraction runs",
    parts={
        "logit": ", of a model with a classifying layer: a backbone without one has no logits, but scores of features, "
        "search and maps"
    },
)
_declare(
    "loss",
    "loss",
    "the forward probe of a model with a classifying layer, if the images have labels of its own classes, or targets",
)
_declare("label", "label", "dubito.cache.label_cache(folder, labels), or by an extraction of images with labels")
_declare("id", "id", "every extraction")
_declare("augmented", "epoch|image_index", "an extraction of augmented epochs (epochs=..., augment=...)")
_declare(
    "pre_activation", "(?P<name>pre_activation)", "the pre-activation probe", "PreActivation()", ignored=("dtype",)
)
_declare("layers", "(?P<name>layers)", "the layers probe", "Layers()", ignored=("dtype",))
_declare_ensemble("tiles", "the tiles probe", "Tiles()", pattern=r"(?P<probe>tiles)_\d+")
_EITHER = ', with keep="logits", or by dubito.ensemble(tables) of one table per model'
_declare_ensemble(MEMBERS, "the probe of several models", "Members(models)", logit=_EITHER)
_declare_ensemble("checkpoints", "the probe of checkpoints", "Members.checkpoints(model, paths)")
_declare_ensemble("dropout", "the Monte-Carlo dropout probe", "Dropout()")
_declare_ensemble("views", "the test-time augmentation probe", "Views()")
_declare_ensemble("noise", "the probe of noisy copies", "Noise()", variance="")
_declare_ensemble(
    "masks",
    "masks of the last layer (dubito.ensembles.HeadMasks().fit(train).extend(table))",
    logit="",
    variance=", from whose logits it is computed",
)
_declare(
    "gradient",
    # A gradient probe may have a name of its own; the ends of its columns identify it.
    "gradient|(?P<name>[a-z][a-z_]*)(?P<part>_root|_l1|_predicted|_uniform|_bound)",
    "the gradient probe",
    "Gradient()",
    parts={
        "_root": ', with method="exact" and weightings=["root"]',
        "_l1": ', with method="exact" and weightings=["expected_l1"]',
        "_predicted": ', with any method but "signs"',
        "_uniform": ", with uniform=True",
        "_bound": ', with method="top"',
    },
    # Not the seed: all images share its signs and noise, so another seed shifts a whole table.
    ignored=("weightings", "uniform"),
)
