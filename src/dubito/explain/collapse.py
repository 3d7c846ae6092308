"""Does the disagreement of members collapse? Mutual information against the size of sub-ensembles, and of models.

    I[Y; M] = I[Y; K] + I[Y; M | K]        members = between sub-ensembles K + within them

As sub-ensembles grow, their means come together and I[Y; K] vanishes, while members disagree as before (Kirsch 2024,
arXiv 2409.02628, section 3 and eqs 10 to 17). What is fitted is I[Y; K] ~ A s^-a for sub-ensembles of s members, by
least squares in logarithms.

How much of a fall says nothing about the members? Where they differ little, MI is half a variance, and over all
partitions of m members into means of s the variance between means is, whatever the members,

    (m - s) / (s (m - 1))  of that between members: 1/s, less for the last few sub-ensembles

(sampling without replacement; ours, not the paper's). It stands beside every value as "by averaging". Random partitions
deviate from it only where members differ much; neighbours in their stored order also where they belong together.

Intervals are bootstraps over images, with the same images for all sizes, so that falls and exponents have intervals of
their own. The members are taken as they are: how much another ensemble would differ is not in the intervals.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from dubito.errors import TableError, ValueRangeError
from dubito.explain.sub_ensembles import BY, Partitioned, check_same_ensemble, partition
from dubito.metrics import Interval, balanced_auroc
from dubito.metrics.bootstrap import draw_rows, percentiles
from dubito.result import Result, axes
from dubito.table import Table
from dubito.types import Json
from dubito.validate import check_bootstrap

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ByModel = Mapping[Any, Table]
"""Tables by the size of the models that made them: positive numbers."""
Means = Float64[np.ndarray, "b v"]
"""Of total, aleatoric and MI by size: the first row of all images, then of every resample."""
CollapseKind = Literal["same", "unknown", "collapse", "partial", "none"]
"""No disagreement at all; nothing to compare; MI falls as averaging makes it; falls less; stays."""

_NO_LOGARITHM = 1e-9
"""Nats: a mean MI below has no logarithm worth fitting."""
_ROUNDING = 1e-5
"""Nats: what rounding in float32 may leave of a mutual information of zero."""
_MOSTLY, _HARDLY = 0.5, 0.25
"""Of the fall that averaging alone explains, on a logarithmic scale: from here a collapse, up to here none."""
_GROUPS = {2: "Pairs", 3: "Triples"}
_LARGE = 1000


@final
@dataclass(frozen=True)
class Level:
    """One size of sub-ensembles.

    Attributes:
        count: How many sub-ensembles.
        size: How many members in each.
        information: I[Y; K], the mean over images, in nats.
        share: Its share of the total uncertainty.
        fall: How many times less than with single members; infinite where nothing is left.
        expected: I[Y; K] if members were alike and differed little: what averaging alone leaves.
        auroc: The AUROC of I[Y; K], OOD against in-distribution images, if there are OOD images.
        spread: The standard deviation of information over partitions, which is not in the intervals.
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


class Decay(NamedTuple):
    """A s^-a, fitted by least squares to the logarithms of mean MI and size: A, a, and the a of averaging alone."""

    scale: float
    exponent: Interval
    expected: float | None = None


@final
@dataclass(frozen=True)
class Collapse(Result):
    """How far the disagreement of one ensemble collapses.

    Attributes:
        name: The name of its table.
        key: The size of its models, if several were compared.
        rows: The number of images.
        members: The number of members, m.
        order: How members were put together.
        total: Mean uncertainty of the ensemble, in nats.
        aleatoric: Its part that members agree on.
        levels: By size of sub-ensembles, from single members on.
        decay: MI against the size of sub-ensembles; None if there is only one, or nothing left.
        largest: MI of the image that members disagree most about.
        ood: The name of the OOD table.
        change: AUROC of the largest sub-ensembles minus that of single members.
        scores: By size, MI of every in-distribution image, in the first partition.
        ood_scores: By size, MI of every OOD image.
    """

    titles: ClassVar[Mapping[str, str]] = {
        "sub_ensembles": "sub-ensembles",
        "information": "MI (nats)",
        "expected": "by averaging",
        "auroc": "AUROC",
    }

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
    ood: str | None = None
    change: Interval | None = None
    scores: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)
    ood_scores: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

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
    def kind(self) -> CollapseKind:
        """Which kind of collapse; intervals must be clear of the bounds."""
        if self.largest <= _ROUNDING:
            return "same"
        if len(self.levels) == 1:
            return "unknown"
        low, high = (
            math.log(max(end, 1.0)) / math.log(self.expected_fall)
            for end in (self.levels[-1].fall.low, self.levels[-1].fall.high)
        )
        return "collapse" if low >= _MOSTLY else "none" if high <= _HARDLY else "partial"

    @property
    def verdict(self) -> str:
        """Whether MI collapses, and what to do."""
        last, whole = self.levels[-1], f"all {self.members} members at once"
        groups = _GROUPS.get(last.size, f"Sub-ensembles of {last.size}")
        falls = f"MI falls {times(last.fall.value)} from 1 to {last.size}"
        by_averaging = f"averaging alone explains {times(self.expected_fall)}"
        stays = "MI hardly falls" if last.fall.value >= 1 else "MI does not fall"
        return {
            "same": f"Your members are the same model: they disagree about none of {self.rows} images. "
            f"Use members that were trained apart: with other seeds, data or architectures.",
            "unknown": _unknown(self),
            "collapse": f"{groups} of your members agree; {falls} ({by_averaging}): use the inner level ({whole}).",
            "partial": f"{falls}, less than averaging would make it ({by_averaging}): {groups.lower()} keep "
            f"differences of their own. Use {whole}: nothing is lost there.",
            "none": f"No collapse: {stays} from 1 to {last.size} ({times(last.fall.value)}; {by_averaging}). Members "
            f"of a sub-ensemble are alike, and sub-ensembles differ: one member of each would say nearly as much.",
        }[self.kind]

    def title(self) -> str:
        """Which ensemble, on which images."""
        return f"{self.members} members, {self.rows} images of {self.name}; {self.order}"

    def records(self) -> list[dict[str, Any]]:
        """One row per size of sub-ensembles."""
        keys = ("information", "share", "fall", "expected", *(("auroc",) if self.ood else ()))
        return [{"sub_ensembles": str(one), **{key: getattr(one, key) for key in keys}} for one in self.levels]

    def cell(self, key: str, value: Any) -> str:
        """MI in five digits, shares and AUROCs in per cent, falls as factors."""
        if value is None or key == "sub_ensembles":
            return super().cell(key, value)
        if key in ("share", "auroc"):
            return _percent(value)
        if key == "fall":
            return times(value.value)
        return f"{value:.5f}" if key == "expected" else f"{value.value:.5f} [{value.low:.5f}, {value.high:.5f}]"

    def findings(self) -> list[str]:
        """The verdict, and what it rests on."""
        if self.kind == "same":
            return [self.verdict]
        first, last = self.levels[0], self.levels[-1]
        share = f"Of all uncertainty, {_percent(first.share)} is epistemic with single members ({first})"
        if len(self.levels) == 1:
            return [self.verdict, f"{share}."]
        sentences = [
            self.verdict,
            f"{share} and {_percent(last.share)} with {last}. The rest has not gone: members disagree inside "
            f"sub-ensembles, where the outer level does not look.",
        ]
        half = next((level for level in self.levels if level.fall.value >= 2), None)
        if half is not None:
            sentences.append(f"Half of it is lost from {half} on.")
        if self.decay is not None and self.decay.expected is not None:
            exponent = self.decay.exponent
            sentences.append(
                f"MI falls about as s^-{exponent.value:.2f} [{exponent.low:.2f}, {exponent.high:.2f}] with the size s "
                f"of sub-ensembles; if members were alike and differed little, as s^-{self.decay.expected:.2f}."
            )
        if self.change is not None and first.auroc is not None and last.auroc is not None:
            sentences.append(_detection(self, first.auroc, last.auroc, self.change))
        return sentences


@final
@dataclass(frozen=True)
class EnsembleDiagnosis(Result):
    """What `diagnose_ensemble` returns: print it, plot it, take it as JSON, or write it as a page with `dubito.report`.

    Attributes:
        of: The ensemble's name in the tables.
        ensembles: One, or one for each size of the models.
        confidence: The confidence of the intervals.
        decay: MI of all members against the size of the models, if there are several.
        fall: From the smallest to the largest of them.
    """

    titles: ClassVar[Mapping[str, str]] = Collapse.titles

    of: str
    ensembles: tuple[Collapse, ...]
    confidence: float
    decay: Decay | None = None
    fall: Interval | None = None

    @property
    def verdict(self) -> str:
        """One sentence."""
        return _over_models(self) if len(self.ensembles) > 1 else self.ensembles[0].verdict

    def title(self) -> str:
        """Which ensembles, on which images."""
        first = self.ensembles[0]
        many = f"{first.members} members" if len(self.ensembles) == 1 else f"{len(self.ensembles)} ensembles"
        return f"Mutual information of '{self.of}', {many}, {first.rows} images of {first.name}; {first.order}"

    def records(self) -> list[dict[str, Any]]:
        """One row per size of sub-ensembles, of every ensemble."""
        several = len(self.ensembles) > 1
        return [
            {**({"models": one.key} if several else {}), **record} for one in self.ensembles for record in one.records()
        ]

    def cell(self, key: str, value: Any) -> str:
        """As of a single ensemble."""
        return f"{value:g}" if key == "models" else self.ensembles[0].cell(key, value)

    def findings(self) -> list[str]:
        """The verdict, and what it rests on; of several ensembles, their verdicts."""
        if len(self.ensembles) == 1:
            return self.ensembles[0].findings()
        return [self.verdict, *(f"{one.key:g}: {one.verdict}" for one in self.ensembles)]

    def to_dict(self) -> Json:
        """Plain values, without those of every image; None for infinity."""
        ensembles = [{**one.to_dict(), "kind": one.kind} for one in self.ensembles]
        return {**super().to_dict(), "ensembles": ensembles}

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """MI against the size of sub-ensembles, one line per ensemble; dashed what averaging alone leaves."""
        ax = axes(ax)
        for one in self.ensembles:
            sizes, values = [level.size for level in one.levels], [level.information for level in one.levels]
            errors = np.array([[v.value - v.low for v in values], [v.high - v.value for v in values]]).clip(min=0)
            name = one.name if one.key is None else f"{one.key:g}"
            line = ax.errorbar(sizes, [v.value for v in values], yerr=errors, marker="o", capsize=3, label=name)
            ax.plot(sizes, [level.expected for level in one.levels], "--", color=line[0].get_color(), alpha=0.6)
        ax.set(xscale="log", yscale="log", xlabel="members per sub-ensemble", ylabel="mutual information (nats)")
        ax.legend(frameon=False)
        return ax


def diagnose_ensemble(
    table: Table | ByModel,
    *,
    of: str = "members",
    ood: Table | ByModel | None = None,
    partitions: int = 5,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> EnsembleDiagnosis:
    """Measure how much members disagree, alone and in sub-ensembles.

    Args:
        table: With the ensemble's logits (column NAME_logit), or its summary (NAME, NAME_between). To compare models of
            several sizes: a table for each, by width, number of parameters or another positive number.
        of: NAME, such as "members", "dropout", "views", "tiles_7", "masks".
        ood: Out-of-distribution images with the same columns, to see how well MI detects them; for several sizes, one
            table for each.
        partitions: How many random partitions are averaged for each size. 0 keeps neighbours together in their stored
            order, which shows whether they belong together. A summary knows neighbours only.
        confidence: Confidence of the bootstrap intervals.
        resamples: Number of bootstrap resamples.
        seed: Seed of the partitions, the balanced draws and the bootstrap.
    """
    check_bootstrap(by=BY, confidence=confidence, resamples=resamples, seed=seed)
    if partitions < 0:
        raise ValueRangeError(
            f"{BY}: partitions must not be negative; got {partitions}. 5 are usual, 0 for neighbours."
        )
    tables, others = _paired(table, ood)
    ensembles, means = [], []
    for key, one in tables.items():
        inside, outside = partition(one, of, partitions=partitions, seed=seed), None
        if key in others:
            outside = partition(others[key], of, partitions=partitions, seed=seed, default_name="ood")
            check_same_ensemble(one, others[key], of, inside, outside)
        means.append(_means(inside, resamples, seed))
        aurocs = None if outside is None else _aurocs(inside, outside, resamples, seed)
        ensembles.append(_collapse(inside, outside, means[-1], aurocs, key, confidence))
    if len(ensembles) == 1:
        return EnsembleDiagnosis(of, tuple(ensembles), confidence)
    mi = np.stack([of_model[:, 2] for of_model in means], 1)
    return EnsembleDiagnosis(
        of,
        tuple(ensembles),
        confidence,
        decay=_fitted(mi, [one.key or 0.0 for one in ensembles], confidence),
        fall=_interval(_ratio(mi[:, 0], mi[:, -1]), confidence) if float(mi.min()) > _NO_LOGARITHM else None,
    )


class _Aurocs(NamedTuple):
    """By size, over partitions: the mean, in the first row of balanced draws, then of resamples; and the deviation."""

    mean: Float64[np.ndarray, "b q"]
    spread: Float64[np.ndarray, "q"]


def _collapse(
    inside: Partitioned,
    outside: Partitioned | None,
    means: Means,
    aurocs: _Aurocs | None,
    key: float | None,
    confidence: float,
) -> Collapse:
    """Everything about one ensemble, from its means of all images and of resamples."""
    mi = means[:, 2:]
    sizes = [float(size) for _, size in inside.partitions]
    decay = _fitted(mi, sizes, confidence)
    if decay is not None:
        decay = decay._replace(expected=float(_exponents(np.array([_averaging(inside)]), sizes)[0]))
    change = None
    if aurocs is not None and len(sizes) > 1:
        change = _interval(aurocs.mean[:, -1] - aurocs.mean[:, 0], confidence)
    return Collapse(
        name=inside.name,
        key=key,
        rows=len(inside.total),
        members=inside.members,
        order=inside.order,
        total=_interval(means[:, 0], confidence),
        aleatoric=_interval(means[:, 1], confidence),
        levels=_levels(inside, means, aurocs, confidence),
        decay=decay,
        largest=float(inside.epistemic.max()),
        ood=None if outside is None else outside.name,
        change=change,
        scores=inside.first,
        ood_scores={} if outside is None else outside.first,
    )


def _levels(inside: Partitioned, means: Means, aurocs: _Aurocs | None, confidence: float) -> tuple[Level, ...]:
    total, mi = means[:, 0], means[:, 2:]
    return tuple(
        Level(
            count,
            size,
            information=_interval(mi[:, place], confidence),
            share=_interval(_ratio(mi[:, place], total, otherwise=0.0), confidence),
            fall=_interval(_ratio(mi[:, 0], mi[:, place]) if place else np.ones(len(mi)), confidence),
            expected=float(mi[0, 0]) * left,
            auroc=None if aurocs is None else _interval(aurocs.mean[:, place], confidence),
            spread=float(inside.between[place].mean(0).std(correction=0)),
            auroc_spread=None if aurocs is None else float(aurocs.spread[place]),
        )
        for place, ((count, size), left) in enumerate(zip(inside.partitions, _averaging(inside), strict=True))
    )


def _averaging(inside: Partitioned) -> list[float]:
    """By size, what averaging alone leaves of MI."""
    m = inside.members
    return [(m - size) / (size * (m - 1)) for _, size in inside.partitions]


def _means(of: Partitioned, resamples: int, seed: int) -> Means:
    """MI is averaged over partitions before rows are drawn: intervals are those of images."""
    rows = torch.stack([of.total, of.aleatoric, *(values.mean(1) for values in of.between)], 1).numpy()
    drawn = [rows[line].mean(0) for block in draw_rows(len(rows), resamples, seed) for line in block]
    return np.stack([rows.mean(0), *drawn])


def _aurocs(inside: Partitioned, outside: Partitioned, resamples: int, seed: int) -> _Aurocs:
    scores, ood_scores = (torch.cat(side.between, 1).T.contiguous().numpy() for side in (inside, outside))
    aurocs = balanced_auroc(scores, ood_scores, draws=5, resamples=resamples, seed=seed)
    both = np.concatenate([aurocs.drawn.mean(0, keepdims=True), aurocs.resampled])
    ends = np.cumsum([values.shape[1] for values in inside.between])
    by_size = np.split(both, ends[:-1], axis=1)
    return _Aurocs(np.stack([part.mean(1) for part in by_size], 1), np.array([part[0].std() for part in by_size]))


def _fitted(mi: Float64[np.ndarray, "b q"], sizes: Sequence[float], confidence: float) -> Decay | None:
    if len(sizes) < 2 or float(mi.min()) <= _NO_LOGARITHM:
        return None
    exponents = _exponents(mi, sizes)
    scale = float(np.exp(np.log(mi[0]).mean() + exponents[0] * np.log(sizes).mean()))
    return Decay(scale, _interval(exponents, confidence))


def _exponents(mi: Float64[np.ndarray, "b q"], sizes: Sequence[float]) -> Float64[np.ndarray, "b"]:
    """Minus the slope of log MI over log size, by least squares."""
    x = np.log(np.array(sizes, dtype=float))
    x -= x.mean()
    slope: np.ndarray = np.log(mi) @ x / (x @ x)
    return -slope


def _interval(values: Float64[np.ndarray, "b"], confidence: float) -> Interval:
    """The first is the value; the others are resamples. Infinite ones stay infinite."""
    kept = np.where(np.isfinite(values[1:]), values[1:], np.finfo(float).max)
    low, high = percentiles(kept, confidence, method="nearest")
    least, most = (math.inf if end == np.finfo(float).max else float(end) for end in (low, high))
    return Interval(float(values[0]), least, most, confidence)


def _ratio(
    part: Float64[np.ndarray, "b"], whole: Float64[np.ndarray, "b"], *, otherwise: float = math.inf
) -> Float64[np.ndarray, "b"]:
    """Where the whole is nothing but rounding, `otherwise`."""
    some = whole > _NO_LOGARITHM
    ratio: np.ndarray = np.where(some, part / np.where(some, whole, 1.0), otherwise)
    return ratio


def _paired(
    table: Table | ByModel, ood: Table | ByModel | None
) -> tuple[dict[float | None, Table], dict[float | None, Table]]:
    """Tables by size of the models, the smallest first; a single one has none."""
    if isinstance(table, Table):
        if isinstance(ood, Mapping):
            raise TableError(
                f"{BY}: ood must be one table where `table` is one; got a mapping. Give one table, or call it once per "
                f"OOD set."
            )
        return {None: table}, {} if ood is None else {None: ood}
    sizes = list(table)
    if len(sizes) < 2 or not all(isinstance(size, Real) and 0 < float(size) < math.inf for size in sizes):
        raise TableError(
            f"{BY}: tables by size of the models must be two or more, with positive numbers as keys; got "
            f"{', '.join(map(repr, sizes)) or 'none'}. Give {{width: table, ...}}, or a single table."
        )
    if ood is not None and (isinstance(ood, Table) or set(ood) != set(sizes)):
        got = "one table" if isinstance(ood, Table) else ", ".join(map(repr, ood))
        raise TableError(
            f"{BY}: ood must have a table for each size of the models, {', '.join(map(repr, sizes))}; got {got}. "
            f"Extract the OOD images with every ensemble."
        )
    order = sorted(sizes)
    others: dict[float | None, Table] = {} if ood is None else {float(size): ood[size] for size in order}
    return {float(size): table[size] for size in order}, others


def times(value: float) -> str:
    """How many times less.

    >>> times(4.04), times(float("inf"))
    ('4.0x', 'to nothing')
    """
    if not math.isfinite(value):
        return "to nothing"
    return f"{value:.1f}x" if value < _LARGE else f"{value:.3g}x"


def _percent(share: Interval) -> str:
    return f"{100 * share.value:.1f} % [{100 * share.low:.1f}, {100 * share.high:.1f}]"


def _over_models(diagnosis: EnsembleDiagnosis) -> str:
    """What the size of models does to the disagreement of all their members."""
    small, large = diagnosis.ensembles[0], diagnosis.ensembles[-1]
    if diagnosis.fall is None or diagnosis.decay is None:
        return "Members of some of these ensembles are the same model, so nothing can be fitted."
    way = f"from {small.key:g} to {large.key:g}"
    change = diagnosis.decay.exponent
    fitted = f"MI ~ size^{-change.value:+.2f} [{-change.high:+.2f}, {-change.low:+.2f}]"
    if diagnosis.fall.low > 1:
        return (
            f"Your larger models agree more: MI falls {times(diagnosis.fall.value)} {way} ({fitted}). A low MI of "
            f"large models is no sign that they know more: compare it within one size only, or take members from "
            f"inside the models (tiles, masks)."
        )
    if diagnosis.fall.high < 1:
        return f"Your larger models disagree more: MI grows {times(1 / diagnosis.fall.value)} {way} ({fitted})."
    return f"MI does not change beyond its interval {way} ({fitted})."


def _unknown(collapse: Collapse) -> str:
    members = collapse.members
    if any(members % size == 0 for size in range(2, members // 2 + 1)):
        return (
            f"MI of {members} members is known, but not that of sub-ensembles, so whether it collapses cannot be seen. "
            f'Keep the members\' logits (keep="logits") to split them.'
        )
    return (
        f"{members} members have no equal sub-ensembles of two or more, so whether MI collapses cannot be seen. "
        f"Give at least 4, an even number."
    )


def _detection(collapse: Collapse, first: Interval, last: Interval, change: Interval) -> str:
    ends = f"AUROC of MI, {collapse.ood} against {collapse.name}: {_percent(first)} with single members"
    then = f"{_percent(last)} with {collapse.levels[-1]}"
    gap = f"{100 * change.value:+.1f} points [{100 * change.low:+.1f}, {100 * change.high:+.1f}]"
    if change.high < 0:
        return f"{ends}, but {then}, {gap}: the outer level also detects OOD images less well."
    if change.low > 0:
        return f"{ends}, and even {then}, {gap}."
    return f"{ends}, {then}: no change beyond the interval ({gap})."
