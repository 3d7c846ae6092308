"""Numbers with intervals, in few digits, and a JSON file with one row a line."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dubito.metrics import Interval, paired_errors

NORMAL = 1.96
"""Standard errors to either side: 95%."""


def short(result: Interval) -> list[float]:
    """Value, low, high."""
    return [round(number, 4) for number in result[:3]]


def difference(metric: Any, one: Tensor, other: Tensor, *arrays: Tensor) -> list[float]:
    """metric(one) - metric(other) on the same rows, with its interval by paired resamples: value, low, high."""
    value = metric(one, *arrays) - metric(other, *arrays)
    (error,) = paired_errors(metric, [one], other, *arrays)
    return [round(number, 4) for number in (value, value - NORMAL * error, value + NORMAL * error)]


def sign(result: list[float]) -> int:
    """1 or -1 where the interval leaves out zero, else 0."""
    return int(np.sign(result[0])) if result[1] > 0 or result[2] < 0 else 0


def with_earlier(expected: Path, part: str, result: dict[str, Any]) -> dict[str, Any]:
    """What was found of some models or sets, beside what the file has of others: long experiments run in parts."""
    earlier = json.loads(expected.read_text())[part] if expected.exists() else {}
    return earlier | result


def write(to: Path, command: str, result: dict[str, Any]) -> None:
    """Indented, but for lists of numbers and for dictionaries without another inside."""
    text = json.dumps({"command": command, **result}, indent=1)
    for innermost in (r"\[[^\[\]{}]*\]", r"\{[^{}]*\}"):
        text = re.sub(innermost, lambda part: " ".join(part[0].split()), text)
    to.write_text(text + "\n")
