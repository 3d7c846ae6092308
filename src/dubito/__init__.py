"""dubito: how far can a pretrained vision model be trusted on each image, and why not?

>>> import dubito
>>> table = dubito.Table(logit=[[4.0, 0.0, 0.0], [1.0, 0.9, 0.8]], label=[0, 1])
>>> dubito.MaxProbability().score(table).argmax().item()  # the second image is the uncertain one
1
"""

import random
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dubito.choices import suggestion as _suggestion

if TYPE_CHECKING:
    from dubito import ensembles as ensembles
    from dubito import explain as explain
    from dubito import heads as heads
    from dubito import metrics as metrics
    from dubito import probes as probes
    from dubito import protocols as protocols
    from dubito import report as report
    from dubito import scores as scores
    from dubito.active import Acquire as Acquire
    from dubito.active import find_label_issues as find_label_issues
    from dubito.audit.audit import audit as audit
    from dubito.cache import extract as extract
    from dubito.cache import open_cache
    from dubito.data import Augment as Augment
    from dubito.data import open_images as open_images
    from dubito.errors import DubitoError as DubitoError
    from dubito.evaluate.compare import compare as compare
    from dubito.evaluate.evaluate import evaluate as evaluate
    from dubito.explain import diagnose as diagnose
    from dubito.explore import explore as explore
    from dubito.guard import Guard as Guard
    from dubito.heads import train as train
    from dubito.models import Preprocess as Preprocess
    from dubito.models import load as load
    from dubito.models import wrap as wrap
    from dubito.report import draw_map as draw_map
    from dubito.scores import Density as Density
    from dubito.scores import Energy as Energy
    from dubito.scores import Entropy as Entropy
    from dubito.scores import Mahalanobis as Mahalanobis
    from dubito.scores import Margin as Margin
    from dubito.scores import MaxProbability as MaxProbability
    from dubito.scores import MutualInformation as MutualInformation
    from dubito.scores import Neighbours as Neighbours
    from dubito.scores import Temperature as Temperature
    from dubito.scores import UncertaintyHead as UncertaintyHead
    from dubito.scores import load_score as load_score
    from dubito.scores import save_score as save_score
    from dubito.search import SafeIndex as SafeIndex
    from dubito.table import Table as Table
    from dubito.table import concat as concat
    from dubito.table import ensemble as ensemble

    open = open_cache  # noqa: A001 (read as dubito.open)

__version__ = "0.1.0"

_EXPORTS = {
    "models": "load wrap Preprocess",
    "data": "open_images Augment",
    "cache": "extract open",
    "table": "Table concat ensemble",
    "scores": "MaxProbability Entropy Margin Energy Temperature Neighbours Density Mahalanobis MutualInformation "
    "UncertaintyHead save_score load_score",
    "heads": "train",
    "evaluate": "evaluate compare",
    "guard": "Guard",
    "search": "SafeIndex",
    "active": "Acquire find_label_issues",
    "audit": "audit",
    "explain": "diagnose",
    "report": "draw_map",
    "explore": "explore",
    "errors": "DubitoError",
}
"""Public names by the room that defines them: imported on first use, so that the command line's help is quick."""
_NAMESPACES = ("scores", "probes", "metrics", "heads", "ensembles", "explain", "protocols", "report")
_HOMES = {name: room for room, names in _EXPORTS.items() for name in names.split()}

__all__ = [*_HOMES, *_NAMESPACES]  # noqa: PLE0604 (all of them are strings)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(_imported(_HOMES[name]), "open_cache" if name == "open" else name)
    if name.startswith("__"):
        raise AttributeError(name)  # looked up by tools, never by people: nothing is imported for it
    if find_spec(f"dubito.{name}"):  # also for `from dubito import choices`, which looks here first
        return _imported(name)
    raise AttributeError(f"module 'dubito' has no attribute '{name}'.{_suggestion(name, __all__)}")


def _imported(room: str) -> ModuleType:
    """A room; packages that draw random numbers while they are imported leave Python's state as it was."""
    state = random.getstate()
    try:
        return import_module(f"dubito.{room}")
    finally:
        random.setstate(state)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Namespace(ModuleType):
    """A room that people look names up in: for one that it does not have, the nearest that it has."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # looked up by tools, never by people
        raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'.{_suggestion(name, self.__all__)}")


class _FrontDoor(ModuleType):
    """Keeps public functions that are named like their room: importing `dubito.evaluate.x` must not replace them."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _NAMESPACES and isinstance(value, ModuleType):
            value.__class__ = _Namespace
        if not (isinstance(value, ModuleType) and name in _HOMES):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _FrontDoor
