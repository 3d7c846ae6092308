"""What `diagnose` found, as numbers, as a table like Table 1 of Pearce et al. 2021, and in plain words."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from dubito.explain._balanced import Estimate, points
from dubito.explain._given import MEAN
from dubito.explain._sentences import findings, verdict
from dubito.types import Json

SCORES = ("max_probability", "entropy", "scaled_entropy", "density")
_HEADER = ("A max p", "B entropy", "C cool", "D density", "1 saturation", "2 extrapolation", "3 overlap")


@final
@dataclass(frozen=True)
class Causes:
    """Of one OOD set, or the mean over several.

    Attributes:
        name: Of the set.
        rows: Of a balanced set, from either side.
        auroc: By score of SCORES, foreign against known.
        causes: By name: saturation, extrapolation, overlap; each a difference of AUROCs, perhaps negative.
        together: Saturation and extrapolation as one, D - B.
        parts: What is compared: the causes; as one (TOGETHER, REST, ALL) those that a negative one leaves untold.
        lead: By how much the largest part is ahead of the second; None if there is but one.
        saturated: Share of the foreign images whose largest probability is exactly 1.0 in float32.
    """

    name: str
    rows: int
    auroc: dict[str, Estimate]
    causes: dict[str, Estimate]
    together: Estimate
    parts: dict[str, Estimate]
    lead: Estimate | None
    saturated: float

    @property
    def ranked(self) -> list[str]:
        """The parts, the largest first."""
        return sorted(self.parts, key=lambda part: -self.parts[part].value)

    @property
    def dominant(self) -> str | None:
        """The largest part, if its lead is beyond the interval; else None."""
        return self.ranked[0] if self.lead is not None and self.lead.low > 0 else None

    def to_json(self) -> Json:
        """Plain numbers."""
        return {
            "rows": self.rows,
            "auroc": {name: value._asdict() for name, value in self.auroc.items()},
            "causes": {name: value._asdict() for name, value in self.causes.items()},
            "together": self.together._asdict(),
            "dominant": self.dominant,
            "parts": {name: value._asdict() for name, value in self.parts.items()},
            "lead": None if self.lead is None else self.lead._asdict(),
            "saturated": self.saturated,
        }


@final
@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found: print it, take it as JSON, or write it as a page with report.diagnosis.

    Attributes:
        known: The known table's name.
        known_rows: How many of its rows were scored.
        classes: c.
        accuracy: On these rows, if they have labels of the model's classes.
        saturated: Share of them whose largest probability is exactly 1.0 in float32.
        by_set: By OOD set.
        mean: Over OOD sets, if there are several.
        density: What D is.
        fitted_on: The rows that it learned from.
        draws: How many balanced sets.
        confidence: Of the intervals.
        notes: What is doubtful about the tables.
        inside: By score, the uncertainty of every known row; with a classifier also norm and cosine.
        outside: By OOD set, the same.
    """

    known: str
    known_rows: int
    classes: int
    accuracy: float | None
    saturated: float
    by_set: dict[str, Causes]
    mean: Causes | None
    density: str
    fitted_on: str
    draws: int
    confidence: float
    notes: tuple[str, ...]
    inside: dict[str, Tensor] = field(repr=False, compare=False)
    outside: dict[str, dict[str, Tensor]] = field(repr=False, compare=False)

    def __getitem__(self, name: str) -> Causes:
        return self.by_set[name]

    @property
    def all(self) -> list[Causes]:
        """Every set, and the mean last."""
        return [*self.by_set.values(), *([self.mean] if self.mean else [])]

    def findings(self) -> dict[str, list[str]]:
        """By OOD set, in plain words: which cause is the largest, then a sentence or two for each."""
        return {
            causes.name: [verdict(causes), *findings(causes, self.known, self.classes, self.saturated)]
            for causes in self.by_set.values()
        } | ({MEAN: [verdict(self.mean)]} if self.mean else {})

    def to_json(self) -> Json:
        """Plain numbers, without the scores of every row."""
        left_out = ("by_set", "mean", "inside", "outside", "notes")
        return {
            **{key: value for key, value in vars(self).items() if key not in left_out},
            "sets": {causes.name: causes.to_json() for causes in self.all},
            "findings": self.findings(),
            "remarks": list(self.notes),
        }

    def lines(self) -> list[list[str]]:
        """A header and one line a set, in per cent; a cell has three rows: value, interval, spread over draws."""
        body = [
            [f"{causes.name}\n{self.confidence:.0%} interval\nover draws", *map(_cell, _columns(causes))]
            for causes in self.all
        ]
        return [["", *_HEADER], *body]

    def __str__(self) -> str:
        accuracy = "" if self.accuracy is None else f", accuracy {points(self.accuracy)} %"
        title = f"AUROC of foreign images against {self.known} ({self.known_rows} images{accuracy}), in per cent"
        header, *body = self.lines()
        split = [list(part) for line in body for part in zip(*(cell.split("\n") for cell in line), strict=True)]
        told = [f"D: {self.density}; fitted on {self.fitted_on}.", *self.notes]
        for name, sentences in self.findings().items():
            told += ["", f"{name}: {sentences[0]}", *(f"  {sentence}" for sentence in sentences[1:])]
        return "\n".join([title, *_aligned([header, *split]), *told])


def _columns(causes: Causes) -> list[Estimate]:
    return [*causes.auroc.values(), *causes.causes.values()]


def _cell(value: Estimate) -> str:
    return f"{points(value.value)}\n[{points(value.low)}, {points(value.high)}]\n±{100 * value.spread:.2f}"


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
