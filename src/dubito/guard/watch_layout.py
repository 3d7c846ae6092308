"""What the state of a watch on the disk must look like, for a watch to go on from it.

Whoever can change the file can make its hash agree, so the hash is no reason to trust numbers: some of them would make
every test silent, and others would fail after thousands of images.
"""

from typing import Any

from dubito.storage import COUNT, check_layout
from dubito.types import Json

_MOST = 1e12
"""No sum of logarithms, and no number of images, comes near it."""
_CLASSES = range(1 << 24)


def check_watch(saved: Json, new: Json) -> None:
    """Raise ValueError unless a state could be that of a watch whose state was `new` when it began."""
    tests: Json = _alike(new["tests"])
    tests["classes"]["counts"] = [range(1 << 40), ...]  # classes that no calibration image was predicted to be
    image = {"accept": bool, "stratum": range(len(new["strata"])), "predicted": _CLASSES, "at": COUNT, "label": str}
    request = {"names": [str, ...], "weights": [float, ...], "images": COUNT, "largest": float, "at": COUNT}
    layout = {
        **dict.fromkeys(("images", "draws", "unknown", "missing", "repeated", "noted"), COUNT),
        "every": range(1, COUNT.stop),
        "edges": _alike(new["edges"]),
        "strata": _alike(new["strata"]),
        "tests": tests,
        "rate": _alike(new["rate"]),
        "requests": [request, ...],
        "pending": [[str, {**image, "requested": bool}], ...],
        "recent": [[str, bool, _CLASSES, dict.fromkeys(new["tests"], float)], ...],
        "peaks": {str: {"log_evidence": float, "since": COUNT, "words": str, "examples": [str, ...]}},
        "alarms": [{"kind": str, "images": COUNT, "id": str, "since": COUNT}, ...],
        "history": [[float] * 3, ...],
        "rates": [[float] * 5, ...],
    }
    check_layout(saved, layout)
    _check_numbers(saved)
    _check_rate(saved["rate"], new["rate"])
    _check_requests(saved)


def _alike(value: Any) -> Any:
    """The layout of plain values that have the same names, lengths and types; null stands for minus infinity."""
    if isinstance(value, dict):
        return {key: _alike(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_alike(one) for one in value]
    if value is None:
        return (None, float)
    return COUNT if type(value) is int else type(value)


def _check_numbers(saved: Json) -> None:
    """Numbers that sums, logarithms and quotients are taken of."""
    learned = [one for test in saved["tests"].values() for row in test["learned"] for one in row]
    if not all(1 <= one < _MOST for one in learned):
        raise ValueError("what a test has learned is out of range")
    if not all(0 < labels < _MOST and 0 <= errors <= labels for labels, errors in saved["strata"]):
        raise ValueError("strata must have labels, and fewer errors than labels")
    if not all(-_MOST < one < _MOST for one in _numbers([saved["tests"], saved["rate"]])):
        raise ValueError("what the tests have seen is out of range")


def _check_rate(rate: Json, new: Json) -> None:
    """The guarantee's own bound, and no more outcomes than images."""
    if rate["bound"] != new["bound"] or not rate["known"] <= rate["images"] or rate["total"] < 0:
        raise ValueError("the outcomes of labelled images are not those of this guarantee")


def _numbers(value: Any) -> list[int | float]:
    """All numbers in plain values."""
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return [one for part in parts for one in _numbers(part)]
    return [value] if isinstance(value, int | float) else []


def _check_requests(saved: Json) -> None:
    """Draws: of images that are remembered, each with its weight."""
    pending = dict(saved["pending"])
    for one in saved["requests"]:
        names, weights = one["names"], one["weights"]
        known = all(name in pending and pending[name]["requested"] for name in names)
        weighted = len(weights) == len(names) and all(1 <= weight <= one["largest"] < _MOST for weight in weights)
        if not names or not known or not weighted or len(names) > one["images"] or len(set(names)) < len(names):
            raise ValueError("a draw of images to label is not one that was made")
