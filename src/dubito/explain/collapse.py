"""Does the disagreement of members collapse? Mutual information against the size of sub-ensembles, and of models.

    I[Y; M] = I[Y; K] + I[Y; M | K]        members = between sub-ensembles K + within them

As sub-ensembles grow, their means come together and I[Y; K] vanishes, while members disagree as before (Kirsch 2024,
arXiv 2409.02628, section 3 and eqs 10 to 17). Fitted is I[Y; K] ~ A s^-a for sub-ensembles of s members.

How much of a fall says nothing about the members? Where they differ little, MI is half a variance, and over all
partitions of m members into means of s the variance between means is, whatever the members,

    (m - s) / (s (m - 1))  of that between members: 1/s, less for the last few sub-ensembles

(sampling without replacement; ours, not the paper's). It stands beside every value as "by averaging". Random partitions
deviate from it only where members differ much; neighbours in their stored order also where they belong together.
Intervals are bootstraps over the same images for all sizes; how much another ensemble would differ is not in them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, final

import numpy as np
from jaxtyping import Float64
from torch import Tensor

from dubito.errors import TableError
from dubito.explain.sub_ensembles import BY, Partitioned, check_same, partition, resampled_aurocs, resampled_means
from dubito.metrics import Interval
from dubito.metrics.bootstrap import percentiles
from dubito.result import Axes, Result, axes
from dubito.table import Table
from dubito.types import Json
from dubito.validate import check_bootstrap, check_number

ByModel = Mapping[Any, Table]
"""Tables by the size of the models that made them: positive numbers."""
CollapseKind = Literal["same", "unknown", "collapse", "partial", "none"]
"""No disagreement at all; nothing to compare; MI falls as averaging makes it; falls less; stays."""

_NO_LOGARITHM = 1e-9
"""Nats: a mean MI below has no logarithm worth fitting."""
_ROUNDING = 1e-5
"""Nats: what rounding in float32 may leave of a mutual information of zero."""
_MOSTLY, _HARDLY = 0.5, 0.25
"""Of the fall that averaging alone explains, on a logarithmic scale: from here a collapse, up to here none."""
_GROUPS = {2: "Pairs", 3: "Triples"}


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
        fall, expected = self.levels[-1].fall, math.log(self.expected_fall)
        low, high = (math.log(max(end, 1.0)) / expected for end in (fall.low, fall.high))
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
            "same": f"Your members are the same model: they agree on all {self.rows} images. "
            f"Use members that were trained apart: with other seeds, data or architectures.",
            "unknown": f"MI of {self.members} members is known, but not that of sub-ensembles, so whether it collapses "
            f'cannot be seen. Keep the members\' logits (keep="logits") to split them.'
            if any(self.members % size == 0 for size in range(2, self.members // 2 + 1))
            else f"{self.members} members have no equal sub-ensembles of two or more, so whether MI collapses cannot "
            f"be seen. Use at least 4, an even number.",
            "collapse": f"{groups} of your members agree; {falls} ({by_averaging}): use the inner level ({whole}).",
            "partial": f"{falls}, less than averaging would make it ({by_averaging}): {groups.lower()} keep "
            f"differences of their own. Use {whole}: nothing is lost there.",
            "none": f"No collapse: {stays} from 1 to {last.size} ({times(last.fall.value)}; {by_averaging}). "
            f"Members of a sub-ensemble are alike, and sub-ensembles differ: one member of each would be nearly as "
            f"informative.",
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
        if first is last:
            return [self.verdict, f"{share}."]
        sentences = [
            self.verdict,
            f"{share} and {_percent(last.share)} with {last}. The rest is still there: members disagree "
            f"inside sub-ensembles, which the outer level does not see.",
        ]
        if half := [level for level in self.levels if level.fall.value >= 2]:
            sentences.append(f"Half of it is lost from {half[0]} on.")
        if self.decay is not None and self.decay.expected is not None:
            exponent = self.decay.exponent
            sentences.append(
                f"MI falls about as s^-{exponent.value:.2f} [{exponent.low:.2f}, {exponent.high:.2f}] with the size s "
                f"of sub-ensembles; if members were alike and differed little, as s^-{self.decay.expected:.2f}."
            )
        if (change := self.change) is not None and first.auroc is not None and last.auroc is not None:
            how = "less well" if change.high < 0 else "better" if change.low > 0 else "as well, within the interval"
            sentences.append(
                f"AUROC of MI, {self.ood} against {self.name}: {_percent(first.auroc)} with single members, "
                f"{_percent(last.auroc)} with {last}, {100 * change.value:+.1f} points [{100 * change.low:+.1f}, "
                f"{100 * change.high:+.1f}]: the outer level detects OOD images {how}."
            )
        return sentences


@final
@dataclass(frozen=True)
class EnsembleDiagnosis(Result):
    """What `diagnose_ensemble` returns: print it, plot it, take it as JSON, or write it as a page.

    Attributes:
        of: The ensemble's name in the tables.
        ensembles: One, or one for each size of the models.
        confidence: The confidence of the intervals.
        decay: MI of all members against the size of the models, if there are several.
        fall: From the smallest to the largest of them.
    """

    titles: ClassVar[Mapping[str, str]] = Collapse.titles
    naming: ClassVar = 2

    of: str
    ensembles: tuple[Collapse, ...]
    confidence: float
    decay: Decay | None = None
    fall: Interval | None = None

    @property
    def verdict(self) -> str:
        """Whether MI collapses; of several ensembles, what the size of the models does to it."""
        small, large = self.ensembles[0], self.ensembles[-1]
        if len(self.ensembles) == 1:
            return small.verdict
        if self.fall is None or self.decay is None:
            return "Members of some of these ensembles are the same model, so nothing can be fitted."
        way, change = f"from {small.key:g} to {large.key:g}", self.decay.exponent
        fitted = f"MI ~ size^{-change.value:+.2f} [{-change.high:+.2f}, {-change.low:+.2f}]"
        if self.fall.low > 1:
            return (
                f"Your larger models agree more: MI falls {times(self.fall.value)} {way} ({fitted}). A low MI of large "
                f"models is no sign that they know more: compare it within one size only, or take members from inside "
                f"the models (tiles, masks)."
            )
        if self.fall.high < 1:
            return f"Your larger models disagree more: MI grows {times(1 / self.fall.value)} {way} ({fitted})."
        return f"MI does not change beyond its interval {way} ({fitted})."

    def title(self) -> str:
        """Which ensembles, on which images."""
        first = self.ensembles[0]
        many = f"{first.members} members" if len(self.ensembles) == 1 else f"{len(self.ensembles)} ensembles"
        return f"Mutual information of '{self.of}', {many}, {first.rows} images of {first.name}; {first.order}"

    def records(self) -> list[dict[str, Any]]:
        """One row per size of sub-ensembles, of every ensemble."""
        rows = [{"models": one.key, **record} for one in self.ensembles for record in one.records()]
        return rows if len(self.ensembles) > 1 else self.ensembles[0].records()

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

    def _page(self) -> str:
        from dubito.explain.pages import ensemble_page  # noqa: PLC0415 (which draws diagnoses)

        return ensemble_page(self)

    def plot(self, ax: Axes | None = None) -> Axes:
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
        ood: OOD images with the same columns, to see how well MI detects them; for several sizes, one table for each.
        partitions: How many random partitions are averaged for each size. 0 keeps neighbours together in their stored
            order, which shows whether they belong together. A summary knows neighbours only.
        confidence: Confidence of the bootstrap intervals.
        resamples: Number of bootstrap resamples.
        seed: Seed of the partitions, the balanced draws and the bootstrap.
    """
    check_bootstrap(by=BY, confidence=confidence, resamples=resamples, seed=seed)
    usual = "5 are usual, 0 for neighbours."
    check_number(partitions, "[0, inf)", by=BY, what="partitions", whole=True, hint=usual)
    tables, others = _paired(table, ood)
    ensembles, means = [], []
    for key, one in tables.items():
        inside, outside = partition(one, of, partitions=partitions, seed=seed), None
        if key in others:
            outside = partition(others[key], of, partitions=partitions, seed=seed, default_name="ood")
            check_same(one, others[key], of, inside, outside)
        means.append(resampled_means(inside, resamples, seed))
        aurocs = None if outside is None else resampled_aurocs(inside, outside, resamples, seed)
        ensembles.append(_collapse(inside, outside, means[-1], aurocs, key, confidence))
    mi = np.stack([of_model[:, 2] for of_model in means], 1)
    decay = _fitted(mi, list(tables), confidence)
    fall = None if decay is None else _interval(_ratio(mi[:, 0], mi[:, -1]), confidence)
    return EnsembleDiagnosis(of, tuple(ensembles), confidence, decay, fall)


def _collapse(
    inside: Partitioned,
    outside: Partitioned | None,
    means: Float64[np.ndarray, "b v"],
    aurocs: tuple[Float64[np.ndarray, "b q"], Float64[np.ndarray, "q"]] | None,
    key: float | None,
    confidence: float,
) -> Collapse:
    """Everything about one ensemble, from its means of all images and of resamples."""
    m, total, mi = inside.members, means[:, 0], means[:, 2:]
    averaging = [(m - size) / (size * (m - 1)) for _, size in inside.partitions]  # what averaging alone leaves of MI
    interval = partial(_interval, confidence=confidence)
    levels = tuple(
        Level(
            count,
            size,
            information=interval(mi[:, place]),
            share=interval(_ratio(mi[:, place], total, otherwise=0.0)),
            fall=interval(_ratio(mi[:, 0], mi[:, place]) if place else np.ones(len(mi))),
            expected=float(mi[0, 0]) * averaging[place],
            auroc=None if aurocs is None else interval(aurocs[0][:, place]),
            spread=float(inside.between[place].mean(0).std(correction=0)),
            auroc_spread=None if aurocs is None else float(aurocs[1][place]),
        )
        for place, (count, size) in enumerate(inside.partitions)
    )
    return Collapse(
        name=inside.name,
        key=key,
        rows=len(inside.total),
        members=m,
        order=inside.order,
        total=interval(total),
        aleatoric=interval(means[:, 1]),
        levels=levels,
        decay=_fitted(mi, [level.size for level in levels], confidence, averaging),
        largest=float(inside.between[0].max()),
        ood=None if outside is None else outside.name,
        change=None if aurocs is None or len(levels) < 2 else interval(aurocs[0][:, -1] - aurocs[0][:, 0]),
        scores=inside.first,
        ood_scores={} if outside is None else outside.first,
    )


def _fitted(
    mi: Float64[np.ndarray, "b q"], sizes: Sequence[Any], confidence: float, averaging: Sequence[float] | None = None
) -> Decay | None:
    """Minus the slope of log MI over log size, by least squares; also that of what averaging alone leaves."""
    if len(sizes) < 2 or float(mi.min()) <= _NO_LOGARITHM:
        return None
    x = np.log(np.array(sizes, dtype=float))
    centred = x - x.mean()
    exponents = -(np.log(mi) @ centred / (centred @ centred))
    scale = float(np.exp(np.log(mi[0]).mean() + exponents[0] * x.mean()))
    expected = None if averaging is None else -float(np.log(averaging) @ centred / (centred @ centred))
    return Decay(scale, _interval(exponents, confidence), expected)


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
    ratio: np.ndarray = np.divide(part, whole, out=np.full(len(part), otherwise), where=whole > _NO_LOGARITHM)
    return ratio


def _paired(table: Table | ByModel, ood: Table | ByModel | None) -> tuple[dict[Any, Table], dict[Any, Table]]:
    """Tables by size of the models, the smallest first; a single one has none."""
    tables: Mapping[Any, Any] = table if isinstance(table, Mapping) else {None: table}
    others: Mapping[Any, Any] = ood if isinstance(ood, Mapping) else {None: ood}
    if ood is not None and set(others) != set(tables):
        expected, got = ("one" if None in one else ", ".join(map(repr, one)) or "none" for one in (tables, others))
        raise TableError(
            f"{BY}: ood must have a table for each of table, {expected}; got {got}. Extract the OOD images with every "
            f"ensemble, and call it once per OOD set."
        )
    if isinstance(table, Mapping):
        models = f"{BY} with {', '.join(map(repr, table)) or 'none'}"
        hint = "Pass {width: table, ...}, or a single table."
        check_number(len(table), "[2, inf)", by=models, what="the number of models", hint=hint, error=TableError)
        for size in table:
            check_number(size, "(0, inf)", by=models, what="the size of the models", hint=hint, error=TableError)
    keys = {size: None if size is None else float(size) for size in sorted(tables)}
    matching = {} if ood is None else {key: others[size] for size, key in keys.items()}
    return {key: tables[size] for size, key in keys.items()}, matching


def times(value: float) -> str:
    """How many times less.

    >>> times(4.04), times(float("inf"))
    ('4.0x', 'to nothing')
    """
    if not math.isfinite(value):
        return "to nothing"
    return f"{value:.1f}x" if value < 1000 else f"{value:.3g}x"


def _percent(share: Interval) -> str:
    return f"{100 * share.value:.1f} % [{100 * share.low:.1f}, {100 * share.high:.1f}]"
