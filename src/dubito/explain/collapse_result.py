"""What `diagnose_ensemble` found: how much members disagree, alone and in sub-ensembles; as numbers and in words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, final

from torch import Tensor

from dubito.explain._agreement import findings, over_models, verdict
from dubito.metrics import Interval
from dubito.types import Json

Kind = Literal["same", "unknown", "collapse", "partial", "none"]
"""No disagreement at all; nothing to compare; MI falls as averaging makes it; falls less; stays."""

_NOTHING = 1e-5
"""Nats: what rounding in float32 may leave of a mutual information of zero."""
_MOSTLY, _HARDLY = 0.5, 0.25
"""Of the fall that averaging alone explains, on a logarithmic scale: from here a collapse, up to here none."""


@final
@dataclass(frozen=True)
class Level:
    """One size of sub-ensembles.

    Attributes:
        count: How many sub-ensembles.
        size: Members in each.
        information: I[Y; K], the mean over images, in nats.
        share: Of the total uncertainty.
        fall: How many times less than with single members; infinite where nothing is left.
        expected: I[Y; K] if members were alike and differed little: what averaging alone leaves.
        auroc: Of I[Y; K], foreign against known images, if there are foreign ones.
        spread: Of information over partitions, their standard deviation: what is not in the intervals.
        auroc_spread: The same of the AUROC.
    """

    count: int
    size: int
    information: Interval
    share: Interval
    fall: Interval
    expected: float
    auroc: Interval | None
    spread: float = 0.0
    auroc_spread: float | None = None

    def __str__(self) -> str:
        return f"{self.count} x {self.size}"

    def to_json(self) -> Json:
        """Plain numbers; None for infinity."""
        intervals = {key: getattr(self, key) for key in ("information", "share", "fall", "auroc")}
        return {
            "count": self.count,
            "size": self.size,
            "expected": self.expected,
            "spread": self.spread,
            "auroc_spread": self.auroc_spread,
            **{key: value and _plain(value) for key, value in intervals.items()},
        }


class Decay(NamedTuple):
    """A s^-a, fitted by least squares to the logarithms of mean MI and size: A, a, and the a of averaging alone."""

    scale: float
    exponent: Interval
    expected: float | None = None


@final
@dataclass(frozen=True)
class Collapse:
    """Of one ensemble.

    Attributes:
        name: Of its table.
        key: The size of its models, if several were compared.
        rows: Images.
        members: m.
        order: How members came together.
        total: Mean uncertainty of the ensemble, in nats.
        aleatoric: Its part that members agree on.
        levels: By size of sub-ensembles, from single members on.
        decay: MI against the size of sub-ensembles; None if there is but one, or nothing left.
        largest: MI of the image that members disagree most about.
        foreign: The name of the foreign table.
        change: AUROC of the largest sub-ensembles less that of single members.
        inside: By size, MI of every known image, in the first partition.
        outside: By size, MI of every foreign image.
    """

    name: str
    key: float | None
    rows: int
    members: int
    order: str
    total: Interval
    aleatoric: Interval
    levels: tuple[Level, ...]
    decay: Decay | None
    largest: float
    foreign: str | None = None
    change: Interval | None = None
    inside: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)
    outside: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def epistemic(self) -> Interval:
        """Mean MI of all members at once, in nats."""
        return self.levels[0].information

    @property
    def expected_fall(self) -> float:
        """From single members to the largest sub-ensembles, by averaging alone: s (m - 1) / (m - s)."""
        size = self.levels[-1].size
        return size * (self.members - 1) / (self.members - size)

    @property
    def kind(self) -> Kind:
        """Of what was found: see `Kind`. Intervals must be clear of the bounds."""
        if self.largest <= _NOTHING:
            return "same"
        if len(self.levels) == 1:
            return "unknown"
        low, high = (
            math.log(max(end, 1.0)) / math.log(self.expected_fall)
            for end in (self.levels[-1].fall.low, self.levels[-1].fall.high)
        )
        return "collapse" if low >= _MOSTLY else "none" if high <= _HARDLY else "partial"

    def to_json(self) -> Json:
        """Plain numbers, without those of every image."""
        return {
            **{key: getattr(self, key) for key in ("name", "key", "rows", "members", "order", "kind", "foreign")},
            "total": _plain(self.total),
            "aleatoric": _plain(self.aleatoric),
            "levels": [level.to_json() for level in self.levels],
            "decay": None if self.decay is None else _decay(self.decay),
            "change": None if self.change is None else _plain(self.change),
            "findings": findings(self),
        }


@final
@dataclass(frozen=True)
class EnsembleDiagnosis:
    """What `diagnose_ensemble` found: print it, take it as JSON, or write it as a page with report.ensemble.

    Attributes:
        of: The ensemble's name in the tables.
        ensembles: One, or one for each size of the models.
        confidence: Of the intervals.
        decay: MI of all members against the size of the models, if there are several.
        fall: From the smallest to the largest of them.
    """

    of: str
    ensembles: tuple[Collapse, ...]
    confidence: float
    decay: Decay | None = None
    fall: Interval | None = None

    @property
    def verdict(self) -> str:
        """One sentence."""
        return over_models(self) if len(self.ensembles) > 1 else verdict(self.ensembles[0])

    def findings(self) -> list[str]:
        """In plain words: the verdict, then a few sentences."""
        if len(self.ensembles) == 1:
            return findings(self.ensembles[0])
        return [over_models(self), *(f"{one.key:g}: {verdict(one)}" for one in self.ensembles)]

    def lines(self) -> list[list[str]]:
        """A header and one line for each size of sub-ensembles."""
        several, foreign = len(self.ensembles) > 1, any(one.foreign for one in self.ensembles)
        interval = f"{self.confidence:.0%} interval"
        header = ["sub-ensembles", "MI (nats)", interval, "share", "fall", "by averaging"]
        lines = [[*(["models"] if several else []), *header, *(["AUROC", interval] if foreign else [])]]
        for one in self.ensembles:
            for level in one.levels:
                cells = _cells(level) + (_auroc(level.auroc) if foreign else [])
                lines.append([*([f"{one.key:g}"] if several else []), *cells])
        return lines

    def to_json(self) -> Json:
        """Plain numbers."""
        return {
            "of": self.of,
            "confidence": self.confidence,
            "ensembles": [one.to_json() for one in self.ensembles],
            "decay": None if self.decay is None else _decay(self.decay),
            "fall": None if self.fall is None else _plain(self.fall),
            "findings": self.findings(),
        }

    def __str__(self) -> str:
        first = self.ensembles[0]
        many = f"{first.members} members" if len(self.ensembles) == 1 else f"{len(self.ensembles)} ensembles"
        title = f"Mutual information of '{self.of}', {many}, {first.rows} images of {first.name}; {first.order}"
        return "\n".join([title, *_aligned(self.lines()), "", *self.findings()])


def _cells(level: Level) -> list[str]:
    mean, low, high, _ = level.information
    fall = f"{level.fall.value:.1f}x" if math.isfinite(level.fall.value) else "to nothing"
    share = f"{100 * level.share.value:.1f} %"
    return [str(level), f"{mean:.5f}", f"[{low:.5f}, {high:.5f}]", share, fall, f"{level.expected:.5f}"]


def _auroc(value: Interval | None) -> list[str]:
    if value is None:
        return ["", ""]
    return [f"{100 * value.value:.1f} %", f"[{100 * value.low:.1f}, {100 * value.high:.1f}]"]


def _plain(value: Interval) -> Json:
    numbers = {key: getattr(value, key) for key in ("value", "low", "high")}
    return {key: number if math.isfinite(number) else None for key, number in numbers.items()}


def _decay(value: Decay) -> Json:
    return {"scale": value.scale, "exponent": _plain(value.exponent), "expected": value.expected}


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
