"""Every calibration method by name: made, saved and loaded.

A saved method is a folder with one file, calibration.safetensors: learned tensors, and as notes the name, settings and
learned numbers, sealed together by a hash. Nothing is pickled.
"""

from dataclasses import fields
from typing import Any

from torch import Tensor

from dubito.calibration.dirichlet import DirichletScaling
from dubito.calibration.histogram import Histogram
from dubito.calibration.isotonic import ClassWiseIsotonic, Isotonic
from dubito.calibration.matrix import MatrixScaling
from dubito.calibration.method import Calibration
from dubito.calibration.temperature import TemperatureScaling
from dubito.calibration.vector import VectorScaling
from dubito.calibration.venn_abers import VennAbers
from dubito.errors import ArtefactError, NotFittedError, ValueRangeError
from dubito.storage import Place, not_there, read_tensors, reading, to_place, write_tensors, writing
from dubito.table import Provenance
from dubito.validate import check_choice

METHODS: dict[str, type[Calibration]] = {
    method.name: method
    for method in (
        TemperatureScaling,
        Histogram,
        Isotonic,
        VennAbers,
        VectorScaling,
        ClassWiseIsotonic,
        DirichletScaling,
        MatrixScaling,
    )
}
"""From the simplest to the most flexible: of several that are equally good, the first is recommended."""
FORMAT = 1
_FILE = "calibration.safetensors"


def make_calibration(name: str, **settings: Any) -> Calibration:
    """A method by its name, with its settings.

    >>> make_calibration("histogram", bins=10)
    Histogram(bins=10)
    """
    check_choice(name, METHODS, by="make_calibration", what="method")
    try:
        return METHODS[name](**settings)
    except TypeError as error:
        raise ValueRangeError(
            f"calibration method '{name}' does not take these settings ({error}). "
            f"Look at help({METHODS[name].__name__})."
        ) from error


def save_calibration(method: Calibration, to: str | Place) -> Place:
    """Write a fitted method into a folder, which is returned."""
    if type(method) is not METHODS.get(method.name):
        raise ArtefactError(
            f"calibration method '{method.name}' ({type(method).__name__}) cannot be saved: it is not one of dubito's "
            f"own, so it could not be loaded again. Use one of {', '.join(METHODS)}."
        )
    if not hasattr(method, "classes_"):
        raise NotFittedError(f"save_calibration: {method.name} has not been fitted. Call fit(table) first.")
    folder = to_place(to)
    learned = {name: getattr(method, name) for name in method.learned}
    tensors = {name: value for name, value in learned.items() if isinstance(value, Tensor)}
    notes = {
        "format": FORMAT,
        "method": method.name,
        "settings": {one.name: _text(getattr(method, one.name)) for one in fields(method)},  # type: ignore[arg-type]
        "classes": method.classes_,
        "learned": {name: _text(value) for name, value in learned.items() if name not in tensors},
        "provenance": None if method.provenance_ is None else method.provenance_.to_json(),
    }
    with writing("the calibration", folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / _FILE, tensors, notes)
    return folder


def load_calibration(path: str | Place) -> Calibration:
    """Read back what `save_calibration` wrote."""
    folder, saved = to_place(path), f"calibration in '{path}'"
    if not (folder / _FILE).is_file():
        raise ArtefactError(
            f"no calibration in '{folder}': {not_there(folder / _FILE)}. Save one with save_calibration."
        )
    with reading(saved, "Save it again."):
        tensors, notes = read_tensors(folder / _FILE)
        if notes.get("format") != FORMAT or notes.get("method") not in [*METHODS]:
            raise ArtefactError(
                f"{saved} is of a kind that this dubito does not know (format {notes.get('format')}, method "
                f"{notes.get('method')}). Update dubito, or save it again."
            )
        method = make_calibration(notes["method"], **{key: _value(one) for key, one in notes["settings"].items()})
        learned = {**{key: _value(one) for key, one in notes["learned"].items()}, **tensors}
        if learned.keys() != set(method.learned):
            raise ValueError(f"it holds {', '.join(sorted(learned)) or 'nothing'} for a method of that name")
        for name, value in learned.items():
            setattr(method, name, value)
        method.classes_ = notes["classes"]
        method.check_learned()
        method.provenance_ = Provenance.from_json(notes["provenance"], saved)
    return method


def _text(value: Any) -> Any:
    """Infinity as text, because JSON has none."""
    return "inf" if value == float("inf") else value


def _value(value: Any) -> Any:
    return float("inf") if value == "inf" else value
